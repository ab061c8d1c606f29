package consensus

import (
	"fmt"
	"math/big"
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// ledger follows a log by itself, event by event, and tells what nobody may ever see in one: an address with two
// owners, a block given out of turn or while it rests, a quota that is exceeded, something left to a revoked node.
// It shares no code with events.State.
type ledger struct {
	pools    map[string]*account
	members  map[string]bool
	leaving  map[string]bool // revoked by the command whose events are being read
	answered map[string]uint64
	faults   []string
	at       *skeinv1.Event
	time     int64 // of the event before
}

type account struct {
	pool   *skeinv1.Pool
	size   uint64
	owner  map[uint64]string // of what is owned or reserved; "" is nobody
	freed  []uint64          // the longest free first
	since  map[uint64]int64
	given  map[uint64]bool
	static map[string]string // address → holder
	grants map[string]map[string]uint32
}

func newLedger() *ledger {
	return &ledger{pools: map[string]*account{}, members: map[string]bool{}, leaving: map[string]bool{},
		answered: map[string]uint64{}}
}

func (l *ledger) fault(format string, args ...any) {
	l.faults = append(l.faults, fmt.Sprintf("event %d (request %s): ", l.at.GetIndex(), l.at.GetRequestId())+
		fmt.Sprintf(format, args...))
}

func (l *ledger) read(e *skeinv1.Event) {
	l.at = e
	if e.GetTime() < l.time {
		l.fault("the log's time goes back by %d ns", l.time-e.GetTime())
	}
	l.time = e.GetTime()
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_NodeAdmitted:
		l.members[b.NodeAdmitted.GetNode().GetId()] = true
	case *skeinv1.Event_NodeRevoked:
		delete(l.members, b.NodeRevoked.GetNodeId())
		l.leaving[b.NodeRevoked.GetNodeId()] = true
	case *skeinv1.Event_PoolCreated:
		l.open(b.PoolCreated.GetPool())
	case *skeinv1.Event_PoolChanged:
		l.change(b.PoolChanged.GetPool())
	case *skeinv1.Event_BlockAllocated:
		l.give(b.BlockAllocated.GetBlock())
	case *skeinv1.Event_BlockReserved:
		l.give(b.BlockReserved.GetBlock())
	case *skeinv1.Event_BlockReleased:
		l.giveBack(b.BlockReleased)
	case *skeinv1.Event_AddressReserved:
		a := l.pools[b.AddressReserved.GetAddress().GetPool()]
		a.static[b.AddressReserved.GetAddress().GetIpv4()] = ""
	case *skeinv1.Event_AddressClaimed:
		l.claim(b.AddressClaimed)
	case *skeinv1.Event_GrantSet:
		l.grant(b.GrantSet.GetGrant())
	case *skeinv1.Event_CommandAnswered:
		l.answer(b.CommandAnswered.GetAnswer())
	}
}

// answer is a command's last event.
func (l *ledger) answer(a *skeinv1.Answer) {
	if first, twice := l.answered[a.GetRequestId()]; twice {
		l.fault("the request was answered before, at %d", first)
	}
	l.answered[a.GetRequestId()] = l.at.GetIndex()
	for id := range l.leaving {
		for _, p := range l.pools {
			for n, owner := range p.owner {
				if owner == id {
					l.fault("block %d of %s stays with the revoked node %s", n, p.pool.GetName(), id)
				}
			}
			for a, by := range p.static {
				if by == id {
					l.fault("address %s stays with the revoked node %s", a, id)
				}
			}
			for ns, g := range p.grants {
				if g[id] > 0 {
					l.fault("%d addresses of %s stay granted to the revoked node %s", g[id], ns, id)
				}
			}
		}
	}
	clear(l.leaving)
}

func (l *ledger) open(p *skeinv1.Pool) {
	l.pools[p.GetName()] = &account{owner: map[uint64]string{}, since: map[uint64]int64{}, given: map[uint64]bool{},
		static: map[string]string{}, grants: map[string]map[string]uint32{}}
	l.change(p)
}

