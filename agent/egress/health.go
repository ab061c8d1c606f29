package egress

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Timing of probes through a gateway.
const (
	ProbeEvery = 300 * time.Millisecond
	// BadAfter is how many consecutive rounds without any answer make a gateway bad.
	BadAfter = 3
	// GoodAfter is how many consecutive answers of one target make a gateway good, unless it was bad recently.
	GoodAfter = 2
	// FlapWindow is how long a bad period counts: each one in the window doubles the answers needed to be good again,
	// up to GoodMost.
	FlapWindow = 60 * time.Second
	GoodMost   = 32
	// StaleAfter is how long a condition lasts without new results.
	StaleAfter = 5 * ProbeEvery
)

// Condition is a gateway's health as its probes show it.
type Condition int

// Conditions. A gateway without targets, or without recent results, is unknown.
const (
	Unknown Condition = iota
	Good
	Bad
)

// String is unknown, good or bad.
func (c Condition) String() string { return [...]string{"unknown", "good", "bad"}[c] }

// ProbeResult is the result of one probe.
type ProbeResult struct {
	Target string
	Err    error // nil: it answered
}

// Health derives the condition of a gateway, or of one slot there, from its probes. The zero Health is Unknown. It is
// not safe for concurrent use.
type Health struct {
	condition Condition
	last      time.Time      // last round with results
	failed    int            // consecutive rounds without any answer
	answered  map[string]int // consecutive answers, by target
	bad       []time.Time    // when it became bad, in FlapWindow
	why       string         // the failures, or the target that answers
}

// Observe adds a round: one result per target. A round without results changes nothing. Rounds must be in order of
// time.
func (h *Health) Observe(now time.Time, round []ProbeResult) {
	if len(round) == 0 {
		return
	}
	// after a gap, earlier results say nothing about now, but the number of bad periods still counts
	if !h.last.IsZero() && now.Sub(h.last) > StaleAfter {
		*h = Health{bad: h.bad}
	}
	h.last = now
	h.bad = slices.DeleteFunc(h.bad, func(t time.Time) bool { return now.Sub(t) >= FlapWindow })
	answered, best, name := map[string]int{}, 0, ""
	var failures []string
	for _, r := range round {
		if r.Err != nil {
			failures = append(failures, r.Err.Error())
			continue
		}
		n := h.answered[r.Target] + 1
		answered[r.Target] = n
		if n > best {
			best, name = n, r.Target
		}
	}
	h.answered = answered
	if best == 0 {
		h.failed++
		slices.Sort(failures)
		h.why = strings.Join(slices.Compact(failures), "; ")
	} else {
		h.failed = 0
	}
	switch {
	case h.condition != Bad && h.failed >= BadAfter:
		h.condition = Bad
		h.bad = append(h.bad, now)
	case h.condition != Good && best >= h.needed():
		h.condition = Good
		h.why = name
	}
}

// needed is how many consecutive answers make it good.
func (h *Health) needed() int {
	n := GoodAfter
	for range len(h.bad) - 1 {
		n = min(2*n, GoodMost)
	}
	return n
}

// Judge returns the present condition and a reason for users.
func (h *Health) Judge(now time.Time) (Condition, string) {
	switch {
	case h.last.IsZero():
		return Unknown, "no target has been probed yet"
	case now.Sub(h.last) > StaleAfter:
		return Unknown, fmt.Sprintf("the last probe is %v old", now.Sub(h.last).Round(100*time.Millisecond))
	case h.condition == Bad && h.failed == 0:
		return Bad, fmt.Sprintf("targets answer again, %d times in a row are wanted after %d bad times in %v", h.needed(),
			len(h.bad), FlapWindow)
	case h.condition == Bad:
		return Bad, fmt.Sprintf("no target answers, %d times in a row: %s", h.failed, h.why)
	case h.condition == Good && h.failed > 0:
		return Good, fmt.Sprintf("no target answers, %d of %d times: %s", h.failed, BadAfter, h.why)
	case h.condition == Good:
		return Good, "targets answer"
	}
	return Unknown, "too few probes yet"
}
