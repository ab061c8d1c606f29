package path

import (
	"container/heap"
	"context"
	"encoding/binary"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
)

// The crowd: many managers on virtual time, on machines whose scheduler lets a process sleep for seconds. The network
// is intact, so every path change is unnecessary.

type crowd struct {
	now   time.Time
	rnd   *rand.Rand
	q     simQueue
	seq   int
	nodes []*crowdNode
	at    map[netip.AddrPort]*crowdNode
	tx    uint64
	burn  bool
	pings int
}

// crowdNode is a process. Events during its sleep are handled when it wakes.
type crowdNode struct {
	c       *crowd
	id      identity.ID
	addr    netip.AddrPort
	m       *Manager
	lag     lag.Meter
	until   time.Time // asleep
	timer   time.Time // the turn that is planned
	talks   []*crowdNode
	count   uint64
	changes int
	was     map[identity.ID]Path
}

func (c *crowd) after(d time.Duration, do func()) {
	c.seq++
	heap.Push(&c.q, simEvent{c.now.Add(d), c.seq, do})
}

func (c *crowd) run(d time.Duration) {
	end := c.now.Add(d)
	for len(c.q) > 0 && !c.q[0].at.After(end) {
		e := heap.Pop(&c.q).(simEvent)
		c.now = e.at
		e.do()
	}
	c.now = end
}

// awake runs a function in the process as soon as that is awake.
func (n *crowdNode) awake(do func()) {
	if n.until.After(n.c.now) {
		n.c.after(n.until.Sub(n.c.now), func() { n.awake(do) })
		return
	}
	do()
}

// turn runs one turn of the manager's loop.
func (n *crowdNode) turn() {
	m := n.m
	m.drain()
	m.due()
	m.runTurns()
	m.publish()
	m.signal()
	for len(m.signals) > 0 {
		s := <-m.signals
		to := n.c.node(s.peer)
		n.c.after(25*time.Millisecond, func() { to.awake(func() { to.m.Punch(n.id, s.signal.GetPunch()); to.turn() }) })
	}
	paths := m.Paths()
	for id, p := range paths {
		if w := n.was[id]; w.Kind != p.Kind || w.Endpoint != p.Endpoint || w.Alive != p.Alive {
			n.changes++
			n.was[id] = p
		}
	}
	next := m.o.turns.next(n.c.now)
	if len(m.o.timers) > 0 {
		next = min(next, max(m.o.timers[0].wake.Sub(n.c.now), 0))
	}
	at := n.c.now.Add(next)
	if n.timer.After(n.c.now) && !at.Before(n.timer) {
		return // an earlier one is planned
	}
	n.timer = at
	n.c.after(next, func() {
		if n.timer.Equal(at) {
			n.awake(n.turn)
		}
	})
}

func (c *crowd) node(id identity.ID) *crowdNode { return c.nodes[binary.BigEndian.Uint32(id[:])-1] }

func (n *crowdNode) SendPing(peer identity.ID, to netip.AddrPort) (tx [12]byte, err error) {
	c := n.c
	c.tx++
	c.pings++
	binary.BigEndian.PutUint64(tx[4:], c.tx)
	other := c.at[to]
	if other == nil || other.id != peer {
		return tx, nil
	}
	c.after(5*time.Millisecond, func() {
		other.awake(func() { // its process answers
			other.m.PingReceived(n.id, n.addr, c.now)
			other.turn()
			c.after(5*time.Millisecond, func() {
				n.awake(func() {
					n.m.PongReceived(peer, to, tx, c.now)
					n.turn()
				})
			})
		})
	})
	return tx, nil
}

func (n *crowdNode) SendPingSize(peer identity.ID, to netip.AddrPort, _ int) ([12]byte, error) {
	return n.SendPing(peer, to)
}

func (n *crowdNode) Choose(identity.ID) (identity.ID, time.Duration, bool) {
	return relayID, 50 * time.Millisecond, true
}
func (n *crowdNode) Absent(identity.ID) bool { return false }
func (n *crowdNode) Ask(identity.ID)         {}

