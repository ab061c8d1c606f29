package client

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func numbered(n byte) identity.ID { return identity.ID{n} }

func TestPick(t *testing.T) {
	ms := time.Millisecond
	near := option{relay: numbered(1), healthy: true, own: 5 * ms, peer: 5 * ms}
	far := option{relay: numbered(2), healthy: true, own: 40 * ms, peer: 40 * ms}
	almost := option{relay: numbered(3), healthy: true, own: 5 * ms, peer: 4 * ms}
	with := func(o option, change func(*option)) option { change(&o); return o }
	for _, c := range []struct {
		name    string
		options []option
		current byte
		want    byte // 0: none
	}{
		{"none", nil, 0, 0},
		{"least sum of both RTTs", []option{far, near}, 0, 1},
		{"a little better is not worth a change", []option{near, almost}, 1, 1},
		{"much better is", []option{far, near}, 2, 1},
		{"the current is suspect", []option{with(near, func(o *option) { o.healthy = false }), far}, 1, 2},
		{"all are suspect: stay", []option{with(near, func(o *option) {
			o.healthy = false
		}), with(far, func(o *option) { o.healthy = false })}, 2, 1},
		{"the peer is gone from the current", []option{with(near, func(o *option) { o.know = knownGone }), far}, 1, 2},
		{"gone everywhere", []option{with(near, func(o *option) { o.know = knownGone })}, 1, 0},
		{"known beats nearer but unknown", []option{with(near, func(o *option) { o.know = unknown }), far}, 0, 2},
		{"unknown beats unlisted", []option{with(near, func(o *option) {
			o.know = unlisted
		}), with(far, func(o *option) { o.know = unknown })}, 0, 2},
		{"healthy but unlisted beats suspect", []option{with(near, func(o *option) {
			o.healthy = false
		}), with(far, func(o *option) { o.know = unlisted })}, 1, 2},
		{"fresh joiner: by own RTT", []option{
			{relay: numbered(1), healthy: true, know: unknown, own: 30 * ms},
			{relay: numbered(2), healthy: true, know: unknown, own: 3 * ms}}, 0, 2},
	} {
		o, ok := pick(c.options, numbered(c.current), false, 0)
		if ok != (c.want != 0) || ok && o.relay != numbered(c.want) {
			t.Errorf("%s: picked %s %v, want %d", c.name, o.relay, ok, c.want)
		}
	}
	suspect := with(far, func(o *option) { o.healthy = false })
	for _, c := range []struct {
		name    string
		options []option
		stay    bool
		late    time.Duration
		want    byte
	}{
		{"the current was chosen a moment ago", []option{far, near}, true, 0, 2},
		{"and is suspect", []option{suspect, near}, true, 0, 1},
		{"this process is later than the gain", []option{far, near}, false, 40 * ms, 2},
		{"it is not", []option{far, near}, false, 30 * ms, 1},
	} {
		if o, _ := pick(c.options, far.relay, c.stay, c.late); o.relay != numbered(c.want) {
			t.Errorf("%s: picked %s, want %d", c.name, o.relay, c.want)
		}
	}
}

func TestBackoff(t *testing.T) {
	for i, want := range []time.Duration{firstRetry, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second,
		16 * time.Second, 30 * time.Second, 30 * time.Second} {
		if lo, hi := backoff(i, 0), backoff(i, 1); lo != want/2 || hi != want {
			t.Errorf("after %d failures: %s to %s, want %s to %s", i, lo, hi, want/2, want)
		}
	}
	if d := backoff(1000, 1); d != maxBackoff {
		t.Errorf("after 1000 failures: %s", d)
	}
}

func TestPatienceWithARelay(t *testing.T) {
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		rtts          []time.Duration
		suspect, dead time.Duration
	}{
		"no answer yet": {nil, 900 * ms, 3 * time.Second},
		"near":          {[]time.Duration{20 * ms, 25 * ms, 300 * ms}, 900 * ms, 3 * time.Second},
		"far":           {[]time.Duration{600 * ms, 610 * ms}, 1800 * ms, 3600 * ms},
		"slow at times": {[]time.Duration{20 * ms, 1200 * ms, 30 * ms}, 2400 * ms, 3600 * ms},
	} {
		if suspect, dead := missing(tt.rtts); suspect != tt.suspect || dead != tt.dead {
			t.Errorf("%s: %s and %s, want %s and %s", name, suspect, dead, tt.suspect, tt.dead)
		}
	}
}
