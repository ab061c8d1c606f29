package udp_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/udp"
	"github.com/skeinmesh/skein/relay/wire"
)

func TestUDPPassesBetweenSymmetricNATs(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		atA, atB := passes(t, a, b)
		if atA != a.port(b) || atB != b.port(a) {
			t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atB, a.port(b), b.port(a))
		}
		for _, size := range []int{1, 1472} {
			large := strings.Repeat("x", size)
			relaytest.WaitFor(t, fmt.Sprintf("a packet of %d bytes", size), func() bool {
				a.send(b, large)
				_, ok := b.from(large)
				return ok
			})
		}
		if st := r.udp.Stats(); st.Ready != 1 || (st.InKernel == 1) != (driver == "kernel") ||
			(st.Packets > 0) != (driver == "userspace") {
			t.Errorf("%+v", st)
		}
	})
}

func TestOneMappingMayHaveManyPairs(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a := startEnd(t, m, n.Host(nattest.PortRestricted), r) // one outside port for all that it sends
		others := []*udpEnd{startEnd(t, m, n.Host(nattest.PortRestricted), r), startEnd(t, m, n.Host(nattest.Symmetric), r),
			startEnd(t, m, n.Host(nattest.Public), r)}
		for _, b := range others {
			join(t, a, b)
		}
		for _, b := range others {
			atA, atB := passes(t, a, b)
			if atA != a.port(b) || atB != b.port(a) {
				t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atB, a.port(b), b.port(a))
			}
		}
	})
}

func TestUDPSpeaksIPv6AndBetweenFamilies(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		six := func(e *udpEnd) { e.ipv6 = true }
		a, b := startEnd(t, m, n.Host(nattest.Public), r, six), startEnd(t, m, n.Host(nattest.Public), r, six)
		c := startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		join(t, a, c)
		for _, other := range []*udpEnd{b, c} {
			atA, atOther := passes(t, a, other)
			if atA != a.port(other) || atOther != other.port(a) {
				t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atOther,
					a.port(other), other.port(a))
			}
		}
		if st := r.udp.Stats(); driver == "kernel" && st.InKernel != 1 { // it does not translate between families
			t.Errorf("%+v", st)
		}
	})
}

func TestNothingIsForwardedForStrangers(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		c := startEnd(t, m, n.Host(nattest.Public), r) // a member, but not of this pair
		join(t, a, b)
		passes(t, a, b)
		for _, to := range []netip.AddrPort{a.port(b), b.port(a)} {
			c.conn.WriteToUDPAddrPort([]byte("from a stranger"), to)
			a.conn.WriteToUDPAddrPort([]byte("to the other's port"), b.port(a))
		}
		passes(t, a, b) // what was sent before has arrived by now, if it ever does
		for _, e := range []*udpEnd{a, b} {
			for _, payload := range []string{"from a stranger", "to the other's port"} {
				if from, ok := e.from(payload); ok {
					t.Errorf("%q arrived from %s", payload, from)
				}
			}
		}
	})
}

func TestUDPFollowsAReboundMappingAndNoReplay(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		thief := startEnd(t, m, n.Host(nattest.Public), r)
		join(t, a, b)
		passes(t, a, b)
		before := r.udp.Stats()

		// Somebody who heard the binds sends copies from elsewhere, and one that never arrived: the mapping stays.
		var fresh []byte
		relaytest.WaitFor(t, "the next bind", func() (ok bool) { fresh, ok = a.Bind(a.reservation(b).Endpoint); return ok })
		for _, copied := range append(slices.Clone(a.binds), fresh) {
			thief.conn.WriteToUDPAddrPort(copied, a.port(b))
		}
		relaytest.WaitFor(t, "the copies", func() bool {
			return r.udp.Stats().Refused >= before.Refused+uint64(len(a.binds))
		})
		passes(t, a, b)
		if st := r.udp.Stats(); st.Rebound != before.Rebound {
			t.Errorf("a copied bind moved the mapping: %+v", st)
		}

		a.open() // a new mapping
		relaytest.WaitFor(t, "the new mapping", func() bool { a.bind(b); return r.udp.Stats().Rebound > before.Rebound })
		atA, _ := passes(t, a, b)
		if atA != a.port(b) {
			t.Errorf("packets come from %s, want %s", atA, a.port(b))
		}
	})
}

