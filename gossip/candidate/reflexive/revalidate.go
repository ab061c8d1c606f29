package reflexive

import "time"

// A NAT may give WireGuard's port another mapping at any time. The regular look comes 20 s later at worst; a path that
// has died, or a peer that sees this host elsewhere, tells sooner.

// revalidateFirst is the pause after a look that Revalidate asked for and that found nothing new. It doubles with each
// further one, up to the pause between regular looks, so that peers that come and go, or lie, cost no more than twice
// the regular ones.
const (
	revalidateFirst = time.Second
	revalidateReset = time.Minute // after the last one the next begins anew
)

// revalidation spaces the looks.
type revalidation struct {
	behind bool          // behind a NAT: else there is no mapping to revalidate
	due    bool          // the next look is one of them
	timer  *time.Timer   // runs until then; nil: none is wanted
	last   time.Time     // look of any kind
	asked  time.Time     // the last of them
	gap    time.Duration // from last to the next
}

// begin notes a look.
func (d *revalidation) begin(now time.Time) {
	d.last = now
	if d.timer != nil {
		d.due, d.asked = true, now
		d.timer.Stop()
		d.timer = nil
	}
}

// end notes what it has found.
func (d *revalidation) end(behind, same bool) {
	d.behind = behind
	switch {
	case !same:
		d.gap = 0
	case d.due:
		d.gap = min(max(2*d.gap, revalidateFirst), keepEvery)
	}
	d.due = false
}

// Revalidate says that something points to another mapping than the last look has found. Two servers are asked at once,
// or some time later when that has been in vain lately. Any goroutine may call it.
func (s *Step) Revalidate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := &s.revalidation
	if !d.behind || d.timer != nil || s.soon == nil {
		return
	}
	if time.Since(d.asked) > revalidateReset {
		d.gap = 0
	}
	d.timer = time.AfterFunc(time.Until(d.last.Add(d.gap)), s.soon)
}
