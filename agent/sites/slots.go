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

// maxSlots is how many leaders can share a site: as many as lead at most, and as many again that led before them.
const maxSlots = 32

// share tells which slot carries each slice of a site.
type share [events.Slices]uint8

// full are the shares of the first n slots, by n. Each slot takes as much from every one before it, so with one more
// only those slices move that it takes; and it takes the highest ones of each, so that slices of a slot are few runs.
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

// shareSeed is one of those with which no more than 1/n of a site and 5 % move when one of up to sixteen leaders is
// lost or comes back while another one is missing: it was found by trying. Every node must come to the same shares at
// all times, so it never changes.
const shareSeed = 406_000

// claim is what speaks for giving a slice that a missing slot would carry to another one.
type claim struct {
	before int // how many of the others carried it later than this one, as slots came to be; maxSlots: it never did
	weight uint64
	slice  int
	slot   uint8
}

// shareOf is who carries what when some slots are taken, of which there is one at least. What belongs to a slot that
// nobody has goes to the others in about equal parts: to one that carried it before there were as many slots, else by
// rendezvous hashing. So with one less, or more, little else moves.
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
	var there []uint8 // those with most slices first: they have the remainder
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

// TakeSlots gives each leader of a site a slot. Who says which one it has keeps it, the best first where two say the
// same; the others get the lowest that are free, those that act first. So all that have the same records come to the
// same, before leaders have said what they got and after.
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

// sharer remembers the shares that it has found, which are the same for all sites that have the same slots taken. It
// is safe for concurrent use.
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

// kinds are the same number for slices that use the leaders in the same order, for sites with the same tiers.
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

// sliced are the leaders of a site that shares its slices among them.
type sliced struct {
	shares *sharer
	bySlot [maxSlots]identity.ID
	tiers  [3]uint32     // slots of those that act, of reserves, and of those that are only elected
	rest   []identity.ID // more leaders than there are slots: the settings have no such number
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

// order is in which order the nodes in a slice use the leaders. Acting leaders come before those that are only
// elected, reserves after those; among equals the one comes first that has the slice, and each next one is who has it
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

// kind is the same for slices that use the leaders in the same order.
func (s *sliced) kind(slice uint8) uint8 { return s.shares.kinds(s.tiers)[slice] }

// Carriers are who comes first for the nodes in each slice of a site.
func Carriers(leaders []Leader) (out [events.Slices]identity.ID) {
	s := newSliced(leaders, &sharer{})
	for i := range out {
		for out[i] = range s.order(uint8(i)) {
			break
		}
	}
	return out
}
