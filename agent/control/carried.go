package control

import (
	"net/netip"
	"sync/atomic"

	"github.com/skeinmesh/skein/identity"
)

// carried are the packets that went to a node and came from it by the tunnel, in bytes as WireGuard counts them.
type carried struct{ sent, received atomic.Uint64 }

func (n *Net) count(node identity.ID) *carried {
	if c, ok := n.carried.Load(node); ok {
		return c.(*carried)
	}
	c, _ := n.carried.LoadOrStore(node, &carried{})
	return c.(*carried)
}

// Carried is how much of what WireGuard counts for a node were packets of the control net, in bytes. Streams are not among them.
func (n *Net) Carried(node identity.ID) (sent, received uint64) {
	c, ok := n.carried.Load(node)
	if !ok {
		return 0, 0
	}
	return c.(*carried).sent.Load(), c.(*carried).received.Load()
}

// inTunnel is what WireGuard counts for a UDP packet with so many bytes in it: headers, padding to 16 bytes, and 32 of its own
// (section 5.4.6 of the WireGuard paper).
func inTunnel(bytes int, at netip.Addr) uint64 {
	header := 40 + 8
	if at.Unmap().Is4() {
		header = 20 + 8
	}
	return uint64((header+bytes+15)/16*16 + 32)
}
