package birthday

import (
	"fmt"
	"net/netip"
	"time"
)

// A carrier-grade NAT has some tens of thousands of mappings for all its hosts, a home router a few thousand. Hosts
// behind one public address share MaxMappings. A mapping counts for mappingFor, which is longer than most NATs keep
// one without an answer.
const (
	MaxMappings = 4096
	mappingFor  = time.Minute

	// An address not proven to be the peer's gets this many attempts in targetFor, whoever asks for them. A member that
	// names a victim's address thus directs at most some 80 packets a second at it, for seven seconds.
	targetTries = 3
	targetFor   = 10 * time.Minute

	maxManySockets = 2 // attempts with many sockets at once
	maxOnePort     = 2 // attempts from WireGuard's port at once
	busyRetry      = 2 * time.Second
	sharedRetry    = 5 * time.Second
	refusedRetry   = 5 * time.Minute // for reasons that last, such as an operator's setting
	targetsKept    = 1024
)

// Refusal is why an attempt may not begin now.
type Refusal struct {
	Text  string
	Retry time.Duration
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("%s; try again in %s", r.Text, r.Retry.Round(time.Second))
}

// Budget counts the cost of port prediction: mappings in this host's NAT and attempts at addresses. Not safe for
// concurrent use.
type Budget struct {
	spent   []spent
	many    int
	one     int
	alone   bool                       // the running attempt with many sockets allows no other beside it
	targets map[netip.Addr][]time.Time // attempts without a hit
}

type spent struct {
	n  int
	at time.Time // zero: reserved by a running attempt
	id uint64
}

// NewBudget returns a budget of which nothing is spent.
func NewBudget() *Budget { return &Budget{targets: map[netip.Addr][]time.Time{}} }

// Ask is a request to begin an attempt.
type Ask struct {
	ID     uint64
	Many   bool // it opens sockets
	Alone  bool // it predicts ports, so no other attempt may use the NAT's next ones
	Cost   int  // mappings
	Others int  // mappings that nodes behind the same public address use
	Target netip.Addr
}

// Begin reserves an attempt's initial cost, or refuses.
func (b *Budget) Begin(a Ask, now time.Time) error {
	b.expire(now)
	id, target := a.ID, a.Target
	switch {
	case a.Many && (b.many >= maxManySockets || b.alone || a.Alone && b.many > 0), !a.Many && b.one >= maxOnePort:
		return &Refusal{"other attempts are under way", busyRetry}
	case len(b.targets[target]) >= targetTries:
		return &Refusal{fmt.Sprintf("%d attempts towards %s have failed lately", len(b.targets[target]), target),
			b.targets[target][0].Add(targetFor).Sub(now)}
	case len(b.targets) >= targetsKept:
		return &Refusal{"too many addresses were tried lately", targetFor / 10}
	}
	if err := b.room(now, a.Cost, a.Others); err != nil {
		return err
	}
	b.spent = append(b.spent, spent{a.Cost, time.Time{}, id})
	if a.Many {
		b.alone = a.Alone
		b.many++
	} else {
		b.one++
	}
	return nil
}

// More reserves more mappings for a running attempt.
func (b *Budget) More(id uint64, now time.Time, n, others int) bool {
	if b.room(now, n, others) != nil {
		return false
	}
	for i := range b.spent {
		if b.spent[i].id == id && b.spent[i].at.IsZero() {
			b.spent[i].n += n
			return true
		}
	}
	return false
}

func (b *Budget) room(now time.Time, cost, others int) error {
	if used := b.Used(now) + others; used+cost > MaxMappings {
		return &Refusal{fmt.Sprintf("%d mappings of the %d for this public address are in use", used, MaxMappings),
			b.relief(now, others)}
	}
	return nil
}

// End records what the attempt has really cost, and whether it has proven the address.
func (b *Budget) End(a Ask, now time.Time, cost int, hit bool) {
	target := a.Target
	for i := range b.spent {
		if b.spent[i].id == a.ID && b.spent[i].at.IsZero() {
			b.spent[i] = spent{cost, now, a.ID}
			if a.Many {
				b.many--
				b.alone = b.alone && b.many > 0
			} else {
				b.one--
			}
			if hit {
				delete(b.targets, target)
			} else if cost > 0 {
				b.targets[target] = append(b.targets[target], now)
			}
			return
		}
	}
}

// Used is how many mappings count now.
func (b *Budget) Used(now time.Time) int {
	b.expire(now)
	n := 0
	for _, s := range b.spent {
		n += s.n
	}
	return n
}

// relief is when some mappings stop counting: soon, if a running attempt may return part of its reservation.
func (b *Budget) relief(now time.Time, others int) time.Duration {
	d := mappingFor
	if b.many+b.one > 0 || others > 0 {
		d = sharedRetry
	}
	for _, s := range b.spent {
		if !s.at.IsZero() {
			d = min(d, s.at.Add(mappingFor).Sub(now))
		}
	}
	return max(d, busyRetry)
}

func (b *Budget) expire(now time.Time) {
	kept := b.spent[:0]
	for _, s := range b.spent {
		if s.at.IsZero() || now.Sub(s.at) < mappingFor {
			kept = append(kept, s)
		}
	}
	b.spent = kept
	for a, times := range b.targets {
		for len(times) > 0 && now.Sub(times[0]) >= targetFor {
			times = times[1:]
		}
		if b.targets[a] = times; len(times) == 0 {
			delete(b.targets, a)
		}
	}
}
