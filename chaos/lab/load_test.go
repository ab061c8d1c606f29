package lab

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/testing/protocmp"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

func TestLoadTheDesignsExample(t *testing.T) {
	got, err := Load("../../examples/three-sites.yaml")
	if err != nil {
		t.Fatal(err)
	}
	yes := true
	all := []string{"dc1", "home1", "cloud1"}
	want := &Spec{
		File: "../../examples/three-sites.yaml", Name: "three-sites",
		Sites: []fabric.SiteSpec{{Name: "dc", NAT: fabric.None, IPv6: true}, {Name: "home", NAT: fabric.PortRestrictedCone},
			{Name: "cloud", NAT: fabric.Symmetric}},
		Nodes: []Node{{Name: "dc1", Site: "dc", Server: true, Relay: "true", Init: true}, {Name: "home1", Site: "home"},
			{Name: "cloud1", Site: "cloud"}},
		Steps: []Step{
			{Line: 13, Text: "wait: converged, within: 30s", Within: 30 * time.Second,
				Action: Wait{Converged: true, Nodes: all}},
			{Line: 14, Text: "expect: {from: home1, to: cloud1, reach: true, path: direct}, within: 10s",
				Within: 10 * time.Second,
				Action: Expect{From: []string{"home1"}, To: []string{"cloud1"}, Reach: &yes, Path: []string{"direct"}, Count: 1}},
			{Line: 15, Text: "partition: [[dc1], [home1, cloud1]]", Action: Partition{[][]string{{"dc1"}, {"home1", "cloud1"}}}},
			{Line: 16, Text: "kill: dc1", Action: Kill{[]string{"dc1"}}},
			{Line: 17, Text: "heal: all", Action: Heal{All: true, Nodes: all}},
		},
	}
	if d := cmp.Diff(want, got, cmpopts.IgnoreFields(Spec{}, "Source"),
		cmpopts.EquateComparable(netip.Prefix{})); d != "" {
		t.Error(d)
	}
}

func TestEveryExampleLoads(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no examples", err)
	}
	names := map[string]string{}
	for _, f := range files {
		s, err := Load(f)
		if err != nil {
			t.Error(err)
			continue
		}
		if s.Name != strings.TrimSuffix(filepath.Base(f), ".yaml") {
			t.Errorf("%s: its name is %q", f, s.Name)
		}
		if other, ok := names[s.Name]; ok {
			t.Errorf("%s and %s are both named %s", f, other, s.Name)
		}
		names[s.Name] = f
	}
}

// base is a good lab that the cases below spoil.
const base = `name: x
sites:
  dc: {nat: none}
  home: {nat: full-cone}
nodes:
  a: {site: dc, server: true}
  b: {site: home}
`

