package path

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// The simulation: two machines, each behind a NAT model, on virtual time. Everything random comes
// from one seed.

type sim struct {
	t        testing.TB
	now      time.Time
	rnd      *rand.Rand
	q        simQueue
	seq      int
	nodes    [2]*simNode
	loss     float64                                   // of each packet on the direct way
	delay    time.Duration                             // one way, direct
	relay    time.Duration                             // one way, over the relay
	cut      func(from, to int, e netip.AddrPort) bool // drops direct packets
	hairpin  bool
	turn     time.Duration                     // until a burst of a large mesh may begin
	carries  func(from, to int, size int) bool // tells padded packets that pass; nil: all do
	stall    func(node int) time.Duration      // how long this node's process still sleeps
	log      []string
	traceMax int                      // bytes of the largest trace
	onUse    func(n *simNode, p Path) // the shell of silent_test.go
	onCheck  func(n *simNode)
}

type simNode struct {
	id        int
	m         Machine
	nat       skeinv1.NatType
	inner     netip.AddrPort // the host's own address
	outer     netip.Addr     // the NAT's
	lan       int            // hosts with the same number share a LAN and a NAT
	maps      *natTable
	wakeSeq   int
	pings     int
	padded    int
	pingsTo   map[netip.AddrPort]int
	first     time.Time // first path of any kind
	direct    time.Time // since when direct without a break
	switches  int
	echoes    []time.Time
	trafficAt time.Time
	trace     trace
}

type natTable struct {
	port     uint16
	out      map[string]uint16 // mapping key -> external port
	owner    map[uint16]*simNode
	contacts map[uint16]map[netip.AddrPort]bool
}

type simEvent struct {
	at  time.Time
	seq int
	do  func()
}
type simQueue []simEvent

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].seq < q[j].seq
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simEvent)) }
func (q *simQueue) Pop() any     { o := *q; e := o[len(o)-1]; *q = o[:len(o)-1]; return e }

var (
	simStart = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	relayID  = identity.ID{9}
	nodeIDs  = [2]identity.ID{{1}, {2}}
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func newSim(t testing.TB, seed uint64, a, b skeinv1.NatType) *sim {
	s := &sim{t: t, now: simStart, rnd: rand.New(rand.NewPCG(seed, 1)), delay: 10 * time.Millisecond,
		relay: 25 * time.Millisecond, hairpin: true}
	for i, nat := range []skeinv1.NatType{a, b} {
		n := &simNode{id: i, nat: nat, lan: i, outer: netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)}),
			pingsTo: map[netip.AddrPort]int{}}
		n.inner = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(1 + i), 2}), 51820)
		if nat == natNone {
			n.inner = netip.AddrPortFrom(n.outer, 51820)
		}
		n.maps = &natTable{port: 40000 + uint16(s.rnd.IntN(1000)), out: map[string]uint16{}, owner: map[uint16]*simNode{},
			contacts: map[uint16]map[netip.AddrPort]bool{}}
		n.m = NewMachine(nodeIDs[i], nodeIDs[1-i], s.now)
		s.nodes[i] = n
	}
	return s
}

// sameLAN puts both hosts behind the first one's NAT.
func (s *sim) sameLAN() {
	a, b := s.nodes[0], s.nodes[1]
	b.lan, b.outer, b.maps, b.nat = a.lan, a.outer, a.maps, a.nat
	b.inner = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, 1, 3}), 51820)
}

// record is the record that STUN would have led to.
func (s *sim) record(n *simNode) Node {
	r := Node{NAT: n.nat, Candidates: []Candidate{{Type: host, Addr: n.inner, Source: "interface"}}}
	switch n.nat {
	case natNone, natBlocked:
	default:
		stun := ap("198.51.100.1:3478")
		r.Candidates = append(r.Candidates, Candidate{Type: srflx, Addr: n.translate(stun), Source: "stun"})
	}
	return r
}

// translate gives the source address that dst sees, and opens the mapping.
func (n *simNode) translate(dst netip.AddrPort) netip.AddrPort {
	if n.nat == natNone {
		return n.inner
	}
	key := n.inner.String()
	if n.nat == natSymmetric {
		key += dst.String()
	}
	port, ok := n.maps.out[key]
	if !ok {
		n.maps.port += 7
		port = n.maps.port
		n.maps.out[key], n.maps.owner[port], n.maps.contacts[port] = port, n, map[netip.AddrPort]bool{}
	}
	n.maps.contacts[port][dst] = true
	return netip.AddrPortFrom(n.outer, port)
}

