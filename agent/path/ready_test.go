package path

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/simtime"
)

// A new peer's first pings must not be spent before the prober has its key. Three once were, in a slow start, and the
// pair then had to wait for further ones.
func TestNoPingBeforeTheKey(t *testing.T) {
	at := ap("203.0.113.2:2000")
	peer := node(natPortRestricted, cand(srflx, at.String()))
	s := &stepper{t: t, now: simStart, m: NewMachine(nodeIDs[0], nodeIDs[1], simStart)}
	s.m.Unready = true
	self := node(natPortRestricted, cand(srflx, "203.0.113.1:1000"))
	for _, in := range []Input{
		{Kind: InputSelf, Node: &self},
		{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: time.Millisecond}},
		{Kind: InputPeer, Node: &peer},
		{Kind: InputPunch, Addresses: []netip.AddrPort{at}},
		{Kind: InputPing, Endpoint: at},
		{Kind: InputNetwork},
	} {
		for _, a := range s.in(10*time.Millisecond, in) {
			if a != "use relay:"+relayID.String()+" alive=true (relay-first)" && a != "use relay:"+relayID.String()+
				" alive=true (no-record)" {
				t.Errorf("%s before the key is there: %s", in.Kind, a)
			}
		}
	}
	if s.m.Path.Kind != Relay {
		t.Errorf("path %s, want the relay, which needs no key", s.m.Path)
	}
	if n := s.pings(at, 10*time.Second); n != 0 {
		t.Errorf("%d pings before the key is there", n)
	}
	s.want(s.in(0, Input{Kind: InputReady}), "punch reply=false", "ping "+at.String())
	if n := s.pings(at, 3*time.Second); n != unprovenPings-1 {
		t.Errorf("%d more pings, want %d", n, unprovenPings-1)
	}
}

// A ping that could not be sent does not count.
func TestPingNotSentIsNotCounted(t *testing.T) {
	at := ap("203.0.113.2:2000")
	s := newStepper(t, node(natPortRestricted, cand(srflx, "203.0.113.1:1000")),
		node(natPortRestricted, cand(srflx, at.String())))
	for range 5 { // the first ping was sent with the record
		s.in(0, Input{Kind: InputSendFailed, Endpoint: at, Error: "network is unreachable"})
	}
	if k := s.m.Spent[0]; k.Endpoint != at || k.Left != unprovenPings {
		t.Errorf("%d pings are left for %s, want %d", k.Left, k.Endpoint, unprovenPings)
	}
	s.in(0, Input{Kind: InputSendFailed, Endpoint: ap("198.51.100.9:9"), Error: "nobody knows this one"})
	if n := s.pings(at, 3*time.Second); n != unprovenPings-1 { // as many as the burst still holds
		t.Errorf("%d pings, want %d", n, unprovenPings-1)
	}
}

func TestManagerWaitsForTheKey(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		w := newWire()
		a, b := nodeIDs[0], nodeIDs[1]
		ma, mb := w.join(a, "203.0.113.1:51820", nil), w.join(b, "203.0.113.2:51820", nil)
		defer ma.Close()
		defer mb.Close()
		ma.SetSelf(recordOf("203.0.113.1:51820"))
		ma.Expect(b)
		ma.SetPeer(b, recordOf("203.0.113.2:51820"))
		time.Sleep(time.Minute)
		synctest.Wait()
		w.mu.Lock()
		sent := w.sent
		w.mu.Unlock()
		if sent != 0 {
			t.Errorf("%d pings before the key is there", sent)
		}
		ma.Ready(b)
		time.Sleep(time.Second)
		synctest.Wait()
		if p := ma.Paths()[b]; p.Kind != Direct {
			t.Errorf("path %s (%s) a second after the key came, want a direct one", p, p.Reason)
		}
		ma.Expect(b) // known and ready: nothing changes
		ma.RemovePeer(b)
		ma.SetPeer(b, &skeinv1.Record{})
		ma.SetPeer(b, recordOf("203.0.113.2:51820"))
		time.Sleep(time.Second)
		synctest.Wait()
		if p := ma.Paths()[b]; p.Kind != Direct {
			t.Errorf("path %s (%s), want a direct one: nobody said that it is to be waited for", p, p.Reason)
		}
	})
}
