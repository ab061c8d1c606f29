package plane_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// For the other end, the tunnel uses a port that is not WireGuard's. When the rewrite is added while the tunnel is
// up, it continues without a new handshake.
func TestTunnelThroughAPortRewrite(t *testing.T) {
	a, b := pair(t)
	plainA, plainB := withHost(a.spec(), b, addr("192.0.2.2")), withHost(b.spec(), a, addr("192.0.2.1"))
	a.apply(t, plainA)
	b.apply(t, plainB)
	b.echo(t, b.overlay4())
	a.echo(t, a.overlay4())
	within(t, 8*time.Second, "the tunnel without a rewrite", func() bool {
		ok, _ := a.reaches(t, b.overlay4())
		return ok
	})
	before := status(t, b)

	guessed := netip.MustParseAddrPort("192.0.2.1:40001")
	rewritten := withHost(a.spec(), b, addr("192.0.2.2"))
	rewritten.PortRewrites = []dataplane.PortRewrite{{Local: guessed.Port(), Remote: netip.AddrPortFrom(addr("192.0.2.2"),
		dataplane.Port)}}
	a.apply(t, rewritten)
	through := withPeer(b.spec(), a.keys.public, guessed, netip.PrefixFrom(a.overlay4(), 32),
		netip.PrefixFrom(a.overlay6(), 128))
	b.apply(t, through)
	a.clean(t, rewritten)
	b.clean(t, through)
	for _, p := range []struct {
		from *host
		to   netip.Addr
	}{{b, a.overlay4()}, {a, b.overlay4()}} {
		within(t, 2*time.Second, "the tunnel through the rewrite", func() bool {
			ok, _ := p.from.reaches(t, p.to)
			return ok
		})
	}
	after := status(t, b)
	if after.Endpoint != guessed {
		t.Errorf("the other end hears WireGuard at %s, want %s", after.Endpoint, guessed)
	}
	if !after.LastHandshake.Equal(before.LastHandshake) || after.RxBytes <= before.RxBytes {
		t.Errorf("before %+v, after %+v: want the same session, carrying packets", before, after)
	}
}

func status(t *testing.T, h *host) dataplane.PeerStatus {
	t.Helper()
	peers, err := h.plane.Peers(t.Context())
	if err != nil || len(peers) != 1 {
		t.Fatalf("peers: %+v, %v", peers, err)
	}
	return peers[0]
}
