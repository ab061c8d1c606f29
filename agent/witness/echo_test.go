package witness

import (
	"context"
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testns"
)

const port = 7946

// host is a node of the test: a namespace with a data plane, the control net's port and a mirror.
type host struct {
	*testns.NS
	t       testing.TB
	n       int
	key     *identity.Key
	private dataplane.Key
	public  dataplane.Key
	plane   *plane.Plane
	mtu     int // of its paths
	wire    *Wire
	admit   atomic.Pointer[func(from, via identity.ID) bool]
}

func (h *host) v4() netip.Addr  { return netip.AddrFrom4([4]byte{10, 4, 0, byte(h.n)}) }
func (h *host) v6() netip.Addr  { return netip.MustParseAddr(fmt.Sprintf("fd00:5::%d", h.n)) }
func (h *host) id() identity.ID { return h.key.ID() }

func (h *host) prefixes() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(h.v4(), 32), netip.PrefixFrom(h.v6(), 128)}
}

// rosterOf is a membership of hosts.
type rosterOf []*host

func (r rosterOf) Key(id identity.ID) (ed25519.PublicKey, bool) {
	for _, h := range r {
		if h.id() == id {
			return h.key.Public(), true
		}
	}
	return nil, false
}

func (r rosterOf) Overlay(id identity.ID) (v4, v6 netip.Addr, ok bool) {
	for _, h := range r {
		if h.id() == id {
			return h.v4(), h.v6(), true
		}
	}
	return v4, v6, false
}

func (r rosterOf) Owner(a netip.Addr) (identity.ID, bool) {
	for _, h := range r {
		if h.v4() == a || h.v6() == a {
			return h.id(), true
		}
	}
	return identity.ID{}, false
}

// zombie is a witness in one site, its two leaders, and a leader of another site.
type zombie struct {
	witness, mirror *host
	leaders         [2]*host
	specs           map[*host]*dataplane.Spec
}

// drivers are those of a zombie's hosts.
type drivers struct{ witness, mirror, bad, good string }

// newZombie makes all hosts, with the kernel's WireGuard where it exists.
func newZombie(t testing.TB) *zombie {
	t.Helper()
	return newZombieWith(t, drivers{"auto", "auto", "auto", "auto"})
}

