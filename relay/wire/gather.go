package wire

import (
	"net"
	"net/netip"
	"sync"
)

// gatherer is a connection below TLS that can hold back what is written, and send it all at once: TLS makes a system
// call for each of its records, which are 16 KiB at most. Where processors are scarce each call also costs the writer
// its turn.
type gatherer struct {
	net.Conn
	mu   sync.Mutex
	held *[]byte // nil: nothing is held back
}

// Gather prepares a connection that a session may come over, before TLS is laid on it.
func Gather(c net.Conn) net.Conn { return &gatherer{Conn: c} }

// TCP is the TCP connection below TLS, if it is one.
func TCP(c net.Conn) (*net.TCPConn, bool) {
	if g, ok := c.(*gatherer); ok {
		c = g.Conn
	}
	t, ok := c.(*net.TCPConn)
	return t, ok
}

func (g *gatherer) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held != nil {
		*g.held = append(*g.held, b...)
		return len(b), nil
	}
	return g.Conn.Write(b)
}

// together calls write, which writes to c, and sends what it wrote at once, by way of a buffer.
func together(c net.Conn, buffer *[]byte, write func() (int, error)) (int, error) {
	g, ok := c.(*gatherer)
	if !ok {
		return write()
	}
	*buffer = (*buffer)[:0]
	g.mu.Lock()
	g.held = buffer
	g.mu.Unlock()
	n, err := write()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = nil
	if _, failed := g.Conn.Write(*buffer); err == nil { // also after an error: TLS may have had something to say
		err = failed
	}
	return n, err
}

// RemoteIP is the address at the other end of a TCP connection; not valid: it is not one.
func RemoteIP(c net.Conn) netip.Addr {
	if t, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return t.AddrPort().Addr()
	}
	return netip.Addr{}
}
