package path

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// wire connects managers: pings of one arrive at the other while the wire is intact.
type wire struct {
	mu       sync.Mutex
	delay    time.Duration
	cut      bool
	tx       uint64
	managers map[identity.ID]*Manager
	at       map[netip.AddrPort]identity.ID
	addr     map[identity.ID]netip.AddrPort
	sent     int
	wrongWay atomic.Int64
	lost     atomic.Int64 // direct paths, by the managers' word
	off      atomic.Bool  // the relays call everybody absent
	none     atomic.Bool  // there is no relay
}

func newWire() *wire {
	return &wire{delay: 5 * time.Millisecond, managers: map[identity.ID]*Manager{}, at: map[netip.AddrPort]identity.ID{},
		addr: map[identity.ID]netip.AddrPort{}}
}

type wireEnd struct {
	w    *wire
	self identity.ID
}

func (e wireEnd) SendPingSize(peer identity.ID, to netip.AddrPort, _ int) ([12]byte, error) {
	return e.SendPing(peer, to)
}

func (e wireEnd) SendPing(peer identity.ID, to netip.AddrPort) ([12]byte, error) {
	w := e.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tx++
	w.sent++
	var tx [12]byte
	binary.BigEndian.PutUint64(tx[4:], w.tx)
	id, ok := w.at[to]
	if w.cut || !ok || id != peer {
		return tx, nil
	}
	self, other := w.managers[e.self], w.managers[id]
	time.AfterFunc(w.delay, func() {
		if other != nil {
			other.PingReceived(e.self, w.addr[e.self], time.Now())
		}
		time.AfterFunc(w.delay, func() {
			w.mu.Lock()
			cut := w.cut
			w.mu.Unlock()
			if !cut {
				self.PongReceived(id, to, tx, time.Now())
			}
		})
	})
	return tx, nil
}

func (e wireEnd) Choose(identity.ID) (identity.ID, time.Duration, bool) {
	return relayID, 50 * time.Millisecond, !e.w.off.Load() && !e.w.none.Load()
}

func (e wireEnd) Absent(identity.ID) bool { return e.w.off.Load() }
func (e wireEnd) Ask(identity.ID)         {}

// memory is a journal for tests.
type memory struct {
	mu      sync.Mutex
	entries []*skeinv1.JournalEntry
}

func (j *memory) Append(e *skeinv1.JournalEntry) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e.Seq = uint64(len(j.entries)) + 1
	j.entries = append(j.entries, e)
}

func (j *memory) Read(since, until time.Time, keep func(*skeinv1.JournalEntry) bool) ([]*skeinv1.JournalEntry, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []*skeinv1.JournalEntry
	for _, e := range j.entries {
		if !(since.IsZero() || e.GetTime() >= since.UnixNano()) || !(until.IsZero() || e.GetTime() <= until.UnixNano()) ||
			keep != nil && !keep(e) {
			continue
		}
		out = append(out, e)
	}
	return out, nil
}

// join starts a manager on the wire.
func (w *wire) join(id identity.ID, addr string, j Journal) *Manager {
	e := wireEnd{w, id}
	m := NewManager(Config{Self: id, Prober: e, Relays: e, Journal: j, OnLost: func(identity.ID) { w.lost.Add(1) },
		Signal: func(peer identity.ID, s *skeinv1.Signal) error {
			w.mu.Lock()
			other, self, cut := w.managers[peer], w.managers[id], w.cut
			w.mu.Unlock()
			if p := self.Paths()[peer]; cut && p.Kind == Direct && p.Alive {
				w.wrongWay.Add(1) // the control net would send this punch over the dead path
			}
			if other != nil {
				time.AfterFunc(25*time.Millisecond, func() { other.Punch(id, s.GetPunch()) })
			}
			return nil
		}})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.managers[id], w.at[ap(addr)], w.addr[id] = m, id, ap(addr)
	return m
}

func recordOf(addr string) *skeinv1.Record {
	return &skeinv1.Record{NatType: natNone, Candidates: []*skeinv1.Candidate{{Type: host, Address: addr,
		Source: "interface"}}}
}

