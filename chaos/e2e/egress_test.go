package e2e

import (
	"errors"
	"strings"
	"testing"
)

// TestEgressCommands: what a user sees who defines, changes, looks at and removes egresses, and who does so wrongly.
func TestEgressCommands(t *testing.T) {
	s := newSite(t, "spare", "solo", map[string]any{"labels": map[string]string{"egress": "yes", "zone": "a"},
		"nodeAddresses": []string{"192.168.7.0/24"}})
	s.running("--init")
	shows := func(want string, args ...string) {
		t.Helper()
		if out := s.ok(args...); !strings.Contains(out, want) {
			t.Errorf("skein %s says\n%s\nwant\n%s", strings.Join(args, " "), out, want)
		}
	}
	create := func(rest string) []string { return strings.Fields("egress create " + rest) }
	s.fails(1, "pool \"default\" does not exist…", create("nat --destination 0.0.0.0/0 --gateway-label egress=yes")...)
	s.ok("pool", "create", "default", "--subnet", "10.64.0.0/16,fd00:64::/112")
	s.ok("pool", "create", "public", "--subnet", "192.0.2.0/28", "--block-size-bits", "0")
	const made = "internet/nat --destination 0.0.0.0/0 --gateway-label egress=yes "
	out, errs, exit := s.run(create(made + "--replicas 2 --address 192.0.2.7 --address 192.0.2.8")...)
	if exit != 0 || !strings.HasPrefix(out, "egress internet/nat defined by event ") ||
		strings.Join(strings.Fields(errs), " ") !=
			"warning: 1 gateway for 2 slots (solo): some hold several slots, and lose all of them when they fail; "+
				"label more nodes, or have fewer replicas" {
		t.Errorf("exit status %d, says\n%s%s", exit, out, errs)
	}
	shows("internet/nat  ", "egress", "list")
	shows("the source address of slot 1 of egress", "ip", "who", "192.0.2.8")
	shows("slot 2 begins: about 33 of 100 clients fall on what is new", "egress", "update", "internet/nat", "--replicas",
		"3", "--address", "")
	shows("Gateways are nodes with egress=yes: 1 of 1 member.", "explain", "egress", "nat")
	eventually(t, "the node's record names its addresses", func() error {
		if out := s.ok("node", "show", "solo"); !strings.Contains(out, "candidate  198.18.") {
			return errors.New(out)
		}
		return nil
	})

	const lab = "lab --gateway-label site=lab --destination "
	for _, c := range []struct{ name, args, complaint string }{
		{"another egress of that name", made + "--replicas 7", "egress internet/nat exists with other properties: " +
			"change it with skein egress update, or take another name"},
		{"host bits", lab + "192.168.10.1/24", "egress default/lab: destination 192.168.10.1/24 has host bits set; write " +
			"192.168.10.0/24"},
		{"destination twice", lab + "203.0.113.0/24,203.0.113.0/24", "egress default/lab: destination 203.0.113.0/24 is " +
			"there twice; write it once"},
		{"a pool as destination", lab + "10.64.3.0/24", "egress default/lab: destination 10.64.3.0/24 overlaps " +
			"10.64.0.0/16 of pool default, which is in the mesh; use other prefixes, or the default route, which leaves the " +
			"mesh out"},
		{"the overlay as destination", lab + "10.4.0.0/24", "egress default/lab: destination 10.4.0.0/24 overlaps the " +
			"overlay 10.4.0.0/16, where nodes have their addresses; use other prefixes, or the default route, which leaves " +
			"the mesh out"},
		{"a node's address as destination", lab + "198.18.0.0/15", "egress default/lab: destination 198.18.0.0/15 covers " +
			"the address … of node solo: clients would lose it through a tunnel; choose smaller networks, or 0.0.0.0/0, which " +
			"leaves the mesh's own ways alone"},
		{"a node's network as destination", lab + "192.168.0.0/16", "egress default/lab: destination 192.168.0.0/16 covers " +
			"the network 192.168.7.0/24 of node solo: clients would lose it through a tunnel; …"},
		{"address outside every pool", lab + "203.0.113.0/24 --address 198.51.100.7", "egress default/lab: address " +
			"198.51.100.7 lies in no pool; …"},
		{"address of another egress", lab + "203.0.113.0/24 --address 10.64.0.1", "egress default/lab: address 10.64.0.1 " +
			"is the tunnel endpoint of slot internet/nat#1; take another"},
		{"address twice", lab + "203.0.113.0/24 --replicas 2 --address 192.0.2.9 --address 192.0.2.9",
			"egress default/lab: address 192.0.2.9 is there twice; each slot needs its own"},
		{"too few addresses", lab + "203.0.113.0/24 --replicas 2 --address 192.0.2.9", "egress default/lab has 1 addresses " +
			"for 2 replicas: …"},
		{"address of a family without destination", lab + "203.0.113.0/24 --address 192.0.2.9,2001:db8::9",
			"egress default/lab: slot 0 has the IPv6 address 2001:db8::9, and the egress has no IPv6 destination; leave it out"},
		{"pool without that family", lab + "2001:db8:9::/48 --pool public", "egress default/lab has IPv6 destinations, and " +
			"its tunnel endpoints are taken from pool public, which is …; name a pool with IPv6, or leave those destinations " +
			"out"},
		{"unknown pool", lab + "203.0.113.0/24 --pool nowhere", "pool \"nowhere\" does not exist: …"},
		{"probe outside the destinations", lab + "203.0.113.0/24 --probe icmp:192.0.2.1", "egress default/lab: probe " +
			"icmp:192.0.2.1 lies in none of its destinations, so no gateway could reach it; probe an address inside them"},
		{"lease too short", lab + "203.0.113.0/24 --lease 100ms", "egress default/lab: a lease of 100 ms is out of range; " +
			"use 500 to 86400000, or 0 for the default of 1200"},
		{"too many slots", lab + "203.0.113.0/24 --replicas 65", "egress default/lab: 65 replicas are out of range; use 1 " +
			"to 64"},
		{"name", "No_Name --gateway-label site=lab --destination 203.0.113.0/24", "the egress's name \"No_Name\": use " +
			"lower-case letters, digits and hyphens, with a letter or digit at both ends"},
		{"label", "lab --destination 203.0.113.0/24 --gateway-label Ä=b", "egress default/lab: gateways: …"},
	} {
		t.Run(c.name, func(t *testing.T) { s.in(t).fails(1, c.complaint, create(c.args)...) })
	}
	s.fails(2, "--replicas 0: an egress has at least one slot; `skein egress remove` removes it",
		create(made+"--replicas 0")...)
	for _, c := range []struct{ args, complaint string }{
		{"egress show nowhere", "there is no egress nowhere in any namespace; `skein egress list` shows those there are"},
		{"egress show default/nat", "there is no egress default/nat; `skein egress list` shows those there are"},
		{"explain egress default/nat", "there is no egress default/nat; `skein egress list` shows those there are"},
		{"egress update nat --replicas 2", "egress default/nat does not exist: there are internet/nat"},
		{"egress remove nat", "egress default/nat does not exist: there are internet/nat"},
		{"node drain nobody", "no member is called \"nobody\"; see `skein nodes`"},
	} {
		s.fails(1, c.complaint, strings.Fields(c.args)...)
	}
	_, errs, exit = s.run(create("lab --destination 192.168.10.0/24 --gateway-label zone=b")...)
	if exit != 0 || strings.Join(strings.Fields(errs), " ") != "warning: no node is eligible: a gateway needs zone=b, "+
		"and the nearest are solo (its label zone is a, not b); "+
		"until there is one, packets for these destinations find no way out" {
		t.Errorf("no eligible node: exit status %d, says\n%s", exit, errs)
	}
	eventually(t, "it owns the slots that can be its", func() error {
		if out := s.ok("egress", "list"); strings.Count(out, "solo") < 1 {
			return errors.New(out)
		}
		return nil
	})
	shows("slot 2 of internet/nat: no other node is eligible", "node", "drain", "solo", "--wait", "0")
	shows("it gets no egress slots", "node", "show", "solo")
	shows("solo may not be one: it is being drained.", "explain", "egress", "nat")
	shows("may have egress slots again", "node", "drain", "solo", "--undo")
	shows("egress default/lab removed", "egress", "remove", "lab")
	if out, err := s.ok("block", "list"), "egress default/lab"; strings.Contains(out, err) {
		t.Errorf("an egress that is gone still has blocks:\n%s", out)
	}
}
