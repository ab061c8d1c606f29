package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// bench is a core with a clock and settings; it names addresses by block and offset: 1/3.
type table struct {
	t    *testing.T
	c    *core
	v    view
	now  time.Time
	pool poolView
}

func newTable(t *testing.T, size uint64, blocks int, change ...func(*poolView)) *table {
	b := &table{t: t, c: newCore("self"), now: start, pool: poolView{Name: "p", BlockSize: size}}
	for _, f := range change {
		f(&b.pool)
	}
	b.v = view{Index: 1, Grants: map[quotaKey]uint32{}}
	for n := range blocks {
		b.v.Blocks = append(b.v.Blocks, blockOf(uint64(n), size))
	}
	b.follow()
	return b
}

func blockOf(n, size uint64) blockView {
	bits := 0
	for s := size; s > 1; s /= 2 {
		bits++
	}
	return blockView{
		Key:   blockKey{"p", n},
		IPv4:  netip.PrefixFrom(plus(netip.MustParseAddr("10.64.0.0"), uint32(n*size)), 32-bits),
		IPv6:  netip.PrefixFrom(plus(netip.MustParseAddr("fd02::"), uint32(n*size)), 128-bits),
		Index: n + 1,
	}
}

func (b *table) follow() {
	b.v.Pools = map[string]poolView{"p": b.pool}
	b.v.Index++
	b.c.follow(b.v, b.now)
}

func (b *table) later(d time.Duration) { b.now = b.now.Add(d) }

// give assigns an address and returns its place, the need, or the refusal.
func (b *table) give(pod string, want ...string) string {
	b.t.Helper()
	q := ask{Request: requestOf(pod, pod), pool: "p"}
	for _, w := range want {
		q.Addresses = append(q.Addresses, netip.MustParseAddr(w))
	}
	r, need, err := b.c.assign(q, b.now)
	switch {
	case err != nil:
		return fmt.Sprintf("%d: %s", err.Code, err.Error())
	case need != nil:
		return []string{"", "block", "grant", "claim"}[need.kind]
	}
	b.c.apply(moment{at: b.now}.stamp(r), b.now)
	return fmt.Sprintf("%d/%d", r.Number, r.Offset)
}

func (b *table) back(pod string) {
	b.t.Helper()
	h := b.c.leases[podnet.Key{ContainerID: pod, Interface: "eth0"}]
	if h == nil {
		b.t.Fatalf("%s has nothing", pod)
	}
	b.c.apply(moment{at: b.now}.stamp(b.c.release(h, "")), b.now)
}

func (b *table) want(pod, place string) {
	b.t.Helper()
	if have := b.give(pod); !strings.HasPrefix(have, place) {
		b.t.Fatalf("%s got %s, want %s", pod, have, place)
	}
}

func TestNextAfterTheLast(t *testing.T) {
	b := newTable(t, 4, 1)
	b.want("a", "0/0")
	b.want("b", "0/1")
	b.back("a")
	b.later(time.Hour)
	b.want("c", "0/2")
	b.want("d", "0/3")
	b.want("e", "0/0")
	b.want("f", "block")
	b.back("c")
	b.want("f", "0/2") // it should rest better, but nothing else is there
}

func TestUsedBlocksBeforeEmptyOnes(t *testing.T) {
	b := newTable(t, 4, 3)
	for i, place := range []string{"0/0", "0/1", "0/2", "0/3", "1/0"} {
		b.want(fmt.Sprint(i), place)
	}
	b.back("2")
	b.later(time.Hour)
	b.want("x", "0/2") // the fuller one, which may never be empty
	b.want("y", "1/1")
	b.back("4")
	b.back("y")
	b.back("1")
	b.want("z", "2/0") // an empty one before what was given back just now, and of them the one never used
	b.later(time.Hour)
	b.back("z")
	b.later(time.Hour)
	for _, p := range []string{"0", "x", "3"} {
		b.back(p)
	}
	b.later(time.Hour)
	b.want("w", "1/2") // of empty ones the one that was left first
}

