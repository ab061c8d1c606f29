package relay

import (
	"net"
	"sync"
	"testing"
)

// gate stands before a relay and can stop moving bytes while its connections stay open, as a relay does that
// hangs or whose network eats packets.
type gate struct {
	net.Listener
	mu      sync.Mutex
	open    *sync.Cond
	stalled bool
	conns   []net.Conn
}

func startGate(t testing.TB, to string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{Listener: l}
	g.open = sync.NewCond(&g.mu)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				continue
			}
			g.mu.Lock()
			g.conns = append(g.conns, c, up)
			g.mu.Unlock()
			go g.copy(c, up)
			go g.copy(up, c)
		}
	}()
	t.Cleanup(func() {
		l.Close()
		g.stall(false)
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, c := range g.conns {
			c.Close()
		}
	})
	return g
}

func (g *gate) stall(on bool) {
	g.mu.Lock()
	g.stalled = on
	g.mu.Unlock()
	g.open.Broadcast()
}

func (g *gate) copy(to, from net.Conn) {
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

// passes tells whether connections pass the gate.
func (g *gate) passes() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.conns) > 0
}
