package consensus

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"

	"github.com/skeinmesh/skein/events"
)

// What pools promise, said once more for Porcupine and by other means than package events: a block has one owner at a
// time; `total` is a lower bound; what was never given goes first, by number, and then what is free for the longest; a
// static address has one holder; grants never sum up to more than the quota. Pools, addresses and quotas are objects of
// their own, each with a history; what happens to several at once stands in the history of each.

const modelBlocks = 16 // of a pool at most

// blocks is a set of numbers.
type blocks uint32

func (b blocks) has(n int) bool    { return b&(1<<n) != 0 }
func (b blocks) with(n int) blocks { return b | 1<<n }
func (b blocks) count() int        { return bits.OnesCount32(uint32(b)) }
func (b blocks) numbers() (n []int) { // in order
	for i := range modelBlocks {
		if b.has(i) {
			n = append(n, i)
		}
	}
	return n
}

type deed string

const (
	allocate deed = "allocate"
	release  deed = "release"
	reserve  deed = "reserve"
	drain    deed = "drain"
	resume   deed = "resume"
	extend   deed = "extend"
	revoke   deed = "revoke"
	claim    deed = "claim"
	giveUp   deed = "give up"
	grant    deed = "grant"
	look     deed = "look" // at the state of the answer's index
)

// ask is what a client asked for. Nodes are numbered from 1; 0 is none.
type ask struct {
	do     deed
	node   int
	amount int    // blocks in all, or addresses
	blocks blocks // to release or to reserve
	at     int64  // the leader's clock when it decided, as its events say; 0: it never did
}

// got is what the client learned.
type got struct {
	unknown bool        // whether it was done at all
	refused events.Code // "": it was done
	blocks  blocks      // that it was given
	seen    any         // by a look: a poolState, holder or grants
}

// poolSpec is what never changes about a pool.
type poolSpec struct {
	name     string
	size     int // blocks before and
	extended int // after it was extended
	cooldown int64
	most     int // blocks of one node; 0: no limit
}

// Owners of a block that are no node.
const (
	never    = int8(0) // nobody ever had it
	freed    = int8(-1)
	reserved = int8(-2)
)

type poolState struct {
	size     int
	draining bool
	gone     uint32 // nodes that were revoked
	owner    [modelBlocks]int8
	queue    [modelBlocks]int8 // freed blocks, the longest free first
	queued   int
	since    [modelBlocks]int64 // when it was freed
}

func (s *poolState) of(node int) (b blocks) {
	for n := range s.size {
		if node > 0 && s.owner[n] == int8(node) {
			b = b.with(n)
		}
	}
	return b
}

func (s *poolState) free(n int, at int64) {
	s.owner[n], s.since[n] = freed, at // since counts in pools with a cooldown alone
	s.queue[s.queued] = int8(n)
	s.queued++
}

func (s *poolState) take(n int, owner int8) {
	if i := slices.Index(s.queue[:s.queued], int8(n)); i >= 0 {
		copy(s.queue[i:], s.queue[i+1:s.queued])
		s.queued--
		s.queue[s.queued] = 0
	}
	s.owner[n], s.since[n] = owner, 0
}

func (p poolSpec) rests(s *poolState, n int, at int64) bool {
	return p.cooldown > 0 && at-s.since[n] < p.cooldown
}

// next is the block to give, if there is one.
func (p poolSpec) next(s *poolState, at int64) (int, bool) {
	for n := range s.size {
		if s.owner[n] == never {
			return n, true
		}
	}
	for _, n := range s.queue[:s.queued] {
		if !p.rests(s, int(n), at) {
			return int(n), true
		}
	}
	return 0, false
}

// after is the state after a deed and what the client must have been told.
func (p poolSpec) after(s poolState, a ask) (poolState, got) {
	before := s
	refuse := func(code events.Code) (poolState, got) { return before, got{refused: code} }
	if a.node > 0 && s.gone>>a.node&1 == 1 && a.do != release { // what it had is free or another's
		return refuse(events.FailedPrecondition)
	}
	switch a.do {
	case allocate:
		return p.give(s, a)
	case release:
		for _, n := range a.blocks.numbers() {
			mine := s.owner[n] == int8(a.node)
			if a.node == 0 {
				mine = s.owner[n] == reserved
			}
			switch {
			case n >= s.size:
				return refuse(events.NotFound)
			case s.owner[n] == never || s.owner[n] == freed:
			case !mine:
				return refuse(events.FailedPrecondition)
			default:
				s.free(n, a.at)
			}
		}
	case reserve:
		n := a.blocks.numbers()[0]
		switch {
		case n >= s.size:
			return refuse(events.NotFound)
		case s.owner[n] > 0:
			return refuse(events.FailedPrecondition)
		case s.owner[n] == reserved:
			return s, got{blocks: a.blocks}
		case s.draining, s.owner[n] == freed && p.rests(&s, n, a.at):
			return refuse(events.FailedPrecondition)
		}
		s.take(n, reserved)
		return s, got{blocks: a.blocks}
	case drain:
		s.draining = true
	case resume:
		s.draining = false
	case extend:
		s.size = p.extended
	case revoke:
		for _, n := range s.of(a.node).numbers() {
			s.free(n, a.at)
		}
		s.gone |= 1 << a.node
	}
	return s, got{}
}

