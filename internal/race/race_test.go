package race

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var pace = Pace{Stagger: 250 * time.Millisecond, Proof: time.Second}

// plan is how a way fares, in milliseconds after it was begun; 0: never.
type plan struct{ connected, up, fails int }

// The ways begin when they should, one is taken, and the others are ended or given back.
func TestFirst(t *testing.T) {
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		ways   []plan
		within time.Duration // 0: no limit
		begun  []time.Duration
		won    int // -1: none
		after  time.Duration
		errs   string
	}{
		"none": {won: -1},
		"the first is quick": {ways: []plan{{10, 20, 0}, {10, 20, 0}}, begun: []time.Duration{0},
			after: 20 * ms},
		"the first is dead": {ways: []plan{{}, {10, 20, 0}, {10, 20, 0}},
			begun: []time.Duration{0, 250 * ms}, won: 1, after: 270 * ms},
		"the first fails": {ways: []plan{{0, 0, 30}, {10, 20, 0}}, begun: []time.Duration{0, 30 * ms},
			won: 1, after: 50 * ms},
		"its handshake is slow": {ways: []plan{{200, 900, 0}, {10, 20, 0}}, begun: []time.Duration{0},
			after: 900 * ms},
		"it is connected and says nothing": {ways: []plan{{100, 0, 0}, {10, 20, 0}},
			begun: []time.Duration{0, 1100 * ms}, won: 1, after: 1120 * ms},
		"it is connected and is another": {ways: []plan{{100, 0, 150}, {10, 20, 0}},
			begun: []time.Duration{0, 150 * ms}, won: 1, after: 170 * ms},
		"connected after the second was begun": {ways: []plan{{260, 700, 0}, {0, 900, 0}, {10, 20, 0}},
			begun: []time.Duration{0, 250 * ms}, after: 700 * ms},
		"the first wins though the second runs": {ways: []plan{{0, 300, 0}, {0, 60, 0}}, begun: []time.Duration{0, 250 * ms},
			after: 300 * ms},
		"all fail": {ways: []plan{{0, 0, 30}, {0, 0, 20}}, begun: []time.Duration{0, 30 * ms},
			won: -1, after: 50 * ms, errs: "way 0, way 1"},
		"no time": {ways: []plan{{0, 0, 30}, {}, {}}, within: 200 * ms, begun: []time.Duration{0, 30 * ms}, won: -1,
			after: 200 * ms,
			errs:  "way 0, context deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if tt.within > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.within)
					defer cancel()
				}
				began := time.Now()
				var mu sync.Mutex
				var begun []time.Duration
				open := map[string]bool{}
				var ways []Way[*string]
				for i, p := range tt.ways {
					ways = append(ways, func(ctx context.Context, connected func()) (*string, error) {
						mu.Lock()
						begun = append(begun, time.Since(began))
						mu.Unlock()
						start := time.Now()
						at := func(n int) <-chan time.Time {
							if n == 0 {
								return nil
							}
							return time.After(time.Until(start.Add(time.Duration(n) * ms)))
						}
						select {
						case <-at(p.connected):
							connected()
						case <-at(p.up):
						case <-at(p.fails):
						case <-ctx.Done():
							return nil, ctx.Err()
						}
						select {
						case <-at(p.up):
						case <-at(p.fails):
							return nil, fmt.Errorf("way %d", i)
						case <-ctx.Done():
							if p.up == 0 {
								return nil, ctx.Err()
							} // too late to stop it
						}
						name := fmt.Sprint(i)
						mu.Lock()
						open[name] = true
						mu.Unlock()
						return &name, nil
					})
				}
				c, errs := First(ctx, pace, ways, func(c *string) {
					mu.Lock()
					delete(open, *c)
					mu.Unlock()
				})
				after := time.Since(began)
				synctest.Wait()
				var says []string
				for _, err := range errs {
					says = append(says, err.Error())
				}
				if tt.won < 0 {
					if c != nil || strings.Join(says, ", ") != tt.errs || len(open) != 0 {
						t.Errorf("got %v, %v; open are %v", c, errs, open)
					}
				} else if c == nil || *c != fmt.Sprint(tt.won) || len(open) != 1 || !open[*c] || errors.Join(errs...) != nil {
					t.Errorf("got %v, %v; open are %v; want way %d alone", c, errs, open, tt.won)
				}
				if after != tt.after || !slices.Equal(begun, tt.begun) {
					t.Errorf("done after %s, ways begun at %v; want %s and %v", after, begun, tt.after, tt.begun)
				}
			})
		})
	}
}