func TestBlocksOfOneAddressRest(t *testing.T) {
	b := newTable(t, 1, 3)
	b.want("a", "0/0")
	b.back("a")
	b.want("b", "1/0")
	b.back("b")
	b.want("c", "2/0")
	b.back("c")
	b.later(time.Second)
	b.want("d", "0/0")
	b.want("e", "1/0")
}

func TestCooldownAndSticky(t *testing.T) {
	b := newTable(t, 2, 1, func(p *poolView) { p.Cooldown, p.Sticky = time.Minute, 5*time.Minute })
	b.want("a", "0/0")
	b.want("b", "0/1")
	b.back("a")
	b.want("x", "block")
	b.want("a", "0/0") // at once: it waits for that one
	b.back("a")
	b.later(2 * time.Minute)
	b.want("x", "block") // the cooldown is over, and still it waits
	b.later(3*time.Minute - 1)
	b.want("x", "block")
	b.later(1)
	b.want("x", "0/0")
	b.back("x")
	b.pool.Sticky = 0
	b.follow()
	b.later(time.Minute - 1)
	b.want("y", "block")
	b.want("x", "block")
	b.pool.Cooldown = 0 // settings count for what rests already
	b.follow()
	b.want("y", "0/0")
}

// TestStickyOverAFailedAdd: an address continues to wait for its pod after an ADD of that pod has failed.
func TestStickyOverAFailedAdd(t *testing.T) {
	b := newTable(t, 4, 1, func(p *poolView) { p.Sticky = time.Hour })
	b.want("p", "0/0")
	b.back("p")
	for range 3 {
		b.later(time.Minute)
		b.want("p", "0/0")
		h := b.c.leases[podnet.Key{ContainerID: "p", Interface: "eth0"}]
		b.c.apply(moment{at: b.now}.stamp(b.c.release(h, AddFailed)), b.now)
	}
	for _, place := range []string{"0/1", "0/2", "0/3", "block"} {
		b.want("not p "+place, place)
	}
	b.want("p", "0/0")
}

func TestWantedAddresses(t *testing.T) {
	b := newTable(t, 4, 2, func(p *poolView) { p.Cooldown = time.Minute })
	if have := b.give("a", "10.64.0.6"); have != "1/2" {
		t.Fatal(have)
	}
	if have := b.give("b", "fd02::7", "10.64.0.7"); have != "1/3" {
		t.Fatal(have)
	}
	b.want("next", "1/0") // after the last, and around
	b.back("a")
	b.c.adopt([]podnet.Found{{Addr: netip.MustParseAddr("fd02::1"), Link: "veth7"}}, b.now)
	for _, want := range [][]string{
		{"3: 10.64.0.7 belongs to pod ns/b since 2026-03-01T12:00:00Z; remove that pod first", "10.64.0.7"},
		{"5: interface eth0 of container b has 10.64.0.7 and fd02::7 already", "fd02::7"},
		{"1: 10.64.0.1 and fd02::2 are not one pod's two addresses", "10.64.0.1", "fd02::2"},
		{"4: 10.64.0.6 was given back by pod ns/a and rests for 1m0s more", "10.64.0.6"},
		{"2: 10.64.0.9 is in no block", "10.64.0.9"},
		{"2: fd02::1 is in use: the kernel has a route for it to veth7", "10.64.0.1"},
	} {
		pod := "new"
		if strings.HasPrefix(want[0], "5") {
			pod = "b"
		}
		code := map[byte]Code{'1': Invalid, '2': Denied, '3': Denied, '4': Unavailable, '5': Exists}[want[0][0]]
		have := b.give(pod, want[1:]...)
		if !strings.HasPrefix(have, fmt.Sprintf("%d%s", code, want[0][1:])) {
			t.Fatalf("%v: %s", want, have)
		}
	}
	b.later(time.Minute)
	if have := b.give("new", "10.64.0.6"); have != "1/2" {
		t.Fatal(have)
	}
}

