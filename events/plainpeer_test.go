package events

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// plain is a plain peer that some nodes carry, as a command gives it.
func plain(name string, carriers string, networks ...string) *skeinv1.Command {
	p := &skeinv1.PlainPeer{Name: name, PublicKey: key("plain", name), CarrierKey: key("carrier", name),
		AllowedIps: networks}
	for _, c := range strings.Fields(carriers) {
		p.Carriers = append(p.Carriers, &skeinv1.PlainCarrier{NodeId: id(c), Sealed: key("sealed", name+c)})
	}
	return &skeinv1.Command{Body: &skeinv1.Command_SetPlainPeer{SetPlainPeer: &skeinv1.SetPlainPeer{PlainPeer: p}}}
}

func removePlain(name string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RemovePlainPeer{RemovePlainPeer: &skeinv1.RemovePlainPeer{Name: name,
		Reason: "lost"}}}
}

func plainPeerHistory(t *testing.T) *world {
	w := newPools(t)
	w.must(plain("phone", "a b"))
	w.must(plain("office", "b", "192.168.8.0/24"))
	w.must(removePlain("phone"))
	return w
}

// A plain peer has an address from the other end of the overlay than nodes have theirs from, for as long as it is
// there.
func TestPlainPeers(t *testing.T) {
	w := newPools(t)
	first := w.must(plain("phone", "a b")).GetPlainPeer()
	if first.GetIpv4() != "10.4.255.254" ||
		!netip.MustParsePrefix(w.s.Cluster().GetOverlayIpv6()).Contains(netip.MustParseAddr(first.GetIpv6())) {
		t.Fatalf("it gets %s and %s", first.GetIpv4(), first.GetIpv6())
	}
	second := w.must(plain("office", "b", "fd12::/64", "192.168.8.0/24")).GetPlainPeer()
	if second.GetIpv4() != "10.4.255.253" || !slices.Equal(second.GetAllowedIps(), []string{"192.168.8.0/24",
		"fd12::/64"}) {
		t.Fatalf("the second is %v", second)
	}
	for at, want := range map[string]string{"10.4.255.254": "phone", second.GetIpv6(): "office",
		"192.168.8.77": "office", "fd12::9": "office",
		"::ffff:10.4.255.254": "phone", "10.4.0.1": "", "192.168.9.1": ""} {
		if p, _ := w.s.PlainPeerAt(netip.MustParseAddr(at)); p.GetName() != want {
			t.Errorf("%s is of %q, want %q", at, p.GetName(), want)
		}
	}
	checkInvariants(t, w.s)
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))

	before := w.s.Hash()
	w.refused(plain("phone", "a"), AlreadyExists, "there is a plain peer phone already", "skein peer remove phone")
	if w.s.Hash() != before {
		t.Error("a refusal changed the state")
	}
	c := plain("phone", "b a", "10.99.0.0/24")
	c.GetSetPlainPeer().Replace = true
	next := w.must(c).GetPlainPeer()
	if next.GetIpv4() != first.GetIpv4() || next.GetIpv6() != first.GetIpv6() ||
		next.GetCreatedIndex() <= first.GetCreatedIndex() || next.GetCarriers()[0].GetNodeId() != id("b") {
		t.Errorf("it became %v", next)
	}
	w.must(removePlain("phone"))
	w.refused(removePlain("phone"), NotFound, "there is no plain peer", "skein peer list")
	if w.s.PlainPeer("phone") != nil || len(w.s.PlainPeers()) != 1 {
		t.Error("it is still there")
	}
	if again := w.must(plain("tablet", "a")).GetPlainPeer(); again.GetIpv4() != "10.4.255.254" {
		t.Errorf("what is free again is not given: %v", again)
	}
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
}