func TestUnusedPairsEndAndTheirPortsAreFree(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver, func(c *udp.Config) {
			c.Idle = 2 * time.Second
			c.First,
				c.Last = 24000, 24001
		})
		// The kernel remembers a UDP flow for so long after its last packet.
		r.sysctl(t, "net/netfilter/nf_conntrack_udp_timeout", "1")
		r.sysctl(t, "net/netfilter/nf_conntrack_udp_timeout_stream", "1")
		a, b, c := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r),
			startEnd(t, m, n.Host(nattest.Public), r)
		join(t, a, b)
		passes(t, a, b)
		if err := a.Reserve(r.Key.ID(), c.ID); err != nil {
			t.Fatal(err)
		}
		relaytest.WaitFor(t, "the refusal while all ports are taken", func() bool {
			return a.reservation(c).Refused == wire.DeniedFull.String()
		})
		relaytest.WaitFor(t, "the end of the pair", func() bool {
			return r.udp.Stats().Pairs == 0 && a.reservation(b).Refused != ""
		})
		if driver == "kernel" && r.entries(t) != 0 {
			t.Errorf("%d entries of the ended pair are left", r.entries(t))
		}
		join(t, a, c)
		passes(t, a, c)
		if driver == "kernel" && r.entries(t) != 4 {
			t.Errorf("%d entries of one pair, want two for each end", r.entries(t))
		}
	})
}

func TestReservationsHaveTheirLimits(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace", func(c *udp.Config) { c.PairsPerClient = 1 })
	h := n.Host(nattest.Public)
	a, b, c := startEnd(t, m, h, r), startEnd(t, m, h, r), startEnd(t, m, h, r)
	join(t, a, b)
	if err := a.Reserve(r.Key.ID(), c.ID); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "the quota", func() bool { return a.reservation(c).Refused == wire.DeniedQuota.String() })
	join(t, c, a) // whoever asks pays
	absent := relaytest.NewKey(t)
	if err := b.Reserve(r.Key.ID(), absent.ID()); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "the refusal for somebody who is not there", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.reserved[absent.ID()].Refused == wire.DeniedNotHere.String()
	})
	a.GiveUpReservation(r.Key.ID(), b.ID)
	relaytest.WaitFor(t, "the end that one side wished", func() bool { return b.reservation(a).Refused != "" })
	a.Reserve(r.Key.ID(), c.ID)
	join(t, a, b)
}

func TestKickedNodesAreForwardedNoMore(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		passes(t, a, b)
		to := a.port(b)
		m.Revoke(a.ID)
		r.Server.Kick(a.ID)
		relaytest.WaitFor(t, "the news at the other end", func() bool { return b.reservation(a).Refused != "" })
		a.conn.WriteToUDPAddrPort([]byte("after the end"), to)
		c := startEnd(t, m, n.Host(nattest.Public), r)
		join(t, c, b)
		passes(t, c, b)
		if _, ok := b.from("after the end"); ok {
			t.Error("a packet of a revoked node arrived")
		}
	})
}

func TestWithoutForwardingInTheKernelThisProcessForwards(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	forwarding(t, r.host, "0")
	if name, why := r.udp.Driver(); name != "userspace" || why == nil || !strings.Contains(why.Error(), "ip_forward") {
		t.Errorf("driver %s: %v", name, why)
	}
	a, b, c := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r),
		startEnd(t, m, n.Host(nattest.Public), r)
	join(t, a, b)
	passes(t, a, b)
	if st := r.udp.Stats(); st.InKernel != 0 {
		t.Errorf("%+v", st)
	}
	forwarding(t, r.host, "1")
	join(t, a, c)
	passes(t, a, c)
	if st := r.udp.Stats(); st.InKernel != 1 {
		t.Errorf("after forwarding was allowed: %+v", st)
	}
}

