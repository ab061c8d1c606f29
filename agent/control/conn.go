package control

import (
	"crypto/tls"
	"net"
	"sync"

	"github.com/skeinmesh/skein/identity"
)

// Conn is an authenticated stream.
type Conn struct {
	*tls.Conn
	peer identity.ID
	way  string
	net  *Net
}

// Close ends the stream.
func (c *Conn) Close() error {
	c.net.mu.Lock()
	delete(c.net.open, c)
	c.net.mu.Unlock()
	return c.Conn.Close()
}

// Peer is the node at the other end; it has proved its identity key.
func (c *Conn) Peer() identity.ID { return c.peer }

// Way is "tunnel" or "relay".
func (c *Conn) Way() string { return c.way }

// stream are the accepted streams of one protocol, whichever way they came.
type stream struct {
	alpn  string
	conns chan net.Conn
}

// listener hands them out.
type listener struct {
	*stream
	once   sync.Once
	closed chan struct{}
	done   <-chan struct{} // the whole control net is closed
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return addr(l.alpn) }

type addr string

func (a addr) Network() string { return "skein" }
func (a addr) String() string  { return string(a) }
