package client

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/relay/wire"
)

// TestPendingQueueLosesNothingToAReleaseThatCameTooEarly is about a packet that finds no session, while a session
// begins before the packet is kept.
func TestPendingQueueLosesNothingToAReleaseThatCameTooEarly(t *testing.T) {
	var q pendingQueue
	w := wire.Unsent{Payload: []byte("first")}
	tried := q.released()
	if all := q.drain(0); len(all) != 0 {
		t.Fatalf("an empty queue releases %d packets", len(all))
	}
	if q.keep(0, w, tried) {
		t.Error("kept a packet whose release has been")
	}
	if !q.keep(0, w, q.released()) {
		t.Error("did not keep a packet that nothing carries")
	}
	if all := q.drain(0); len(all) != 1 {
		t.Errorf("released %d packets, want the one that was kept", len(all))
	}
}

// A relay is asked about an absent peer less and less often, and soon again once there is a sign that the peer is back.
func TestAskedEverMoreRarely(t *testing.T) {
	for asked, want := range []time.Duration{15 * time.Second, 30 * time.Second, time.Minute, 2 * time.Minute,
		4 * time.Minute, 4 * time.Minute} {
		if have := (absence{asked: asked}).hold(); have != want {
			t.Errorf("asked %d times, not again for %s, want %s", asked, have, want)
		}
	}
	if have := (absence{asked: 1 << 40}).hold(); have != goneLong {
		t.Errorf("asked often, not again for %s", have)
	}
}
