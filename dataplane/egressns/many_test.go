package egressns

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

// crowd is an egress with n clients, each with both families.
func crowd(n int) dataplane.GatewaySpec {
	s := aSpec()
	s.Clients = nil
	a4, a6 := netip.MustParseAddr("10.64.0.1"), netip.MustParseAddr("fd64::1")
	for i := range n {
		s.Clients = append(s.Clients, dataplane.GatewayClient{IPv4: a4, IPv6: a6, Slot: i % 2})
		a4, a6 = a4.Next(), a6.Next()
	}
	return s
}

func openAlone(t testing.TB) *NS {
	host := testns.New(t, "gwm")
	file := filepath.Join(t.TempDir(), "netns", "one")
	var n *NS
	host.Must("opening", func() (err error) {
		n, err = Open(Options{File: file, Egress: "internet/nat", Driver: wantDriver()})
		return err
	})
	t.Cleanup(func() {
		n.Close()
		if err := Remove(file); err != nil {
			t.Error(err)
		}
	})
	return n
}

// TestAThousandClients: they are made within seconds, and adding or removing one costs the same whatever their
// number.
func TestAThousandClients(t *testing.T) {
	n := openAlone(t)
	apply := func(s dataplane.GatewaySpec) (int, time.Duration) {
		t.Helper()
		begin := time.Now()
		w, notes, err := n.Apply(s)
		if err != nil || len(notes) > 0 {
			t.Fatal(notes, err)
		}
		return w, time.Since(begin)
	}
	apply(crowd(2)) // one by each slot, whose device the first of its clients brings
	fewWrites, few := apply(crowd(3))
	fewGone, _ := apply(crowd(2))
	writes, took := apply(crowd(1000))
	oneWrites, one := apply(crowd(1001))
	again, idle := apply(crowd(1001))
	goneWrites, gone := apply(crowd(1000))
	t.Logf("1,000 clients: %d messages, %s; one more: %d messages, %s (among three: %d, %s); nothing new: %s; one gone: "+
		"%d messages, %s", writes, took, oneWrites, one, fewWrites, few, idle, goneWrites, gone)
	if oneWrites != fewWrites || goneWrites != fewGone || again != 0 {
		t.Errorf("one more took %d messages, among three %d; one gone %d, among three %d; nothing new %d", oneWrites,
			fewWrites, goneWrites, fewGone, again)
	}
	if limit := 5 * time.Second; n.Driver() != fou.Kernel && took > limit { // the guest of the kernel tier is emulated
		t.Errorf("1,000 clients took %s", took)
	}
}

func BenchmarkOneMoreClient(b *testing.B) {
	n := openAlone(b)
	for b.Loop() {
		for _, k := range []int{1000, 1001} {
			if _, _, err := n.Apply(crowd(k)); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func BenchmarkRenew(b *testing.B) {
	n := openAlone(b)
	if _, _, err := n.Apply(crowd(1000)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		t, err := n.Begin(0, time.Second)
		if err == nil {
			err = n.Grant(0, t)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