func TestMistakesAreNamed(t *testing.T) {
	cases := []struct{ name, file, want string }{
		{"unknown key at the top", base + "stepz: []\n",
			`f.yaml:8: unknown key "stepz" (did you mean "steps"?); allowed: name, sites, config, settings, nodes, pools, egresses, steps`},
		{"unknown key in a site", strings.Replace(base, "dc: {nat: none}", "dc: {nat: none, natt: x}", 1),
			`f.yaml:3: sites.dc: unknown key "natt" (did you mean "nat"?); allowed: nat, ipv4, ipv6, hairpin, portmap, behind, lan, delay`},
		{"unknown NAT", strings.Replace(base, "full-cone", "ful-cone", 1),
			`f.yaml:4: sites.home.nat: "ful-cone" is not known (did you mean "full-cone"?); allowed: none, one-to-one, full-cone, restricted-cone, port-restricted-cone, symmetric, symmetric-sequential, double, udp-blocked`},
		{"a symmetric NAT that hairpins", strings.Replace(base, "nat: full-cone", "nat: symmetric, hairpin: true", 1),
			`f.yaml:4: sites.home: nat: symmetric cannot have hairpin: true: nothing is translated, or the filtering lets nothing in from the NAT's own address`},
		{"a public site that maps ports", strings.Replace(base, "nat: full-cone", "nat: none, portmap: [pcp]", 1),
			`f.yaml:4: sites.home: nat: none cannot have portmap: its router has no ports to give away`},
		{"an unknown port-mapping protocol", strings.Replace(base, "nat: full-cone", "nat: full-cone, portmap: [pcp, stun]",
			1), `f.yaml:4: sites.home.portmap: "stun" is not known; allowed: pcp, natpmp, upnp`},
		{"no address at all", strings.Replace(base, "nat: full-cone", "nat: full-cone, ipv4: false", 1),
			`f.yaml:4: sites.home: has neither IPv4 nor IPv6: add ipv6: true`},
		{"behind nobody", strings.Replace(base, "nat: full-cone", "nat: full-cone, behind: isp", 1),
			`f.yaml:4: sites.home: is behind "isp", which is not another site; allowed: dc, home`},
		{"three in a row", strings.Replace(base, "nat: full-cone}", "nat: full-cone, behind: isp}\n  isp: {nat: full-cone, "+
			"behind: dc}", 1), `f.yaml:4: sites.home: is behind isp, which is behind dc itself; allowed is one behind another`},
		{"a public LAN", strings.Replace(base, "nat: full-cone", "nat: full-cone, lan: 8.8.8.0/24", 1),
			`f.yaml:4: sites.home.lan: "8.8.8.0/24" is not a network that hosts can be in; allowed: a private network such as 192.168.1.0/24`},
		{"no family in common", strings.Replace(strings.Replace(base, "nat: full-cone", "nat: full-cone, ipv4: false, "+
			"ipv6: true", 1), "nat: none", "nat: none, ipv6: false", 1),
			`f.yaml:6: nodes.a: creates the cluster, and b could not reach it to join: home has IPv6 only`},
		{"wrong type", strings.Replace(base, "server: true", "server: maybe", 1),
			`f.yaml:6: nodes.a.server: is "maybe"; allowed: true or false`},
		{"a list for a mapping", "name: x\nsites: [a]\nnodes: {}\n",
			`f.yaml:2: sites: is a list; allowed: a mapping from names to sites`},
		{"unknown site", strings.Replace(base, "site: home", "site: hom", 1),
			`f.yaml:7: nodes.b.site: there is no site "hom" above; allowed: dc, home`},
		{"no server", strings.Replace(base, ", server: true", "", 1),
			`f.yaml:1: no node is a server: add server: true to at least one of a, b`},
		{"two initialisers", strings.Replace(base, "site: dc, server: true}", "site: dc, server: true, init: true}\n  c: "+
			"{site: dc, server: true, init: true}", 1),
			`f.yaml:1: a, c all have init: true; one node creates the cluster, the others join`},
		{"initialiser that is not a server", strings.Replace(base, "b: {site: home}", "b: {site: home, init: true}", 1),
			"f.yaml:7: nodes.b: creates the cluster (init: true) and so must be a server: add server: true\n" +
				`f.yaml:7: nodes.b: creates the cluster behind a NAT (full-cone), where a could not reach it to join: put it, or the node with init: true, into a site with nat: none or one-to-one`},
		{"an initialiser that is late", strings.Replace(base, "server: true", "server: true, late: true", 1),
			"f.yaml:6: nodes.a: creates the cluster and so cannot be late: leave late out, or give another server init: true"},
		{"the lab's own config key", strings.Replace(base, "b: {site: home}", "b: {site: home, config: {stateDir: /x}}", 1),
			`f.yaml:7: nodes.b.config: the key "stateDir" is set by the lab itself: leave it out`},
		{"reserved name", strings.Replace(base, "b: {", "inet: {", 1),
			`f.yaml:7: nodes.inet: node name "inet" is kept for the lab's core and routers: choose one that is not "inet", does not begin with "r-" and does not end in "-inet"`},
		{"reserved name of a site", strings.ReplaceAll(strings.Replace(base, "home: {", "inet: {", 1),
			"site: home", "site: inet"),
			`f.yaml:4: sites.inet: site name "inet" is kept for the lab's core: choose one that does not end in "inet"`},
		{"duplicate node", base + "  b: {site: dc}\n", `f.yaml:8: no valid YAML: mapping key "b" already defined at [7:3]`},
		{"bad name", strings.Replace(base, "name: x", "name: X_y", 1),
			`f.yaml:1: name: "X_y" is not a name; allowed: up to 32 of a-z, 0-9 and -, not - at the ends`},
		{"broken YAML", "name: [x\n", `f.yaml:1: no valid YAML: sequence end token ']' not found`},
		{"beside nobody", base + "  c: {beside: d, config: {dataplane: {instance: 1}}}\n",
			`f.yaml:8: nodes.c.beside: "d" is not a node above that has a network namespace of its own; allowed: a, b`},
		{"beside one that is beside", base + "  c: {beside: a}\n  d: {beside: c}\n",
			`f.yaml:9: nodes.d.beside: "c" is not a node above that has a network namespace of its own; allowed: a, b`},
		{"beside, and elsewhere", base + "  c: {beside: a, site: home}\n",
			`f.yaml:8: nodes.c: is at home and beside a, which is at dc: leave site out`},
		{"beside, without an agent", base + "  c: {beside: a, role: host}\n",
			`f.yaml:8: nodes.c: role: host has no agent, and so cannot be beside one: leave beside out`},
		{"a mesh without a server", base + "  c: {beside: a, mesh: second}\n",
			`f.yaml:1: no node of mesh second is a server: add server: true to one of them`},
		{"a fault where there is no network", base + "  c: {beside: b}\nsteps: [{partition: [[a], [c]]}]\n",
			`f.yaml:9: steps[1]: c has no network of its own: name b, which it is beside`},
		{"empty", "", `f.yaml: is empty; a lab has name, sites, nodes and steps (docs/lab.md)`},
		{"a pool without subnets", base + "pools: {web: {blockSizeBits: 3}}\n",
			`f.yaml:8: pools.web: the key "subnets" is missing: a pool has at least one`},
		{"a pool's unknown key", base + "pools: {web: {subnets: [10.1.0.0/24], blocksize: 3}}\n",
			`f.yaml:8: pools.web: unknown key "blocksize"; allowed: subnets, blockSizeBits, cooldown, sticky, maxBlocksPerNode, namespaces, allowed, quotas`},
		{"an IPv6 subnet that YAML takes apart", base + "pools: {web: {subnets: [fd01::/120]}}\n",
			`f.yaml:8: pools.web.subnets[1]: is a mapping for YAML: put an IPv6 subnet into quotes`},
		{"a pool's bad subnet", base + "pools: {web: {subnets: [{ipv4: 10.1.0.0}]}}\n",
			`f.yaml:8: pools.web.subnets[1].ipv4: "10.1.0.0" is not a subnet; allowed: a subnet such as 10.100.0.0/24 or fd00:100::/120`},
		{"a pool's odd cooldown", base + "pools: {web: {subnets: [10.1.0.0/24], cooldown: 1500ms}}\n",
			`f.yaml:8: pools.web.cooldown: 1.5s is not allowed: whole seconds, at most 1000h`},
		{"a pool's bad name", base + "pools: {We_b: {subnets: [10.1.0.0/24]}}\n",
			`f.yaml:8: pools.We_b: "We_b" is not a name; allowed: up to 32 of a-z, 0-9 and -, not - at the ends`},
		{"an unknown topology", base + "settings: {topology: star}\n",
			`f.yaml:8: settings.topology: "star" is not known; allowed: full, site`},
		{"too many leaders", base + "settings: {leadersPerSite: 17}\n",
			`f.yaml:8: settings.leadersPerSite: is "17"; allowed: a whole number from 1 to 16`},
		{"an unknown setting", base + "settings: {siteTopologies: {}}\n",
			`f.yaml:8: settings: unknown key "siteTopologies"; allowed: topology, leadersPerSite, siteTopology`},
		{"an anchor", strings.Replace(base, "{nat: none}", "&x {nat: none}", 1),
			`f.yaml:3: sites.dc: anchors, aliases and tags are not understood in a lab file: write it out`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { wantError(t, c.file, c.want) })
	}
}

