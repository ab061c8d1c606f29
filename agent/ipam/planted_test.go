package ipam

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// life is a node whose pods come and go, whose agent is killed, and whose kernel keeps links. It checks the rules by
// the assigned addresses only, without looking inside the Manager.
type life struct {
	t      *testing.T
	r      *rig
	h      *hand
	rng    *rand.Rand
	has    map[podnet.Key]Lease     // what pods were told
	kernel map[podnet.Key]bool      // of them, those whose links are there
	alien  netip.Addr               // an address of another program's link
	freed  map[netip.Addr]time.Time // when an address was given back
}

const lifeCooldown = 40 * time.Second

// In the random life of a node no address is assigned twice: not after a kill of the agent, not while the kernel has
// it, not while it rests. Pods keep their addresses, and no address lies outside the node's blocks.
func TestAnyLifeOfANode(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h := newHand()
			g := newAgreement(t, h.now)
			p := poolOf("default", 3, "10.64.0.0/26", "fd02::/122")
			p.CooldownSeconds = uint32(lifeCooldown / time.Second)
			g.pool(p)
			l := &life{t: t, r: g.start("a"), h: h, rng: rand.New(rand.NewPCG(seed, 0)), has: map[podnet.Key]Lease{},
				kernel: map[podnet.Key]bool{},
				freed:  map[netip.Addr]time.Time{}}
			for range 400 {
				l.step()
				l.check()
			}
			if len(l.has) == 0 || len(l.freed) < 10 {
				t.Fatalf("%d pods at the end, %d addresses given back: the run says nothing", len(l.has), len(l.freed))
			}
		})
	}
}

func (l *life) step() {
	l.h.add(time.Duration(l.rng.IntN(3000)) * time.Millisecond)
	switch n := l.rng.IntN(100); {
	case n < 50 && len(l.has) < 30:
		l.come()
	case n < 85:
		l.leave()
	case n < 90: // the agent is killed; the links stay
		l.r.restart(l.found()...)
	case n < 93: // another program uses an address in this node's blocks
		if blocks := l.blocks(); len(blocks) > 0 && !l.alien.IsValid() {
			a := plus(blocks[l.rng.IntN(len(blocks))].Addr(), uint32(l.rng.IntN(8)))
			if !slices.ContainsFunc(slices.Collect(maps.Values(l.has)), func(o Lease) bool { return o.IPv4 == a }) {
				l.alien = a
			}
			l.r.Adopt(l.found())
		}
	default: // links are there by now, and an audit sees them
		for k := range l.has {
			l.kernel[k] = true
		}
		if freed := l.r.Audit(l.found(), func(Lease) bool { return true }); len(freed) > 0 {
			l.t.Fatalf("an audit took %v from pods that run", freed)
		}
	}
}

func (l *life) come() {
	got, err := l.r.try(fmt.Sprint("pod-", l.r.n))
	if codeIs(err, Exhausted) {
		return
	}
	if err != nil {
		l.t.Fatal(err)
	}
	for _, o := range l.has {
		if o.IPv4 == got.IPv4 || o.IPv6 == got.IPv6 {
			l.t.Fatalf("%s and %s were given to %s and belong to %s", got.IPv4, got.IPv6, got.Pod, o.Pod)
		}
	}
	if got.IPv4 == l.alien {
		l.t.Fatalf("%s was given to %s, and somebody else's link has it", got.IPv4, got.Pod)
	}
	if at, ok := l.freed[got.IPv4]; ok && l.h.now().Sub(at) < lifeCooldown {
		l.t.Fatalf("%s was given to %s %s after another pod had it", got.IPv4, got.Pod, l.h.now().Sub(at))
	}
	if !slices.ContainsFunc(l.blocks(), func(p netip.Prefix) bool { return p.Contains(got.IPv4) }) {
		l.t.Fatalf("%s was given to %s and lies in no block of this node", got.IPv4, got.Pod)
	}
	if a, b := got.IPv4.As4(), got.IPv6.As16(); a[3] != b[15] {
		l.t.Fatalf("%s and %s do not belong together", got.IPv4, got.IPv6)
	}
	l.has[got.Key], l.kernel[got.Key] = got, l.rng.IntN(2) == 0 // else its ADD is still under way
}

