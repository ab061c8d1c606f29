package events

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func podRanges(ranges ...string) *skeinv1.Command {
	return changeSettings(&skeinv1.Settings{PodRanges: ranges}, "pod_ranges")
}

func podCIDRs(name, kubeNode string, cidrs ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
		NodeId: id(name), PodCidrs: &skeinv1.PodCidrs{KubernetesNode: kubeNode, Cidrs: cidrs},
	}}}
}

// podNetsOf are all networks of pods that the state knows, with their nodes.
func podNetsOf(s *State) string {
	var out []string
	for _, n := range s.Nodes() {
		if c := n.GetPodCidrs(); c != nil {
			out = append(out, n.GetName()+"="+c.GetKubernetesNode()+":"+strings.Join(c.GetCidrs(), ","))
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func podCIDRHistory(t *testing.T) *world {
	w := newPools(t)
	w.must(podRanges("10.244.0.0/16"))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24"))
	return w
}

// A Node's networks are its member's from the command on, and end with the member, with the ranges, or with another
// member that is the Node.
func TestPodCIDRs(t *testing.T) {
	w := newPools(t)
	step := func(c *skeinv1.Command, want string) {
		t.Helper()
		w.must(c)
		if have := podNetsOf(w.s); have != want {
			t.Fatalf("after %v there are %q, want %q", c, have, want)
		}
		checkInvariants(t, w.s)
		checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	}
	step(podRanges("fd44::/48", "10.244.0.0/16", "10.244.0.0/16"), "")
	if r := w.s.Settings().GetPodRanges(); !slices.Equal(r, []string{"10.244.0.0/16", "fd44::/48"}) {
		t.Errorf("the ranges are %v", r)
	}
	step(podCIDRs("a", "node-a", "fd44:0:0:1::/64", "10.244.1.0/24"), "a=node-a:10.244.1.0/24,fd44:0:0:1::/64")
	step(podCIDRs("b", "node-b", "10.244.2.0/24"), "a=node-a:10.244.1.0/24,fd44:0:0:1::/64 b=node-b:10.244.2.0/24")
	step(changeNode("b", "beta", map[string]string{"site": "x"}),
		"a=node-a:10.244.1.0/24,fd44:0:0:1::/64 beta=node-b:10.244.2.0/24")
	if evs, _, err := w.propose(podCIDRs("b", "node-b", "10.244.2.0/24")); err != nil || len(evs) != 0 {
		t.Errorf("what is so already gives %v, %v", evs, err)
	}
	// The host joined anew: the same Node is another member now, with the same network.
	step(podCIDRs("c", "node-b", "10.244.2.0/24"), "a=node-a:10.244.1.0/24,fd44:0:0:1::/64 c=node-b:10.244.2.0/24")
	step(podRanges("10.244.0.0/16"), "a=node-a:10.244.1.0/24 c=node-b:10.244.2.0/24")
	step(revoke(id("c")), "a=node-a:10.244.1.0/24")
	if r := w.s.Revoked(idOf("c")); r.GetNode().GetPodCidrs() != nil {
		t.Errorf("the revoked node keeps %v", r.GetNode().GetPodCidrs())
	}
	step(podCIDRs("b", "node-d", "10.244.2.0/24"), "a=node-a:10.244.1.0/24 beta=node-d:10.244.2.0/24")
	step(podCIDRs("a", ""), "beta=node-d:10.244.2.0/24")
	step(podRanges(), "")
}

// An address is of the pods of the node whose network it lies in.
func TestPodCIDRAt(t *testing.T) {
	w := newPools(t)
	w.must(podRanges("10.244.0.0/16", "fd44::/48"))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24", "fd44:0:0:1::/64"))
	w.must(podCIDRs("b", "node-b", "10.244.2.0/24"))
	for addr, want := range map[string]string{
		"10.244.1.0": "a 10.244.1.0/24", "10.244.1.255": "a 10.244.1.0/24", "10.244.2.9": "b 10.244.2.0/24",
		"::ffff:10.244.2.9": "b 10.244.2.0/24", "10.244.3.1": "", "fd44:0:0:1::5": "a fd44:0:0:1::/64", "10.4.0.1": "",
	} {
		have := ""
		if n, p := w.s.PodCIDRAt(netip.MustParseAddr(addr)); n != nil {
			have = n.GetName() + " " + p.String()
		}
		if have != want {
			t.Errorf("%s is in %q, want %q", addr, have, want)
		}
	}
}

// Networks in which somebody else has addresses are refused, from either side, and the refusal says whose they are.
func TestPodCIDRsThatAreTaken(t *testing.T) {
	w := newPools(t)
	w.refused(podCIDRs("a", "node-a", "10.244.1.0/24"), FailedPrecondition, "outside of the pod ranges",
		"there are none", "--pod-ranges")
	w.must(podRanges("10.0.0.0/8", "fd00::/8"))
	w.must(createPool(pool("default", 2, "10.64.0.0/24")))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24"))
	w.must(define(egress("web/out", "10.99.0.0/16", 1)))
	before := w.s.Hash()
	for _, c := range []struct {
		c     *skeinv1.Command
		code  Code
		words []string
	}{
		{podCIDRs("b", "node-b", "10.244.0.0/16"), AlreadyExists, []string{"10.244.0.0/16", "10.244.1.0/24 of a"}},
		{podCIDRs("b", "node-b", "10.244.1.128/25"), AlreadyExists, []string{"10.244.1.0/24 of a"}},
		{podCIDRs("b", "node-b", "10.64.0.0/16"), AlreadyExists, []string{"10.64.0.0/24 of pool default"}},
		{podCIDRs("b", "node-b", "10.4.3.0/24"), AlreadyExists, []string{"the overlay 10.4.0.0/16"}},
		{podCIDRs("b", "node-b", "10.99.3.0/24"), FailedPrecondition, []string{"destination 10.99.0.0/16 of egress web/out"}},
		{podCIDRs("b", "node-b", "192.168.0.0/24"), FailedPrecondition, []string{"outside of the pod ranges (10.0.0.0/8, " +
			"fd00::/8)"}},
		{podCIDRs("b", "node-b", "10.2.0.1/24"), InvalidArgument, []string{"host bits", "10.2.0.0/24"}},
		{podCIDRs("b", "node-b", "10.0.0.0/7"), FailedPrecondition, []string{"outside"}},
		{podCIDRs("b", "node-b", "10.2.0.0/24", "10.2.0.0/25"), InvalidArgument, []string{"overlap"}},
		{podCIDRs("b", "", "10.2.0.0/24"), InvalidArgument, []string{"Kubernetes Node is missing"}},
		{podCIDRs("b", "node-b", "rubbish"), InvalidArgument, []string{"not a prefix"}},
		{podCIDRs("x", "node-x", "10.2.0.0/24"), NotFound, []string{"not a member"}},
		{createPool(pool("q", 2, "10.244.0.0/16")), AlreadyExists, []string{"10.244.1.0/24", "pods of a"}},
		{define(egress("web/in", "10.244.1.0/28", 1)), InvalidArgument, []string{"10.244.1.0/24, the pods of a"}},
		{podRanges("0.0.0.0/0"), InvalidArgument, []string{"0.0.0.0/8"}},
		{podRanges("10.1.2.3/8"), InvalidArgument, []string{"write 10.0.0.0/8"}},
		{podRanges("::ffff:10.0.0.0/104"), InvalidArgument, []string{"not a prefix"}},
	} {
		w.refused(c.c, c.code, c.words...)
	}
	if w.s.Hash() != before {
		t.Error("a refusal left a trace")
	}
}

// A log that nobody decided does not give a network to two, nor lets a node bring its own.
func TestFoldOfForgedPodCIDRs(t *testing.T) {
	w := newPools(t)
	w.must(podRanges("10.0.0.0/8"))
	w.must(createPool(pool("p", 2, "10.64.0.0/24")))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24"))
	set := func(name, node string, cidrs ...string) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_PodCidrsSet{PodCidrsSet: &skeinv1.PodCidrsSet{NodeId: id(name),
			PodCidrs: &skeinv1.PodCidrs{KubernetesNode: node, Cidrs: cidrs}}}}
	}
	own := proto.CloneOf(w.s.Node(idOf("b")))
	own.PodCidrs = &skeinv1.PodCidrs{KubernetesNode: "node-b", Cidrs: []string{"10.9.0.0/24"}}
	fresh := proto.CloneOf(own)
	fresh.Id, fresh.Name, fresh.Ipv4, fresh.Ipv6, fresh.WireguardKey = id("z"), "z", "10.4.9.9", "fd09::9",
		key("wireguard", "z")
	for _, e := range []*skeinv1.Event{
		set("b", "node-b", "10.244.1.0/25"), set("b", "node-b", "10.64.0.0/28"), set("b", "node-b", "10.4.0.0/24"),
		set("b", "node-b", "10.3.0.1/24"), set("b", "node-b", "10.3.1.0/24", "10.3.0.0/24"), set("b", "", "10.3.0.0/24"),
		set("b", "node-b"), set("z", "node-z", "10.3.0.0/24"),
		{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: own}}},
		{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: fresh}}},
		{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: pool("q", 2, "10.244.0.0/16")}}},
	} {
		e.Index, e.Time, e.Schema = w.s.Index()+1, w.s.Time(), SchemaMax
		if p := e.GetPoolCreated().GetPool(); p != nil {
			p.CreatedIndex = e.Index
		}
		before := w.s.Proto()
		if err := w.s.Fold(e); err != nil {
			t.Fatal(err)
		}
		after := w.s.Proto()
		after.Index, after.Time = before.Index, before.Time
		if !proto.Equal(before, after) {
			t.Errorf("%v changed the state", e)
		}
	}
	p := throughBytes(t, w.s).Proto()
	p.Nodes[0], p.Nodes[1] = proto.CloneOf(p.Nodes[0]), proto.CloneOf(p.Nodes[1])
	for _, n := range p.Nodes[:2] {
		n.PodCidrs = &skeinv1.PodCidrs{KubernetesNode: "n", Cidrs: []string{"10.7.0.0/24"}}
	}
	if _, err := FromProto(p); err == nil || !strings.Contains(err.Error(), "networks") {
		t.Errorf("a snapshot in which two have one network gives %v", err)
	}
}