func TestManagerFindsAndLosesADirectPath(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		w, j := newWire(), &memory{}
		a, b := nodeIDs[0], nodeIDs[1]
		ma, mb := w.join(a, "203.0.113.1:51820", j), w.join(b, "203.0.113.2:51820", nil)
		defer ma.Close()
		defer mb.Close()
		ma.SetSelf(recordOf("203.0.113.1:51820"))
		mb.SetSelf(recordOf("203.0.113.2:51820"))
		ma.SetPeer(b, recordOf("203.0.113.2:51820"))
		mb.SetPeer(a, recordOf("203.0.113.1:51820"))
		<-ma.Changed()
		synctest.Wait()
		if p := ma.Paths()[b]; p.Kind != Relay || p.Relay != relayID {
			t.Fatalf("at first %s (%s), want the relay", p, p.Rule)
		}
		time.Sleep(time.Second)
		for id, m := range map[identity.ID]*Manager{b: ma, a: mb} {
			if p := m.Paths()[id]; p.Kind != Direct || !p.Alive {
				t.Fatalf("after a second %s (%s), want direct", p, p.Rule)
			}
		}
		n := uint64(0)
		busy := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(countersEvery) {
				n += 1000
				ma.Traffic(map[identity.ID]Counters{b: {RxBytes: n, TxBytes: n}})
			}
		}
		busy(10 * time.Second)
		w.mu.Lock()
		w.cut = true
		w.mu.Unlock()
		cut := time.Now()
		for p := ma.Paths()[b]; p.Kind != Relay; p = ma.Paths()[b] {
			<-ma.Changed()
		}
		if d := time.Since(cut); d > 750*time.Millisecond {
			t.Errorf("relay after %s", d)
		}
		if m := ma.Metrics(); m.Upgrades != 1 || m.Downgrades != 1 || m.Blackouts.Count != 1 ||
			m.Blackouts.Max > 950*time.Millisecond {
			t.Errorf("metrics %+v", m)
		}
		if n := w.lost.Load(); n != 1 {
			t.Errorf("told of %d lost paths, want 1: the other end is idle and has not noticed", n)
		}
		if n := w.wrongWay.Load(); n > 0 {
			t.Errorf("%d punches left before the new path was known", n)
		}
		again, err := replay(j.entries)
		if err != nil || len(again) != 3 {
			t.Fatalf("replayed %d decisions, want 3: %v", len(again), err)
		}
		for _, r := range again {
			if !r.same() {
				t.Errorf("replay decided %v, recorded %v", r.Again, r.Recorded)
			}
		}
		past, err := ExplainAt(j, b, cut)
		if err != nil || past.Path != "direct:203.0.113.2:51820" || past.Rule != "direct-proven" {
			t.Errorf("path at the cut %+v, %v", past, err)
		}
	})
}

// eventually waits for the next result of the manager's goroutine.
func eventually(t *testing.T, m *Manager, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for !ok() {
		select {
		case <-m.Changed():
		case <-time.After(100 * time.Millisecond):
		case <-deadline:
			t.Fatalf("%s: not within ten seconds", what)
		}
	}
}

func TestManagerPeersComeAndGo(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		w := newWire()
		a, b := nodeIDs[0], nodeIDs[1]
		m := w.join(a, "203.0.113.1:51820", nil)
		if _, ok := m.Explain(b); ok {
			t.Error("explains a stranger")
		}
		m.SetSelf(recordOf("203.0.113.1:51820"))
		m.SetPeer(b, recordOf("203.0.113.2:51820"))
		eventually(t, m, "the relay", func() bool { return m.Paths()[b].Kind == Relay })
		w.none.Store(true)
		m.RelaysChanged()
		eventually(t, m, "no relay", func() bool { return m.Paths()[b].Kind == None })
		w.none.Store(false)
		m.RelaysChanged()
		eventually(t, m, "the relay again", func() bool { return m.Paths()[b].Kind == Relay })
		if e, ok := m.Explain(b); !ok || e.Path.Kind != Relay || len(e.Probes) != 1 {
			t.Errorf("explanation %+v", e)
		}
		m.SetSettings(Settings{Exclude: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}})
		eventually(t, m, "an excluded address", func() bool { return m.Paths()[b].Rule == "no-candidate" || m.refreshed(b) })
		m.RemovePeer(b)
		eventually(t, m, "removed", func() bool { return len(m.Paths()) == 0 })
		m.PingReceived(b, ap("203.0.113.2:51820"), time.Now())
		m.NetworkChanged()
		synctest.Wait()
		if len(m.Paths()) != 0 {
			t.Error("a stranger's ping made a peer")
		}
		m.Close()
		m.Close()
		m.SetPeer(b, recordOf("203.0.113.2:51820"))
		if _, ok := m.Explain(b); ok {
			t.Error("explains after the end")
		}
	})
}

