package ipam

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"time"
)

const (
	// softRest is how long a released address is avoided while another is free, even without a cooldown.
	softRest = 30 * time.Second
	// maxBlockSize limits the memory of a block; addresses beyond it are not used.
	maxBlockSize = 1 << 20
)

// past is a released address.
type past struct {
	lease Lease
	freed time.Time // by this run's clock
	fast  bool      // no pod ever had it, so it need not rest
}

// hard is how long no other pod may get the address.
func (p *past) hard(s poolView) time.Duration {
	switch {
	case p.fast:
		return 0
	case p.lease.Pod != "":
		return max(s.Cooldown, s.Sticky)
	}
	return s.Cooldown
}

func (p *past) soft(s poolView) time.Duration { return max(p.hard(s), softRest) }

// block is one of this node's blocks. An offset means the address of that number in each family.
type block struct {
	view    blockView
	size    uint32
	busy    []uint64 // a bit per offset: held or resting
	nbusy   uint32
	held    map[uint32]int // offset → number of leases and kernel entries that occupy it
	rests   map[uint32]*past
	sweepAt time.Time // when the next rest may end
	freed   time.Time // when an address was last given back; zero: never
	idle    time.Time // since when nothing is held
	leaving string    // request ID of the pending release, while no address may be assigned; empty: none
}

func newBlock(v blockView, now time.Time) *block {
	p := v.prefix()
	size := uint32(maxBlockSize)
	if n := p.Addr().BitLen() - p.Bits(); n < 20 {
		size = 1 << n
	}
	return &block{view: v, size: size, busy: make([]uint64, (size+63)/64), held: map[uint32]int{},
		rests: map[uint32]*past{}, idle: now}
}

func (b *block) set(off uint32) {
	if w, m := &b.busy[off/64], uint64(1)<<(off%64); *w&m == 0 {
		*w |= m
		b.nbusy++
	}
}

// clearBusy clears the bit of an offset that is neither held nor resting.
func (b *block) clearBusy(off uint32) {
	if b.held[off] > 0 || b.rests[off] != nil {
		return
	}
	if w, m := &b.busy[off/64], uint64(1)<<(off%64); *w&m != 0 {
		*w &^= m
		b.nbusy--
	}
}

func (b *block) rest(off uint32, p *past, s poolView) {
	b.rests[off] = p
	b.set(off)
	if p.freed.After(b.freed) {
		b.freed = p.freed
	}
	if end := p.freed.Add(p.soft(s)); b.sweepAt.IsZero() || end.Before(b.sweepAt) {
		b.sweepAt = end
	}
}

func (b *block) wake(off uint32) {
	delete(b.rests, off)
	b.clearBusy(off)
}

// sweep ends the rests that are over.
func (b *block) sweep(now time.Time, s poolView) {
	if b.sweepAt.IsZero() || now.Before(b.sweepAt) {
		return
	}
	b.sweepAt = time.Time{}
	for off, p := range b.rests {
		end := p.freed.Add(p.soft(s))
		if !now.Before(end) {
			b.wake(off)
		} else if b.sweepAt.IsZero() || end.Before(b.sweepAt) {
			b.sweepAt = end
		}
	}
}

// next is the first free offset after the last one used.
func (b *block) next(cursor uint32, used bool) (uint32, bool) {
	if b.nbusy >= b.size {
		return 0, false
	}
	start := uint32(0)
	if used {
		start = (cursor + 1) % b.size
	}
	if off, ok := b.zero(start, b.size); ok {
		return off, true
	}
	return b.zero(0, start)
}

// zero is the first free offset in [from, to).
func (b *block) zero(from, to uint32) (uint32, bool) {
	for w := from / 64; w*64 < to; w++ {
		free := ^b.busy[w]
		if w == from/64 {
			free &= ^uint64(0) << (from % 64)
		}
		if free == 0 {
			continue
		}
		off := w*64 + uint32(bits.TrailingZeros64(free))
		return off, off < to
	}
	return 0, false
}

// available is how many addresses could be assigned now, including those that should rest (soft) if possible.
func (b *block) available(now time.Time, s poolView) int {
	n := int(b.size) - len(b.held)
	for off, p := range b.rests {
		if b.held[off] == 0 && now.Before(p.freed.Add(p.hard(s))) {
			n--
		}
	}
	return n
}

// addrs are the addresses at an offset, one per family.
func (b *block) addrs(off uint32) (v4, v6 netip.Addr) {
	if b.view.IPv4.IsValid() {
		v4 = plus(b.view.IPv4.Addr(), off)
	}
	if b.view.IPv6.IsValid() {
		v6 = plus(b.view.IPv6.Addr(), off)
	}
	return v4, v6
}

// plus adds n to the low 32 bits of an address; within a block they never overflow.
func plus(a netip.Addr, n uint32) netip.Addr {
	if a.Is4() {
		b := a.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+n)
		return netip.AddrFrom4(b)
	}
	b := a.As16()
	binary.BigEndian.PutUint32(b[12:], binary.BigEndian.Uint32(b[12:])+n)
	return netip.AddrFrom16(b)
}

// minus is the distance from b to a, which have the same family, in the low 32 bits.
func minus(a, b netip.Addr) uint32 {
	x, y := a.As16(), b.As16()
	return binary.BigEndian.Uint32(x[12:]) - binary.BigEndian.Uint32(y[12:])
}
