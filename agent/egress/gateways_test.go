package egress

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Only the node that owns a client's address by the agreed state may register it.
func TestAddressesOfANode(t *testing.T) {
	s := events.NewState()
	do := func(c *skeinv1.Command) {
		t.Helper()
		c.Time, c.Entropy = int64(time.Hour)*24*365*56, bytes.Repeat([]byte{byte(s.Index() + 1)}, 64)
		evs, _, err := events.Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	key := bytes.Repeat([]byte{1}, 32)
	node := identity.IDOf(key)
	do(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "00112233445566778899aabbccddeeff", OverlayIpv4: "10.4.0.0/16",
		FirstNode: &skeinv1.NewNode{Name: "a", IdentityKey: key, WireguardKey: bytes.Repeat([]byte{2}, 32), Server: true,
			MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}}}})
	do(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
		Name: "default", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.100.0.0/24", Ipv6: "fd00:100::/120"}},
		BlockSizeBits: 3}}}})
	do(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
		NodeId: node.String(), Pool: "default", Total: 1}}})
	self := s.Node(node)
	for addr, why := range map[string]string{
		self.GetIpv4(): "", self.GetIpv6(): "", "10.100.0.7": "", "fd00:100::7": "",
		"10.100.0.8": "is not of node a", "fd00:100::8": "is not of node a", "192.0.2.1": "is not of node a",
		"10.4.0.99": "is not of node a",
	} {
		err := holder(s)(node, netip.MustParseAddr(addr))
		if (err == nil) != (why == "") || err != nil && !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want %q", addr, err, why)
		}
	}
	if err := holder(s)(nodeID(9), netip.MustParseAddr("10.100.0.7")); err == nil || !strings.Contains(err.Error(),
		"is not a member") {
		t.Errorf("a stranger's: %v", err)
	}
}

// A file name stays in its directory and is short enough, whatever the egress's name.
func TestFilesOfNamespaces(t *testing.T) {
	refs := []Ref{{"a", "b"}, {"kube-system", "out-1"}, {"a", "b/../../../../root/.ssh/authorized_keys"}, {"..", ".."},
		{"", ""}, {"a", "b\x00c"}, {"a", strings.Repeat("x", 5000)},
		{"a\x00b", "c"}}
	names := map[string]bool{}
	for _, ref := range refs {
		name := fileName(7, ref)
		if n, its := parseFile(name, ref); n != 7 || !its {
			t.Errorf("%s is %d, %t", name, n, its)
		}
		if len(name) > 64 || strings.Trim(name, "0123456789abcdef-") != "" {
			t.Errorf("egress %q has the file %q", ref, name)
		}
		names[name] = true
		if _, its := parseFile(name, Ref{"a", "other"}); its {
			t.Errorf("%s is taken for another egress's", name)
		}
		former := formerName(7, ref)
		if (former != "") != ref.Valid() || strings.Contains(former, "/") {
			t.Errorf("egress %q had the file %q", ref, former)
		}
		if n, its := parseFile(former, ref); former != "" && (n != 7 || !its) {
			t.Errorf("its former name %s is %d, %t", former, n, its)
		}
	}
	if len(names) != len(refs) {
		t.Errorf("%d names for %d egresses", len(names), len(refs))
	}
	for _, name := range []string{"", "a", "x.a.b", "0.a.b", "-1.a.b", "+1.a.b", "99999999.a.b", "1-", "251.a.b"} {
		if _, its := parseFile(name, Ref{"a", "b"}); its {
			t.Errorf("%q is taken for a gateway's", name)
		}
	}
	if n, its := parseFile("1.a", Ref{"a", "b"}); n != 1 || its {
		t.Errorf("a stray's number is %d, its egress's: %t", n, its)
	}
}

// The addresses in a namespace follow from its number, so they are unique.
func TestNumbersOfNamespaces(t *testing.T) {
	g := &Gateways{cfg: GatewaysConfig{Dir: t.TempDir()}, served: map[Ref]*gateway{}}
	for want, taken := range [][]int{{}, {1}, {2, 1}, {1, 2, 4}} {
		clear(g.served)
		for i, n := range taken {
			g.served[Ref{"x", string(rune('a' + i))}] = &gateway{number: n}
		}
		if n := g.number(Ref{"y", "z"}); n != min(want+1, 3) {
			t.Errorf("with %v taken it is %d", taken, n)
		}
	}
	for n := 1; n <= maxEgresses; n++ {
		g.served[Ref{"x", fileName(n, Ref{})}] = &gateway{number: n}
	}
	if n := g.number(Ref{"y", "z"}); n != 0 {
		t.Errorf("with all taken it is %d", n)
	}
}

