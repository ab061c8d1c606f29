package sites

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
	"sync"

	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// maxSlots is how many leaders can share a site: the most that may be elected, and as many former ones.
const maxSlots = 32

// share maps each slice of a site to the slot that carries it.
type share [events.Slices]uint8

// full returns the shares of the first n slots, by n. A new slot takes about equally much from every slot before it, so
// only the slices that it takes move. It takes the highest slices of each, so that a slot's slices form few runs.
var full = sync.OnceValue(func() *[maxSlots + 1]share {
	var out [maxSlots + 1]share
	for n := 2; n <= maxSlots; n++ {
		out[n] = out[n-1]
		var has [maxSlots]int
		for _, s := range out[n] {
			has[s]++
		}
		for range events.Slices / n {
			most := slices.Index(has[:n-1], slices.Max(has[:n-1]))
			i := events.Slices - 1
			for out[n][i] != uint8(most) {
				i--
			}
			out[n][i] = uint8(n - 1)
			has[most]--
		}
	}
	return &out
})

// shareSeed was found by trial. With it, no more than 1/n of a site and 5 % move when one of up to sixteen leaders is
// lost or returns while another one is missing. All nodes must compute the same shares at all times, so it never
// changes.
const shareSeed = 406_000

// claim ranks giving a slice of a missing slot to another slot.
type claim struct {
	before int // how many other slots carried the slice more recently, as slots were added; maxSlots: this one never did
	weight uint64
	slice  int
	slot   uint8
}

// shareOf returns who carries which slice when only some slots are taken, at least one. The slices of missing slots are
// divided about equally among the others: each goes to a slot that carried it when there were fewer slots, otherwise by
// rendezvous hashing. So one slot more or less moves little else.
func shareOf(taken uint32) share {
	n := bits.Len32(taken)
	out := full()[n]
	if taken == 1<<n-1 {
		return out
	}
	var room [maxSlots]int // slices that a slot may still get
	for _, s := range out {
		room[s]--
	}
	var there []uint8 // slots with the most slices first: these get the remainder
	for s := range uint8(n) {
		if taken&(1<<s) != 0 {
			there = append(there, s)
		}
	}
	slices.SortStableFunc(there, func(a, b uint8) int { return cmp.Compare(room[a], room[b]) })
	for i, s := range there {
		room[s] += events.Slices/len(there) + 1 // one to spare
		if i < events.Slices%len(there) {
			room[s]++
		}
	}
	var claims []claim
	for i, owner := range out {
		if taken&(1<<owner) != 0 {
			continue
		}
		var had []uint8
		for k := n - 1; k > 0; k-- {
			if s := full()[k][i]; taken&(1<<s) != 0 && !slices.Contains(had, s) {
				had = append(had, s)
			}
		}
		for _, s := range there {
			before := slices.Index(had, s)
			if before < 0 {
				before = maxSlots
			}
			claims = append(claims, claim{before, mix(mix(uint64(s)+shareSeed) ^ uint64(i)), i, s})
		}
	}
	slices.SortFunc(claims, func(a, b claim) int {
		return cmp.Or(a.before-b.before, cmp.Compare(b.weight, a.weight), a.slice-b.slice, cmp.Compare(a.slot, b.slot))
	})
	for _, c := range claims {
		if missing := taken&(1<<out[c.slice]) == 0; missing && room[c.slot] > 0 {
			out[c.slice] = c.slot
			room[c.slot]--
		}
	}
	return out
}

// TakeSlots gives each leader of a site a slot. A leader keeps the slot that its record names; if two name the same,
// the better one keeps it. The others get the lowest free slots, acting leaders first. So all hosts with the same
// records agree, both before and after the leaders have published their slots.
func TakeSlots(leaders []Leader, perSite int, says func(identity.ID) uint32) {
	limit := uint32(min(max(perSite, len(leaders)), maxSlots))
	taken := uint32(0)
	for i := range leaders {
		leaders[i].Slot = 0
		if s := says(leaders[i].ID); leaders[i].Term > 0 && s > 0 && s <= limit && taken&(1<<(s-1)) == 0 {
			taken |= 1 << (s - 1)
			leaders[i].Slot = s
		}
	}
	for _, acting := range []bool{true, false} {
		for i := range leaders {
			l, free := &leaders[i], bits.TrailingZeros32(^taken)
			if l.Slot == 0 && l.Acting == acting && free < maxSlots {
				taken |= 1 << free
				l.Slot = uint32(free) + 1
			}
		}
	}
}

// sharer caches shares, which are the same for all sites that have the same slots taken. It is safe for concurrent use.
type sharer struct {
	mu     sync.Mutex
	found  map[uint32]*share
	sorted map[[3]uint32]*share // by tiers; see kinds
}

func (sh *sharer) of(taken uint32) *share {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	s := sh.found[taken]
	if s == nil {
		v := shareOf(taken)
		if s = &v; sh.found == nil {
			sh.found = map[uint32]*share{}
		}
		sh.found[taken] = s
	}
	return s
}

// kinds numbers the slices by the order in which they use the leaders, for sites with the same tiers.
func (sh *sharer) kinds(tiers [3]uint32) *share {
	sh.mu.Lock()
	k := sh.sorted[tiers]
	sh.mu.Unlock()
	if k != nil {
		return k
	}
	k = &share{}
	known := map[string]uint8{}
	for slice := range k {
		var order []byte
		for _, left := range tiers {
			for left != 0 {
				slot := sh.of(left)[slice]
				order = append(order, slot)
				left &^= 1 << slot
			}
		}
		kind, ok := known[string(order)]
		if !ok {
			kind = uint8(len(known))
			known[string(order)] = kind
		}
		k[slice] = kind
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.sorted == nil {
		sh.sorted = map[[3]uint32]*share{}
	}
	sh.sorted[tiers] = k
	return k
}

// sliced holds the leaders of a site that share its slices.
type sliced struct {
	shares *sharer
	bySlot [maxSlots]identity.ID
	tiers  [3]uint32     // bits for the slots of acting leaders, of reserves, and of leaders that are only elected
	rest   []identity.ID // leaders beyond maxSlots; the settings allow no such number
}

func newSliced(leaders []Leader, shares *sharer) *sliced {
	s := &sliced{shares: shares}
	for _, l := range leaders {
		if l.Slot == 0 {
			s.rest = append(s.rest, l.ID)
			continue
		}
		tier := 2
		switch {
		case l.Acting && !l.Reserve:
			tier = 0
		case l.Acting:
			tier = 1
		}
		s.bySlot[l.Slot-1] = l.ID
		s.tiers[tier] |= 1 << (l.Slot - 1)
	}
	return s
}

// order yields the leaders in the order in which the nodes in a slice use them: acting leaders, then reserves, then
// those that are only elected. Of equals the one that carries the slice comes first, and each next one would carry it
// without those before.
func (s *sliced) order(slice uint8) iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for _, left := range s.tiers {
			for left != 0 {
				slot := s.shares.of(left)[slice]
				if !yield(s.bySlot[slot]) {
					return
				}
				left &^= 1 << slot
			}
		}
		for _, id := range s.rest {
			if !yield(id) {
				return
			}
		}
	}
}

// kind returns the same number for slices that use the leaders in the same order.
func (s *sliced) kind(slice uint8) uint8 { return s.shares.kinds(s.tiers)[slice] }

// Carriers returns for each slice of a site the leader that the nodes in it use first.
func Carriers(leaders []Leader) (out [events.Slices]identity.ID) {
	s := newSliced(leaders, &sharer{})
	for i := range out {
		for out[i] = range s.order(uint8(i)) {
			break
		}
	}
	return out
}