// A plain peer's name, keys and networks are nobody else's, from either side, and the refusal says whose they are.
func TestPlainPeersThatOverlap(t *testing.T) {
	w := newPools(t)
	w.must(podRanges("10.244.0.0/16"))
	w.must(podCIDRs("a", "node-a", "10.244.1.0/24"))
	w.must(createPool(pool("default", 2, "10.64.0.0/24")))
	w.must(define(egress("web/out", "10.99.0.0/16", 1)))
	w.must(plain("office", "b", "192.168.8.0/24"))
	with := func(c *skeinv1.Command, change func(*skeinv1.SetPlainPeer)) *skeinv1.Command {
		change(c.GetSetPlainPeer())
		return c
	}
	for _, c := range []struct {
		c     *skeinv1.Command
		code  Code
		words []string
	}{
		{plain("x", "a", "192.168.0.0/16"), AlreadyExists, []string{"192.168.8.0/24 behind plain peer office"}},
		{plain("x", "a", "192.168.8.4/30"), AlreadyExists, []string{"192.168.8.0/24 behind plain peer office"}},
		{plain("x", "a", "10.64.0.0/28"), AlreadyExists, []string{"10.64.0.0/24 of pool default"}},
		{plain("x", "a", "10.244.0.0/16"), AlreadyExists, []string{"10.244.1.0/24", "the pods of a"}},
		{plain("x", "a", "10.4.7.0/24"), AlreadyExists, []string{"the overlay 10.4.0.0/16"}},
		{plain("x", "a", "10.0.0.0/8"), AlreadyExists, []string{"the overlay"}},
		{plain("x", "a", "10.99.1.0/24"), FailedPrecondition, []string{"egress web/out"}},
		{plain("x", "a", "0.0.0.0/0"), InvalidArgument, []string{"not private", "use an egress"}},
		{plain("x", "a", "198.51.100.0/24"), InvalidArgument, []string{"not private"}},
		{plain("x", "a", "172.16.0.1/16"), InvalidArgument, []string{"host bits", "172.16.0.0/16"}},
		{plain("x", "a", "nonsense"), InvalidArgument, []string{"not a prefix"}},
		{plain("x", "a", "172.16.0.0/16", "172.16.3.0/24"), InvalidArgument, []string{"overlap"}},
		{plain("a", "b"), AlreadyExists, []string{"taken by node"}},
		{plain("X", "b"), InvalidArgument, []string{"lower-case"}},
		{plain("", "b"), InvalidArgument, nil},
		{plain("x", ""), InvalidArgument, []string{"--via"}},
		{plain("x", "a b c d e"), InvalidArgument, []string{"too many"}},
		{plain("x", "a a"), InvalidArgument, []string{"named twice"}},
		{plain("x", "nobody"), NotFound, []string{"not a member"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer.PublicKey = key("wireguard", "b") }),
			AlreadyExists, []string{"used by node b"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer.PublicKey = key("carrier", "office") }),
			AlreadyExists, []string{"used by plain peer office"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer.CarrierKey = c.PlainPeer.PublicKey }),
			InvalidArgument, []string{"the same"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer.PublicKey = []byte("short") }),
			InvalidArgument, []string{"5 bytes"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer.Carriers[0].Sealed = nil }),
			InvalidArgument, []string{"carrier a"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.LifetimeNanos = -1 }), InvalidArgument,
			[]string{"an expiry after"}},
		{with(plain("x", "a"), func(c *skeinv1.SetPlainPeer) { c.PlainPeer = nil }), InvalidArgument, nil},
		{admit("office", "1"), AlreadyExists, []string{"taken by a plain peer", "skein peer remove office"}},
		{changeNode("b", "office", nil), AlreadyExists, []string{"taken by a plain peer"}},
		{rotateKeyTo("b", key("plain", "office")), AlreadyExists, []string{"used by plain peer office"}},
		{createPool(pool("other", 2, "192.168.8.128/25")), AlreadyExists, []string{"behind plain peer office"}},
		{define(egress("web/other", "192.168.0.0/16", 1)), InvalidArgument, []string{"behind plain peer office"}},
	} {
		w.refused(c.c, c.code, c.words...)
	}
	w.must(podRanges("10.244.0.0/16", "192.168.0.0/16"))
	w.refused(podCIDRs("b", "node-b", "192.168.8.0/26"), AlreadyExists, "behind plain peer office")
}

func rotateKeyTo(name string, to []byte) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: id(name),
		WireguardKey: to}}}
}

