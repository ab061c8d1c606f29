package plane_test

import (
	"net/netip"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/internal/testns"
)

// A userspace device needs queues and two goroutines for every peer: about 31 KiB. The complete agent may use 64 MiB
// with 1,000 peers.
func TestAThousandUserspacePeersAreSmall(t *testing.T) {
	h := &host{NS: testns.New(t, "plane"), keys: newKeyPair(t), n: 1}
	p, err := plane.Open(t.Context(), plane.Options{Namespace: &h.Handle, Driver: "userspace"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	h.plane = p
	used := func() int {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapInuse + m.StackInuse)
	}
	one, _ := fleetSpec(h, 1)
	h.apply(t, one) // with the device's own buffers
	before := used()
	many, _ := fleetSpec(h, 1001)
	h.apply(t, many)
	if _, err := p.Peers(t.Context()); err != nil {
		t.Fatal(err)
	}
	const most = 42 << 20
	grown := used() - before
	t.Logf("1,000 peers take %.1f MiB", float64(grown)/(1<<20))
	if grown > most {
		t.Errorf("%d bytes for 1,000 peers, want at most %d", grown, most)
	}
}

func BenchmarkApplyOneChangeAmong1000(b *testing.B) {
	h := &host{NS: testns.New(b, "plane"), keys: newKeyPair(b), n: 1}
	p, err := plane.Open(b.Context(), plane.Options{Namespace: &h.Handle})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	s, keys := fleetSpec(h, 1000)
	if _, err := p.Apply(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	peer := s.WireGuard.Peers[keys[500]]
	i := 0
	for b.Loop() {
		i++
		peer.Endpoint = netip.AddrPortFrom(addr("203.0.113.1"), uint16(1+i%60000))
		s.WireGuard.Peers[keys[500]] = peer
		if r, err := p.Apply(b.Context(), s); err != nil || r.Writes["wireguard"] != 1 {
			b.Fatal(r, err)
		}
	}
}

func BenchmarkPeers1000(b *testing.B) {
	h := &host{NS: testns.New(b, "plane"), keys: newKeyPair(b), n: 1}
	p, err := plane.Open(b.Context(), plane.Options{Namespace: &h.Handle})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	s, _ := fleetSpec(h, 1000)
	if _, err := p.Apply(b.Context(), s); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if peers, err := p.Peers(b.Context()); err != nil || len(peers) != 1000 {
			b.Fatal(len(peers), err)
		}
	}
}