func TestLargeBlock(t *testing.T) {
	b := newTable(t, 1<<16, 1)
	seen := map[string]bool{}
	for i := range 1 << 16 {
		place := b.give(fmt.Sprint(i))
		if seen[place] || !strings.HasPrefix(place, "0/") {
			t.Fatalf("the %dth is %s", i, place)
		}
		seen[place] = true
	}
	b.want("more", "block")
	h := b.c.leases[podnet.Key{ContainerID: "65535", Interface: "eth0"}]
	if h.IPv4.String() != "10.64.255.255" || h.IPv6.String() != "fd02::ffff" {
		t.Fatalf("the last is %s, %s", h.IPv4, h.IPv6)
	}
}

func TestAdoptRebuildsALostFile(t *testing.T) {
	b := newTable(t, 8, 2)
	for i := range 10 {
		b.give(fmt.Sprint(i))
	}
	b.back("3")
	var kernel []podnet.Found
	for _, h := range b.c.leases {
		kernel = append(kernel, found(h.Lease)...)
	}
	lost := newCore("self")
	lost.follow(b.v, b.now)
	records, changed := lost.adopt(kernel, b.now)
	for _, r := range records {
		lost.apply(moment{at: b.now}.stamp(r), b.now)
	}
	if len(changed) != 0 || len(lost.leases) != 9 {
		t.Fatalf("%d leases, %v", len(lost.leases), changed)
	}
	for k, h := range b.c.leases {
		n := lost.leases[k]
		if n == nil || n.IPv4 != h.IPv4 || n.IPv6 != h.IPv6 || n.Pod != h.Pod || n.Pool != h.Pool || n.block != h.block ||
			n.off != h.off {
			t.Fatalf("%v became %v", h, n)
		}
	}
	if records, changed = lost.adopt(kernel, b.now); len(records)+len(changed) != 0 {
		t.Fatalf("the second time: %v %v", records, changed)
	}
}

func TestStrangersInTheKernel(t *testing.T) {
	b := newTable(t, 4, 1)
	b.want("a", "0/0")
	stranger := podnet.Found{Addr: netip.MustParseAddr("10.64.0.1"), Link: "veth7"}
	b.c.adopt([]podnet.Found{stranger, {Addr: netip.MustParseAddr("10.64.0.9"), Link: "veth8"}}, b.now)
	b.want("b", "0/2")
	b.want("c", "0/3")
	b.want("d", "block")
	b.v.Blocks = append(b.v.Blocks, blockOf(2, 4)) // the block around 10.64.0.9 becomes ours
	b.follow()
	for _, place := range []string{"2/0", "2/2", "2/3", "block"} {
		b.want("in "+place, place)
	}
	b.c.adopt(nil, b.now)
	b.want("d", "block") // missing once is not gone
	b.later(auditSpace)
	b.c.adopt([]podnet.Found{stranger}, b.now)
	b.later(softRest)
	b.want("d", "2/1")
	b.want("e", "block")
}

// TestPodsOfCoil: a pod made by Coil is not a lease of this node, and its address is not assigned. Its container and
// link are known.
func TestPodsOfCoil(t *testing.T) {
	b := newTable(t, 4, 1)
	coil := podnet.Found{Addr: netip.MustParseAddr("10.64.0.0"), Link: "veth7", OfCoil: true,
		Key: podnet.Key{ContainerID: "0123abcd", Interface: "eth0"}}
	if records, _ := b.c.adopt([]podnet.Found{coil}, b.now); len(records) != 0 || len(b.c.leases) != 0 {
		t.Errorf("a lease of ours was made of it: %v", records)
	}
	b.want("a", "0/1")
	l := b.c.seenLease(b.c.seen[coil.Addr])
	if l.Key != (podnet.Key{ContainerID: "0123abcd", Interface: "eth0"}) || l.Link != "veth7" || !l.Adopted ||
		l.IPv4 != coil.Addr {
		t.Errorf("it is shown as %+v", l)
	}
	b.later(auditSpace)
	b.c.adopt(nil, b.now)
	b.later(auditSpace)
	if records, _ := b.c.adopt(nil, b.now); len(records) != 1 || len(b.c.seen) != 0 {
		t.Errorf("after its end: %v, %v", records, b.c.seen)
	}
}

