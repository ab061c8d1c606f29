package e2e

import (
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

func TestConfigFile(t *testing.T) {
	s := newSite(t, "spare", "newcomer", nil)
	for _, c := range []struct{ name, file, complaint string }{
		{"unknown key", "name: a\nports:\n  wiregard: 51820\n",
			`{skein.yaml}:3: unknown key "ports.wiregard"; allowed here: control, metrics, plain, relay, relayOutside, stun, udpRelay, wireguard`},
		{"unknown key at the top", "nmae: a\n",
			`{skein.yaml}:1: unknown key "nmae"; allowed here: advertise, cni, …, stateDir, stunServers`},
		{"text for a number", "name: a\nports: {wireguard: many}\n",
			`{skein.yaml}:2: ports.wireguard: want a whole number, have "many"`},
		{"number beyond the range", "ports: {wireguard: 70000}\n",
			`{skein.yaml}:1: ports.wireguard: want a whole number from 0 to 65535, have "70000"`},
		{"text for a list", "name: a\n\nnodeAddresses: 192.168.7.0/24\n",
			`{skein.yaml}:3: nodeAddresses: want a list, have "192.168.7.0/24"`},
		{"number for a truth", "server: 1\n", `{skein.yaml}:1: server: want true or false, have "1"`},
		{"list for a mapping", "ports: [1, 2]\n", `{skein.yaml}:1: ports: want a mapping (key: value), have "["`},
		{"key twice", "name: a\nname: b\n", `{skein.yaml}:2: mapping key "name" already defined at [1:1]`},
		{"not YAML", "name: [a\n", `{skein.yaml}:1: sequence end token ']' not found`},
		{"value not allowed", "relay: sometimes\n",
			`{skein.yaml}:1: relay: "sometimes" is not allowed; allowed: auto, true, false`},
		{"ports collide", "ports: {stun: 51820}\n", `{skein.yaml}:1: ports.stun: port 51820/udp is taken by ports.wireguard`},
		{"public node address", "name: a\nnodeAddresses:\n- 192.168.1.0/24\n- 8.8.8.0/24\n",
			`{skein.yaml}:2: nodeAddresses: 8.8.8.0/24 is not private; peers route only private prefixes to a node: 10/8, 172.16/12, 192.168/16, 100.64/10, fc00::/7`},
		{"bad name", "name: My_Host\n",
			`{skein.yaml}:1: name: "My_Host" is not a host label; allowed: 1 to 63 of a-z, 0-9 and -, with no - at either end`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := s.in(t)
			s.write("skein.yaml", []byte(c.file))
			s.fails(1, c.complaint, s.upArgs("--init")...)
		})
	}
	t.Run("no such file", func(t *testing.T) {
		s.in(t).fails(1, `configuration file: open {none.yaml}: no such file or directory`, "up", "--config",
			s.path("none.yaml"), "--init")
	})
	if _, err := os.Stat(s.path("state")); err == nil {
		t.Error("a refused configuration left a state directory behind")
	}
}

func TestLabFile(t *testing.T) {
	s := newSite(t, "spare", "newcomer", nil)
	good := "name: other\nsites:\n  dc: {nat: none}\nnodes:\n  a: {site: dc, server: true}\n"
	for _, c := range []struct{ name, file, complaint string }{
		{"unknown key", good + "steeps: []\n",
			`{lab.yaml}:6: unknown key "steeps" (did you mean "steps"?); allowed: name, sites, config, settings, nodes, pools, egresses, steps`},
		{"unknown NAT", strings.Replace(good, "none", "magic", 1),
			`{lab.yaml}:3: sites.dc.nat: "magic" is not known; allowed: none, one-to-one, full-cone, restricted-cone, port-restricted-cone, symmetric, symmetric-sequential, double, udp-blocked`},
		{"unknown site", strings.Replace(good, "site: dc", "site: moon", 1),
			`{lab.yaml}:5: nodes.a.site: there is no site "moon" above; allowed: dc`},
		{"wrong type", strings.Replace(good, "server: true", "server: maybe", 1),
			`{lab.yaml}:5: nodes.a.server: is "maybe"; allowed: true or false`},
		{"unknown step", good + "steps:\n  - {explode: a}\n",
			`{lab.yaml}:7: steps[1]: unknown key "explode"; allowed: wait, expect, pods, ping, transfer, serve, fetch, flow, exec, partition, block, zombie, nat, rebind, move, pause, resume, kill, stop, start, heal, log, within, nodes`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := s.in(t)
			s.write("lab.yaml", []byte(c.file))
			s.fails(1, c.complaint, "lab", "up", s.path("lab.yaml"))
		})
	}
}

