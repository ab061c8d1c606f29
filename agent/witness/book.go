package witness

import (
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// hold is how long a leader is said to be silent after it was found so last; twice as long each time that it is found
	// so again, until it has not been for forgetAfter.
	hold        = 30 * time.Second
	holdMost    = 10 * time.Minute
	forgetAfter = 10 * time.Minute
	// aloneFor is how long nothing comes back before a leader is said to be silent that no other one can be compared with.
	// Whoever is dead is known to be dead by then.
	aloneFor = 15 * time.Second
	// firstFor is how long one is not judged by kinds of which it never has had an echo answered: it may be about to meet
	// the other sites' leaders.
	firstFor = 15 * time.Second
)

// Outcome is what a witness made out of one echo and its tries.
type Outcome int

// Outcomes. Nothing follows from Unknown.
const (
	Unknown  Outcome = iota
	Answered         // the leader passes on what it should
	Silent           // it answers itself and passes nothing on, and another leader does
	Alone            // it answers itself and passes nothing on, and there is no other leader to compare with
)

// Said is what a witness says of a leader.
type Said struct {
	Leader identity.ID
	Kinds  uint32 // as in SilentLeader
	Since  time.Time
}

// Book remembers what came of echoes, and what is to be said for it. The zero value is empty. It is not safe for
// concurrent use.
type Book struct{ leaders map[identity.ID]*entry }

type entry struct {
	watched  bool
	began    time.Time // to be watched, at first
	answered [Kinds]time.Time
	kinds    uint32 // that are said to be lost
	since    time.Time
	until    time.Time // of what is said; in the past: nothing is
	hold     time.Duration
}

// Watch names the leaders that are watched now.
func (b *Book) Watch(leaders []identity.ID, now time.Time) {
	if b.leaders == nil {
		b.leaders = map[identity.ID]*entry{}
	}
	for id, e := range b.leaders {
		e.watched = slices.Contains(leaders, id)
		if !e.watched && now.Sub(e.until) >= forgetAfter && now.Sub(e.began) >= forgetAfter {
			delete(b.leaders, id)
		}
	}
	for _, id := range leaders {
		if b.leaders[id] == nil {
			b.leaders[id] = &entry{began: now}
		}
		b.leaders[id].watched = true
	}
}

// Note takes what came of an echo by a leader. It reports whether something else is to be said now.
func (b *Book) Note(leader identity.ID, kind Kind, o Outcome, now time.Time) (news bool) {
	e := b.leaders[leader]
	if e == nil || !e.watched {
		return false
	}
	last := e.answered[kind]
	switch {
	case o == Answered:
		e.answered[kind] = now
		return false
	case o == Silent && (!last.IsZero() || now.Sub(e.began) >= firstFor):
	case o == Alone && !last.IsZero() && now.Sub(last) >= aloneFor:
	default:
		return false
	}
	bit := uint32(1) << kind
	if !now.Before(e.until) { // it was not said to be silent
		switch {
		case e.until.IsZero() || now.Sub(e.until) >= forgetAfter:
			e.hold = hold
		default:
			e.hold = min(2*e.hold, holdMost)
		}
		e.since, e.kinds = now, 0
	}
	news = e.kinds&bit == 0
	e.kinds |= bit
	e.until = now.Add(e.hold)
	return news
}

// Said is what is to be said now, by leader.
func (b *Book) Said(now time.Time) (out []Said) {
	for id, e := range b.leaders {
		if now.Before(e.until) {
			out = append(out, Said{Leader: id, Kinds: e.kinds, Since: e.since})
		}
	}
	slices.SortFunc(out, func(x, y Said) int { return x.Leader.Compare(y.Leader) })
	return out
}

// Ends is when the next of what is said ends; zero: nothing is said.
func (b *Book) Ends(now time.Time) (first time.Time) {
	for _, e := range b.leaders {
		if now.Before(e.until) && (first.IsZero() || e.until.Before(first)) {
			first = e.until
		}
	}
	return first
}