// TestLinkReadBeforeItsAlias: the kernel was read while a pod's link was being made and had no alias. The next scan
// shows that the link is the lease's, and the foreign entry disappears; another program's link with the address
// remains one.
func TestLinkReadBeforeItsAlias(t *testing.T) {
	b := newTable(t, 4, 1)
	b.want("a", "0/0")
	l := b.c.leases[podnet.Key{ContainerID: "a", Interface: "eth0"}]
	bare := []podnet.Found{{Addr: l.IPv4, Link: "skp1"}, {Addr: l.IPv6, Link: "skp1"}}
	named := slices.Clone(bare)
	for i := range named {
		named[i].ContainerID, named[i].Interface = "a", "eth0"
	}
	b.c.adopt(bare, b.now)
	if len(b.c.seen) != 2 {
		t.Fatalf("a link without an alias: %v", b.c.seen)
	}
	b.later(time.Second)
	stranger := podnet.Found{Addr: l.IPv4, Link: "veth7"}
	if _, changed := b.c.adopt(append(named, stranger), b.now); len(b.c.seen) != 1 || b.c.seen[l.IPv4].link != "veth7" ||
		len(changed) != 2 {
		t.Errorf("with its alias, beside a stranger's route: %v, changed %v", b.c.seen, changed)
	}
	if _, changed := b.c.adopt(append(named, stranger), b.now); len(changed) != 0 {
		t.Errorf("read once more, it changed %v", changed)
	}
	if records, changed := b.c.adopt(named, b.now); len(b.c.seen) != 0 || len(records) != 0 || len(changed) != 1 {
		t.Errorf("with its alias: %v, %v, changed %v", b.c.seen, records, changed)
	}
	b.back("a")
	b.later(softRest)
	for _, place := range []string{"0/1", "0/2", "0/3", "0/0"} {
		b.want("after "+place, place) // nobody is thought to have the first
	}
}

// TestBlockComesAndGoes: a lease outlives its block, and has its place again when the block returns.
func TestBlockComesAndGoes(t *testing.T) {
	b := newTable(t, 2, 2)
	b.want("a", "0/0")
	all := b.v.Blocks
	b.v.Blocks = all[1:]
	b.follow()
	b.want("b", "1/0")
	if b.c.leases[podnet.Key{ContainerID: "a", Interface: "eth0"}] == nil {
		t.Fatal("the lease went with its block")
	}
	b.v.Blocks = all
	b.follow()
	b.want("c", "0/1")
	b.want("d", "1/1")
	b.want("e", "block")
	b.back("a")
	b.want("e", "0/0")
}

func TestQuota(t *testing.T) {
	b := newTable(t, 8, 1, func(p *poolView) { p.Quotas = map[string]uint32{"ns": 3} })
	b.want("a", "grant")
	b.v.Grants[quotaKey{"p", "ns"}] = 2
	b.follow()
	b.want("a", "0/0")
	b.want("b", "0/1")
	b.want("c", "grant")
	b.back("a")
	b.want("c", "0/2")
	b.c.caps[quotaKey{"p", "ns"}] = 1 // it is being lowered
	b.want("d", "grant")
	b.pool.Quotas = nil
	b.follow()
	b.want("d", "0/3")
	b.pool.Quotas = map[string]uint32{"ns": 0}
	b.follow()
	b.want("e", "3: namespace ns may have no address of pool p")
}

