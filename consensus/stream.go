package consensus

import (
	"context"
	"crypto/tls"
	"net"

	"github.com/skeinmesh/skein/identity"
)

// Dialer opens an authenticated stream to a node: the control net.
type Dialer interface {
	Dial(ctx context.Context, node identity.ID, alpn string) (net.Conn, error)
}

// peerOf is the node that a connection has proved to come from.
func peerOf(c net.Conn) (identity.ID, bool) {
	switch c := c.(type) {
	case interface{ Peer() identity.ID }:
		id := c.Peer()
		return id, !id.IsZero()
	case *tls.Conn:
		if key, err := identity.PeerKey(c.ConnectionState()); err == nil {
			return identity.IDOf(key), true
		}
	}
	return identity.ID{}, false
}

// nodeAddr is a node's ID as a network address: Raft's configuration names servers by nothing else,
// so that it stays true whatever way the control net takes.
type nodeAddr identity.ID

func (a nodeAddr) Network() string { return "skein" }
func (a nodeAddr) String() string  { return identity.ID(a).String() }
