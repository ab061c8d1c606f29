package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// defaultEvery is the pace of a Ping that names none.
const defaultEvery = 20 * time.Millisecond

// firstAnswer is how long a Ping waits for its first echo.
const firstAnswer = 10 * time.Second

// running is a stream of echoes that goes on while other steps are done.
type running struct {
	from, to string
	stream   *ping.Stream
}

// StartPings begins a stream of echoes from each place to each other, after each has been answered once.
func (l *Lab) StartPings(ctx context.Context, p Ping) error {
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	for _, f := range p.From {
		for _, t := range p.To {
			if f == t {
				continue
			}
			dst, err := l.target(t)
			if err != nil {
				return err
			}
			s, err := l.PingSized(f, dst, p.Every, 0, p.Size)
			if err != nil {
				return err
			}
			l.pings = append(l.pings, running{f, t, s})
			if err := s.Answered(ctx, 1); err != nil {
				return fmt.Errorf("from %s to %s: %w", f, t, err)
			}
		}
	}
	return nil
}

// EndPings ends all streams, and fails when one lost more echoes than allowed (lost, -1: any number), or had
// none answered for longer than allowed (longest, 0: any time).
func (l *Lab) EndPings(lost int, longest time.Duration) error {
	reports := make([]ping.Report, len(l.pings))
	var wg sync.WaitGroup
	for i, p := range l.pings {
		wg.Go(func() { reports[i] = p.stream.Stop() })
	}
	wg.Wait()
	var errs []error
	for i, p := range l.pings {
		r := reports[i]
		text := fmt.Sprintf("%s to %s: %d of %d echoes lost, longest time without an answer %s", p.from, p.to, r.Lost(),
			r.Sent, round(r.Longest()))
		l.progress("%s", text)
		if lost >= 0 && r.Lost() > lost {
			errs = append(errs, fmt.Errorf("%s; allowed: %d; not answered: %s", text, lost, blackouts(r)))
		}
		if longest > 0 && r.Longest() > longest {
			errs = append(errs, fmt.Errorf("%s; allowed: %s", text, longest))
		}
	}
	l.pings = nil
	return errors.Join(errs...)
}

// blackouts lists when a stream's echoes were lost, the first few of the times.
func blackouts(r ping.Report) string {
	const shown = 5
	var parts []string
	for _, b := range r.Blackouts[:min(len(r.Blackouts), shown)] {
		parts = append(parts, fmt.Sprintf("%d from %s on", b.Lost, b.Start.UTC().Format("15:04:05.000")))
	}
	if more := len(r.Blackouts) - len(parts); more > 0 {
		parts = append(parts, fmt.Sprintf("%d more times", more))
	}
	return strings.Join(parts, ", ")
}
