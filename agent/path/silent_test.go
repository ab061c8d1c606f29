package path

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The simulation with a model of WireGuard, which sends to its configured endpoint or where it last heard the peer,
// counts bytes, and continues without its agent. The relays know who is connected.

type kernel struct {
	*sim
	ends    [2]*end
	oneWay  bool          // the second node answers nothing
	still   bool          // WireGuard sends where it was told, wherever the peer is heard: it runs in userspace
	deaf    bool          // something on the direct way drops WireGuard's packets, and no pings
	every   time.Duration // between packets
	worst   time.Duration // longest silence among the echoes since start
	started time.Time
	last    time.Time
	sent    int
	echoed  int
}

type end struct {
	wg       netip.AddrPort // where it sends
	c, read  Counters
	asked    questions
	hasRead  bool
	agent    bool // runs
	tunnel   bool // forwards
	sessions bool // the relays have a session of it
}

var proxy = ap("127.0.0.1:40000")

func newKernel(t testing.TB, seed uint64, nat skeinv1.NatType) *kernel {
	k := &kernel{sim: newSim(t, seed, nat, natPortRestricted), every: 20 * time.Millisecond}
	for i := range k.ends {
		k.ends[i] = &end{agent: true, tunnel: true, sessions: true}
	}
	k.stall = func(node int) time.Duration {
		if k.ends[node].agent {
			return 0
		}
		return time.Hour // what arrives for a dead agent is lost
	}
	k.onUse = func(n *simNode, p Path) {
		switch p.Kind {
		case Relay:
			k.ends[n.id].wg = proxy
		case Direct:
			k.ends[n.id].wg = p.Endpoint
		}
	}
	k.onCheck = func(n *simNode) {
		k.after(2*time.Millisecond, func() { k.count(n) })
		k.after(2*k.relay, func() { k.word(n) })
	}
	k.start(true)
	k.run(5 * time.Second)
	wantPaths(t, k.sim, "at the start", Direct, true)
	k.counting()
	return k
}

// word is the relay's report about the other node.
func (k *kernel) word(n *simNode) {
	c := RelayChoice{ID: relayID, RTT: 2 * k.relay}
	if !k.ends[1-n.id].sessions {
		c = RelayChoice{Absent: true}
	}
	if k.ends[n.id].agent && n.m.Relay != c {
		k.input(n, Input{Kind: InputRelay, Relay: c})
	}
}

// counting reads the counters like the agent's loop.
func (k *kernel) counting() {
	for i, n := range k.nodes {
		var tick func()
		tick = func() {
			k.count(n)
			k.after(250*time.Millisecond, tick)
		}
		k.after(time.Duration(i)*90*time.Millisecond, tick)
	}
}

func (k *kernel) count(n *simNode) {
	e := k.ends[n.id]
	if !e.agent {
		return
	}
	e.c.At, e.c.Endpoint, e.c.rawRx, e.c.rawTx = k.now, e.wg, e.c.RxBytes, e.c.TxBytes
	last, had := e.read, e.hasRead
	e.read, e.hasRead = e.c, true
	if !had {
		k.input(n, Input{Kind: InputAdopted, Endpoint: e.wg})
		return
	}
	for _, in := range observe(last, e.c) {
		k.input(n, in)
	}
	if e.asked = e.asked.next(last, e.c, n.m.byRelay(e.wg)); n.m.deaf(e.asked) {
		k.input(n, Input{Kind: InputUnheard})
	}
}

// packet carries 100 bytes of the tunnel; got runs when it has arrived.
func (k *kernel) packet(n *simNode, got func(to *simNode)) {
	from, to := k.ends[n.id], k.ends[1-n.id]
	if !from.tunnel {
		return
	}
	from.c.TxBytes += 100
	arrive := func(src netip.AddrPort) {
		if to.tunnel {
			to.c.RxBytes += 100
			if src == proxy {
				to.c.Relayed++
			}
			if !k.still {
				to.wg = src
			}
			got(k.nodes[1-n.id])
		}
	}
	if from.wg != proxy {
		if k.deaf {
			return
		}
		// WireGuard's packets bypass the agents, which it does not need.
		k.carry(n, from.wg, func(_ *simNode, src netip.AddrPort) { arrive(src) })
		return
	}
	if !from.agent {
		return
	}
	k.after(k.relay, func() {
		switch {
		case !to.sessions:
			k.after(k.relay, func() { k.word(n) })
		case to.agent:
			arrive(proxy)
		}
	})
}

