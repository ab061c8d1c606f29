package lab

import (
	"context"
	"errors"
	"fmt"
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

// StartPings begins a stream of echoes from each node to each other, after each has been answered once.
func (l *Lab) StartPings(ctx context.Context, from, to []string, every time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, firstAnswer)
	defer cancel()
	for _, f := range from {
		for _, t := range to {
			if f == t {
				continue
			}
			s, err := l.PingNode(f, t, every, 0)
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

// EndPings ends all streams, and fails when one lost more echoes than allowed.
func (l *Lab) EndPings(lost int) error {
	var errs []error
	for _, p := range l.pings {
		r := p.stream.Stop()
		text := fmt.Sprintf("%s to %s: %d of %d echoes lost, longest time without an answer %s", p.from, p.to, r.Lost(), r.Sent, round(r.Longest()))
		l.progress("%s", text)
		if r.Lost() > lost {
			errs = append(errs, fmt.Errorf("%s; allowed: %d", text, lost))
		}
	}
	l.pings = nil
	return errors.Join(errs...)
}