func newZombieWith(t testing.TB, by drivers) *zombie {
	t.Helper()
	var all rosterOf
	add := func(n int, driver string) *host {
		h := &host{NS: testns.New(t, "witness"), t: t, n: n, mtu: dataplane.MTU}
		k, err := ecdh.X25519().GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		h.private, h.public = dataplane.Key(k.Bytes()), dataplane.Key(k.PublicKey().Bytes())
		if h.key, err = identity.NewKey(); err != nil {
			t.Fatal(err)
		}
		if h.plane, err = plane.Open(t.Context(), plane.Options{Namespace: &h.Handle, Driver: driver,
			Log: slog.New(slog.DiscardHandler)}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.plane.Close() })
		if os.Getenv("SKEIN_WANT_KERNEL") == "1" && driver == "auto" && h.plane.Driver() != "kernel" {
			t.Fatalf("driver is %s, want kernel", h.plane.Driver())
		}
		all = append(all, h)
		return h
	}
	z := &zombie{witness: add(1, by.witness), mirror: add(4, by.mirror)}
	z.leaders = [2]*host{add(2, by.bad), add(3, by.good)}
	specs := map[*host]*dataplane.Spec{}
	z.specs = specs
	for _, h := range all {
		specs[h] = &dataplane.Spec{
			WireGuard: dataplane.WireGuard{PrivateKey: h.private, Port: dataplane.Port, Mark: dataplane.DefaultNumbers().MarkWG,
				Peers: map[dataplane.Key]dataplane.Peer{}},
			Link: dataplane.Link{Name: dataplane.DefaultNumbers().Link, MTU: dataplane.MTU,
				Addresses: []netip.Prefix{netip.PrefixFrom(h.v4(), 16), netip.PrefixFrom(h.v6(), 64)}},
			Hops: dataplane.Hops{Self: h.v4(), Own: h.prefixes()}, ControlPort: port, Complete: true,
		}
	}
	wires := 0
	peer := func(a, b *host) {
		wires++
		ends := [2]netip.Addr{netip.AddrFrom4([4]byte{198, 18, byte(wires), 1}),
			netip.AddrFrom4([4]byte{198, 18, byte(wires), 2})}
		testns.Link(a.NS, b.NS, fmt.Sprintf("wire%d", wires), []netip.Prefix{netip.PrefixFrom(ends[0], 24)},
			[]netip.Prefix{netip.PrefixFrom(ends[1], 24)})
		for i, x := range []*host{a, b} {
			o := []*host{b, a}[i]
			s := specs[x]
			s.WireGuard.Peers[o.public] = dataplane.Peer{Endpoint: netip.AddrPortFrom(ends[1-i], dataplane.Port),
				AllowedIPs: o.prefixes()}
			s.Targets = append(s.Targets, o.prefixes()...)
		}
	}
	for _, l := range z.leaders {
		peer(z.witness, l)
		peer(l, z.mirror)
		for _, end := range []*host{z.witness, z.mirror} {
			far := map[*host]*host{z.witness: z.mirror, z.mirror: z.witness}[end]
			specs[end].Hops.Guards = append(specs[end].Hops.Guards, dataplane.HopGuard{From: l.v4(), Sources: far.prefixes()})
			specs[l].Hops.Guards = append(specs[l].Hops.Guards, dataplane.HopGuard{From: end.v4(), Sources: end.prefixes()})
			for _, p := range end.prefixes() {
				specs[l].Hops.Routes = append(specs[l].Hops.Routes, dataplane.HopRoute{Prefix: p, Via: end.v4(), Last: true})
			}
		}
		specs[l].Pods.Forward = true
	}
	for _, end := range []*host{z.witness, z.mirror} { // by the first leader, through whichever leader an echo goes
		far := map[*host]*host{z.witness: z.mirror, z.mirror: z.witness}[end]
		for _, p := range far.prefixes() {
			s := specs[end]
			s.Hops.Routes = append(s.Hops.Routes, dataplane.HopRoute{Prefix: p, Via: z.leaders[0].v4()})
			s.Targets = append(s.Targets, p)
			s.Link.Narrow = append(s.Link.Narrow, dataplane.Narrow{Prefix: p, MTU: dataplane.MTU - dataplane.HopOverhead})
		}
	}
	for _, h := range all {
		s := specs[h]
		slices.SortFunc(s.Hops.Routes, dataplane.HopRoute.Compare)
		slices.SortFunc(s.Hops.Guards, dataplane.HopGuard.Compare)
		slices.SortFunc(s.Targets, netip.Prefix.Compare)
		if r, err := h.plane.Apply(t.Context(), *s); err != nil || len(r.Errors) > 0 {
			t.Fatalf("apply: %v, %v", err, r.Errors)
		}
		h.listen(all)
	}
	return z
}

// listen opens the host's control net, and answers echoes in its namespace.
func (h *host) listen(all rosterOf) {
	type echo struct {
		from     identity.ID
		at, self netip.AddrPort
		b        []byte
	}
	echoes := make(chan echo, 100)
	n, err := control.New(control.Config{Key: h.key, Roster: all, Port: port, Link: dataplane.DefaultNumbers().Link,
		Log:    slog.New(slog.DiscardHandler),
		Tunnel: func(identity.ID) control.Tunnel { return control.Up },
		PacketKey: func(o identity.ID) (key [32]byte, ok bool) {
			self := h.id()
			binary.BigEndian.PutUint64(key[:], binary.BigEndian.Uint64(self[:])^binary.BigEndian.Uint64(o[:]))
			_, ok = all.Key(o)
			return key, ok
		},
		OnPacket: func(identity.ID, byte, []byte) {},
		OnEcho: func(from identity.ID, at, self netip.AddrPort, b []byte) {
			echoes <- echo{from, at, self, slices.Clone(b)}
		}})
	if err != nil {
		h.t.Fatal(err)
	}
	h.admits(func(identity.ID, identity.ID) bool { return true })
	h.wire = &Wire{Self: h.id(), Link: dataplane.DefaultNumbers().Link, Port: port, Overlay: all.Overlay, Owner: all.Owner,
		Seal: n.SealEcho,
		Open: n.OpenEcho, Count: n.CountEcho, MTU: func(identity.ID) int { return h.mtu }}
	m := &Mirror{Wire: h.wire, Admit: func(from, via identity.ID) bool { return (*h.admit.Load())(from, via) }}
	h.Must("listen", func() error { return n.Bind(h.v4(), h.v6()) })
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.Do(func() {
			for e := range echoes {
				_ = m.Take(e.from, e.at, e.self, e.b)
			}
		})
	}()
	h.t.Cleanup(func() {
		n.Close()
		close(echoes)
		<-done
	})
}