func (l *ledger) change(p *skeinv1.Pool) {
	a := l.pools[p.GetName()]
	a.pool, a.size = p, uint64(poolSize(p))
	var all []netip.Prefix
	for _, o := range l.pools {
		for _, s := range o.pool.GetSubnets() {
			for _, text := range []string{s.GetIpv4(), s.GetIpv6()} {
				if text == "" {
					continue
				}
				prefix := netip.MustParsePrefix(text)
				if i := slices.IndexFunc(all, prefix.Overlaps); i >= 0 {
					l.fault("the subnets %s and %s overlap", all[i], prefix)
				}
				all = append(all, prefix)
			}
		}
	}
}

func (l *ledger) give(b *skeinv1.Block) {
	p := l.pools[b.GetPool()]
	name := fmt.Sprintf("block %d of %s", b.GetNumber(), b.GetPool())
	n := b.GetNumber()
	owner, taken := p.owner[n]
	reserving := b.GetNodeId() == ""
	switch {
	case n >= p.size:
		l.fault("%s does not exist", name)
	case taken && (owner != "" || reserving):
		l.fault("%s goes to %q and belongs to %q", name, b.GetNodeId(), owner)
	case !reserving && !l.members[b.GetNodeId()]:
		l.fault("%s goes to %s, which is not a member", name, b.GetNodeId())
	case !reserving && p.pool.GetDraining():
		l.fault("%s is given while the pool drains", name)
	}
	if v4, v6 := blockPrefixes(p.pool, n); v4 != b.GetIpv4() || v6 != b.GetIpv6() {
		l.fault("%s is given as %s %s and is %s %s", name, b.GetIpv4(), b.GetIpv6(), v4, v6)
	}
	if !reserving && !taken {
		l.checkTurn(p, n, name)
	}
	if rest := l.at.GetTime() - p.since[n]; !reserving && p.given[n] && !taken &&
		rest < int64(p.pool.GetCooldownSeconds())*1e9 {
		l.fault("%s rested %d ns, and %d s is its cooldown", name, rest, p.pool.GetCooldownSeconds())
	}
	p.owner[n], p.given[n] = b.GetNodeId(), true
	p.freed = slices.DeleteFunc(p.freed, func(f uint64) bool { return f == n })
	have := 0
	for _, o := range p.owner {
		if o != "" && o == b.GetNodeId() {
			have++
		}
	}
	if most := p.pool.GetMaxBlocksPerNode(); most > 0 && have > int(most) {
		l.fault("%s is the %dth of its node, and %d are allowed", name, have, most)
	}
}

// checkTurn: what was never given goes first, by number; then what is free for the longest.
func (l *ledger) checkTurn(p *account, n uint64, name string) {
	for first := range p.size {
		if !p.given[first] {
			if first != n {
				l.fault("%s is given while %d never was", name, first)
			}
			return
		}
	}
	if len(p.freed) > 0 && p.freed[0] != n {
		l.fault("%s is given while %d is free for longer", name, p.freed[0])
	}
}

func (l *ledger) giveBack(b *skeinv1.BlockReleased) {
	p := l.pools[b.GetPool()]
	owner, taken := p.owner[b.GetNumber()]
	if !taken || owner != b.GetNodeId() {
		l.fault("block %d of %s is released by %q and belongs to %q (%t)", b.GetNumber(), b.GetPool(),
			b.GetNodeId(), owner, taken)
	}
	delete(p.owner, b.GetNumber())
	p.freed = append(p.freed, b.GetNumber())
	p.since[b.GetNumber()] = l.at.GetTime()
}

