package consensus

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A connection that nobody uses carries nothing until it ends: pings over it would be traffic, by which the path is
// watched that it leads over.
func TestAConnectionThatNobodyUsesEndsInSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, id := newNetwork(), identity.ID{1}
		server := NewHTTPServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
			slog.New(slog.DiscardHandler))
		go server.Serve(PlainListener(n.listen(id, identity.ALPNRPC)))
		d := &countingDialer{Dialer: dialer{n, identity.ID{2}}}
		answer, err := NewConns(d).HTTP().Get(URL(id))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		synctest.Wait()
		before := d.bytes.Load()
		time.Sleep(pingAfter)
		if after := d.bytes.Load(); after != before {
			t.Errorf("%d bytes were carried after the answer", after-before)
		}
		if open := d.open.Load(); open != 0 {
			t.Errorf("%d connections are open %s after the answer", open, pingAfter)
		}
		server.Close()
	})
}

// TestAServerPingsAClientThatSaysNothingSeldom: a node that follows a stream sends nothing, and its answers to pings
// would pass the leader of its site. The server pings it all the same, so that a handler of a dead client ends.
func TestAServerPingsAClientThatSaysNothingSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, id := newNetwork(), identity.ID{1}
		server := NewHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for beat := time.NewTicker(time.Second); r.Context().Err() == nil; <-beat.C {
				_, _ = w.Write([]byte{1})
				_ = http.NewResponseController(w).Flush()
			}
		}), slog.New(slog.DiscardHandler))
		go server.Serve(PlainListener(n.listen(id, identity.ALPNRPC)))
		d := &countingDialer{Dialer: dialer{n, identity.ID{2}}}
		answer, err := NewConns(d).HTTP().Get(URL(id))
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, answer.Body) }()
		time.Sleep(pingTimeout)
		before := d.written.Load()
		time.Sleep(7 * time.Second)
		if sent := d.written.Load() - before; sent != 0 {
			t.Errorf("the client sent %d bytes before a ping was due", sent)
		}
		time.Sleep(2 * time.Second)
		if d.written.Load() == before {
			t.Errorf("the client was not pinged in %s", serverPingAfter+time.Second)
		}
		answer.Body.Close()
		server.Close()
		time.Sleep(2 * time.Second) // the handler's next turn
	})
}

// countingDialer counts what its connections carry, and how many are open.
type countingDialer struct {
	Dialer
	open, bytes, written atomic.Int64
}

func (d *countingDialer) Dial(ctx context.Context, to identity.ID, alpn string) (net.Conn, error) {
	c, err := d.Dialer.Dial(ctx, to, alpn)
	if err != nil {
		return nil, err
	}
	d.open.Add(1)
	return &dialedConn{Conn: c, d: d}, nil
}

type dialedConn struct {
	net.Conn
	d      *countingDialer
	closed atomic.Bool
}

func (c *dialedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.d.bytes.Add(int64(n))
	return n, err
}

func (c *dialedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.d.bytes.Add(int64(n))
	c.d.written.Add(int64(n))
	return n, err
}

func (c *dialedConn) Close() error {
	if !c.closed.Swap(true) {
		c.d.open.Add(-1)
	}
	return c.Conn.Close()
}
