package lab

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// hosted is a good lab with a node that has no agent.
const hosted = base + "  target: {site: dc, role: host}\n"

func TestEgressesAndHosts(t *testing.T) {
	s, err := Parse("f.yaml",
		[]byte(strings.Replace(hosted, "b: {site: home}", "b: {site: home, labels: {gate: 'yes'}}", 1)+`egresses:
  web/nat: {destinations: [0.0.0.0/0, '::/0'], gateways: {gate: 'yes'}, replicas: 2, pool: lan, lease: 1.5s, probes: ['icmp:198.18.1.13'],
    addresses: [198.18.1.208, {ipv4: 198.18.1.209, ipv6: '2001:db8:1::d1'}], fouSourcePortAuto: true}
steps:
  - {pods: {node: a, start: [p], egress: [web/nat, web/other, x/y], annotations: {k: v}}}
  - {serve: {node: target}}
  - {fetch: {from: a/p, to: target, source: {owner-of: web/nat}, family: ipv4}, within: 3s}
  - {fetch: {from: [a, b], to: target, port: 8080, source: [b, 10.0.0.1]}}
  - {fetch: {from: a, to: target, fails: true}}
  - {flow: {from: a/p, to: target, proto: tcp, every: 1ms}}
  - {flow: {lost: 0, longest: 300ms}}
  - {kill: all}
  - {partition: [[b]]}
  - {block: {from: target, to: all}}
  - {expect: {from: site:dc, to: target, reach: true}}
`))
	if err != nil {
		t.Fatal(err)
	}
	egresses := []*skeinv1.Egress{{Namespace: "web", Name: "nat", Destinations: []string{"0.0.0.0/0", "::/0"},
		Gateways: map[string]string{"gate": "yes"}, Replicas: 2, Pool: "lan",
		LeaseMillis: 1500, Probes: []string{"icmp:198.18.1.13"}, FouSourcePortAuto: true,
		Addresses: []*skeinv1.EgressAddress{{Ipv4: "198.18.1.208"}, {Ipv4: "198.18.1.209", Ipv6: "2001:db8:1::d1"}}}}
	if d := cmp.Diff(egresses, s.Egresses, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	yes := true
	want := []Action{
		StartPods{Nodes: []string{"a"}, Pods: []string{"p"},
			Annotations: map[string]string{"skein.dev/egress.web": "nat,other", "skein.dev/egress.x": "y", "k": "v"}},
		Serve{Nodes: []string{"target"}, Port: 80},
		Fetch{From: []string{"a/p"}, To: []string{"target"}, Port: 80, Family: "ipv4", OwnerOf: Ref{"web", "nat"}},
		Fetch{From: []string{"a", "b"}, To: []string{"target"}, Port: 8080, Source: []string{"b", "10.0.0.1"}},
		Fetch{From: []string{"a"}, To: []string{"target"}, Port: 80, Fails: true},
		Flow{From: []string{"a/p"}, To: []string{"target"}, Port: 80, Proto: "tcp", Every: time.Millisecond, Lost: -1},
		Flow{Port: 80, Proto: "udp", Every: defaultEvery, Lost: 0, Longest: 300 * time.Millisecond},
		Kill{[]string{"a", "b"}},
		Partition{[][]string{{"b"}, {"a", "target"}}},
		Block{From: []string{"target"}, To: []string{"a", "b", "target"}},
		Expect{From: []string{"a"}, To: []string{"target"}, Reach: &yes, Count: 1},
	}
	for i, w := range want {
		if d := cmp.Diff(w, s.Steps[i].Action); d != "" {
			t.Errorf("step %d: %s", i+1, d)
		}
	}
	if d := cmp.Diff(map[string]string{"gate": "yes"}, s.Nodes[1].Labels); d != "" || s.Steps[2].Within != 3*time.Second {
		t.Error(d, s.Steps[2].Within)
	}
}

func TestMistakesInEgresses(t *testing.T) {
	for _, c := range []struct{ file, want string }{
		{hosted + "egresses: {nat: {destinations: [0.0.0.0/0]}}\n",
			`f.yaml:9: egresses.nat: "nat" names no egress; allowed: namespace/name`},
		{hosted + "egresses: {a/nat: {}}\n",
			`f.yaml:9: egresses.a/nat: the key "destinations" is missing: list the subnets that it leads to`},
		{hosted + "egresses: {a/nat: {destinations: [x], addresses: [y]}}\n", "f.yaml:9: egresses.a/nat.destinations: " +
			"\"x\" is not a subnet; allowed: one such as 0.0.0.0/0 or '::/0'\n" +
			`f.yaml:9: egresses.a/nat.addresses[1]: "y" is not an address`},
		{strings.Replace(hosted, "role: host", "role: host, labels: {a: b}", 1),
			`f.yaml:8: nodes.target: role: host has no agent: leave out server, admin, leader, late, relay, init, labels, config and mesh`},
		{hosted + "steps:\n  - {kill: target}\n", `f.yaml:10: steps[1].kill: target is a host without an agent (role: host)`},
		{hosted + "steps:\n  - {expect: {from: a, to: target, path: direct}}\n",
			`f.yaml:10: steps[1].expect: there is no path to or from a host without an agent: leave path out`},
		{hosted + "steps:\n  - {pods: {node: target, start: [p]}}\n",
			`f.yaml:10: steps[1].pods.node: target is a host without an agent (role: host)`},
		{hosted + "steps:\n  - {serve: {port: 80}}\n",
			`f.yaml:10: steps[1].serve: the key "node" is missing: name the nodes or pods that serve`},
		{hosted + "steps:\n  - {fetch: {from: a}}\n",
			`f.yaml:10: steps[1].fetch: needs both from and to: nodes, or pods as NODE/POD`},
		{hosted + "steps:\n  - {fetch: {from: a, to: target, source: c}}\n",
			`f.yaml:10: steps[1].fetch.source: "c" is neither an address nor a node; nodes: a, b, target`},
		{hosted + "steps:\n  - {fetch: {from: a, to: target, source: b, fails: true}}\n",
			`f.yaml:10: steps[1].fetch: fails: true gets no answer: leave source and sources out`},
		{hosted + "steps:\n  - {flow: {from: a, to: target, lost: 0}}\n",
			`f.yaml:10: steps[1].flow: either starts flows, with from and to, or ends them and says how many numbers may be lost: {lost: 0}, or for how long none may come back: {longest: 1s}`},
		{hosted + "steps:\n  - {pods: {node: a, start: [p], egress: nat}}\n",
			`f.yaml:10: steps[1].pods.egress: "nat" names no egress; allowed: namespace/name`},
	} {
		wantError(t, c.file, c.want)
	}
}

// The stub of an agent gives every slot to node a.

func (s *stub) egressFile() string { return filepath.Join(s.state, "egress") }

func (s *stub) CreateEgress(_ context.Context, r *skeinv1.CreateEgressRequest) (*skeinv1.EgressResponse, error) {
	b, err := proto.Marshal(r.GetEgress())
	if err == nil {
		err = os.WriteFile(s.egressFile(), b, 0o600)
	}
	return &skeinv1.EgressResponse{Egress: r.GetEgress(), Warnings: []string{"the stub warns"}}, err
}

func (s *stub) Egresses(context.Context, *skeinv1.EgressesRequest) (*skeinv1.EgressesResponse, error) {
	b, err := os.ReadFile(s.egressFile())
	if err != nil {
		return &skeinv1.EgressesResponse{}, nil
	}
	e := &skeinv1.Egress{}
	if err := proto.Unmarshal(b, e); err != nil {
		return nil, err
	}
	out := &skeinv1.EgressSummary{Egress: e}
	for i := range e.GetReplicas() {
		out.Slots = append(out.Slots, &skeinv1.SlotView{Owner: "a", Slot: &skeinv1.EgressSlot{Namespace: e.GetNamespace(),
			Name: e.GetName(), Number: i}})
	}
	return &skeinv1.EgressesResponse{Egresses: []*skeinv1.EgressSummary{out}}, nil
}

func TestFetchByTheOwnerOfAnEgress(t *testing.T) {
	const file = `name: NAME
sites: {dc: {nat: none}, home: {nat: full-cone}}
nodes:
  a: {site: dc, server: true}
  b: {site: home}
  target: {site: dc, role: host}
egresses:
  x/y: {destinations: [0.0.0.0/0], gateways: {g: h}EXTRA}
`
	for _, c := range []struct{ name, extra, from, want string }{
		{"the owner's address", "", "a", ""},
		{"another's", "", "b", "target saw b come from 198.18.2.1, not from 198.18.1.11 and 2001:db8:1::b"},
		{"a slot's own", ", addresses: [198.18.2.1]", "b", ""},
		{"a slot's own, and the owner's is another", ", addresses: [198.18.2.1]", "a", "not from 198.18.2.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := raiseStubs(t, strings.Replace(file, "EXTRA", c.extra, 1))
			if err := l.Serve(Serve{Nodes: []string{"target"}, Port: 80}); err != nil {
				t.Fatal(err)
			}
			err := l.Fetch(t.Context(), 0, Fetch{From: []string{c.from}, To: []string{"target"}, Port: 80, Family: "ipv4",
				OwnerOf: Ref{"x", "y"}})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if err := l.Fetch(t.Context(), 0, Fetch{From: []string{c.from}, To: []string{"target"}, Port: 80,
				OwnerOf: Ref{"x", "z"}}); err == nil || !strings.Contains(err.Error(), "knows no egress x/z") {
				t.Errorf("an egress that is not there: %v", err)
			}
			if st := l.Status(t.Context()); len(st.Nodes) != 2 || len(st.Hosts) != 1 || st.Hosts[0].Address != "198.18.1.13" {
				t.Errorf("%+v", st)
			}
		})
	}
}