// refreshed asks for the present rule, since the snapshot may be a second old.
func (m *Manager) refreshed(id identity.ID) bool {
	e, _ := m.Explain(id)
	return e.Path.Rule == "no-candidate"
}

// Only an answer from the pinged address, to a ping of this host, proves a path.
func TestManagerForgedPongs(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		w := newWire()
		w.cut = true
		b := nodeIDs[1]
		m := w.join(nodeIDs[0], "203.0.113.1:51820", nil)
		defer m.Close()
		m.SetPeer(b, recordOf("203.0.113.2:51820"))
		synctest.Wait()
		var tx [12]byte
		tx[11] = 1 // the first ping's
		m.PongReceived(b, ap("203.0.113.2:51820"), [12]byte{9}, time.Now())
		m.PongReceived(identity.ID{77}, ap("203.0.113.2:51820"), tx, time.Now())
		m.PongReceived(b, ap("203.0.113.3:51820"), tx, time.Now()) // from elsewhere
		synctest.Wait()
		if p := m.Paths()[b]; p.Kind != Relay {
			t.Errorf("%s after forged answers", p)
		}
		m.PongReceived(b, ap("203.0.113.2:51820"), tx, time.Now()) // used up
		synctest.Wait()
		if p := m.Paths()[b]; p.Kind != Relay {
			t.Errorf("%s after a replayed answer", p)
		}
		if n := m.Metrics(); n.PongsUnknown != 2 || n.PongsReceived != 1 {
			t.Errorf("metrics %+v", n)
		}
	})
}

func TestCarries(t *testing.T) {
	for n, want := range map[uint64]bool{0: false, 32: false, 148: false, 92: false, 180: false, 64: true,
		128: true, 1452: true} {
		if carries(n) != want {
			t.Errorf("%d bytes: %t", n, !want)
		}
	}
}

// WireGuard's endpoints from before this agent count before the first Spec is derived from the paths, so that nothing
// is written.
func TestSettledPathsHoldWhatWasAdopted(t *testing.T) {
	for range 200 {
		m := newWire().join(nodeIDs[0], "192.0.2.1:51820", nil)
		m.SetPeer(nodeIDs[1], recordOf("192.0.2.2:51820"))
		m.Traffic(map[identity.ID]Counters{nodeIDs[1]: {Endpoint: ap("192.0.2.2:51820"),
			Handshake: time.Now().Add(-time.Second)}})
		m.Settle(t.Context())
		if p := m.Paths()[nodeIDs[1]]; p.Kind != Direct || p.Rule != "direct-adopted" {
			t.Fatalf("the path is %s (%s)", p, p.Rule)
		}
		m.Close()
		m.Settle(t.Context()) // returns
	}
}

// The absence of a peer without traffic changes nothing now: it is recorded, and does not wake the agent.
func TestAnIdlePeerIsOff(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		w := newWire()
		m := w.join(nodeIDs[0], "203.0.113.1:51820", nil)
		defer m.Close()
		m.SetSettings(Settings{Lazy: true})
		m.SetSelf(recordOf("203.0.113.1:51820"))
		m.SetPeer(nodeIDs[1], recordOf("203.0.113.2:51820"))
		synctest.Wait()
		<-m.Changed()
		if p := m.Paths()[nodeIDs[1]]; p.Kind != Relay || p.Rule != ruleIdle {
			t.Fatalf("at first %s (%s), want the relay, idle", p, p.Rule)
		}
		time.Sleep(2 * refresh)
		w.off.Store(true)
		m.RelaysChanged()
		synctest.Wait()
		if p := m.Paths()[nodeIDs[1]]; p.Kind != None {
			t.Errorf("the peer is off: %s (%s)", p, p.Rule)
		}
		select {
		case <-m.Changed():
			t.Error("the loop was woken for a peer that nobody talks to")
		default:
		}
		w.off.Store(false)
		m.RelaysChanged()
		<-m.Changed()
		if p := m.Paths()[nodeIDs[1]]; p.Kind != Relay {
			t.Errorf("the peer is back: %s (%s)", p, p.Rule)
		}
		w.none.Store(true)
		m.RelaysChanged()
		<-m.Changed() // that no relay is left is news: nothing could carry a packet
	})
}