// ping runs an echo through the tunnel from the first node.
func (k *kernel) echo(d time.Duration) {
	k.started, k.last, k.worst, k.sent, k.echoed = k.now, k.now, 0, 0, 0
	end := k.now.Add(d)
	var tick func()
	tick = func() {
		if !k.now.Before(end) {
			return
		}
		k.sent++
		k.packet(k.nodes[0], func(b *simNode) {
			if k.oneWay {
				k.echoed++
				return
			}
			k.packet(b, func(*simNode) {
				k.echoed++
				k.worst = max(k.worst, k.now.Sub(k.last))
				k.last = k.now
			})
		})
		k.after(k.every, tick)
	}
	tick()
}

func (k *kernel) lost() int { return k.sent - k.echoed }

// kill ends the second node's agent; a hung one keeps its session with the relay for a while.
func (k *kernel) kill(hung time.Duration) {
	k.ends[1].agent = false
	k.after(hung, func() { k.ends[1].sessions = false })
}

// restart starts a new agent with the state on disk and in the kernel.
func (k *kernel) restart() {
	n, e := k.nodes[1], k.ends[1]
	n.m = NewMachine(nodeIDs[1], nodeIDs[0], k.now)
	n.trace = trace{}
	n.wakeSeq++
	e.agent, e.hasRead = true, false
	recs := [2]Node{k.record(k.nodes[0]), k.record(n)}
	k.input(n, Input{Kind: InputSelf, Node: &recs[1]})
	k.input(n, Input{Kind: InputPeer, Node: &recs[0]})
	if e.tunnel {
		k.count(n)
	}
	k.after(100*time.Millisecond, func() {
		e.sessions = true
		k.word(n)
		k.word(k.nodes[0])
	})
}

func (k *kernel) want(when string, kind Kind, alive, silent bool, rule string) {
	k.t.Helper()
	p := k.nodes[0].m.Path
	if p.Kind != kind || p.Alive != alive || p.Silent != silent || p.Rule != rule {
		k.dump()
		k.t.Fatalf("%s: %s alive=%t silent=%t (%s: %s), want %s alive=%t silent=%t (%s)", when, p, p.Alive, p.Silent, p.Rule,
			p.Reason, kind, alive, silent, rule)
	}
}

// Neither an agent that is killed or hangs nor its return interrupts the tunnel.
func TestAgentAway(t *testing.T) {
	for name, c := range map[string]struct{ every, hung time.Duration }{
		"killed, 50 packets a second":  {20 * time.Millisecond, 0},
		"killed, one packet a second":  {time.Second, 0},
		"killed, a packet in a minute": {time.Minute, 0},
		"hangs, 50 packets a second":   {20 * time.Millisecond, 10 * time.Second},
		"hangs, 5 packets a second":    {200 * time.Millisecond, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(5) {
				k := newKernel(t, seed, natPortRestricted)
				k.every = c.every
				k.echo(3 * time.Minute)
				k.run(2*time.Second + time.Duration(seed)*37*time.Millisecond)
				k.kill(c.hung)
				k.run(2 * time.Minute)
				if p := k.nodes[0].m.Path; p.Kind != Direct || c.every <= time.Second && !p.Silent {
					k.dump()
					t.Fatalf("without the agent: %s silent=%t (%s)", p, p.Silent, p.Rule)
				}
				if k.lost() > 2 { // two may be under way
					k.dump()
					t.Fatalf("%d packets of %d lost without the agent", k.lost(), k.sent)
				}
				switches := k.nodes[0].switches
				if c.every <= time.Second && switches > 6 {
					k.dump()
					t.Fatalf("%d switches", switches)
				}
				k.restart()
				k.run(5 * time.Second)
				wantPaths(t, k.sim, "the agent is back", Direct, true)
				k.want("the agent is back", Direct, true, false, "direct-proven")
				k.run(2 * time.Minute)
				if k.lost() > 0 {
					k.dump()
					t.Fatalf("%d packets of %d lost", k.lost(), k.sent)
				}
			}
		})
	}
}

// An idle pair whose relays report the peer absent stays on the endpoint that worked last, without flapping.
func TestIdlePeerAway(t *testing.T) {
	k := newKernel(t, 1, natPortRestricted)
	k.run(30 * time.Second)
	switches := k.nodes[0].switches
	k.kill(0)
	k.run(10 * time.Minute)
	k.want("idle", Direct, false, false, "peer-away")
	if n := k.nodes[0].switches - switches; n > 1 {
		k.dump()
		t.Errorf("%d switches, want one: from alive to not known to be", n)
	}
	k.echo(10 * time.Second)
	k.run(2 * time.Second)
	k.want("traffic", Direct, true, true, "direct-silent")
	k.run(10 * time.Second)
	if k.lost() > 0 {
		t.Errorf("%d packets lost", k.lost())
	}
}

