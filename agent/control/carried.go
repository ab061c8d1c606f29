package control

import (
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/skeinmesh/skein/identity"
)

// Carried is what the control net sent by a peer of the tunnel and got from there, in bytes as WireGuard counts them.
// Raft's streams are not among it: a path that carries them is watched as for users' traffic. Acks are the
// acknowledgements of the streams' segments and what opens and closes streams, at most.
type Carried struct{ Sent, Received, AcksSent, AcksReceived uint64 }

type carried struct{ sent, received, acksSent, acksReceived atomic.Uint64 }

// count is where packets from and to a node are counted: at the peer of the tunnel that passes them on.
func (n *Net) count(node identity.ID) *carried {
	if n.cfg.Via != nil {
		node = n.cfg.Via(node)
	}
	return n.countAt(node)
}

func (n *Net) countAt(peer identity.ID) *carried {
	if c, ok := n.carried.Load(peer); ok {
		return c.(*carried)
	}
	c, _ := n.carried.LoadOrStore(peer, &carried{})
	return c.(*carried)
}

// Carried is what went to a peer of the tunnel and came from it since the start, for whatever node.
func (n *Net) Carried(peer identity.ID) Carried {
	v, ok := n.carried.Load(peer)
	if !ok {
		return Carried{}
	}
	c := v.(*carried)
	return Carried{c.sent.Load(), c.received.Load(), c.acksSent.Load(), c.acksReceived.Load()}
}

// countedConn is a stream in the tunnel whose bytes are counted, unless it turns out that they are not to be. The peer
// that passes them on may change while the stream is open.
type countedConn struct {
	net.Conn
	at   func() *carried
	ends atomic.Bool // nothing is counted from now on
}

// counted has a stream that a member began counted, from its handshake on.
func (n *Net) counted(c net.Conn) net.Conn {
	from, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return c
	}
	node, known := n.cfg.Roster.Owner(from.AddrPort().Addr().Unmap())
	if !known {
		return c
	}
	return newCounted(c, func() *carried { return n.count(node) })
}

// newCounted counts a stream that has just been opened.
func newCounted(c net.Conn, at func() *carried) *countedConn {
	at().bare(openPackets)
	return &countedConn{Conn: c, at: at}
}

// bare counts packets without data in each direction.
func (c *carried) bare(n uint64) {
	c.acksSent.Add(n * ackBytes)
	c.acksReceived.Add(n * ackBytes)
}

// Close counts the packets of the stream's end.
func (c *countedConn) Close() error {
	if !c.ends.Swap(true) {
		c.at().bare(closePackets)
	}
	return c.Conn.Close()
}

// counts tells of which protocol the bytes are counted.
func counts(alpn string) bool { return alpn != identity.ALPNRaft }

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.ends.Load() {
		by := c.at()
		bytes, acks := inSegments(n)
		by.received.Add(bytes)
		by.acksSent.Add(acks)
	}
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 && !c.ends.Load() {
		by := c.at()
		bytes, acks := inSegments(n)
		by.sent.Add(bytes)
		by.acksReceived.Add(acks)
	}
	return n, err
}

const (
	segment    = 1300                  // bytes of a full one in a tunnel of IPv6's least MTU and more
	tcpHeaders = 40 + 32               // IPv6, and TCP with timestamps
	ackBytes   = (tcpHeaders + 8) + 32 // padded to 16; a SYN has as many

	openPackets  = 2 // without data that open a stream, in either direction at most: SYN and ACK
	closePackets = 3 // and that end it: FIN, ACK, and RST where the other end had more to say
)

// inSegments is what WireGuard counts for bytes of a stream, at most, and for the acknowledgements that go the other
// way.
func inSegments(n int) (bytes, acks uint64) {
	segments := (n + segment - 1) / segment
	return uint64(n + segments*(ackBytes+16)), uint64(segments * ackBytes)
}

// inTunnel is what WireGuard counts for a UDP packet with so many bytes in it: headers, padding to 16 bytes, and 32 of
// its own (section 5.4.6 of the WireGuard paper).
func inTunnel(bytes int, at netip.Addr) uint64 {
	header := 40 + 8
	if at.Unmap().Is4() {
		header = 20 + 8
	}
	return uint64((header+bytes+15)/16*16 + 32)
}