// admits says whether the NAT lets a packet from src in at a port, and to whom.
func (n *simNode) admits(port uint16, src netip.AddrPort) *simNode {
	owner := n.maps.owner[port]
	if owner == nil {
		return nil
	}
	contacts := n.maps.contacts[port]
	switch n.nat {
	case natFullCone:
		return owner
	case natRestricted:
		for c := range contacts {
			if c.Addr() == src.Addr() {
				return owner
			}
		}
	case natPortRestricted, natSymmetric:
		if contacts[src] {
			return owner
		}
	}
	return nil
}

// send carries a UDP packet to a process; deliver runs at the receiver with the source address it sees.
func (s *sim) send(from *simNode, dst netip.AddrPort, deliver func(to *simNode, src netip.AddrPort)) {
	s.carry(from, dst, func(to *simNode, src netip.AddrPort) {
		s.awake(to, 0, func() { deliver(to, src) })
	})
}

// carry is send to a kernel, which never sleeps.
func (s *sim) carry(from *simNode, dst netip.AddrPort, deliver func(to *simNode, src netip.AddrPort)) {
	var to *simNode
	src := from.inner
	for _, n := range s.nodes {
		if n != from && n.lan == from.lan && n.inner == dst {
			to = n
		}
	}
	if to == nil {
		if from.nat == natBlocked {
			return
		}
		src = from.translate(dst)
	}
	if s.rnd.Float64() < s.loss {
		return
	}
	d := s.delay + time.Duration(s.rnd.Int64N(int64(s.delay/4)+1))
	s.after(d, func() {
		for _, n := range s.nodes {
			switch {
			case to != nil || n == from:
			case n.nat == natNone && n.inner == dst:
				to = n
			case n.lan != from.lan && n.outer == dst.Addr() && (s.hairpin || n.outer != from.outer):
				to = n.admits(dst.Port(), src)
			}
		}
		if to == nil || s.cut != nil && s.cut(from.id, to.id, dst) {
			return
		}
		deliver(to, src)
	})
}

// awake runs a function once the node's process is awake; arrived inputs come before due timers.
func (s *sim) awake(n *simNode, after time.Duration, do func()) {
	if s.stall != nil {
		if d := s.stall(n.id); d > 0 {
			s.after(d+after, do)
			return
		}
	}
	do()
}

func (s *sim) after(d time.Duration, do func()) {
	s.seq++
	heap.Push(&s.q, simEvent{s.now.Add(d), s.seq, do})
}

func (s *sim) run(d time.Duration) {
	end := s.now.Add(d)
	for len(s.q) > 0 && !s.q[0].at.After(end) {
		e := heap.Pop(&s.q).(simEvent)
		s.now = e.at
		e.do()
	}
	s.now = end
}

func (s *sim) input(n *simNode, in Input) {
	before := n.m.Path
	var actions []Action
	n.trace.add(n.m, s.now, in)
	n.m, actions = Step(n.m, s.now, in)
	for _, a := range actions {
		switch a.Kind {
		case ActionPing:
			s.ping(n, a.Endpoint, a.Size)
		case ActionPunch:
			if a.Unheard {
				s.after(s.relay, func() { s.input(s.nodes[1-n.id], Input{Kind: InputUnheard, Reply: true}) })
				break
			}
			s.punch(n, a.Reply)
		case ActionWake:
			s.wake(n, a.At)
		case ActionUse:
			s.used(n, before, a.Path)
			if s.onUse != nil {
				s.onUse(n, a.Path)
			}
		case ActionBurst:
			s.after(s.turn, func() { s.input(n, Input{Kind: InputGo}) })
		case ActionCheck:
			if s.onCheck != nil {
				s.onCheck(n)
			}
		}
	}
}

func (s *sim) used(n *simNode, from, to Path) {
	s.log = append(s.log, fmt.Sprintf("%8s node %d %s -> %s alive=%t %s", s.now.Sub(simStart), n.id, from, to,
		to.Alive, to.Rule))
	if told := (Past{Path: to.String(), Rule: to.Rule}).Alive(); told != to.Alive {
		s.t.Errorf("the journal would tell of %s by rule %s that alive is %t; it is not so", to, to.Rule, told)
	}
	if to.Alive && n.first.IsZero() {
		n.first = s.now
	}
	if to.Kind == Direct && to.Alive {
		if from.Kind != Direct || !from.Alive {
			n.direct = s.now
		}
	} else {
		n.direct = time.Time{}
	}
	n.switches++
	s.replay(n, decision(n.m.Peer, from, to))
}