func (l *ledger) claim(c *skeinv1.AddressClaimed) {
	p := l.pools[c.GetPool()]
	switch by, kept := p.static[c.GetAddress()]; {
	case !kept:
		l.fault("%s is claimed and is not reserved", c.GetAddress())
	case by != "" && c.GetNodeId() != "":
		l.fault("%s goes to %s while %s holds it", c.GetAddress(), c.GetNodeId(), by)
	}
	p.static[c.GetAddress()] = c.GetNodeId()
}

func (l *ledger) grant(g *skeinv1.Grant) {
	p := l.pools[g.GetPool()]
	if p.grants[g.GetNamespace()] == nil {
		p.grants[g.GetNamespace()] = map[string]uint32{}
	}
	p.grants[g.GetNamespace()][g.GetNodeId()] = g.GetAddresses()
	sum := uint32(0)
	for _, n := range p.grants[g.GetNamespace()] {
		sum += n
	}
	if quota := p.pool.GetQuotas()[g.GetNamespace()]; sum > quota {
		l.fault("%d addresses of %s are granted, and %d is the quota", sum, g.GetNamespace(), quota)
	}
}

// compare tells where a state says otherwise than the ledger.
func (l *ledger) compare(s *events.State) (differences []string) {
	note := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	owned := map[string]string{}
	for _, b := range s.Blocks() {
		owned[fmt.Sprint(b.GetPool(), b.GetNumber())] = b.GetNodeId()
		if owner, ok := l.pools[b.GetPool()].owner[b.GetNumber()]; !ok || owner != b.GetNodeId() {
			note("block %d of %s belongs to %q, by its events to %q (%t)", b.GetNumber(), b.GetPool(), b.GetNodeId(), owner, ok)
		}
	}
	for name, p := range l.pools {
		for n, owner := range p.owner {
			if _, ok := owned[fmt.Sprint(name, n)]; !ok {
				note("block %d of %s belongs to nobody, by its events to %q", n, name, owner)
			}
		}
		var queue []uint64
		for _, f := range s.Freed(name) {
			queue = append(queue, f.GetNumber())
		}
		if !slices.Equal(queue, p.freed) {
			note("freed blocks of %s are %v, by their events %v", name, queue, p.freed)
		}
	}
	for _, v := range s.Statics() {
		if by := l.pools[v.GetPool()].static[v.GetIpv4()]; by != v.GetNodeId() {
			note("address %s is held by %q, by its events by %q", v.GetIpv4(), v.GetNodeId(), by)
		}
	}
	return differences
}

// poolSize is how many blocks a pool has.
func poolSize(p *skeinv1.Pool) (n int) {
	for _, s := range p.GetSubnets() {
		n += subnetSize(p, s)
	}
	return n
}

func subnetSize(p *skeinv1.Pool, s *skeinv1.PoolSubnet) int {
	text := s.GetIpv4()
	if text == "" {
		text = s.GetIpv6()
	}
	prefix := netip.MustParsePrefix(text)
	return 1 << (prefix.Addr().BitLen() - prefix.Bits() - int(p.GetBlockSizeBits()))
}

// blockPrefixes are what a block's number stands for.
func blockPrefixes(p *skeinv1.Pool, number uint64) (v4, v6 string) {
	for _, s := range p.GetSubnets() {
		if size := uint64(subnetSize(p, s)); number >= size {
			number -= size
			continue
		}
		return nth(s.GetIpv4(), number, p.GetBlockSizeBits()), nth(s.GetIpv6(), number, p.GetBlockSizeBits())
	}
	return "", ""
}

func nth(subnet string, number uint64, bits uint32) string {
	if subnet == "" {
		return ""
	}
	base := netip.MustParsePrefix(subnet).Addr()
	sum := new(big.Int).SetBytes(base.AsSlice())
	sum.Add(sum, new(big.Int).Lsh(new(big.Int).SetUint64(number), uint(bits)))
	a, _ := netip.AddrFromSlice(sum.FillBytes(make([]byte, base.BitLen()/8)))
	return netip.PrefixFrom(a, base.BitLen()-int(bits)).String()
}