// A change reads well in `skein diff`.
func TestPodCIDRsInDiff(t *testing.T) {
	w := newPools(t)
	before := w.s.Clone()
	w.must(podRanges("10.244.0.0/16", "fd44::/48"))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24", "fd44:0:0:1::/64"))
	lines := strings.Join(Diff(before, w.s), "\n")
	for _, want := range []string{`pod_ranges [] → ["10.244.0.0/16" "fd44::/48"]`, "pod_cidrs (none) → " +
		"node-a,10.244.1.0/24,fd44:0:0:1::/64"} {
		if !strings.Contains(lines, want) {
			t.Errorf("%q is not in\n%s", want, lines)
		}
	}
}

// While a server folds schema 4 only, nothing of it comes into the log, and the refusal names the server.
func TestPodCIDRsInMixedVersions(t *testing.T) {
	w := newPools(t)
	w.must(podRanges("10.244.0.0/16"))
	w.must(admit("d", "1", func(a *skeinv1.AdmitNode) { a.Node.Server, a.Node.MaxSchema = true, 4 }))
	w.refused(podCIDRs("a", "node-a", "10.244.1.0/24"), FailedPrecondition,
		"server d folds event schemas up to 4", "needs 5")
	w.refused(podRanges("10.245.0.0/16"), FailedPrecondition, "server d", "upgrade skein on d")
	w.must(removeServer(id("d")))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24"))
	w.refused(admit("e", "1", func(a *skeinv1.AdmitNode) { a.Node.Server, a.Node.MaxSchema = true, 4 }),
		FailedPrecondition, "e")
	if what, need := w.s.neededSchema(); need != 5 {
		t.Errorf("the state needs schema %d for %s", need, what)
	}
}