func (l *life) leave() {
	for k, gone := range l.has {
		delete(l.has, k)
		delete(l.kernel, k)
		l.freed[gone.IPv4] = l.h.now()
		if _, held := l.r.Release(k, ""); !held {
			l.t.Fatalf("%s had %s and held nothing", gone.Pod, gone.IPv4)
		}
		return
	}
}

// check verifies that pods have the addresses that they were assigned.
func (l *life) check() {
	for k, want := range l.has {
		if have, ok := l.r.Lookup(k); !ok || have.IPv4 != want.IPv4 || have.IPv6 != want.IPv6 {
			l.t.Fatalf("%s was given %s and %s and has %v", want.Pod, want.IPv4, want.IPv6, have)
		}
	}
}

func (l *life) blocks() (out []netip.Prefix) {
	l.r.g.mu.Lock()
	defer l.r.g.mu.Unlock()
	for _, b := range l.r.g.state.BlocksOf(nodeID("a").String()) {
		out = append(out, netip.MustParsePrefix(b.GetIpv4()))
	}
	return out
}

// found is the kernel's state.
func (l *life) found() (out []podnet.Found) {
	for k, has := range l.has {
		if l.kernel[k] {
			out = append(out, found(has)...)
		}
	}
	if l.alien.IsValid() {
		out = append(out, podnet.Found{Addr: l.alien, Link: "veth7"})
	}
	return out
}

// A late copy of a release gets the first one's answer, since its request ID says what is returned: the same for the
// same blocks, and another for a block that the node was allocated again. Without a fixed ID each request would get a
// new one.
func TestGivingBackSaysWhat(t *testing.T) {
	b := newTable(t, 4, 2)
	b.later(idleFor)
	back := func() string {
		t.Helper()
		for _, k := range b.c.plan(b.now, nil) {
			if k.kind == taskRelease {
				return k.command("self").GetRequestId()
			}
		}
		t.Fatal("nothing is given back")
		return ""
	}
	first := back()
	if again := back(); first == "" || again != first {
		t.Fatalf("the same blocks are given back as %q and as %q", first, again)
	}
	b.v.Blocks[0].Index += 100 // taken and given again
	b.follow()
	b.later(idleFor)
	if second := back(); second == "" || second == first {
		t.Fatalf("a block that the node got again is given back as %q, like the first time", second)
	}
	s := staticView{Pool: "p", Namespace: "ns", Pod: "db-0", IPv4: netip.MustParseAddr("10.64.0.1"),
		Holder: "self", Index: 7}
	up := b.c.givingUp(s).command("self").GetRequestId()
	if same := b.c.givingUp(s).command("self").GetRequestId(); up == "" || same != up {
		t.Fatalf("the same address is given up as %q and as %q", up, same)
	}
	s.Index = 9
	if other := b.c.givingUp(s).command("self").GetRequestId(); other == up {
		t.Fatalf("an address that was claimed again is given up as %q, like the first time", other)
	}
}

// While a grant is being lowered the node uses no more than the new value: the log may already have taken the rest.
func TestLoweredGrantIsNotUsed(t *testing.T) {
	b := newTable(t, 8, 1, func(p *poolView) { p.Quotas = map[string]uint32{"ns": 5} })
	k := quotaKey{"p", "ns"}
	b.v.Grants[k] = 4
	b.follow()
	b.want("a", "0/0")
	b.c.caps[k] = 2
	b.want("b", "0/1")
	b.want("c", "grant") // the log still says 4
	delete(b.c.caps, k)
	b.want("c", "0/2")
}
