package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// reference is a slow and obvious model: each pod's assigned addresses, the kernel's state, and when an address was
// last released, by a clock that never jumps.
type reference struct {
	cooldown, sticky time.Duration
	leases           map[podnet.Key]Lease
	strangers        map[netip.Addr]bool // in the kernel at the last Adopt
	unsure           map[netip.Addr]bool // strangers that are gone, and perhaps not taken for gone yet
	freed            map[netip.Addr]end
	truth            time.Duration
}

type end struct {
	at   time.Duration
	pod  string
	fast bool
}

// mayGive is the reason why an address must not be assigned to a pod; empty: none.
func (f *reference) mayGive(a netip.Addr, pod string) string {
	for _, l := range f.leases {
		if l.IPv4 == a {
			return "it belongs to " + l.Key.ContainerID
		}
	}
	if f.strangers[a] {
		return "the kernel has it"
	}
	if e, ok := f.freed[a]; ok && !e.fast {
		ago := f.truth - e.at
		if own := pod != "" && e.pod == pod && ago < f.sticky; ago < f.cooldown && !own {
			return fmt.Sprintf("it rests: given back %s ago", ago)
		}
		if ago < f.sticky && e.pod != "" && e.pod != pod {
			return fmt.Sprintf("it waits for %s: given back %s ago", e.pod, ago)
		}
	}
	return ""
}

// machine runs a Manager and the reference side by side.
type machine struct {
	reference
	r      *rig
	g      *agreement
	offset time.Duration // of the wall clock
}

func newMachine(t *testing.T, rt *rapid.T) *machine {
	m := &machine{reference: reference{
		leases: map[podnet.Key]Lease{}, strangers: map[netip.Addr]bool{}, unsure: map[netip.Addr]bool{},
		freed:    map[netip.Addr]end{},
		cooldown: rapid.SampledFrom([]time.Duration{0, time.Minute, 10 * time.Minute}).Draw(rt, "cooldown"),
		sticky:   rapid.SampledFrom([]time.Duration{0, 0, 2 * time.Minute, 20 * time.Minute}).Draw(rt, "sticky"),
	}}
	now := func() time.Time { return start.Add(m.truth + m.offset) }
	m.g = newAgreement(t, func() time.Time { return start.Add(m.truth) })
	p := poolOf("default", rapid.SampledFrom([]uint32{0, 1, 2, 3}).Draw(rt, "bits"), "10.64.0.0/27", "")
	p.CooldownSeconds, p.StickySeconds = uint32(m.cooldown/time.Second), uint32(m.sticky/time.Second)
	m.g.pool(p)
	m.r = m.g.start("a", func(c *Config) {
		c.Now, c.Uptime = now, func() time.Duration { return time.Hour + m.truth }
	})
	return m
}

func (m *machine) later(rt *rapid.T) {
	m.truth += rapid.SampledFrom([]time.Duration{time.Second, 20 * time.Second, time.Minute, 3 * time.Minute,
		11 * time.Minute, 2 * time.Hour}).Draw(rt, "later")
}

func (m *machine) assign(rt *rapid.T) {
	pod := rapid.SampledFrom([]string{"p", "q", "r", ""}).Draw(rt, "pod")
	req := m.r.request(pod)
	l, err := m.r.Assign(rt.Context(), req)
	if err != nil {
		if !codeIs(err, Exhausted) {
			rt.Fatalf("assign: %v", err)
		}
		m.wantExhausted(rt, pod, err)
		return
	}
	if why := m.mayGive(l.IPv4, pod); why != "" {
		rt.Fatalf("%s was given to %q: %s", l.IPv4, pod, why)
	}
	if _, _, b := m.g.state.BlockAt(l.IPv4); b.GetNodeId() != m.r.self {
		rt.Fatalf("%s lies in block %v", l.IPv4, b)
	}
	m.leases[l.Key] = l
}

// wantExhausted fails if an address could have been assigned.
func (m *machine) wantExhausted(rt *rapid.T, pod string, err error) {
	for _, b := range m.g.state.BlocksOf(m.r.self) {
		p := netip.MustParsePrefix(b.GetIpv4())
		for a := p.Addr(); p.Contains(a); a = a.Next() {
			if !m.unsure[a] && m.mayGive(a, pod) == "" && !m.isLeaving(b) {
				rt.Fatalf("%v, but %s is free for %q", err, a, pod)
			}
		}
	}
}

func (m *machine) isLeaving(b *skeinv1.Block) bool {
	m.r.Manager.mu.Lock()
	defer m.r.Manager.mu.Unlock()
	return m.r.core.blocks[blockKey{b.GetPool(), b.GetNumber()}].leaving != ""
}

func (m *machine) any(rt *rapid.T) (Lease, bool) {
	keys := slices.SortedFunc(maps.Keys(m.leases), func(a, b podnet.Key) int {
		return m.leases[a].any().Compare(m.leases[b].any())
	})
	if len(keys) == 0 {
		return Lease{}, false
	}
	return m.leases[rapid.SampledFrom(keys).Draw(rt, "lease")], true
}

func (m *machine) gone(l Lease, fast bool) {
	delete(m.leases, l.Key)
	if old, ok := m.freed[l.IPv4]; ok && fast && !old.fast {
		return // no pod had it: what the last one left counts
	}
	m.freed[l.IPv4] = end{at: m.truth, pod: l.Pod, fast: fast}
}