// anyPodCommand is a command about pods' networks.
func anyPodCommand(t *rapid.T, n func() string) *skeinv1.Command {
	cidr := rapid.SampledFrom([]string{"10.244.0.0/24", "10.244.1.0/24", "10.244.0.0/23", "10.64.0.0/26",
		"10.4.0.0/28", "fd44::/64"})
	if rapid.IntRange(0, 2).Draw(t, "ranges") == 0 {
		return podRanges(rapid.SampledFrom([][]string{nil, {"10.0.0.0/8"}, {"10.244.0.0/24"},
			{"10.0.0.0/8", "fd44::/48"}}).Draw(t, "pod ranges")...)
	}
	return podCIDRs(n(), rapid.SampledFrom([]string{"n1", "n2", "n3"}).Draw(t, "Node"),
		rapid.SliceOfN(cidr, 0, 2).Draw(t, "CIDRs")...)
}

// checkPodCIDRs: a network of pods has one owner, whoever it is.
func checkPodCIDRs(t fatal, s *State) {
	t.Helper()
	var all []podNet
	for _, n := range s.Nodes() {
		for _, text := range n.GetPodCidrs().GetCidrs() {
			p := netip.MustParsePrefix(text)
			if o, taken := s.overlap(p); taken {
				t.Fatalf("%s of the pods of %s lies in pool %s", p, n.GetName(), o.pool)
			}
			for _, o := range s.overlays() {
				if o.Overlaps(p) {
					t.Fatalf("%s of the pods of %s lies in the overlay %s", p, n.GetName(), o)
				}
			}
			for _, o := range all {
				if o.prefix.Overlaps(p) {
					t.Fatalf("%s belongs to pods of %s and of %s", p, n.GetId(), o.node)
				}
			}
			if at, in := s.PodCIDRAt(p.Addr()); at != n || in != p {
				t.Fatalf("%s is not found by its address", p)
			}
			all = append(all, podNet{p, n.GetId()})
		}
	}
	if len(all) != len(s.podNets) {
		t.Fatalf("%d networks are in nodes and %d in the index", len(all), len(s.podNets))
	}
}
