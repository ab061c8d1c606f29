package consensus

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// slowDialer returns pipes after a while; their other ends come from far.
type slowDialer struct {
	takes time.Duration
	fails bool
	dials atomic.Int32
	far   chan net.Conn
}

func (d *slowDialer) Dial(ctx context.Context, _ identity.ID, _ string) (net.Conn, error) {
	d.dials.Add(1)
	select {
	case <-time.After(d.takes):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if d.fails {
		return nil, errors.New("nobody is there")
	}
	near, far := net.Pipe()
	d.far <- far
	return near, nil
}

func withOutgoing(t *testing.T, d *slowDialer, test func(t *testing.T, l *outgoing, peer identity.ID)) {
	simtime.Test(t, func(t *testing.T) {
		r, err := OpenReplica(t.TempDir(), quiet)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		d.far = make(chan net.Conn, 64)
		l := newOutgoing(identity.ID{1}, d, r)
		defer l.Close()
		test(t, l, identity.ID{2})
	})
}

// A stream whose dial takes longer than Raft waits is ready for Raft's next request.
func TestDialOutlivesTheRequest(t *testing.T) {
	withOutgoing(t, &slowDialer{takes: 5 * time.Second}, func(t *testing.T, l *outgoing, peer identity.ID) {
		to := raft.ServerAddress(peer.String())
		for i := range 2 {
			if c, err := l.Dial(to, 2*time.Second); err == nil {
				t.Fatalf("request %d got %v after two seconds", i, c)
			}
		}
		c, err := l.Dial(to, 2*time.Second)
		if err != nil || l.dialer.(*slowDialer).dials.Load() != 1 {
			t.Fatalf("the third request got %v, %v after %d dials", c, err, l.dialer.(*slowDialer).dials.Load())
		}
		far := <-l.dialer.(*slowDialer).far
		go func() { _, _ = far.Write([]byte("!")) }()
		var b [1]byte
		if _, err := c.Read(b[:]); err != nil || b[0] != '!' {
			t.Errorf("read %q, %v", b, err)
		}
		c.Close()
	})
}

// A server that may be needed has a stream ready, and another one when that ends. It has none while Raft uses one.
func TestStreamStandsReady(t *testing.T) {
	withOutgoing(t, &slowDialer{takes: time.Second}, func(t *testing.T, l *outgoing, peer identity.ID) {
		d, to := l.dialer.(*slowDialer), raft.ServerAddress(peer.String())
		l.keep([]identity.ID{l.self, peer})
		far := <-d.far
		far.Close()
		far = <-d.far
		c, err := l.Dial(to, time.Millisecond)
		if err != nil {
			t.Fatalf("no stream stands ready: %v", err)
		}
		time.Sleep(time.Minute)
		if n := d.dials.Load(); n != 2 {
			t.Errorf("%d dials, want two: Raft has a stream", n)
		}
		far.Close()
		c.Close()
		<-d.far // Raft's has ended
		l.keep(nil)
		l.keep([]identity.ID{peer})
		<-d.far // the one that is no longer wanted
		if n := d.dials.Load(); n != 4 {
			t.Errorf("%d dials", n)
		}
	})
}

// A server that ends each stream at once is not dialed as often as two seconds allow.
func TestRefusedRequestFails(t *testing.T) {
	withOutgoing(t, &slowDialer{takes: time.Millisecond}, func(t *testing.T, l *outgoing, peer identity.ID) {
		d := l.dialer.(*slowDialer)
		go func() {
			for {
				select {
				case c := <-d.far:
					c.Close()
				case <-l.ctx.Done():
					return
				}
			}
		}()
		for range 10 { // it is chance whether the end is noticed before the stream is used
			if c, err := l.Dial(raft.ServerAddress(peer.String()), 2*time.Second); err == nil {
				c.Close()
			}
		}
		if n := d.dials.Load(); n > 10*dialsMost {
			t.Errorf("%d dials for ten requests", n)
		}
	})
}

// Servers that are off, or that end each stream at once, are dialed more and more rarely.
func TestVainDialsBecomeRare(t *testing.T) {
	for name, d := range map[string]*slowDialer{
		"off":     {takes: time.Second, fails: true},
		"refuses": {takes: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			withOutgoing(t, d, func(t *testing.T, l *outgoing, peer identity.ID) {
				go func() {
					for {
						select {
						case c := <-d.far:
							c.Close()
						case <-l.ctx.Done():
							return
						}
					}
				}()
				l.keep([]identity.ID{peer})
				time.Sleep(time.Hour)
				if n := d.dials.Load(); n < 50 || n > 80 {
					t.Errorf("%d dials in an hour, want one a minute after the first few", n)
				}
				l.Close()
				n := d.dials.Load()
				time.Sleep(time.Hour)
				if d.dials.Load() != n {
					t.Error("it dials after its end")
				}
			})
		})
	}
}