// admits makes a host's mirror answer the given members, even while it answers others.
func (h *host) admits(whom func(from, via identity.ID) bool) { h.admit.Store(&whom) }

// ask sends an echo through a leader, or directly.
func (z *zombie) ask(via *host, kind Kind) (r result) {
	id := identity.ID{}
	if via != nil {
		id = via.id()
	}
	z.witness.Do(func() {
		r = z.witness.wire.ask(context.Background(), id, []identity.ID{z.mirror.id()}, kind,
			pace{tries: 4, spacing: 100 * time.Millisecond, rest: 700 * time.Millisecond})
	})
	return r
}

// passes waits until a leader forwards these kinds of echoes and no others.
func (z *zombie) passes(via *host, want ...Kind) {
	via.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		var got []Kind
		var last error
		for k := range Kinds {
			if r := z.ask(via, k); r.answered {
				got = append(got, k)
			} else if r.err != nil {
				last = r.err
			}
		}
		if slices.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			via.t.Fatalf("node %d passes on %v, want %v; %v", via.n, got, want, last)
		}
	}
}

// drop makes a host drop forwarded packets that a rule matches, until the returned function is called.
func (h *host) drop(match ...expr.Any) (repair func()) {
	h.t.Helper()
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "zombie"}
	change := func(what string, f func(c *nftables.Conn)) {
		h.Must(what, func() error {
			c, err := nftables.New(nftables.WithNetNSFd(int(h.Handle)))
			if err != nil {
				return err
			}
			f(c)
			return c.Flush()
		})
	}
	change("break", func(c *nftables.Conn) {
		c.AddTable(table)
		chain := c.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookForward,
			Priority: nftables.ChainPriorityFilter})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(match, &expr.Verdict{Kind: expr.VerdictDrop})})
	})
	return func() { change("repair", func(c *nftables.Conn) { c.DelTable(table) }) }
}

var (
	isNew = []expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil,
			expr.CtStateBitNEW), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)}}
	isReply = []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1,
		Data: []byte{1}}}
	isLarge = []expr.Any{&expr.Meta{Key: expr.MetaKeyLEN, Register: 1},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpGt, Register: 1, Data: binary.BigEndian.AppendUint32(nil, 1200)}}
	isIPv6 = []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1,
		Data: []byte{unix.NFPROTO_IPV6}}}
)

// Echoes pass the leader's own forwarding, whatever the routes are, and are lost as other packets are.
func TestEchoesThroughALeader(t *testing.T) { echoesThroughALeader(t, newZombie(t)) }

// TestEchoesByBothDrivers: a witness in the kernel, whose leaders have both drivers, and a mirror in userspace.
func TestEchoesByBothDrivers(t *testing.T) {
	z := newZombieWith(t, drivers{witness: "auto", mirror: "userspace", bad: "userspace", good: "auto"})
	if z.witness.plane.Driver() != "kernel" {
		t.Skip("this kernel has no WireGuard")
	}
	echoesThroughALeader(t, z)
}

func echoesThroughALeader(t *testing.T, z *zombie) {
	t.Helper()
	bad, good := z.leaders[0], z.leaders[1]
	all := []Kind{SmallIPv4, LargeIPv4, SmallIPv6, LargeIPv6}
	z.passes(bad, all...)
	z.passes(good, all...)
	for _, c := range []struct {
		name   string
		match  []expr.Any
		passed []Kind
	}{
		{"new flows", isNew, nil},
		{"the way back", isReply, nil},
		{"large packets", isLarge, []Kind{SmallIPv4, SmallIPv6}},
		{"IPv6", isIPv6, []Kind{SmallIPv4, LargeIPv4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			repair := bad.drop(c.match...)
			z.passes(bad, c.passed...)
			z.passes(good, all...)
			if r := z.askSelf(bad); !r.answered {
				t.Errorf("the leader itself does not answer: %v", r.err)
			}
			repair()
			z.passes(bad, all...)
		})
	}
	t.Run("a mirror answers whom it admits", func(t *testing.T) {
		z.mirror.admits(func(from, via identity.ID) bool { return from == z.witness.id() && via == good.id() })
		z.passes(bad)
		z.passes(good, all...)
	})
}

