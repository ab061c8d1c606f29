package consensus

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
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

// streamLayer lets Raft's transport speak over the control net.
type streamLayer struct {
	self    identity.ID
	dialer  Dialer
	in      net.Listener
	replica *Replica
	log     *slog.Logger

	mu     sync.Mutex
	open   map[*serverConn]bool // accepted; the transport would leave them open when it closes
	closed bool
}

func (l *streamLayer) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, err := identity.ParseID(string(address))
	if err != nil {
		return nil, fmt.Errorf("dial Raft peer: %w", err)
	}
	ctx := context.Background()
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return l.dialer.Dial(ctx, id, identity.ALPNRaft)
}

// Accept lets in servers alone: any other member could forge the log. A server that this node does
// not know yet is let in once the replica, which also follows other servers, has caught up.
func (l *streamLayer) Accept() (net.Conn, error) {
	for {
		c, err := l.in.Accept()
		if err != nil {
			return nil, err
		}
		id, ok := peerOf(c)
		if !ok || l.replica.State().Server(id) == nil {
			l.log.Warn("refused a Raft connection: the other end is not a server", "node", id)
			c.Close()
			continue
		}
		s := &serverConn{Conn: c, layer: l, peer: id}
		l.mu.Lock()
		if l.closed {
			c.Close()
		}
		l.open[s] = true
		l.mu.Unlock()
		return s, nil
	}
}

func (l *streamLayer) Close() error {
	err := l.in.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for c := range l.open {
		c.Conn.Close()
	}
	return err
}

func (l *streamLayer) Addr() net.Addr { return nodeAddr(l.self) }

// serverConn is an accepted stream. It ends when the other end is no server any more.
type serverConn struct {
	net.Conn
	layer *streamLayer
	peer  identity.ID
}

func (c *serverConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.layer.replica.State().Server(c.peer) == nil {
		return 0, fmt.Errorf("node %s is no server any more", c.peer)
	}
	return n, err
}

func (c *serverConn) Close() error {
	c.layer.mu.Lock()
	delete(c.layer.open, c)
	c.layer.mu.Unlock()
	return c.Conn.Close()
}
