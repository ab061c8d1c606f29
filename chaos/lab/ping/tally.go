package ping

import (
	"slices"
	"time"
)

// Tally keeps the account of a stream of echoes, numbered from 0. It is not safe for concurrent use.
type Tally struct {
	sent       []time.Time
	rtt        []time.Duration // by number; 0: not answered
	received   int
	duplicates int
	strays     int
	waiting    time.Time     // when the first echo left since the last answer came; zero: none has
	silence    time.Duration // the longest that such an echo and its followers waited for any answer
}

// Sent notes that the next echo left and returns its number.
func (t *Tally) Sent(at time.Time) int {
	t.sent = append(t.sent, at)
	t.rtt = append(t.rtt, 0)
	if t.waiting.IsZero() {
		t.waiting = at
	}
	return len(t.sent) - 1
}

// Received notes the answer to an echo.
func (t *Tally) Received(number int, at time.Time) {
	switch {
	case number < 0 || number >= len(t.sent):
		t.strays++
	case t.rtt[number] != 0:
		t.duplicates++
	default:
		t.rtt[number] = max(at.Sub(t.sent[number]), 1)
		t.received++
		if !t.waiting.IsZero() {
			t.silence = max(t.silence, at.Sub(t.waiting))
			t.waiting = time.Time{}
		}
	}
}

// Report is the account of a stream.
type Report struct {
	Sent, Received, Duplicates int
	Pending                    int // sent too recently to be called lost
	Min, Median, P99, Max      time.Duration
	Blackouts                  []Blackout    // in order of time
	Silence                    time.Duration // the longest between an echo and the next answer, to whichever echo
}

// Lost is how many echoes were not answered in time.
func (r Report) Lost() int { return r.Sent - r.Received - r.Pending }

// Longest is the longest time for which traffic stood still: echoes were lost, or their answers came late.
func (r Report) Longest() time.Duration {
	longest := r.Silence
	for _, b := range r.Blackouts {
		longest = max(longest, b.Duration)
	}
	return longest
}

// Blackout is a run of echoes that were lost one after another. It lasts from the sending of the
// first lost one to the sending of the next answered one, or of the last of all.
type Blackout struct {
	Start    time.Time
	Duration time.Duration
	Lost     int
	Open     bool // no later echo was answered
}

// Report accounts for what is known at a time; an echo is lost when it has no answer after patience.
func (t *Tally) Report(now time.Time, patience time.Duration) Report {
	r := Report{Sent: len(t.sent), Received: t.received, Duplicates: t.duplicates, Silence: t.silence}
	answered := make([]time.Duration, 0, t.received)
	var dark *Blackout
	for i, at := range t.sent {
		switch {
		case t.rtt[i] != 0:
			answered = append(answered, t.rtt[i])
			if dark != nil {
				dark.Duration = at.Sub(dark.Start)
				r.Blackouts = append(r.Blackouts, *dark)
				dark = nil
			}
		case now.Sub(at) < patience:
			r.Pending++
		case dark == nil:
			dark = &Blackout{Start: at, Lost: 1}
		default:
			dark.Lost++
			dark.Duration = at.Sub(dark.Start)
		}
	}
	if dark != nil {
		dark.Open = true
		r.Blackouts = append(r.Blackouts, *dark)
	}
	if len(answered) > 0 {
		slices.Sort(answered)
		r.Min, r.Max = answered[0], answered[len(answered)-1]
		r.Median, r.P99 = quantile(answered, 50), quantile(answered, 99)
	}
	return r
}

// quantile of a sorted list, by the nearest rank.
func quantile(sorted []time.Duration, percent int) time.Duration {
	rank := (len(sorted)*percent + 99) / 100
	return sorted[max(rank, 1)-1]
}
