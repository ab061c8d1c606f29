package nft_test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/internal/testns"
)

func open(t *testing.T, n *testns.NS) *nft.Reconciler {
	t.Helper()
	var r *nft.Reconciler
	n.Must("open", func() (err error) { r, err = nft.NewReconciler(dataplane.Numbers{}); return err })
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func spec(n int) dataplane.Spec {
	s := dataplane.Spec{Complete: true}
	for i := range n {
		s.Targets = append(s.Targets,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}), 128))
	}
	return s
}

// A set far beyond a socket's default buffers is written in parts, read back whole, and shrunk again.
func TestLargeSets(t *testing.T) {
	const many = 20000
	r := open(t, testns.New(t, "nft"))
	for _, n := range []int{many, many - 1, 1, 0} {
		s := spec(n)
		writes, _, err := r.Reconcile(s)
		if err != nil {
			t.Fatalf("%d targets: %v", n, err)
		}
		t.Logf("%d targets in each family: %d messages", n, writes)
		if d, err := r.Diff(s); err != nil || len(d) > 0 {
			t.Fatalf("%d targets: differs: %.200q %v", n, d, err)
		}
	}
}

// Adjacent and growing prefixes are where interval sets are easily got wrong.
func TestNeighboursAndEdges(t *testing.T) {
	r := open(t, testns.New(t, "nft"))
	for _, ps := range [][]string{
		{"10.0.0.0/32", "10.0.0.1/32", "10.0.0.2/31", "255.255.255.255/32", "0.0.0.0/32"},
		{"10.0.0.1/32", "10.0.0.2/31", "255.255.255.254/31"},
		{"10.0.0.0/24", "fd00::/64", "ffff::/16"},
		{"10.0.0.0/25", "10.0.0.128/25", "fd00::/65", "fd00:0:0:0:8000::/65"},
		{"10.0.0.0/23"},
		{"10.0.0.0/8", "10.1.0.0/16"},
		{},
	} {
		s := dataplane.Spec{Complete: true}
		for _, p := range ps {
			s.Targets = append(s.Targets, netip.MustParsePrefix(p))
		}
		if _, _, err := r.Reconcile(s); err != nil {
			t.Fatalf("%v: %v", ps, err)
		}
		if d, err := r.Diff(s); err != nil || len(d) > 0 {
			t.Fatalf("%v: differs: %q %v", ps, d, err)
		}
	}
}

// Whoever looks with nft sees what DESIGN.md says.
func TestListedByNft(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		testenv.Missing(t, "needs nft, of Debian's package nftables, to look with")
	}
	n := testns.New(t, "nft")
	r := open(t, n)
	if _, _, err := r.Reconcile(spec(2)); err != nil {
		t.Fatal(err)
	}
	var out []byte
	n.Must("nft list ruleset", func() (err error) {
		out, err = exec.Command("nft", "list", "ruleset").CombinedOutput()
		return err
	})
	for _, want := range []string{"table inet skein", "type filter hook prerouting priority filter; policy accept;",
		"type route hook output priority filter; policy accept;",
		"meta mark & 0x00000060 == 0x00000020 accept", "ip daddr @skein_targets_ipv4 meta mark set meta mark & 0xffffffdf " +
			"| 0x00000040 accept",
		"ip6 daddr @skein_targets_ipv6 meta mark set meta mark & 0xffffffdf | 0x00000040 accept",
		"flags interval", "10.0.0.1"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("nft does not show %q in:\n%s", want, out)
		}
	}
}

func BenchmarkOneChangeAmong1000(b *testing.B) {
	n := testns.New(b, "nft")
	var r *nft.Reconciler
	n.Must("open", func() (err error) { r, err = nft.NewReconciler(dataplane.Numbers{}); return err })
	defer r.Close()
	s := spec(1000)
	if _, _, err := r.Reconcile(s); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		i++
		s.Targets[0] = netip.MustParsePrefix(fmt.Sprintf("11.0.%d.%d/32", i>>8&255, i&255))
		if w, _, err := r.Reconcile(s); err != nil || w != 2 {
			b.Fatal(w, err)
		}
	}
}