// A server in a lab tells clients of both families who they are, and flows come back to them.
func TestServeFetchFlow(t *testing.T) {
	l := raiseStubs(t, `name: NAME
sites:
  dc: {nat: none}
  home: {nat: port-restricted-cone}
nodes:
  a: {site: dc, server: true}
  b: {site: home}
  target: {site: dc, role: host}
`)
	ctx := t.Context()
	if err := l.Serve(Serve{Nodes: []string{"target"}, Port: 80}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		f    Fetch
		want string // in the error; "": none
	}{
		{Fetch{From: []string{"a"}, To: []string{"target"}, Source: []string{"a"}}, ""},
		// as its NAT's address
		{Fetch{From: []string{"b"}, To: []string{"target"}, Source: []string{"b"}, Family: "ipv4"}, ""},
		{Fetch{From: []string{"b"}, To: []string{"target"}, Source: []string{"a"}, Family: "ipv4"}, "target saw b come " +
			"from 198.18.2.1, not from 198.18.1.11"},
		{Fetch{From: []string{"a"}, To: []string{"target"}, Fails: true}, "should get no answer"},
		{Fetch{From: []string{"a"}, To: []string{"target"}, Port: 81, Fails: true}, ""},
	} {
		if c.f.Port == 0 {
			c.f.Port = 80
		}
		err := l.Fetch(ctx, 0, c.f)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v, want %q", c.f, err, c.want)
		}
	}
	for _, proto := range []string{"udp", "tcp", protoConnect} {
		if err := l.StartFlows(ctx, Flow{From: []string{"b"}, To: []string{"target"}, Port: 80, Proto: proto,
			Every: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range l.flows {
		if err := f.stream.Answered(ctx, 50); err != nil {
			t.Error(err)
		}
	}
	if err := l.EndFlows(0, time.Second); err != nil {
		t.Error(err)
	}

	// What a cut loses is told.
	for _, proto := range []string{"udp", protoConnect} {
		if err := l.StartFlows(ctx, Flow{From: []string{"a"}, To: []string{"target"}, Port: 80, Proto: proto,
			Every: time.Millisecond}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Block(Block{From: []string{"a"}, To: []string{"target"}}); err != nil {
		t.Fatal(err)
	}
	if err := l.Fetch(ctx, 5*time.Second, Fetch{From: []string{"a"}, To: []string{"target"}, Port: 80,
		Fails: true}); err != nil {
		t.Error(err)
	}
	if err := l.EndFlows(0, 0); err == nil || strings.Count(err.Error(), "allowed: 0 lost") != 2 {
		t.Errorf("flows that were cut: %v", err)
	}
	// A port that nobody serves refuses: such a connection does not stand.
	refused, err := l.Connect("a", netip.AddrPortFrom(l.Plan.Hosts[2].Addr, 81), time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if err := refused.Answered(short, 1); err == nil {
		t.Error("a connection to a port that nobody serves stood")
	}
	if r := refused.Stop(); r.Sent == 0 || r.Received != 0 {
		t.Errorf("a port that nobody serves: %+v", r)
	}
	if err := l.Heal(ctx); err != nil {
		t.Error(err)
	}
	if err := l.Kill(ctx, "target"); err == nil || !strings.Contains(err.Error(), "target is a host without an agent") {
		t.Errorf("kill a host: %v", err)
	}
}

// Namespaces that agents have bound below their directories go with the lab, with what lives there.
func TestDownUnbindsGateways(t *testing.T) {
	l := raiseStubs(t, "name: NAME\nsites: {dc: {nat: none}}\nnodes:\n  a: {site: dc, server: true}\n")
	dir := filepath.Join(l.Dir, "nodes", "a", "run", "netns")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "egress1")
	out, exit, err := l.Exec(t.Context(), "a", "/bin/sh", "-c", "touch "+file+" && unshare -n mount --bind "+
		"/proc/self/ns/net "+file+" && nsenter --net="+file+" sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'")
	if err != nil || exit != 0 {
		t.Fatal(out, exit, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		t.Fatal(out, err)
	}
	inside, err := processOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "plain"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.Down(context.WithoutCancel(t.Context())); err != nil {
		t.Fatal(err)
	}
	if inside.alive() {
		t.Error("what lives in a gateway's namespace is left")
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), file) {
		t.Error("it is still mounted", err)
	}
	if _, err := os.Stat(l.Dir); err == nil {
		t.Error("the lab's directory is left")
	}
}

func TestFewSources(t *testing.T) {
	addrs := func(all ...string) (out []netip.Addr) {
		for _, a := range all {
			out = append(out, netip.MustParseAddr(a))
		}
		return out
	}
	for _, c := range []struct {
		seen  []netip.Addr
		least int
		says  string
	}{
		{addrs("192.0.2.1", "192.0.2.1"), 0, ""},
		{addrs("192.0.2.1", "192.0.2.2", "192.0.2.1"), 2, ""},
		{addrs("192.0.2.1", "192.0.2.1", "2001:db8::1", "2001:db8::2"), 2, "all come from 192.0.2.1; at least 2 addresses"},
		{addrs("192.0.2.1", "192.0.2.2", "2001:db8::1"), 2, "all come from 2001:db8::1"},
	} {
		err := fewSources(c.seen, c.least)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v, %d: %v, want %q", c.seen, c.least, err, c.says)
		}
	}
}
