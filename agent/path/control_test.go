package path

import (
	"testing"
	"time"
)

// Packets of the control net do not count as traffic, in whatever order the two counters are read; other packets do.
func TestControlIsNoTraffic(t *testing.T) {
	at := simStart
	var last Counters
	for i, c := range []struct {
		rx, tx, controlRx, controlTx, acksTx uint64
		shaken                               bool // WireGuard has a new session
		traffic, control, heard              bool
	}{
		{rx: 1000, tx: 1000, controlRx: 800, controlTx: 800},
		{rx: 1000, tx: 1000, controlRx: 800, controlTx: 800},
		{rx: 1160, tx: 1208, controlRx: 960, controlTx: 1008, control: true, heard: true},
		// counted before WireGuard has sent it
		{rx: 1160, tx: 1208, controlRx: 960, controlTx: 1168, control: true},
		{rx: 1160, tx: 1368, controlRx: 960, controlTx: 1168},                              // and now it has
		{rx: 1480, tx: 1528, controlRx: 960, controlTx: 1168, traffic: true},               // something else
		{rx: 1640, tx: 1528, controlRx: 1120, controlTx: 1168, control: true, heard: true}, // the peer's
		{rx: 1640, tx: 1528, controlRx: 1120, controlTx: 1168},
		// a stream, acknowledged
		{rx: 1940, tx: 1640, controlRx: 1420, controlTx: 1168, acksTx: 112, control: true, heard: true},
		{rx: 1940, tx: 1640, controlRx: 1420, controlTx: 1168, acksTx: 112},
		// one without an acknowledgement of its own
		{rx: 2240, tx: 1640, controlRx: 1720, controlTx: 1168, acksTx: 224, control: true, heard: true},
		// hides nothing that comes later
		{rx: 2240, tx: 1700, controlRx: 1720, controlTx: 1168, acksTx: 224, traffic: true},
		{rx: 2332, tx: 1848, controlRx: 1720, controlTx: 1168, acksTx: 224, shaken: true},
		// a session that other traffic needed
		{rx: 2512, tx: 2068, controlRx: 1720, controlTx: 1168, acksTx: 224, shaken: true, traffic: true},
		{rx: 160, tx: 160, controlRx: 1720, controlTx: 1168, acksTx: 224}, // another device
	} {
		at = at.Add(countersEvery)
		next := Counters{RxBytes: c.rx, TxBytes: c.tx, ControlRx: c.controlRx, ControlTx: c.controlTx, AcksTx: c.acksTx,
			At: at, Handshake: last.Handshake}
		if c.shaken {
			next.Handshake = at
		}
		next = next.WithoutControl(last)
		var traffic, control, heard bool
		if i > 0 {
			for _, in := range observe(last, next) {
				traffic = traffic || in.Kind == InputTraffic
				control, heard = control || in.Kind == InputControl, heard || in.Kind == InputControl && in.Reply
			}
		}
		if traffic != c.traffic || control != c.control || heard != c.heard {
			t.Errorf("reading %d: traffic %v, control %v, heard %v; want %v, %v, %v", i, traffic, control, heard, c.traffic,
				c.control, c.heard)
		}
		last = next
	}
}

// A path on which the control net gets answers is pinged only at its keepalive. A path on which it gets none is
// checked by a ping, and given up when that has no answer either.
func TestControlAsks(t *testing.T) {
	s := newSim(t, 1, natPortRestricted, natPortRestricted)
	s.start(true)
	s.run(10 * time.Second)
	talk := func(d time.Duration, heard bool) {
		for end := s.now.Add(d); s.now.Before(end); {
			s.input(s.nodes[0], Input{Kind: InputControl, Reply: heard})
			s.run(countersEvery)
		}
	}
	before := s.nodes[0].pings
	talk(20*time.Second, true)
	if n := s.nodes[0].pings - before; n > 2 {
		t.Errorf("%d pings in 20 s though the control net hears the peer", n)
	}
	before = s.nodes[0].pings
	talk(20*time.Second, false)
	if n := s.nodes[0].pings - before; n < 5 || n > 12 {
		t.Errorf("%d pings in 20 s in which the control net heard nothing, want one in two seconds", n)
	}
	s.cut = cutAll
	talk(4*time.Second, false)
	wantPaths(t, s, "cut", Relay, true)
}