// Fold takes no plain peer that contradicts the state, whatever log it is in.
func TestForgedPlainPeersAreNotFolded(t *testing.T) {
	w := newPools(t)
	w.must(plain("office", "b", "192.168.8.0/24"))
	good := proto.CloneOf(w.s.PlainPeer("office"))
	forge := func(change func(*skeinv1.PlainPeer)) *skeinv1.PlainPeer {
		p := proto.CloneOf(good)
		p.Name, p.Ipv4, p.Ipv6 = "x", "10.4.200.1", strings.TrimSuffix(w.s.Cluster().GetOverlayIpv6(), "/64")+"77"
		p.PublicKey, p.CarrierKey, p.AllowedIps = key("plain", "x"), key("carrier", "x"), []string{"192.168.9.0/24"}
		change(p)
		return p
	}
	fold := func(s *State, p *skeinv1.PlainPeer) bool {
		t.Helper()
		if err := s.Fold(&skeinv1.Event{Index: s.Index() + 1, Schema: plainPeerSchema,
			Body: &skeinv1.Event_PlainPeerSet{PlainPeerSet: &skeinv1.PlainPeerSet{PlainPeer: p}}}); err != nil {
			t.Fatal(err)
		}
		return s.PlainPeer(p.GetName()) != nil
	}
	if !fold(w.s.Clone(), forge(func(*skeinv1.PlainPeer) {})) {
		t.Fatal("the peer that is not forged is not folded: the test proves nothing")
	}
	for what, change := range map[string]func(*skeinv1.PlainPeer){
		"a node's name":      func(p *skeinv1.PlainPeer) { p.Name = "a" },
		"a path":             func(p *skeinv1.PlainPeer) { p.Name = "../x" },
		"a node's key":       func(p *skeinv1.PlainPeer) { p.PublicKey = w.s.NodeByName("a").GetWireguardKey() },
		"a node's address":   func(p *skeinv1.PlainPeer) { p.Ipv4 = w.s.NodeByName("a").GetIpv4() },
		"an address outside": func(p *skeinv1.PlainPeer) { p.Ipv4 = "192.0.2.1" },
		"the families":       func(p *skeinv1.PlainPeer) { p.Ipv4, p.Ipv6 = p.Ipv6, p.Ipv4 },
		"another's network":  func(p *skeinv1.PlainPeer) { p.AllowedIps = []string{"192.168.8.0/25"} },
		"a public network":   func(p *skeinv1.PlainPeer) { p.AllowedIps = []string{"198.51.100.0/24"} },
		"the overlay":        func(p *skeinv1.PlainPeer) { p.AllowedIps = []string{"10.4.0.0/24"} },
		"twice": func(p *skeinv1.PlainPeer) {
			p.AllowedIps = []string{"192.168.9.0/24",
				"192.168.9.0/25"}
		},
		"no key": func(p *skeinv1.PlainPeer) { p.CarrierKey = nil },
	} {
		s := w.s.Clone()
		p := forge(change)
		if fold(s, p) {
			t.Errorf("%s: it is folded", what)
		}
		checkInvariants(t, s)
		bad := w.s.Proto()
		bad.PlainPeers = append(bad.PlainPeers, p)
		if _, err := FromProto(bad); err == nil {
			t.Errorf("%s: a snapshot with it is read", what)
		}
	}
	s := w.s.Clone()
	fold(s, forge(func(*skeinv1.PlainPeer) {}))
	w.must(removePlain("office"))
	node := proto.CloneOf(s.NodeByName("b"))
	node.Name = "x"
	if err := s.Fold(&skeinv1.Event{Index: s.Index() + 1, Schema: 1,
		Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: node}}}); err != nil ||
		s.NodeByName("x") != nil {
		t.Errorf("a node gets a plain peer's name: %v", err)
	}
}

// A plain peer lives for as long as was said, by the leader's clock, also when the log's time is set back.
func TestPlainPeersExpire(t *testing.T) {
	w := newPools(t)
	c := plain("phone", "a")
	c.GetSetPlainPeer().LifetimeNanos = int64(time.Hour)
	p := w.must(c).GetPlainPeer()
	if left := time.Duration(p.GetExpiresAt() - p.GetCreatedAt()); left != time.Hour {
		t.Errorf("it lives for %s", left)
	}
	w.must(plain("office", "a"))
	if have := w.s.NextPlainExpiry(); have != p {
		t.Errorf("%v expires first", have)
	}
	stale := removePlain("phone")
	stale.GetRemovePlainPeer().CreatedIndex = p.GetCreatedIndex() + 1
	if evs, _, err := w.propose(stale); err != nil || len(evs) != 0 {
		t.Errorf("the removal of another peer gives %v %v", evs, err)
	}
	w.now = w.now.Add(-30 * time.Minute)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_RepairClock{RepairClock: &skeinv1.RepairClock{}}})
	if next := w.s.PlainPeer("phone"); next.GetExpiresAt() != w.now.Add(time.Hour).UnixNano() {
		t.Errorf("with the clock set back it expires at %s, and it is %s", time.Unix(0, next.GetExpiresAt()), w.now)
	}
	stale.GetRemovePlainPeer().CreatedIndex = p.GetCreatedIndex()
	w.must(stale)
	if w.s.NextPlainExpiry() != nil {
		t.Error("one is left that expires")
	}
}