// occupy takes a port on a host for the length of the test.
func occupy(t *testing.T, host, network, address string) {
	t.Helper()
	err := fabric.In(fabric.HostNS(labName, host), func() error {
		if network == "udp" {
			c, err := net.ListenPacket(network, address)
			if err == nil {
				t.Cleanup(func() { c.Close() })
			}
			return err
		}
		l, err := net.Listen(network, address)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestPortTaken(t *testing.T) {
	s := newSite(t, "spare", "alone", nil)
	first := s.running("--init")
	s.ok("down", "--purge")
	first.ends()
	for _, c := range []struct{ name, network, address, complaint string }{
		{"wireguard", "udp", ":51820", "UDP port 51820 is taken by another program: stop it, or set ports.wireguard in the " +
			"configuration"},
		{"relay", "tcp", ":7443", "relay and join port: listen tcp :7443: bind: address already in use (if another " +
			"program has it, set ports.relay in the configuration)"},
		{"stun", "udp", ":3478", "start STUN server: listen on udp4 port 3478: listen udp4 :3478: bind: address already in " +
			"use; stop what uses the port, or set ports.stun"},
		{"control", "tcp", ":7946", "control net: listen on …:7946/tcp: listen tcp …:7946: bind: address already in use " +
			"(set ports.control to another port if it is taken)"},
		{"metrics", "tcp", "127.0.0.1:9469", "metrics and health: listen tcp 127.0.0.1:9469: bind: address already in use " +
			"(set ports.metrics to another address, or to off)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := s.in(t)
			occupy(t, "spare", c.network, c.address)
			s.fails(1, c.complaint, s.upArgs()...)
		})
	}
	again := s.running() // and it resumes when the ports are free
	s.ok("down", "--purge")
	again.ends()
}

func TestCapabilities(t *testing.T) {
	s := newSite(t, "spare", "humble", nil)
	const advice = ": run it as root, or give it these capabilities (systemd: AmbientCapabilities=)"
	with := func(caps ...uintptr) *site {
		s := s.in(t)
		s.only = append([]uintptr{}, caps...)
		return s
	}
	with().fails(1, "the agent lacks CAP_NET_ADMIN and CAP_NET_RAW"+advice, s.upArgs("--init")...)
	with(unix.CAP_NET_RAW).fails(1, "the agent lacks CAP_NET_ADMIN"+advice, s.upArgs("--init")...)
	with(unix.CAP_NET_ADMIN).fails(1, "the agent lacks CAP_NET_RAW"+advice, s.upArgs("--init")...)
	if _, err := os.Stat(s.path("state")); err == nil {
		t.Error("an agent that may not run left a state directory behind")
	}

	// No more than these two are needed.
	p := with(unix.CAP_NET_ADMIN, unix.CAP_NET_RAW).running("--init")
	if problems := s.status().GetProblems(); len(problems) > 0 {
		t.Errorf("with these two alone it has problems: %v", problems)
	}

	// Others than root are told so.
	const nobody = 65534
	for _, dir := range []string{s.dir, s.path("run")} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	other := s.in(t)
	other.user = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	other.fails(1, "no permission to use {run/agent.sock}: run as root", "status")
	other.fails(1, "the agent lacks CAP_NET_ADMIN and CAP_NET_RAW"+advice, s.upArgs("--init")...)

	s.ok("down", "--purge")
	if exit := p.ends(); exit != 0 {
		t.Errorf("exit status %d", exit)
	}
}

func TestUsage(t *testing.T) {
	s := newSite(t, "spare", "newcomer", nil)
	for _, c := range []struct {
		args      []string
		complaint string
	}{
		{[]string{"fly"}, `unknown command or argument "fly" for "skein"; see ` + "`skein --help`"},
		{[]string{"status", "now"}, `unknown command or argument "now" for "skein status"; see ` + "`skein status --help`"},
		{[]string{"token"}, "skein token needs a subcommand; see `skein token --help`"},
		{[]string{"token", "steal"}, `unknown command or argument "steal" for "skein token"; see ` + "`skein token --help`"},
		{[]string{"lab", "burn"}, `unknown command or argument "burn" for "skein lab"; see ` + "`skein lab --help`"},
		{[]string{"status", "--colour"}, "unknown flag: --colour; see `skein status --help`"},
		{[]string{"status", "-o", "xml"}, "-o xml: allowed: table, json"},
		{[]string{"state", "--at", "yesterday"},
			`--at yesterday: want an index such as 17, a time such as 2026-01-02T15:04:05Z, "2026-01-02 15:04:05" or 15:04:05, or an age such as 5m`},
		{[]string{"diff", "1"}, "skein diff takes two moments; see `skein diff --help`"},
		{[]string{"diff", "a", "b"}, "\"a\" is not a moment: want an index such as 17, a time such as 2026-01-02T15:04:05Z " +
			"or 15:04:05, or an age such as 5m"},
		{[]string{"node", "show"}, "skein node show takes one node's name or ID; see `skein node show --help`"},
		{[]string{"node", "revoke", "a", "b"},
			"skein node revoke takes one node's name or ID; see `skein node revoke --help`"},
		{[]string{"token", "create", "--uses", "0"}, "--uses 0 --ttl 1h0m0s: both must be above zero"},
		{[]string{"token", "create", "--ttl", "soon"}, `invalid argument "soon" for "--ttl" flag: …; see ` +
			"`skein token create --help`"},
		{[]string{"token", "create", "--role", "king"}, `--role: role "king" does not exist: use agent, admin or server`},
		{[]string{"node", "grant", "a"}, "skein node grant takes one node's name or ID, and a role: admin or server; see " +
			"`skein node grant --help`"},
		{[]string{"node", "grant", "a", "king"}, `role "king" does not exist: use agent, admin or server`},
		{[]string{"node", "withdraw", "a", "agent"}, "every member is an agent: name the role admin or server; `skein node " +
			"revoke` removes a member"},
		{[]string{"up", "--init", "--join", "x"}, "--init and --join cannot be used together: a node creates a cluster or " +
			"joins one"},
		{[]string{"up", "--role", "king"}, "--role king: allowed: agent, relay"},
		{[]string{"up", "--join", "x", "--join-timeout", "0s"}, "--join-timeout 0s: want more than zero"},
		{[]string{"explain"}, "skein explain needs a subcommand; see `skein explain --help`"},
		{[]string{"explain", "peer"}, "skein explain peer takes one …; see `skein explain peer --help`"},
		{[]string{"explain", "peer", "x", "--at", "teatime"}, `--at …teatime…`},
		{[]string{"server", "recover"}, "this cannot be undone: read `skein server recover --help`, then add --yes"},
		{[]string{"lab", "up"}, "skein lab up takes one lab file; see `skein lab up --help`"},
		{[]string{"lab", "exec", "a"}, "skein lab exec takes a node and a command, such as `home1 -- skein status`; see " +
			"`skein lab exec --help`"},
		{[]string{"lab", "down", "a", "b"},
			"skein lab down takes at most one lab's name or file; see `skein lab down --help`"},
		{[]string{"lab", "run"}, "skein lab run takes one lab file or several; see `skein lab run --help`"},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) { s.in(t).fails(2, c.complaint, c.args...) })
	}
}