// sleeps lets the process sleep up to 2.5 s repeatedly while the machine is overloaded.
func (n *crowdNode) sleeps() {
	if n.c.burn {
		n.until = n.c.now.Add(time.Duration(n.c.rnd.Int64N(int64(2500 * time.Millisecond))))
	}
	n.c.after(max(n.until.Sub(n.c.now), 0)+time.Duration(n.c.rnd.ExpFloat64()*float64(time.Second)), n.sleeps)
}

// talk reads the counters of the pairs that talk, as the agent does.
func (n *crowdNode) talk() {
	n.awake(func() {
		n.count += 1000
		all := map[identity.ID]Counters{}
		for _, o := range n.talks {
			all[o.id] = Counters{RxBytes: n.count, TxBytes: n.count, At: n.c.now}
		}
		n.m.Traffic(all)
		n.turn()
		n.c.after(countersEvery, n.talk)
	})
}

func newCrowd(t *testing.T, size, peers, talkers int) *crowd {
	c := &crowd{now: simStart, rnd: rand.New(rand.NewPCG(1, 2)), at: map[netip.AddrPort]*crowdNode{}}
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	for i := range size {
		n := &crowdNode{c: c, addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), 51820),
			was: map[identity.ID]Path{}}
		binary.BigEndian.PutUint32(n.id[:], uint32(i+1))
		n.m = newManager(Config{Self: n.id, Prober: n, Relays: n, Clock: func() time.Time { return c.now }, Lag: &n.lag,
			Log:    slog.New(slog.DiscardHandler),
			Signal: func(identity.ID, *skeinv1.Signal) error { return nil }}, ctx, stop)
		c.nodes, c.at[n.addr] = append(c.nodes, n), n
	}
	for i, n := range c.nodes {
		n.m.SetSettings(Settings{Lazy: true})
		n.m.SetSelf(recordOf(n.addr.String()))
		for k := 1; k <= peers/2; k++ {
			for _, o := range []*crowdNode{c.nodes[(i+k)%size], c.nodes[(i+size-k)%size]} {
				n.m.SetPeer(o.id, recordOf(o.addr.String()))
				if k <= talkers/2 {
					n.talks = append(n.talks, o)
				}
			}
		}
		c.after(time.Duration(c.rnd.Int64N(int64(time.Second))), func() { n.turn(); n.talk(); n.sleeps() })
	}
	return c
}

// changes are the changes of all paths since the last call.
func (c *crowd) changes() (sum int) {
	for _, n := range c.nodes {
		sum += n.changes
		n.changes = 0
	}
	return sum
}

// TestSuspicionIsTold: Paths shows who is suspected, and Changed fires at the beginning and end of a suspicion, also
// for a peer that is added later.
func TestSuspicionIsTold(t *testing.T) {
	c := newCrowd(t, 3, 2, 2)
	a, b := c.nodes[0], c.nodes[1]
	a.m.SetReplaceable(map[identity.ID]bool{b.id: true})
	for _, again := range []bool{false, true} {
		if again {
			a.m.RemovePeer(b.id)
			a.m.SetPeer(b.id, recordOf(b.addr.String()))
		}
		c.run(20 * time.Second)
		a.lag.Note(c.now.Add(-time.Second), c.now)
		a.lag.Note(c.now.Add(-200*time.Millisecond), c.now.Add(300*time.Millisecond)) // not the only time: it counts longer
		b.until = c.now.Add(900 * time.Millisecond)
		for _, want := range []bool{true, false} {
			select {
			case <-a.m.Changed():
			default:
			}
			for range 100 {
				if c.run(20 * time.Millisecond); a.m.Paths()[b.id].Suspect == want {
					break
				}
			}
			if p := a.m.Paths()[b.id]; p.Suspect != want || p.Kind != Direct || !p.Alive {
				t.Fatalf("added later %t: suspected %t, want %t: %+v", again, p.Suspect, want, p)
			}
			select {
			case <-a.m.Changed():
			default:
				t.Errorf("added later %t: nobody is told that suspected is %t", again, want)
			}
		}
		c.run(trustMax + calmAfter)
	}
	if n := a.m.Metrics().Suspicions; n != 2 {
		t.Errorf("%d suspicions are counted, want 2", n)
	}
	if p := c.nodes[2].m.Metrics(); p.Suspicions > 0 {
		t.Errorf("%d suspicions where nobody can stand in", p.Suspicions)
	}
}