func (m *machine) release(rt *rapid.T) {
	l, ok := m.any(rt)
	if !ok {
		return
	}
	reason := rapid.SampledFrom([]string{"", AddFailed}).Draw(rt, "reason")
	if have, held := m.r.Release(l.Key, reason); !held || have.IPv4 != l.IPv4 {
		rt.Fatalf("release of %v: %v %v", l, have, held)
	}
	m.gone(l, reason == AddFailed)
	if _, held := m.r.Release(l.Key, ""); held {
		rt.Fatal("it was held twice")
	}
}

// adopt passes the kernel's state: links of most leases, and foreign links that come and go.
func (m *machine) adopt(rt *rapid.T) {
	m.r.Adopt(m.kernel(rt))
	m.settle()
}

func (m *machine) kernel(rt *rapid.T) (out []podnet.Found) {
	next := map[netip.Addr]bool{}
	for range rapid.IntRange(0, 3).Draw(rt, "strangers") {
		next[plus(netip.MustParseAddr("10.64.0.0"), rapid.Uint32Range(0, 40).Draw(rt, "stranger"))] = true
	}
	for _, l := range m.leases {
		delete(next, l.IPv4)
		out = append(out, found(l)...)
	}
	for a := range next {
		out = append(out, podnet.Found{Addr: a, Link: "veth7"})
	}
	for a := range m.strangers {
		if !next[a] {
			m.unsure[a] = true
		}
	}
	m.strangers = next
	return out
}

// settle updates the reference with the addresses that the Manager has just released.
func (m *machine) settle() {
	for a := range m.unsure {
		m.r.Manager.mu.Lock()
		there := m.r.core.seen[a] != nil
		m.r.Manager.mu.Unlock()
		if !there {
			delete(m.unsure, a)
			m.freed[a] = end{at: m.truth}
		}
	}
}

// restart kills the agent, perhaps in the middle of a write, and sets the wall clock.
func (m *machine) restart(rt *rapid.T) {
	m.offset += rapid.SampledFrom([]time.Duration{0, 0, time.Hour, -time.Hour, 24 * time.Hour}).Draw(rt, "jump")
	if rapid.Bool().Draw(rt, "torn") {
		f, err := os.OpenFile(m.r.cfg.File, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			rt.Fatal(err)
		}
		if _, err := f.WriteString(`12345678 {"op":"give","c":"never ackn`); err != nil {
			rt.Fatal(err)
		}
		f.Close()
	}
	if notes := m.r.restart(m.kernel(rt)...); len(notes) > 0 {
		rt.Fatalf("odd: %v", notes)
	}
	for a := range m.unsure { // what only the kernel had is forgotten with the run
		delete(m.unsure, a)
	}
}

// blocks adds a block or removes one, used or not.
func (m *machine) blocks(rt *rapid.T) {
	have := m.g.state.BlocksOf(m.r.self)
	if len(have) > 0 && rapid.Bool().Draw(rt, "take") {
		b := rapid.SampledFrom(have).Draw(rt, "block")
		m.g.must(&skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{
			Pool: b.GetPool(), Numbers: []uint64{b.GetNumber()}, NodeId: m.r.self,
		}}})
		return
	}
	if u := m.g.state.PoolUse("default"); u.Never > 0 {
		m.g.must(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
			NodeId: m.r.self, Pool: "default", Total: uint32(len(have) + 1),
		}}})
	}
}

func (m *machine) round(*rapid.T) {
	m.r.round()
	m.r.wg.Wait()
}

// audit leaves some leases without a link; of these some pods are gone.
func (m *machine) audit(rt *rapid.T) {
	kernel := m.kernel(rt)
	l, ok := m.any(rt)
	if ok {
		kernel = slices.DeleteFunc(kernel, func(f podnet.Found) bool { return f.Addr == l.IPv4 })
	}
	lost := rapid.Bool().Draw(rt, "gone")
	for _, freed := range m.r.Audit(kernel, func(x Lease) bool { return x.Key == l.Key && lost }) {
		if !ok || freed.Key != l.Key || !lost {
			rt.Fatalf("the audit freed %v", freed)
		}
		m.gone(freed, false)
	}
	m.settle()
}

// check compares the leases with the reference.
func (m *machine) check(rt *rapid.T) {
	ours := 0
	for _, l := range m.r.Leases() {
		if l.Adopted {
			continue
		}
		ours++
		if want := m.leases[l.Key]; want.IPv4 != l.IPv4 {
			rt.Fatalf("%v has %s, and was told %s", l.Key, l.IPv4, want.IPv4)
		}
	}
	if ours != len(m.leases) {
		rt.Fatalf("%d leases of %d are there", ours, len(m.leases))
	}
	for name, p := range m.r.Pools() {
		if uint32(1)<<m.g.state.Pool(name).GetBlockSizeBits()*p.Blocks != p.Used+p.Free+p.Resting {
			rt.Fatalf("pool %s does not add up: %+v", name, p)
		}
	}
}

func TestAgainstTheReference(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newMachine(t, rt)
		defer func() { m.r.Close() }()
		rt.Repeat(map[string]func(*rapid.T){
			"assign": m.assign, "assign again": m.assign, "release": m.release, "later": m.later, "adopt": m.adopt,
			"restart": m.restart,
			"blocks":  m.blocks, "round": m.round, "audit": m.audit, "": m.check,
		})
	})
}