func TestSettingsAndLeadersAreRead(t *testing.T) {
	s, err := Parse("f.yaml", []byte(strings.Replace(base, "b: {site: home}", "b: {site: home, leader: true}", 1)+
		"settings: {topology: site, leadersPerSite: 3, siteTopology: {dc: full}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c := s.Settings; c.GetTopology() != "site" || c.GetLeadersPerSite() != 3 || c.GetSiteTopology()["dc"] != "full" {
		t.Errorf("settings: %v", c)
	}
	if c := newLab(s, fabric.Plan{}, Options{}).config(s.Nodes[1]); c["leader"] != true {
		t.Errorf("b's configuration is %v", c)
	}
}

func TestMistakesInSteps(t *testing.T) {
	cases := []struct{ step, want string }{
		{"{kil: a}", `unknown key "kil" (did you mean "kill"?); allowed: wait, expect, pods, ping, transfer, serve, fetch, flow, exec, partition, block, zombie, nat, rebind, move, pause, resume, kill, stop, start, heal, log, within, nodes`},
		{"{kill: c}", `.kill: there is no node "c"; nodes: a, b`},
		{"{kill: a, stop: b}", `: a step does one thing, this one has kill and stop: make a step of each`},
		{"{kill: a, within: 3s}", `: the key "within" belongs to wait, expect, transfer, fetch, exec and the start of pods`},
		{"{wait: soon}", `.wait: "soon" is not known; allowed: a duration such as 5s, or converged`},
		{"{wait: converged, within: 5}", `.within: "5" is not a duration; allowed: a duration such as 500ms, 30s or 2m`},
		{"{wait: 5s, nodes: [a]}", `: the key "nodes" belongs to {wait: converged}`},
		{"{expect: {from: a, to: b}}",
			`.expect: expects nothing: add reach: true, reach: false, or path; or addresses: agree`},
		{"{expect: {from: a, to: a, reach: true}}", `.expect: from and to are the same`},
		{"{expect: {from: a, reach: true}}", `.expect: needs both from and to: nodes, site:NAME, all, or pods as NODE/POD`},
		{"{expect: {from: a, to: b, path: wire}}", `.expect.path: "wire" is not a path; allowed: direct, relay, hop, none`},
		{"{expect: {from: a, to: b, reach: true, count: many}}",
			`.expect.count: is "many"; allowed: a whole number from 1 to 10000`},
		{"{exec: {command: ls}}", `.exec: the key "node" is missing: name the node that runs the command`},
		{"{exec: {node: a, command: ls, matches: '('}}", ".exec.matches: is not a regular expression: error parsing " +
			"regexp: missing closing ): `(`"},
		{"{partition: [[a], [a, b]]}", `.partition[2]: node "a" is in two groups`},
		{"{partition: [[a, b]]}", `.partition: the one group holds every node: nothing is cut off from it`},
		{"{block: {from: a, to: b, proto: sctp}}",
			`.block.proto: "sctp" is not known (did you mean "tcp"?); allowed: all, udp, tcp, icmp`},
		{"{stop: site:nowhere}", `.stop: no node is in a site "nowhere"; sites: dc, home`},
		{"{ping: {from: a, to: b, lost: 0}}",
			`.ping: either starts echoes, with from and to, or ends them and says how many may be lost: {lost: 0}, or for how long: {longest: 1s}`},
		{"{ping: {from: a}}", ".ping: needs both from and to: nodes, site:NAME, all, or pods as NODE/POD"},
		{"{zombie: {node: a, drops: newer}}", ".zombie.drops: \"newer\" is not known (did you mean \"new\"?); allowed: " +
			"new, direction, large"},
		{"{zombie: {node: a}}", ".zombie: needs both node and drops: new, direction, large"},
		{"{zombie: {drops: new}}", ".zombie: needs both node and drops: new, direction, large"},
		{"{zombie: {node: c, drops: new}}", ".zombie.node: there is no node \"c\"; nodes: a, b\nf.yaml:9: steps[1].zombie: " +
			"needs both node and drops: new, direction, large"},
		{"{nat: {site: home, kind: double}}",
			`.nat: full-cone cannot become double while the lab is up: only kinds that give all hosts one address can, and not double`},
		{"{nat: {site: hom, kind: symmetric}}", `.nat.site: there is no site "hom"; allowed: dc, home`},
		{"{rebind: [home, dc]}", `.rebind[2]: site dc has nat: none, which has no mappings to forget`},
		{"{move: {node: all, to: home}}", ".move.node: one node moves at a time\nf.yaml:9: steps[1].move: needs both node " +
			"and to: the name of a site"},
		{"{transfer: {from: a}}", ".transfer: needs both from and to: nodes, site:NAME, all, or pods as NODE/POD"},
		{"{block: {from: a, to: b, percent: 100}}", `.block.percent: is "100"; allowed: a whole number from 1 to 99`},
		{"{pods: {start: [p]}}", `.pods: the key "node" is missing: name the nodes of the pods`},
		{"{pods: {node: a}}", `.pods: either starts pods (start: [a, b], or a number) or stops them (stop: [a, b], or all)`},
		{"{pods: {node: a, start: 0}}", `.pods.start: is "0"; allowed: a whole number from 1 to 1000`},
		{"{pods: {node: a, start: []}}", `.pods.start: is empty; allowed: names of pods, or a number`},
		{"{pods: {node: a, start: [P_]}}",
			`.pods.start: "P_" is not a name; allowed: up to 32 of a-z, 0-9 and -, not - at the ends`},
		{"{pods: {node: a, start: [all]}}", `.pods.start: "all" means all pods of a node: choose another name`},
		{"{pods: {node: a, start: [x-inet]}}",
			`.pods.start: pod name "x-inet" is kept for the lab's core: choose one that does not end in "inet"`},
		{"{pods: {node: a, start: [p], prefix: q}}", `.pods: prefix goes with a number of pods: {start: 20, prefix: q}`},
		{"{pods: {node: all, start: [p], ips: [10.1.0.1]}}", `.pods: ips are for one pod on one node, this step starts 2`},
		{"{pods: {node: a, start: [p], ips: [10.1.0.1, 10.1.0.2]}}",
			`.pods.ips: more than one address of a family; a pod has one of each at most`},
		{"{pods: {node: a, start: [p], ips: [x]}}", `.pods.ips: "x" is not an address`},
		{"{pods: {node: a, stop: [p]}}", `.pods.stop: no pod "p" runs on a after the steps above; running: none`},
		{"{pods: {node: a, stop: all, namespace: web}}",
			`.pods: namespace is for pods that start, not for those that stop: leave it out`},
		{"{pods: {node: a, start: [p, p]}}", `.pods: pod p of node a runs already: stop it first`},
		{"{expect: {from: a/p, to: b, reach: true}}", ".expect.from: no pod \"p\" runs on a after the steps above; " +
			"running: none\nf.yaml:9: steps[1].expect: needs both from and to: nodes, site:NAME, all, or pods as NODE/POD"},
		{"{expect: {from: all/p, to: b, reach: true}}", ".expect.from: \"all/p\" names no pod that runs after the steps " +
			"above\nf.yaml:9: steps[1].expect: needs both from and to: nodes, site:NAME, all, or pods as NODE/POD"},
		{"{expect: {addresses: agree, reach: true}}",
			`.expect: addresses: agree is about the whole lab: make a step of the rest`},
		{"{expect: {addresses: maybe}}", `.expect.addresses: "maybe" is not known; allowed: agree`},
		{"kill", `: is "kill"; allowed: a mapping with the keys wait, expect, pods, ping, transfer, serve, fetch, flow, exec, partition, block, zombie, nat, rebind, move, pause, resume, kill, stop, start, heal, log, within, nodes`},
	}
	for _, c := range cases {
		t.Run(c.step, func(t *testing.T) {
			want := "f.yaml:9: steps[1]" + c.want
			if strings.HasPrefix(c.want, "unknown") {
				want = "f.yaml:9: steps[1]: " + c.want
			}
			wantError(t, base+"steps:\n  - "+c.step+"\n", want)
		})
	}
}

func wantError(t *testing.T, file, want string) {
	t.Helper()
	_, err := Parse("f.yaml", []byte(file))
	if err == nil {
		t.Fatalf("accepted; want %s", want)
	}
	if err.Error() != want {
		t.Errorf("\n got %s\nwant %s", err, want)
	}
}

func TestSelectorsAndDefaults(t *testing.T) {
	s, err := Parse("f.yaml", []byte(base+`steps:
  - stop: [site:home, a]
  - partition: [[site:dc]]
  - wait: converged
    nodes: a
  - {exec: {node: all, command: [skein, status], output: running}, within: 3s}
  - {wait: 1m30s}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []Action{
		Stop{[]string{"b", "a"}},
		Partition{[][]string{{"a"}, {"b"}}},
		Wait{Converged: true, Nodes: []string{"a"}},
		Exec{Nodes: []string{"a", "b"}, Command: []string{"skein", "status"}, Output: []string{"running"}},
		Wait{For: 90 * time.Second},
	}
	for i, w := range want {
		if d := cmp.Diff(w, s.Steps[i].Action); d != "" {
			t.Errorf("step %d: %s", i+1, d)
		}
	}
	if s.Steps[2].Within != defaultConverge || s.Steps[3].Within != 3*time.Second {
		t.Errorf("within: %v and %v", s.Steps[2].Within, s.Steps[3].Within)
	}
}

func TestPodsAndPools(t *testing.T) {
	s, err := Parse("f.yaml", []byte(base+`pools:
  default: {subnets: [10.1.0.0/24, 'fd01::/120']}
  web: {subnets: [{ipv4: 10.2.0.0/24, ipv6: 'fd02::/120'}], blockSizeBits: 0, cooldown: 1m, sticky: 2s, maxBlocksPerNode: 3, namespaces: web, allowed: ["*"], quotas: {web: 5}}
steps:
  - {pods: {node: all, start: [p, q]}}
  - {pods: {node: a, start: 2, prefix: w, namespace: web, pool: web, longest: 1s}, within: 5s}
  - {pods: {node: site:home, start: [no], ips: [10.1.0.9, 'fd01::9'], expect_error: full, code: 11}}
  - {expect: {from: all/p, to: [b, a/all], reach: true}}
  - {pods: {node: a, stop: [p, w2]}}
  - {expect: {from: all/p, to: a/all, reach: true}}
  - {exec: {node: [a/q, b], command: [ip, addr]}}
  - {pods: {node: all, stop: all}}
  - {pods: {node: a, start: [p]}}
  - {expect: {addresses: agree}, within: 3s}
`))
	if err != nil {
		t.Fatal(err)
	}
	pools := []*skeinv1.Pool{
		{Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.1.0.0/24"}, {Ipv6: "fd01::/120"}}},
		{Name: "web", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.2.0.0/24", Ipv6: "fd02::/120"}}, CooldownSeconds: 60,
			StickySeconds: 2, MaxBlocksPerNode: 3,
			Namespaces: []string{"web"}, Allowed: []string{"*"}, Quotas: map[string]uint32{"web": 5}},
	}
	if d := cmp.Diff(pools, s.Pools, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	yes := true
	want := []Action{
		StartPods{Nodes: []string{"a", "b"}, Pods: []string{"p", "q"}},
		StartPods{Nodes: []string{"a"}, Pods: []string{"w1", "w2"}, Namespace: "web", Pool: "web", Longest: time.Second},
		StartPods{Nodes: []string{"b"}, Pods: []string{"no"}, IPs: addrs("10.1.0.9", "fd01::9"), Fails: true,
			Text: "full", Code: 11},
		Expect{From: []string{"a/p", "b/p"}, To: []string{"b", "a/p", "a/q", "a/w1", "a/w2"}, Reach: &yes, Count: 1},
		StopPods{Nodes: []string{"a"}, Pods: []string{"p", "w2"}},
		Expect{From: []string{"b/p"}, To: []string{"a/q", "a/w1"}, Reach: &yes, Count: 1},
		Exec{Nodes: []string{"a/q", "b"}, Command: []string{"ip", "addr"}},
		StopPods{Nodes: []string{"a", "b"}},
		StartPods{Nodes: []string{"a"}, Pods: []string{"p"}},
		Accounts{},
	}
	for i, w := range want {
		if d := cmp.Diff(w, s.Steps[i].Action, cmpopts.EquateComparable(netip.Addr{})); d != "" {
			t.Errorf("step %d: %s", i+1, d)
		}
	}
	if s.Steps[1].Within != 5*time.Second || s.Steps[0].Within != 0 || s.Steps[9].Within != 3*time.Second {
		t.Error("within is not as it says")
	}
}

func TestLoadRefusesWhatIsNoLabFile(t *testing.T) {
	if _, err := Load("nowhere.yaml"); err == nil || !strings.Contains(err.Error(), "nowhere.yaml") {
		t.Errorf("missing file: %v", err)
	}
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(big); err == nil || !strings.Contains(err.Error(), "at most 1048576") {
		t.Errorf("a file that is too big: %v", err)
	}
}

// FuzzParse: whatever comes in, Parse answers with a Spec that can be numbered, or with an error.
func FuzzParse(f *testing.F) {
	f.Add([]byte(base))
	files, _ := filepath.Glob("../../examples/*.yaml")
	for _, name := range files {
		if src, err := os.ReadFile(name); err == nil {
			f.Add(src)
		}
	}
	f.Add([]byte("name: x\nsites: {a: &b {nat: none}}\nnodes: {c: *b}\nsteps: [{wait: {}}, [], 3, null]"))
	f.Fuzz(func(t *testing.T, src []byte) {
		s, err := Parse("f", src)
		if err != nil {
			return
		}
		if _, err := s.Plan(); err != nil {
			t.Errorf("accepted, but cannot be built: %v", err)
		}
		if !s.Initialiser().Server {
			t.Error("accepted without an initialiser")
		}
	})
}

// Nodes beside others are in their namespaces, and each mesh has its own creator.
func TestNodesBesideOthers(t *testing.T) {
	s, err := Parse("f.yaml", []byte(base+"  a2: {beside: a, mesh: second, server: true}\n  b2: {beside: b, mesh: "+
		"second}\nsteps: [{partition: [[a]]}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	plan, err := s.Plan()
	if err != nil || len(plan.Hosts) != 2 {
		t.Fatalf("%d hosts, %v; want those of a and b alone", len(plan.Hosts), err)
	}
	if got := s.Initialiser().Name + " " + s.initialiser("second").Name; got != "a a2" {
		t.Errorf("the meshes' creators are %s", got)
	}
	if n, _ := s.Node("b2"); n.Site != "home" || n.host() != "b" {
		t.Errorf("b2 is at %s in the namespace of %s", n.Site, n.host())
	}
	if want := (Partition{[][]string{{"a"}, {"b"}}}); !reflect.DeepEqual(s.Steps[0].Action, want) {
		t.Errorf("a is cut off from %v, want %v", s.Steps[0].Action, want)
	}
}
