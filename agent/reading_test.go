package agent

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/identity"
)

// A packet of the control net that WireGuard has counted, and the control net has not yet, asks for a second look, and
// is no traffic when that explains it. What it does not explain is.
func TestSecondLook(t *testing.T) {
	at := time.Unix(1000, 0)
	peer, other := identity.ID{1}, identity.ID{2}
	var r reading
	read := func(wireguard, control uint64) map[identity.ID]path.Counters {
		at = at.Add(time.Second)
		return map[identity.ID]path.Counters{peer: {RxBytes: wireguard, ControlRx: control, At: at},
			other: {RxBytes: 500, At: at}}
	}
	for i, c := range []struct {
		wireguard, control, after uint64
		clear, explained          bool
	}{
		{wireguard: 1000, control: 900, after: 900, clear: true, explained: true}, // the first tells nothing
		{wireguard: 1160, control: 1060, after: 1060, clear: true, explained: true},
		{wireguard: 1320, control: 1060, after: 1220, clear: false, explained: true}, // not counted yet
		{wireguard: 1480, control: 1220, after: 1220, clear: false, explained: false},
		{wireguard: 1640, control: 1380, after: 1380, clear: true, explained: true},
		{wireguard: 1672, control: 1380, after: 1380, clear: true, explained: true}, // a keepalive
	} {
		now := read(c.wireguard, c.control)
		if got := r.clear(now); got != c.clear {
			t.Errorf("reading %d: clear is %v at the first look, want %v", i, got, c.clear)
		}
		n := now[peer]
		n.ControlRx = c.after
		now[peer] = n
		if got := r.clear(now); got != c.explained {
			t.Errorf("reading %d: clear is %v at the second look, want %v", i, got, c.explained)
		}
		r.published(now)
	}
	at = at.Add(time.Second)
	r.published(map[identity.ID]path.Counters{other: {RxBytes: 500, At: at}})
	if _, ok := r.last[peer]; ok {
		t.Error("a peer that left is remembered")
	}
}
