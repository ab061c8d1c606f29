package witness

import (
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// hold is how long a leader is reported silent after the last echo that found it so. Each new report lasts twice as
	// long, up to holdMost, unless the leader was not reported for forgetAfter.
	hold        = 30 * time.Second
	holdMost    = 10 * time.Minute
	forgetAfter = 10 * time.Minute
	// aloneFor is how long no echo has been answered before a leader is reported that cannot be compared with another
	// one. A leader that is dead is known to be dead by then.
	aloneFor = 15 * time.Second
	// firstFor is how long a leader is not judged by a kind of echo that has never been answered: it may still be setting
	// up its sessions with the other sites' leaders.
	firstFor = 15 * time.Second
)

// Outcome is what a witness concludes from one echo and its tries.
type Outcome int

// Outcomes. Unknown says nothing about the leader.
const (
	Unknown  Outcome = iota
	Answered         // the leader forwards the echo
	Silent           // the leader is alive and does not forward, and another leader does
	Alone            // the leader is alive and does not forward, and there is no other leader to compare with
)

// Said is a witness's report of a silent leader.
type Said struct {
	Leader identity.ID
	Kinds  uint32 // of packets that are lost, as in SilentLeader
	Since  time.Time
}

// Book remembers the outcomes of echoes, and which reports follow from them. The zero value is empty. It is not safe
// for concurrent use.
type Book struct{ leaders map[identity.ID]*entry }

type entry struct {
	watched  bool
	began    time.Time // when it was first watched
	answered [Kinds]time.Time
	kinds    uint32 // that are reported lost
	since    time.Time
	until    time.Time // end of the report; in the past: there is no report
	hold     time.Duration
}

// Watch sets the leaders that are watched now.
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

// Note records the outcome of an echo through a leader, and reports whether the report of this leader changes.
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
	if !now.Before(e.until) { // there was no report
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

// Said returns the present reports, by leader.
func (b *Book) Said(now time.Time) (out []Said) {
	for id, e := range b.leaders {
		if now.Before(e.until) {
			out = append(out, Said{Leader: id, Kinds: e.kinds, Since: e.since})
		}
	}
	slices.SortFunc(out, func(x, y Said) int { return x.Leader.Compare(y.Leader) })
	return out
}

// Ends returns when the next report ends; zero: there is none.
func (b *Book) Ends(now time.Time) (first time.Time) {
	for _, e := range b.leaders {
		if now.Before(e.until) && (first.IsZero() || e.until.Before(first)) {
			first = e.until
		}
	}
	return first
}
