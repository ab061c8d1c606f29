package gossip

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A member that makes new versions of its record without end has only as many passed on as an honest one may make, and
// others' versions still pass.
func TestOneNodesVersionsArePassedOnAtABoundedRate(t *testing.T) {
	start := time.Unix(1000, 0)
	var p passOn
	count := func(id identity.ID, every, total time.Duration) (n int) {
		for d := time.Duration(0); d < total; d += every {
			if p.allow(id, start.Add(d)) {
				n++
			}
		}
		return n
	}
	if n := count(identity.ID{1}, time.Millisecond, 10*time.Second); n < 10*passOnPerSecond ||
		n > passOnBurst+10*passOnPerSecond {
		t.Errorf("%d of 10000 versions in 10 s are passed on, want %d at most", n, passOnBurst+10*passOnPerSecond)
	}
	if n := count(identity.ID{2}, publishSpacing, time.Minute); n != int(time.Minute/publishSpacing) {
		t.Errorf("%d versions of an honest node are passed on, want all %d", n, time.Minute/publishSpacing)
	}
	for i := range maxDigests + 10 {
		p.allow(identity.ID{9, byte(i >> 16), byte(i >> 8), byte(i)}, start)
	}
	if len(p) > maxDigests {
		t.Errorf("%d nodes are remembered", len(p))
	}
}

type streamOf struct {
	net.Conn
	peer identity.ID
}

func (s streamOf) Peer() identity.ID { return s.peer }

type streams struct{ c chan net.Conn }

func (s streams) Accept() (net.Conn, error) {
	c, ok := <-s.c
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (s streams) Close() error   { return nil }
func (s streams) Addr() net.Addr { return nil }

// One member holds many silent streams; other members still get streams.
func TestOneMemberDoesNotTakeAllStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hostile, honest := simKey(1).ID(), simKey(2).ID()
		g := bareGossip(newRoster(simKey(1), simKey(2)))
		st := &g.stats
		l := streams{make(chan net.Conn)}
		served := make(chan identity.ID, maxStreams)
		go g.acceptStreams(l, func(c net.Conn, id identity.ID) { served <- id; c.Close() })
		var open []net.Conn
		dial := func(id identity.ID) net.Conn {
			near, far := net.Pipe()
			open = append(open, near)
			l.c <- streamOf{far, id}
			synctest.Wait()
			return near
		}
		for range 2 * maxStreams {
			dial(hostile)
		}
		if n := st.snapshot().Busy; n != 2*maxStreams-maxPeerStreams {
			t.Errorf("%d streams of one member were turned away, want all but %d", n, maxPeerStreams)
		}
		near := dial(honest)
		go near.Write([]byte{streamMagic})
		synctest.Wait()
		select {
		case id := <-served:
			if id != honest {
				t.Errorf("%s is served", id)
			}
		default:
			t.Error("another member finds no place")
		}
		for _, c := range open {
			c.Close()
		}
		synctest.Wait()
		before := st.snapshot().Busy
		if dial(hostile).Close(); st.snapshot().Busy != before {
			t.Error("turned away though its streams have ended")
		}
		close(l.c)
		synctest.Wait()
	})
}