// burnt is the result of a crowd on overloaded machines: changes per path in use and minute, in the first 30 s and in
// the minute after, and suspicions per peer likewise.
type burnt struct{ first, then, suspected, suspectedThen float64 }

// burn runs a crowd on idle machines, on overloaded ones, and on idle ones again, when all pairs with traffic must be
// direct. With replaceable peers, these may be suspected.
func burn(t *testing.T, size int, others bool) (b burnt) {
	const peers, talkers = 8, 2
	c := newCrowd(t, size, peers, talkers)
	direct := func() (n int) {
		for _, a := range c.nodes {
			for _, b := range a.talks {
				if p := a.m.Paths()[b.id]; p.Kind == Direct && p.Alive {
					n++
				}
			}
		}
		return n
	}
	suspicions := func() (n uint64) {
		for _, a := range c.nodes {
			n += a.m.Metrics().Suspicions
		}
		return n
	}
	for _, n := range c.nodes {
		ids := map[identity.ID]bool{}
		for _, o := range n.talks {
			ids[o.id] = others
		}
		n.m.SetReplaceable(ids)
	}
	pairs := float64(size * talkers)
	c.run(20 * time.Second)
	if n := direct(); n != size*talkers {
		t.Fatalf("%d of %.0f paths that are used are direct, on idle machines", n, pairs)
	}
	c.changes()
	if n := suspicions(); n > 0 {
		t.Errorf("%d peers were suspected on idle machines", n)
	}
	c.burn = true
	c.run(30 * time.Second)
	b.first = 2 * float64(c.changes()) / pairs
	first := float64(suspicions())
	b.suspected = 2 * first / pairs
	c.run(time.Minute)
	b.then = float64(c.changes()) / pairs
	b.suspectedThen = (float64(suspicions()) - first) / pairs
	c.burn = false
	c.run(30 * time.Second)
	t.Logf("others %t: changes of each path that is used, a minute: %.3f in the first 30 s, %.3f in the minute after; "+
		"suspicions %.3f and %.3f; %d pings", others, b.first, b.then, b.suspected, b.suspectedThen, c.pings)
	if n := direct(); n != size*talkers {
		t.Errorf("%d of %.0f paths that are used are direct, 30 s after the machines are idle again", n, pairs)
	}
	return b
}

// TestCrowdStaysCalm: 500 managers on machines that let them sleep up to 2.5 s change few paths. With replaceable
// peers, equally many paths are given up, except for chance effects of a few more pings, and peers are suspected
// rarely.
func TestCrowdStaysCalm(t *testing.T) {
	size := 500
	if testing.Short() {
		size = 100
	}
	alone, others := burn(t, size, false), burn(t, size, true)
	if alone.then > 0.1 || others.then > 0.1 {
		t.Errorf("%.3f changes of each path in a minute, %.3f where others can stand in", alone.then, others.then)
	}
	if others.first+others.then > 1.05*(alone.first+alone.then) {
		t.Errorf("more paths are changed where others can stand in: %+v, else %+v", others, alone)
	}
	if alone.suspected+alone.suspectedThen > 0 {
		t.Errorf("peers are suspected in whose place nobody can stand in: %+v", alone)
	}
	if others.suspectedThen > 3 {
		t.Errorf("each peer is suspected %.3f times a minute", others.suspectedThen)
	}
}