// Every plain peer has a carrier that can fold it, and every server folds it.
func TestPlainPeersNeedSchemas(t *testing.T) {
	w := newPools(t)
	w.must(plainSchemas("b", 1, plainPeerSchema-1))
	w.refused(plain("phone", "b"), FailedPrecondition, "its carrier b folds event schemas up to 5",
		"upgrade skein on b")
	w.must(plain("phone", "a"))
	w.must(removePlain("phone"))
	w.must(plainSchemas("a", 1, plainPeerSchema-1))
	w.must(plainSchemas("b", 1, plainPeerSchema))
	w.refused(plain("phone", "b"), FailedPrecondition, "server a folds event schemas up to 5 and this command needs 6")
}

func plainSchemas(name string, low, high uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id(name),
		MinSchema: low, MaxSchema: high}}}
}

// Plain peers are bounded in number, and what they may take of the state is bounded in bytes; removing always works.
func TestPlainPeersAreBounded(t *testing.T) {
	w := newPools(t)
	n, err := w.until(MaxPlainPeers+1, func(i int) *skeinv1.Command {
		return plain(fmt.Sprintf("p%d", i), "a", fmt.Sprintf("192.168.%d.%d/30", i/64, i%64*4))
	})
	demand(t, err, "there are 1024 plain peers", "skein peer remove")
	if n != MaxPlainPeers {
		t.Errorf("%d are admitted", n)
	}
	w.must(removePlain("p7"))
	w.must(plain("p7", "a"))
	checkSame(t, "snapshot", w.s, throughBytes(t, w.s))
}

// Diff says what became of a plain peer, and shows none of its sealed secrets.
func TestDiffOfPlainPeers(t *testing.T) {
	w := newPools(t)
	before := w.s.Clone()
	w.must(plain("office", "b", "192.168.8.0/24"))
	lines := Diff(before, w.s)
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "+ plain peer office: ipv4 \"10.4.255.254\"") ||
		!strings.Contains(lines[0], id("b")) ||
		strings.Contains(lines[0], string(key("sealed", "officeb"))) {
		t.Errorf("it says %q", lines)
	}
	if lines := Diff(w.s, before); len(lines) != 1 || lines[0] != "- plain peer office" {
		t.Errorf("it says %q", lines)
	}
}

// anyPlainCommand draws a command about few plain peers.
func anyPlainCommand(t *rapid.T, n func() string) *skeinv1.Command {
	if rapid.IntRange(0, 3).Draw(t, "plain") == 0 {
		return removePlain(n())
	}
	network := rapid.SampledFrom([]string{"192.168.8.0/24", "192.168.8.0/25", "10.244.1.0/25", "10.64.0.0/24",
		"10.4.0.0/29", "nonsense"})
	c := plain(n(), n()+" "+n(), network.Draw(t, "network"))
	c.GetSetPlainPeer().Replace = rapid.Bool().Draw(t, "replace")
	c.GetSetPlainPeer().PlainPeer.PublicKey = key(rapid.SampledFrom([]string{"plain", "wireguard"}).Draw(t, "kind"),
		n())
	return c
}

// checkPlainPeers: whatever a plain peer has is its own.
func checkPlainPeers(t fatal, s *State, own func(what, v, id string)) {
	t.Helper()
	var all []netip.Prefix
	for _, p := range s.PlainPeers() {
		owner := "plain peer " + p.GetName()
		own("name ", p.GetName(), owner)
		own("address ", p.GetIpv4(), owner)
		own("address ", p.GetIpv6(), owner)
		own("key ", string(p.GetPublicKey()), owner)
		own("key ", string(p.GetCarrierKey()), owner)
		for _, text := range p.GetAllowedIps() {
			n := netip.MustParsePrefix(text)
			_, pool := s.overlap(n)
			_, pods := s.podNetOverlapping(n, "")
			if pool || pods || slices.ContainsFunc(all, n.Overlaps) || slices.ContainsFunc(s.overlays(), n.Overlaps) {
				t.Fatalf("%s of plain peer %s is somebody else's", n, p.GetName())
			}
			all = append(all, n)
		}
	}
	if len(all) != len(s.plainNets) {
		t.Fatalf("%d networks are behind plain peers, and %d are known", len(all), len(s.plainNets))
	}
}
