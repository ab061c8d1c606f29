package relaytest

import (
	"net"
	"sync"
	"testing"
)

// Gate stands before a relay and can stop moving bytes while its connections stay open, as a relay does that
// hangs or whose network eats packets.
type Gate struct {
	net.Listener
	mu      sync.Mutex
	open    *sync.Cond
	stalled bool
	conns   []net.Conn
}

// Serve listens until the test ends, and has each connection served on a goroutine of its own.
func Serve(t testing.TB, serve func(net.Conn)) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return l
}

// StartGate opens a gate to the address of a relay.
func StartGate(t testing.TB, to string) *Gate {
	t.Helper()
	g := &Gate{}
	g.open = sync.NewCond(&g.mu)
	g.Listener = Serve(t, func(c net.Conn) {
		up, err := net.Dial("tcp", to)
		if err != nil {
			c.Close()
			return
		}
		g.mu.Lock()
		g.conns = append(g.conns, c, up)
		g.mu.Unlock()
		go g.copy(c, up)
		g.copy(up, c)
	})
	t.Cleanup(func() {
		g.Listener.Close()
		g.Stall(false)
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, c := range g.conns {
			c.Close()
		}
	})
	return g
}

// Stall makes the gate move nothing, or go on.
func (g *Gate) Stall(on bool) {
	g.mu.Lock()
	g.stalled = on
	g.mu.Unlock()
	g.open.Broadcast()
}

func (g *Gate) copy(to, from net.Conn) {
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		g.mu.Lock()
		for g.stalled {
			g.open.Wait()
		}
		g.mu.Unlock()
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Passes tells whether connections pass the gate.
func (g *Gate) Passes() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.conns) > 0
}
