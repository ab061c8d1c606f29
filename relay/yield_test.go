package relay

import (
	"runtime"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A reader that is ahead of a writer gives it turns until it has caught up, and none when it waits for its network.
func TestAReaderYieldsToTheWriterItIsAheadOf(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // turns are taken one after the other
	s := NewServer(ServerConfig{})
	defer s.Close()
	const packets, perTurn = 4 * aheadPackets, 32
	for _, waits := range []bool{false, true} { // for its network
		to := &session{wire: &wire{q: newQueue(&s.pool, packets, 1<<22, serverStanding)}}
		if waits {
			to.writing.Store(int64(s.now() - time.Second))
		}
		for range packets {
			to.q.push(s.now(), identity.ID{1}, ChannelWireGuard, []byte("packet"))
		}
		ended := make(chan struct{})
		go func() { // the writer: it loses its turn after some packets
			defer close(ended)
			for to.q.waiting() > 0 {
				to.q.mu.Lock()
				for l := &to.q.lanes[laneBulk]; l.packets > 0; {
					if to.q.pool.put(l.pop(l.turn)); l.packets%perTurn == 0 {
						break
					}
				}
				to.q.mu.Unlock()
				runtime.Gosched()
			}
		}()
		(&forwarder{s: s, ahead: to}).yield()
		if left := to.q.waiting(); waits != (left > aheadPackets) {
			t.Errorf("the writer waits for its network %t: %d of %d packets are left after the reader has yielded",
				waits, left, packets)
		}
		<-ended
	}
}
