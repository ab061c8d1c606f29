package wire

import (
	"net/netip"

	"github.com/skeinmesh/skein/identity"
)

// Frames by which a relay tells where its clients' packets come from.
const (
	FrameShow  FrameType = 0x24 // splice: this connection, too, shows where this node's packets come from
	FrameWhere FrameType = 0xa4 // client to relay: where do that node's packets come from?
	FrameSeen  FrameType = 0xa5 // relay to client: node 8 · up to four addresses of 16; none: the node has no session here

	maxSeen = 4
)

// AppendSeen appends a FrameSeen. Addresses beyond the fourth are left out.
func AppendSeen(b []byte, node identity.ID, addrs []netip.Addr) []byte {
	addrs = addrs[:min(len(addrs), maxSeen)]
	b = append(AppendHeader(b, FrameSeen, 8+16*len(addrs)), node[:]...)
	for _, a := range addrs {
		a16 := a.As16()
		b = append(b, a16[:]...)
	}
	return b
}

// DecodeSeen takes a body whose length checkHeader has approved.
func DecodeSeen(b []byte) (node identity.ID, addrs []netip.Addr) {
	for rest := b[8:]; len(rest) >= 16 && len(addrs) < maxSeen; rest = rest[16:] {
		addrs = append(addrs, netip.AddrFrom16([16]byte(rest[:16])).Unmap())
	}
	return DecodeNode(b), addrs
}
