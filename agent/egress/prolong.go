package egress

import (
	"context"
	"slices"
	"time"
)

const (
	readEvery = time.Second            // interval of reading other clocks while a leader answers
	readFor   = 400 * time.Millisecond // limit for all answers of a round
	maxReads  = 4                      // rounds running at a time
)

// readAt is when other machines' clocks must be read; the zero time: never, since no lease here is longer than a
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

// read runs a round of readings. It first begins a further ticket for each lease that needs one.
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

// leave grants tickets for the rest of long leases, so that they survive until the next agent runs, which may take
// longer than a normal ticket. Other machines' clocks must first prove the rest, since this machine may just have
// been resumed from a freeze.
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