func TestAFirewallThatDropsIsNoticed(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	c, drop := r.nft(t), nftables.ChainPolicyDrop
	other := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "other"})
	c.AddChain(&nftables.Chain{Table: other, Name: "forward", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	relaytest.WaitFor(t, "the fall back to userspace", func() bool {
		a.bind(b)
		a.send(b, "lost")
		a.ReservationFailed(r.Key.ID(), b.ID)
		return r.udp.Stats().FellBack == 1
	})
	passes(t, a, b)
	if name, why := r.udp.Driver(); name != "userspace" || why == nil || !strings.Contains(why.Error(), "firewall") {
		t.Errorf("driver %s: %v", name, why)
	}
}

// Two members prove an idle pair's ends, let no packet pass and call it failed. Whatever is true of their pair, others'
// pairs stay in the kernel: those that are there, and those that come.
func TestMembersWhoCallTheirIdlePairFailedConcernNobodyElse(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	c := startEnd(t, m, n.Host(nattest.Public), r)
	join(t, a, b)
	passes(t, a, b)
	liar, friend := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r)
	join(t, liar, friend)
	relaytest.WaitFor(t, "the liars' pair to fall back", func() bool {
		liar.ReservationFailed(r.Key.ID(), friend.ID)
		return r.udp.Stats().FellBack == 1
	})
	if name, why := r.udp.Driver(); name != "kernel" || why != nil { // said at once, not at the timekeeper's next round
		t.Errorf("with another pair that the kernel forwards, the relay says %s: %v", name, why)
	}
	join(t, a, c)
	passes(t, a, c)
	a.open() // its mapping towards b moves, so that the pair is written anew
	relaytest.WaitFor(t, "the new mapping", func() bool { a.bind(b); return r.udp.Stats().Rebound > 0 })
	passes(t, a, b)
	if st := r.udp.Stats(); st.Ready != 3 || st.InKernel != 2 {
		t.Errorf("%d of 3 pairs are in the kernel, want all but the liars': %+v", st.InKernel, st)
	}

	// The failure is remembered for the two, also when they ask anew.
	friend.GiveUpReservation(r.Key.ID(), liar.ID) // the liar has asked too much for the moment
	relaytest.WaitFor(t, "the end of the liars' pair", func() bool { return liar.reservation(friend).Refused != "" })
	join(t, friend, liar)
	if st := r.udp.Stats(); st.Ready != 3 || st.InKernel != 2 {
		t.Errorf("%d of 3 pairs are in the kernel after the liars asked anew, want 2: %+v", st.InKernel, st)
	}
}

// counted counts what the kernel is asked.
type counted struct {
	udp.Kernel
	used atomic.Int64
}

func (c *counted) Used(m udp.Mapping) (bool, error) {
	c.used.Add(1)
	return c.Kernel.Used(m)
}

// Of thousands of pairs that nobody uses a few are looked at when one is said to have failed, and none when the kernel
// was seen to forward a moment ago.
func TestFewPairsAreLookedAtWhenOneFails(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	kernel := &counted{Kernel: kernelTable{r.table, r.host}}
	at := func(port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(port))
	}
	var mappings []udp.Mapping
	for i := range 10 * udp.OthersSeen {
		mappings = append(mappings, udp.Mapping{
			ALocal: at(24000 + i), ARemote: at(1 + i), BLocal: at(26000 + i), BRemote: at(2001 + i)})
	}
	u := udp.OfPairs(kernel, mappings)
	now := time.Now()
	u.SeeOthers(now)
	if asked := kernel.used.Load(); asked != udp.OthersSeen || !u.Worked().IsZero() {
		t.Errorf("the kernel was asked about %d of %d pairs, want %d; one is used: %t", asked, len(mappings),
			udp.OthersSeen, !u.Worked().IsZero())
	}
	u.SetWorked(now)
	u.SeeOthers(now.Add(time.Second))
	if asked := kernel.used.Load(); asked != udp.OthersSeen {
		t.Errorf("the kernel was asked about %d pairs though it was seen to forward", asked-udp.OthersSeen)
	}
}