func (p poolSpec) give(s poolState, a ask) (poolState, got) {
	before, g := s, got{}
	have, want := s.of(a.node).count(), a.amount
	if have >= want {
		return s, g
	}
	if s.draining {
		return before, got{refused: events.FailedPrecondition}
	}
	if p.most > 0 {
		want = min(want, p.most)
	}
	for range min(want-have, 16) {
		n, ok := p.next(&s, a.at)
		if !ok {
			break
		}
		s.take(n, int8(a.node))
		g.blocks = g.blocks.with(n)
	}
	if g.blocks == 0 {
		return before, got{refused: events.ResourceExhausted}
	}
	return s, g
}

func (p poolSpec) model() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return poolState{size: p.size} },
		Step: func(state, input, output any) (bool, any) {
			s, a, g := state.(poolState), input.(ask), output.(got)
			if a.do == look {
				return s.looksLike(g.seen.(poolState)), s
			}
			if p.cooldown > 0 && a.at == 0 { // it changed nothing, and what rested then is not known
				a.at = math.MaxInt64
				_, want := p.after(s, a)
				return g.unknown || want.refused == g.refused || want.refused == "" && s.mayRest(a, g.refused), s
			}
			if p.cooldown == 0 {
				a.at = 0
			}
			return agrees(s, a, g, p.after)
		},
		DescribeOperation: describe,
		DescribeState:     func(s any) string { return s.(poolState).String() },
	}
}

// agrees compares what the client was told with what it must have been told.
func agrees[S any](s S, a ask, g got, after func(S, ask) (S, got)) (bool, any) {
	next, want := after(s, a)
	if g.unknown {
		return true, next
	}
	return g.refused == want.refused && g.blocks == want.blocks, next
}

// mayRest reports whether a refusal is what one gets while what one wants rests.
func (s *poolState) mayRest(a ask, refused events.Code) bool {
	switch a.do {
	case allocate:
		return refused == events.ResourceExhausted && !slices.Contains(s.owner[:s.size], never)
	case reserve:
		return refused == events.FailedPrecondition && s.owner[a.blocks.numbers()[0]] == freed
	}
	return false
}

// looksLike compares what can be seen: who has which block.
func (s *poolState) looksLike(o poolState) bool {
	return s.owner == o.owner && s.size == o.size && s.draining == o.draining && slices.Equal(s.queue[:s.queued],
		o.queue[:o.queued])
}

func (s poolState) String() string {
	var out []string
	for n := range s.size {
		switch o := s.owner[n]; o {
		case never:
			out = append(out, "·")
		case freed:
			out = append(out, "free")
		case reserved:
			out = append(out, "kept")
		default:
			out = append(out, fmt.Sprint("n", o))
		}
	}
	text := strings.Join(out, " ") + fmt.Sprint(" next freed ", s.queue[:s.queued])
	if s.draining {
		text += " draining"
	}
	return text
}

// holder is who holds a static address.
type holder struct {
	node int
	gone uint32
}

func afterClaim(s holder, a ask) (holder, got) {
	if a.node > 0 && s.gone>>a.node&1 == 1 {
		return s, got{refused: events.FailedPrecondition}
	}
	switch {
	case a.do == revoke:
		if s.node == a.node {
			s.node = 0
		}
		s.gone |= 1 << a.node
	case a.do == giveUp && s.node == a.node:
		s.node = 0
	case a.do == claim && s.node != 0 && s.node != a.node:
		return s, got{refused: events.FailedPrecondition}
	case a.do == claim:
		s.node = a.node
	}
	return s, got{}
}

func claimModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return holder{} },
		Step: func(state, input, output any) (bool, any) {
			s, a, g := state.(holder), input.(ask), output.(got)
			if a.do == look {
				return s.node == g.seen.(holder).node, s
			}
			return agrees(s, a, g, afterClaim)
		},
		DescribeOperation: describe,
		DescribeState:     func(s any) string { return fmt.Sprintf("held by n%d", s.(holder).node) },
	}
}

const modelNodes = 8

// grants are what the nodes may use of one namespace's quota.
type grants struct {
	of   [modelNodes]int
	gone uint32
}

func afterGrant(quota int) func(grants, ask) (grants, got) {
	return func(s grants, a ask) (grants, got) {
		if s.gone>>a.node&1 == 1 && a.amount > 0 {
			return s, got{refused: events.FailedPrecondition}
		}
		if a.do == revoke {
			s.of[a.node] = 0
			s.gone |= 1 << a.node
			return s, got{}
		}
		next, sum := s, 0
		next.of[a.node] = a.amount
		for _, n := range next.of {
			sum += n
		}
		if sum > quota && a.amount > s.of[a.node] {
			return s, got{refused: events.ResourceExhausted}
		}
		return next, got{}
	}
}

func grantModel(quota int) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return grants{} },
		Step: func(state, input, output any) (bool, any) {
			s, a, g := state.(grants), input.(ask), output.(got)
			if a.do == look {
				return s.of == g.seen.(grants).of, s
			}
			return agrees(s, a, g, afterGrant(quota))
		},
		DescribeOperation: describe,
		DescribeState:     func(s any) string { return fmt.Sprint(s.(grants).of) },
	}
}

func describe(input, output any) string {
	a, g := input.(ask), output.(got)
	text := string(a.do)
	if a.node > 0 {
		text += fmt.Sprint(" n", a.node)
	}
	if a.amount > 0 || a.do == grant {
		text += fmt.Sprint(" ", a.amount)
	}
	if a.blocks != 0 {
		text += fmt.Sprint(" ", a.blocks.numbers())
	}
	switch {
	case g.unknown:
		return text + " → ?"
	case g.refused != "":
		return text + " → " + string(g.refused)
	case g.seen != nil:
		return text + fmt.Sprint(" → ", g.seen)
	case a.do == allocate:
		return text + fmt.Sprint(" → ", g.blocks.numbers())
	}
	return text + " → done"
}