// No ticket begins before the kernel has the slot's source address as agreed, and only for the epoch of that address.
func TestKernelHasTheAgreedSource(t *testing.T) {
	with := func(addrs ...string) *skeinv1.Egress {
		e := &skeinv1.Egress{}
		for _, a := range addrs {
			e.Addresses = append(e.Addresses, &skeinv1.EgressAddress{Ipv4: a})
		}
		return e
	}
	for i, c := range []struct {
		has, agreed *skeinv1.Egress
		want        [2]bool // of slots 0 and 1
	}{
		{nil, with(), [2]bool{false, false}},
		{with(), with(), [2]bool{true, true}},
		{with("192.0.2.1", "192.0.2.2"), with("192.0.2.1", "192.0.2.3"), [2]bool{true, false}},
		{with(), with("192.0.2.1"), [2]bool{false, true}},
	} {
		r := &gateway{has: c.has, egress: c.agreed, epochs: []uint64{7, 8}}
		if got := [2]bool{r.current(0, 7), r.current(1, 8)}; got != c.want {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
		if r.current(0, 6) || r.current(0, 8) || r.current(2, 7) {
			t.Errorf("%d: a ticket of another epoch, or of no slot, begins", i)
		}
	}
}

// During a change of a slot's source address, and after a failed one, the kernel's address is unknown: no ticket
// begins for that slot, even if the former address is agreed again meanwhile. Other slots continue.
func TestNoTicketBeginsWhileTheSourceChanges(t *testing.T) {
	with := func(addrs ...string) *skeinv1.Egress {
		e := &skeinv1.Egress{}
		for _, a := range addrs {
			e.Addresses = append(e.Addresses, &skeinv1.EgressAddress{Ipv4: a})
		}
		return e
	}
	a, b := with("192.0.2.1", "192.0.2.9"), with("192.0.2.2", "192.0.2.9")
	gw := &gateway{has: a, egress: a, epochs: []uint64{7, 8}, unsure: map[int]bool{}}
	if gw.changing(with("192.0.2.1", "192.0.2.9")); !gw.current(0, 7) {
		t.Error("no ticket begins while something else is changed")
	}
	gw.egress, gw.epochs = b, []uint64{9, 8}
	gw.changing(b)
	gw.egress, gw.epochs = a, []uint64{10, 8} // agreed again before b was done
	if gw.current(0, 10) {
		t.Error("a ticket begins though the kernel may have another source address")
	}
	if gw.changing(a); gw.current(0, 10) {
		t.Error("a ticket begins while it is changed back")
	}
	if !gw.current(1, 8) {
		t.Error("no ticket begins for a slot whose address stays")
	}
	more := with("192.0.2.1", "192.0.2.9", "192.0.2.3")
	gw.egress, gw.epochs = more, []uint64{10, 8, 11}
	if gw.changing(more); gw.current(2, 11) {
		t.Error("a ticket begins while a slot gets its first address")
	}
}

// Removing an earlier run's strays keeps only files of egresses that this node serves, and removes nothing before
// these are known.
func TestClientsOfStraysAreForgotten(t *testing.T) {
	g := &Gateways{cfg: GatewaysConfig{Known: t.TempDir()}, served: map[Ref]*gateway{}}
	mine := &gateway{g: g, number: 1, ref: Ref{"a", "served"}}
	gone := &gateway{g: g, number: 2, ref: Ref{"a", "gone"}}
	for _, r := range []*gateway{mine, gone} {
		r.known, r.formerKnown = g.clientsFiles(r.number, r.ref)
	}
	for _, f := range []string{mine.known, mine.known + newSuffix, mine.formerKnown, gone.known, gone.known + newSuffix,
		gone.formerKnown} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (names []string) {
		files, err := os.ReadDir(g.cfg.Known)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			names = append(names, f.Name())
		}
		return names
	}
	if err := g.ForgetStrays(); err != nil || len(left()) != 6 {
		t.Errorf("without an agreed state: %v, left are %v", err, left())
	}
	g.state, g.served[mine.ref] = events.NewState(), mine
	want := []string{filepath.Base(mine.known), filepath.Base(mine.known) + newSuffix, filepath.Base(mine.formerKnown)}
	slices.Sort(want)
	if err := g.ForgetStrays(); err != nil || !slices.Equal(left(), want) {
		t.Errorf("%v, left are %v, want %v", err, left(), want)
	}
	g.cfg.Known = filepath.Join(g.cfg.Known, "none")
	if err := g.ForgetStrays(); err != nil {
		t.Errorf("of a directory that is not there: %v", err)
	}
}