// askSelf sends an echo to a leader itself.
func (z *zombie) askSelf(l *host) (r result) {
	z.witness.Do(func() {
		r = z.witness.wire.ask(context.Background(), z.witness.id(), []identity.ID{l.id()}, SmallIPv4,
			pace{tries: 4, spacing: 100 * time.Millisecond, rest: time.Second})
	})
	return r
}

// If a leader's onward path carries less than the path to the leader, its router reports that by ICMP, and the report
// is used as for other packets: large echoes are as large as the whole path carries.
func TestLargeIsWhatTheWayCarries(t *testing.T) {
	z := newZombie(t)
	l := z.leaders[0]
	z.passes(l, SmallIPv4, LargeIPv4, SmallIPv6, LargeIPv6)
	for _, p := range z.mirror.prefixes() {
		z.specs[l].Link.Narrow = append(z.specs[l].Link.Narrow, dataplane.Narrow{Prefix: p, MTU: 1300})
	}
	if _, err := l.plane.Apply(t.Context(), *z.specs[l]); err != nil {
		t.Fatal(err)
	}
	z.passes(l, SmallIPv4, LargeIPv4, SmallIPv6, LargeIPv6)
	z.witness.Must("ask the kernel", func() error {
		f, err := openFlow(z.witness.v4(), netip.AddrPortFrom(z.mirror.v4(), port))
		if err != nil {
			return err
		}
		defer f.Close()
		if mtu, err := f.mtu(); err != nil || mtu != 1300 {
			return fmt.Errorf("the way to the mirror carries %d bytes: %w", mtu, err)
		}
		return nil
	})
}

// BenchmarkEcho measures what an echo and its answer cost in processor time at all four hosts together, including three
// tunnels and the leader's forwarding.
func BenchmarkEcho(b *testing.B) {
	z := newZombie(b)
	z.passes(z.leaders[0], SmallIPv4, LargeIPv4, SmallIPv6, LargeIPv6)
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	for kind := range Kinds {
		b.Run(kind.String(), func(b *testing.B) {
			before := used()
			for b.Loop() {
				z.ask(z.leaders[0], kind)
			}
			b.ReportMetric(float64((used()-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

func TestMessagesAreRead(t *testing.T) {
	m := message{kind: request, nonce: nonce{1, 2, 3}, via: netip.MustParseAddr("10.4.0.9")}
	for _, size := range []int{0, messageBytes, 1300} {
		b := m.encode(size)
		if got, err := decode(b); err != nil || got != m || len(b) != max(size, messageBytes) {
			t.Errorf("%d bytes: %+v, %v", len(b), got, err)
		}
	}
	m.via = netip.Addr{}
	if got, err := decode(m.encode(0)); err != nil || got != m {
		t.Errorf("without a leader: %+v, %v", got, err)
	}
	for n := range messageBytes {
		if _, err := decode(make([]byte, n)); err == nil {
			t.Errorf("%d bytes were read", n)
		}
	}
}

// A mirror answers each member a bounded number of echoes a second.
func TestMirrorsRoom(t *testing.T) {
	m, now, n := &Mirror{}, time.Unix(1000, 0), 0
	for range 10_000 {
		if m.mayAnswer(identity.ID{1}, now) {
			n++
		}
	}
	if n != answersBurst || !m.mayAnswer(identity.ID{2}, now) {
		t.Errorf("%d at once, and another member is left without", n)
	}
	for range 10_000 {
		if m.mayAnswer(identity.ID{1}, now.Add(time.Second)) {
			n++
		}
	}
	if n != answersBurst+answersPerMember {
		t.Errorf("%d after a second", n)
	}
}
