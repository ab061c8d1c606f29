package server

import (
	"crypto/tls"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// A reader that is ahead of a writer gives it turns until it has caught up, and none when it waits for its network.
func TestAReaderYieldsToTheWriterItIsAheadOf(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // turns are taken one after the other
	s := New(Config{})
	defer s.Close()
	const packets, perTurn = 4 * aheadPackets, 32
	for _, waits := range []bool{false, true} { // for its network
		here, there := net.Pipe() // nobody reads there
		defer there.Close()
		q := wire.NewQueue(&s.pool, packets, 1<<22, queueStanding)
		to := &session{Conn: wire.NewConn(tls.Server(here, &tls.Config{}), q, &s.load, s.now)}
		defer to.End(wire.ErrClosed)
		if waits {
			to.Queue.PushControl(func(b []byte) []byte { return wire.AppendToken(b, wire.FramePong, 1) })
			go to.WriteLoop()
			for deadline := time.Now().Add(time.Minute); to.Stuck(s.now()) <= aheadStuck; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("the writer is at no write")
				}
			}
		}
		for i := range packets {
			to.Queue.Push(s.now(), identity.ID{1, byte(i / perTurn)}, wire.ChannelWireGuard, []byte("packet"))
		}
		ended := make(chan struct{})
		go func() { // the writer: it loses its turn after some packets
			defer close(ended)
			for i := range byte(packets / perTurn) {
				to.Queue.Forget(identity.ID{1, i})
				runtime.Gosched()
			}
		}()
		(&forwarder{s: s, ahead: to}).yield()
		if left := to.waiting(); waits != (left > aheadPackets) {
			t.Errorf("the writer waits for its network %t: %d of %d packets are left after the reader has yielded",
				waits, left, packets)
		}
		<-ended
	}
}