func TestPlan(t *testing.T) {
	b := newTable(t, 2, 0)
	plan := func(want ...string) {
		t.Helper()
		var have []string
		tasks := b.c.plan(b.now, nil)
		sortTasks(tasks)
		for _, k := range tasks {
			switch k.kind {
			case taskAllocate:
				have = append(have, fmt.Sprintf("%d blocks", k.total))
			case taskRelease:
				s := "back"
				for _, v := range k.blocks {
					s += fmt.Sprintf(" %d", v.Key.Number)
				}
				have = append(have, s)
			}
		}
		if !slices.Equal(have, want) {
			t.Fatalf("the plan is %q, want %q", have, want)
		}
	}
	blocks := func(numbers ...uint64) {
		b.v.Blocks = nil
		for _, n := range numbers {
			b.v.Blocks = append(b.v.Blocks, blockOf(n, 2))
		}
		b.follow()
	}
	plan() // a pool that is not in use has no spare
	if n := b.c.wanted("p", 5, b.now); n != 3 {
		t.Fatalf("5 requests want %d blocks", n)
	}
	blocks(0)
	b.want("a", "0/0")
	plan("2 blocks")
	blocks(0, 1)
	plan()
	b.want("b", "0/1")
	b.want("c", "1/0")
	plan("3 blocks")
	b.pool.MaxBlocks = 2
	blocks(0, 1)
	plan()
	b.pool.MaxBlocks = 0
	blocks(0, 1, 2)
	plan()
	b.back("c")
	plan()
	b.later(idleFor)
	plan("back 2") // one spare is enough, and both rested long
	b.want("c", "2/0")
	plan()
	b.back("a")
	b.back("b")
	b.back("c")
	b.later(idleFor)
	plan("back 1 2")
	tasks := b.c.plan(b.now, nil)
	b.c.leave(tasks[0])
	for _, p := range []string{"d", "e"} {
		b.want(p, "0/")
	}
	b.want("f", "block")
	plan("4 blocks", "back 1 2") // the same again until it is decided
	b.c.stay(tasks[0])
	b.want("f", "1/")
	plan()
	for _, p := range []string{"d", "e", "f"} {
		b.back(p)
	}
	b.later(unusedFor)
	plan("back 0 1 2") // nobody used the pool for an hour
	b.pool.Sticky = 2 * unusedFor
	blocks(0, 1, 2)
	plan("back 2")
	b.pool.Draining = true
	blocks(0, 1, 2)
	plan("back 0 1 2")
}

// TestEmptyBlocksGoBackAfterAStart: a restarted node that has also lost its file knows only from the kernel which of
// its blocks are in use. Empty blocks beyond the spare are returned; without pods all are, once the pool has been
// unused for long.
func TestEmptyBlocksGoBackAfterAStart(t *testing.T) {
	if idleFor != 5*time.Minute {
		t.Errorf("an empty block is kept for %s", idleFor)
	}
	for _, c := range []struct {
		name  string
		pod   bool
		after time.Duration
		want  []uint64
	}{{"at once", true, 0, nil}, {"with a pod", true, idleFor, []uint64{2}},
		{"without", false, unusedFor, []uint64{0, 1, 2}}} {
		b := newTable(t, 2, 3)
		b.want("a", "0/0")
		var kernel []podnet.Found
		if c.pod {
			kernel = found(b.c.leases[podnet.Key{ContainerID: "a", Interface: "eth0"}].Lease)
		}
		anew := newCore("self")
		anew.follow(b.v, b.now)
		records, _ := anew.adopt(kernel, b.now)
		for _, r := range records {
			anew.apply(moment{at: b.now}.stamp(r), b.now)
		}
		var back []uint64
		for _, k := range anew.plan(b.now.Add(c.after), nil) {
			for _, v := range k.blocks {
				back = append(back, v.Key.Number)
			}
		}
		if slices.Sort(back); !slices.Equal(back, c.want) {
			t.Errorf("%s: blocks %v go back, want %v", c.name, back, c.want)
		}
	}
}