func TestFlowsOutliveTheirRelaysAgent(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	host := n.Host(nattest.Public)
	r := startUDP(t, host, m, "kernel")
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	passes(t, a, b)
	used := a.port(b).Port()
	r.Kill()
	r.Server.Close()
	r.table.Close()
	passes(t, a, b) // nobody but the kernel is left
	again, err := relaynft.Open(relaynft.Config{NetNS: int(r.ns)})
	if err != nil {
		t.Fatal(err)
	}
	if !again.Stale(used) || again.Stale(24099) {
		t.Errorf("port %d is not known to be in use", used)
	}
	passes(t, a, b)
	if err := again.Close(); err != nil { // or it would repair what is purged
		t.Fatal(err)
	}
	if err := relaynft.Purge(relaynft.Config{NetNS: int(r.ns)}); err != nil {
		t.Fatal(err)
	}
	if r.ours(t) != nil {
		t.Error("the table is there after the purge")
	}
	a.send(b, "after the purge")
	c := startUDP(t, host, m, "kernel")
	d, e := startEnd(t, m, n.Host(nattest.Public), c), startEnd(t, m, n.Host(nattest.Public), c)
	join(t, d, e)
	passes(t, d, e)
	if _, ok := b.from("after the purge"); ok {
		t.Error("a flow outlived the purge")
	}
}

func TestATableThatSomebodyDeletedIsRepaired(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	passes(t, a, b)
	nft := r.nft(t)
	nft.DelTable(r.ours(t))
	if err := nft.Flush(); err != nil {
		t.Fatal(err)
	}
	a.open() // whose new mapping has no entry in the connection table
	relaytest.WaitFor(t, "the table to be repaired", func() bool {
		a.bind(b)
		b.bind(a)
		return r.udp.Stats().Rebound > 0
	})
	passes(t, a, b)
}

func TestASessionAfterTheFirstKeepsThePair(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), relaytest.NewMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		passes(t, a, b)
		before := a.port(b)
		a.SetRelays(nil)
		relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(a.ID) })
		passes(t, a, b) // a client whose agent is away goes on being served
		a.Use(r.Relay)
		relaytest.WaitFor(t, "the new session", func() bool { return a.Connected(r.Key.ID()) })
		join(t, a, b)
		if a.port(b) != before {
			t.Errorf("port %s after the new session, %s before", a.port(b), before)
		}
		binds := r.udp.Stats()
		a.open() // its key is a new one, and its counter began anew
		relaytest.WaitFor(t, "the rebinding", func() bool { a.bind(b); return r.udp.Stats().Rebound > binds.Rebound })
		passes(t, a, b)
	})
}

func TestAClientsRequestsArePaced(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace")
	h := n.Host(nattest.Public)
	// refusals may still be on their way when b asks
	a, b := startEnd(t, m, h, r, func(e *udpEnd) { e.holds = true }), startEnd(t, m, h, r)
	for range 1000 {
		if err := a.Reserve(r.Key.ID(), b.ID); err != nil {
			t.Fatal(err)
		}
	}
	relaytest.WaitFor(t, "the refusal of some", func() bool { return r.udp.Stats().Denied >= 1000-256-16-100 })
	if st := r.udp.Stats(); st.Pairs != 1 {
		t.Errorf("%d pairs", st.Pairs)
	}
	join(t, b, a) // the other end is not concerned
	passes(t, a, b)
}

func TestAFloodAtAReservedPortWakesNobody(t *testing.T) {
	n, m := nattest.New(t), relaytest.NewMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	a, b, c := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r),
		startEnd(t, m, n.Host(nattest.Public), r)
	join(t, a, b)
	passes(t, a, b)
	for range 2000 {
		c.conn.WriteToUDPAddrPort(make([]byte, 1400), a.port(b))
	}
	passes(t, a, b) // what was sent before has been dropped by now
	if st := r.udp.Stats(); st.Refused != 0 {
		t.Errorf("%d datagrams of a stranger reached this process", st.Refused)
	}
}