// replay checks that every decision of every simulation can be reproduced from its trace, through JSON.
func (s *sim) replay(n *simNode, want *skeinv1.PathDecision) {
	s.t.Helper()
	b, err := json.Marshal(n.trace.drain())
	if err != nil {
		s.t.Fatal(err)
	}
	var t Trace
	if err := json.Unmarshal(b, &t); err != nil {
		s.t.Fatal(err)
	}
	if r := (replayed{Recorded: want, Again: t.fold()}); !r.same() {
		s.t.Errorf("replay decided %v, want %v", r.Again, want)
	}
	s.traceMax = max(s.traceMax, len(b))
}

func (s *sim) wake(n *simNode, at time.Time) {
	n.wakeSeq++
	mine := n.wakeSeq
	if at.IsZero() {
		return
	}
	s.after(at.Sub(s.now), func() {
		s.awake(n, time.Microsecond, func() {
			if n.wakeSeq == mine {
				s.input(n, Input{Kind: InputTick})
			}
		})
	})
}

func (s *sim) ping(n *simNode, to netip.AddrPort, size int) {
	passes := func(from, to int) bool { return size == 0 || s.carries == nil || s.carries(from, to, size) }
	sent := s.now
	n.pings++
	if size > 0 {
		n.padded++
	}
	n.pingsTo[to]++
	s.send(n, to, func(peer *simNode, src netip.AddrPort) {
		if !passes(n.id, peer.id) {
			return
		}
		s.send(peer, src, func(back *simNode, from netip.AddrPort) {
			if back == n && from == to && passes(peer.id, n.id) {
				s.input(n, Input{Kind: InputPong, Endpoint: to, RTT: s.now.Sub(sent), Sent: sent, Size: size})
			}
		})
		s.input(peer, Input{Kind: InputPing, Endpoint: src})
	})
}

func (s *sim) punch(n *simNode, reply bool) {
	if n.m.Relay.ID.IsZero() {
		return
	}
	var addrs []netip.AddrPort
	for _, c := range n.m.Self.Candidates {
		addrs = append(addrs, c.Addr)
	}
	s.after(s.relay, func() { s.input(s.nodes[1-n.id], Input{Kind: InputPunch, Addresses: addrs, Reply: reply}) })
}

// start gives both machines the other's record, the second one somewhat later, as gossip would.
func (s *sim) start(withRelay bool) {
	recs := [2]Node{s.record(s.nodes[0]), s.record(s.nodes[1])}
	for i, n := range s.nodes {
		s.after(time.Duration(i)*40*time.Millisecond, func() {
			s.input(n, Input{Kind: InputSelf, Node: &recs[i]})
			if withRelay {
				s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: 2 * s.relay}})
			}
			s.input(n, Input{Kind: InputPeer, Node: &recs[1-i]})
		})
	}
}

// data sends what WireGuard would: over the path in use.
func (s *sim) data(n *simNode, deliver func(to *simNode)) {
	switch p := n.m.Path; p.Kind {
	case Relay:
		s.after(s.relay, func() { deliver(s.nodes[1-n.id]) })
	case Direct:
		s.send(n, p.Endpoint, func(to *simNode, _ netip.AddrPort) { deliver(to) })
	}
}

// countersEvery is how often the agent reads WireGuard's counters.
const countersEvery = 250 * time.Millisecond

// traffic runs a ping at 50 a second inside the tunnel from the first node, with counters read as the agent reads them.
func (s *sim) traffic(d time.Duration) {
	a := s.nodes[0]
	end := s.now.Add(d)
	var tick, count func()
	tick = func() {
		if s.now.After(end) {
			return
		}
		a.trafficAt = s.now
		s.data(a, func(b *simNode) {
			b.trafficAt = s.now
			s.data(b, func(a *simNode) { a.echoes = append(a.echoes, s.now) })
		})
		s.after(20*time.Millisecond, tick)
	}
	count = func() {
		if s.now.After(end) {
			return
		}
		for _, n := range s.nodes {
			if s.now.Sub(n.trafficAt) <= countersEvery {
				s.input(n, Input{Kind: InputTraffic})
			}
		}
		s.after(countersEvery, count)
	}
	tick()
	count()
}

// blackout is the longest silence among the echoes after a time.
func (s *sim) blackout(after time.Time) time.Duration {
	last, worst := after, time.Duration(0)
	for _, e := range s.nodes[0].echoes {
		if e.After(after) {
			worst = max(worst, e.Sub(last))
			last = e
		}
	}
	return max(worst, s.now.Sub(last))
}

func (s *sim) dump() {
	for _, l := range s.log {
		s.t.Log(l)
	}
}