// The relay that replaced a dead direct path has no session of the peer: the path returns to the last endpoint at
// once.
func TestRelayWithoutThePeer(t *testing.T) {
	k := newKernel(t, 1, natPortRestricted)
	k.cut = cutAll
	k.echo(time.Minute)
	k.run(5 * time.Second)
	k.want("cut", Relay, true, false, "direct-dead")
	k.kill(0)
	k.cut = nil
	k.run(1500 * time.Millisecond)
	k.want("agent killed on the relay, the direct way repaired", Direct, false, false, "peer-away")
	k.run(3 * time.Second)
	k.want("tunnel heard", Direct, true, true, "direct-silent")
	k.restart()
	k.run(5 * time.Second)
	k.want("agent back", Direct, true, false, "direct-proven")
}

// If the tunnel dies with its agent or its host, no path is reported as alive.
func TestTunnelDiesWithItsAgent(t *testing.T) {
	k := newKernel(t, 1, natPortRestricted)
	k.echo(5 * time.Minute)
	k.run(3 * time.Second)
	k.ends[1].tunnel = false
	k.kill(0)
	k.run(time.Minute)
	k.want("dead", Direct, false, false, "peer-away")
	k.ends[1].tunnel, k.ends[1].wg = true, netip.AddrPort{}
	k.restart()
	k.ends[1].hasRead, k.ends[1].read = true, k.ends[1].c
	k.run(5 * time.Second)
	k.want("back", Direct, true, false, "direct-proven")
	// The agent first, then the host.
	k = newKernel(t, 2, natPortRestricted)
	k.echo(5 * time.Minute)
	k.run(3 * time.Second)
	k.kill(0)
	k.run(5 * time.Second)
	k.want("agent killed", Direct, true, true, "direct-silent")
	k.ends[1].tunnel = false
	k.run(muteAfter + 600*time.Millisecond)
	k.want("host dead", Direct, false, false, "peer-away")
}

// Real cuts, also one-way ones, are never mistaken for a silent agent: the relay has the traffic within a second.
func TestCutsWithCounters(t *testing.T) {
	over := 0
	for seed := range uint64(200) {
		if d := cutWithCounters(t, seed, false); d > time.Second {
			over++
		}
	}
	if over > 2 {
		t.Errorf("%d of 200 cuts took more than a second", over)
	}
}

// A cut of an idle pair is noticed by the end that has traffic, and the other end accepts it.
func TestIdleCutsWithCounters(t *testing.T) {
	for seed := range uint64(200) {
		if d := cutWithCounters(t, seed, true); d > 1250*time.Millisecond {
			t.Errorf("seed %d took %s", seed, d)
		}
	}
}

// cutWithCounters cuts a direct path, and returns how long the first node's echoes were missing.
func cutWithCounters(t *testing.T, seed uint64, idle bool) time.Duration {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 3))
	k := newKernel(t, seed, natPortRestricted)
	k.loss = []float64{0, 0, 0.05}[seed%3]
	k.every = []time.Duration{20 * time.Millisecond, 5 * time.Millisecond, 50 * time.Millisecond}[rnd.IntN(3)]
	k.delay = []time.Duration{time.Millisecond, 10 * time.Millisecond, 60 * time.Millisecond}[rnd.IntN(3)]
	before, way := 2*time.Second+time.Duration(rnd.IntN(1000))*time.Millisecond, rnd.IntN(3)
	k.still = rnd.IntN(2) == 0
	if !idle {
		k.echo(9 * time.Second)
	}
	k.run(before)
	k.cut = func(from, to int, _ netip.AddrPort) bool { return way == 2 || from == way }
	if idle {
		k.echo(6 * time.Second)
	}
	k.worst, k.last = 0, k.now
	k.run(5 * time.Second)
	for _, n := range k.nodes {
		if n.m.Path.Kind != Relay {
			k.dump()
			t.Fatalf("seed %d, cut %d, in userspace %t: node %d has %s (%s)", seed, way, k.still, n.id, n.m.Path, n.m.Path.Rule)
		}
	}
	if k.worst > time.Second {
		t.Logf("seed %d, cut %d, in userspace %t, loss %.2f, delay %s: dark for %s", seed, way, k.still, k.loss,
			k.delay, k.worst)
	}
	return k.worst
}

// If a peer without its agent gets another address, WireGuard follows it, and the path follows WireGuard.
func TestSilentPeerRoams(t *testing.T) {
	k := newKernel(t, 1, natNone)
	k.echo(time.Minute)
	k.run(3 * time.Second)
	k.kill(0)
	k.run(5 * time.Second)
	b := k.nodes[1]
	b.maps.out = map[string]uint16{} // its NAT forgets
	k.packet(b, func(*simNode) {})
	k.run(2 * time.Second)
	k.want("roamed", Direct, true, true, "direct-silent")
	if got, want := k.nodes[0].m.Path.Endpoint, k.ends[0].wg; got != want {
		t.Errorf("path leads to %s, WireGuard sends to %s", got, want)
	}
}
