package consensus

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"

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

// outgoing lets Raft's transport dial over the control net. Nothing comes in by it: see inbound.
type outgoing struct {
	self    identity.ID
	dialer  Dialer
	replica *Replica
	once    sync.Once
	closed  chan struct{}
}

// Dial opens a stream to a server. Raft dials whom its configuration names; a revoked node stays there until a leader has
// taken it out, and gets nothing more meanwhile.
func (l *outgoing) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, err := identity.ParseID(string(address))
	if err != nil {
		return nil, fmt.Errorf("dial Raft peer: %w", err)
	}
	if err := l.check(id); err != nil {
		return nil, err
	}
	ctx := context.Background()
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	c, err := l.dialer.Dial(ctx, id, identity.ALPNRaft)
	if err != nil {
		return nil, err
	}
	return &outConn{Conn: c, layer: l, peer: id}, nil
}

func (l *outgoing) check(id identity.ID) error {
	if l.replica.State().Revoked(id) != nil {
		return fmt.Errorf("node %s was revoked", id)
	}
	return nil
}

func (l *outgoing) Accept() (net.Conn, error) {
	<-l.closed
	return nil, net.ErrClosed
}

func (l *outgoing) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *outgoing) Addr() net.Addr { return nodeAddr(l.self) }

// outConn is a stream that this server opened. It carries nothing more to a node that was revoked since.
type outConn struct {
	net.Conn
	layer *outgoing
	peer  identity.ID
}

func (c *outConn) Write(b []byte) (int, error) {
	if err := c.layer.check(c.peer); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}
