package egress

import (
	"context"
	"slices"
	"time"
)

const (
	readEvery = time.Second            // readings of other clocks, while a leader answers
	readFor   = 400 * time.Millisecond // for all answers of a round
	maxReads  = 4                      // rounds under way at a time
)

// readAt is when other machines' clocks are to be read; the zero time: never, since every lease here is as short as a
// ticket.
func (r *LeaseClient) readAt(now time.Time) time.Time {
	if r.cfg.Clocks == nil || r.reading >= maxReads {
		return time.Time{}
	}
	every := time.Duration(0)
	for _, h := range r.holders {
		if _, _, needed := h.Prolong(now); needed {
			every = RenewEvery
		} else if every == 0 && h.Long() {
			every = readEvery
		}
	}
	if every == 0 {
		return time.Time{}
	}
	if r.lastRead.IsZero() {
		return now
	}
	return r.lastRead.Add(every)
}

// read begins a round of readings: tickets first, where a lease needs another one, then the questions.
func (r *LeaseClient) read(ctx context.Context) {
	r.lastRead = r.cfg.Now()
	r.round++
	r.reading++
	round := r.round
	for _, s := range sorted(r.holders) {
		h := r.holders[s]
		began := r.cfg.Now()
		epoch, life, ok := h.Prolong(began)
		if !ok {
			continue
		}
		t, err := r.cfg.Kernel.Begin(s, epoch, life)
		if err != nil {
			r.cfg.Log.Warn("no further ticket for the slot could be begun; trying again", "slot", s.String(),
				"error", err)
			continue
		}
		h.Prolonging(round, epoch, t, began, life)
	}
	go func() {
		asking, cancel := context.WithTimeout(ctx, readFor)
		defer cancel()
		readings := r.cfg.Clocks.Read(asking)
		r.post(func() {
			r.reading--
			for _, s := range sorted(r.holders) {
				r.do(r.holders[s].Read(round, readings, r.cfg.Now()))
			}
		})
	}()
}

// leave grants what is left of long leases, as tickets that nobody has to prolong: the next agent may take longer to
// begin than a ticket lives. Other machines' clocks have to prove first that this much is left: the machine may just
// have been continued.
func (r *LeaseClient) leave() {
	long := func(s Slot) bool { return r.holders[s].Long() }
	if r.cfg.Clocks == nil || !slices.ContainsFunc(sorted(r.holders), long) {
		return
	}
	ask := func() Readings {
		ctx, cancel := context.WithTimeout(context.Background(), readFor)
		defer cancel()
		return r.cfg.Clocks.Read(ctx)
	}
	first := ask()
	r.round++
	for _, s := range sorted(r.holders) {
		began := r.cfg.Now()
		epoch, life, ok := r.holders[s].Rest(first, began)
		if !ok {
			continue
		}
		t, err := r.cfg.Kernel.Begin(s, epoch, life)
		if err != nil {
			r.cfg.Log.Warn("the slot's lease ends with its ticket", "slot", s.String(), "error", err)
			continue
		}
		r.holders[s].Prolonging(r.round, epoch, t, began, life)
	}
	second := ask()
	for _, s := range sorted(r.holders) {
		r.do(r.holders[s].Read(r.round, second, r.cfg.Now()))
	}
}
