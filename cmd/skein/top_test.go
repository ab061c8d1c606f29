package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/golden"
)

// usageAfter is what an agent has counted after some seconds: so many of everything each second.
func usageAfter(seconds uint64) *skeinv1.UsageResponse {
	u := &skeinv1.UsageResponse{
		NodeId: "7ef4fee4c02da850", Name: "home1", Version: "v0.2.0", Pid: 4711,
		At: time.Date(2026, 3, 1, 12, 0, int(seconds), 0, time.UTC).UnixNano(), StartedAt: 1,
		UptimeNanos: int64(seconds * 1e9),
		CpuNanos:    int64(seconds * 25e6), Wakeups: seconds * 142, Preemptions: seconds, RssBytes: 38 << 20,
		HeapBytes: 9 << 20, Goroutines: 143,
		Threads: 9, Files: 41, GcCycles: seconds / 8, GcCpuNanos: int64(seconds * 1e6),
		PingsSent: seconds * 12, PingsReceived: seconds * 11, PongsSent: seconds * 11, PongsReceived: seconds * 10,
		NetlinkRequests: seconds * 8, NetlinkNotifications: seconds / 2, RecordsPublished: seconds / 16,
		RecordsTaken: seconds * 3 / 2, PathChanges: seconds / 8,
	}
	for i, path := range []string{"direct", "relay", "down", "relay"} {
		k := seconds * uint64(i) * 100_000
		p := &skeinv1.PeerUsage{NodeId: fmt.Sprint(i), Name: fmt.Sprintf("peer%d", i), Path: path, RxBytes: k,
			TxBytes: 2 * k}
		if path == "relay" {
			p.Detail = []string{1: "session", 3: "udp"}[i]
		}
		u.Peers = append(u.Peers, p)
	}
	return u
}

func TestTop(t *testing.T) {
	var lines []string
	for _, args := range [][]string{{"top", "--once"}, {"top", "--once", "--peers", "2"},
		{"top", "--once", "--peers", "1", "-o", "json"}} {
		f := newFakeAgent(t)
		f.usages = []*skeinv1.UsageResponse{usageAfter(320), usageAfter(336)}
		out, beside, err := f.skein(t, append(args, "--interval", "100ms")...)
		if err != nil || beside != "" {
			t.Fatalf("%v, and beside it %q", err, beside)
		}
		lines = append(append(lines, "$ skein "+strings.Join(args, " ")),
			strings.Split(strings.TrimSuffix(out, "\n"), "\n")...)
	}
	for _, l := range lines {
		if n := len([]rune(l)); n > tableWidth {
			t.Errorf("%d columns: %s", n, l)
		}
	}
	golden.Lines(t, "top", lines)
}

func TestTopUse(t *testing.T) {
	f := newFakeAgent(t)
	for _, args := range [][]string{
		{"top", "--interval", "1ms"}, {"top", "--interval", "2h"}, {"top", "--interval", "often"},
		{"top", "--peers", "-1"}, {"top", "home1"}, {"top", "-o", "yaml"},
	} {
		if _, _, err := f.skein(t, args...); !errors.As(err, new(cli.UsageError)) || len(f.asked) > 0 {
			t.Errorf("skein %s: %v, want wrong use, and nothing asked", strings.Join(args, " "), err)
		}
	}
	f.run = t.TempDir()
	if _, _, err := f.skein(t, "top", "--once"); err == nil || !strings.Contains(err.Error(), "skein up") {
		t.Errorf("without an agent: %v, want what to do", err)
	}
}

// script is a top of which a test gives the samples; after the last its context ends, as by Ctrl-C.
func script(once bool, samples ...*skeinv1.UsageResponse) (shown []float64, err error) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	t := top{once: once, interval: time.Hour,
		ask: func(context.Context) (*skeinv1.UsageResponse, error) {
			if samples[0] == nil {
				return nil, errors.New("no agent")
			}
			u := samples[0]
			samples = samples[1:]
			return u, nil
		},
		wait: func(ctx context.Context, _ time.Duration) error {
			if len(samples) == 0 {
				stop()
			}
			return ctx.Err()
		},
		show: func(r *skeinv1.UsageRates) error {
			shown = append(shown, time.Duration(r.GetIntervalNanos()).Seconds())
			return nil
		},
	}
	err = t.run(ctx)
	return shown, err
}

func TestTopGoesOn(t *testing.T) {
	again := func(seconds uint64) *skeinv1.UsageResponse { // of another run
		u := proto.CloneOf(usageAfter(seconds))
		u.StartedAt++
		return u
	}
	for _, c := range []struct {
		name    string
		once    bool
		samples []*skeinv1.UsageResponse
		shown   string
		err     string
	}{
		{"until it is ended", false, []*skeinv1.UsageResponse{usageAfter(1), usageAfter(3), usageAfter(6)}, "[2 3]",
			""},
		{"once", true, []*skeinv1.UsageResponse{usageAfter(1), usageAfter(3), usageAfter(6)}, "[2]", ""},
		{"once, ended before", true, []*skeinv1.UsageResponse{usageAfter(1)}, "[]", "interrupted"},
		{"the agent starts anew", false, []*skeinv1.UsageResponse{usageAfter(8), again(1), again(5)}, "[4]", ""},
		{"once, and it starts anew", true, []*skeinv1.UsageResponse{usageAfter(8), again(1)}, "[]", "started anew"},
		{"the agent ends", false, []*skeinv1.UsageResponse{usageAfter(1), usageAfter(3), nil}, "[2]", "no agent"},
	} {
		shown, err := script(c.once, c.samples...)
		if got := fmt.Sprint(shown); got != c.shown || (err == nil) != (c.err == "") || err != nil &&
			!strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: intervals %s, %v; want %s, %q", c.name, got, err, c.shown, c.err)
		}
	}
}

// TestScreen: a frame overwrites the one before it, fits, and the terminal comes back.
func TestScreen(t *testing.T) {
	var b strings.Builder
	s := &screen{w: &b, size: func() (int, int) { return 6, 3 }}
	s.begin("wait")
	if err := s.draw("one\na long line\nthree\nfour\n"); err != nil {
		t.Fatal(err)
	}
	s.end()
	want := screenBegin + "wait" + screenHome + "one" + lineEnd + "a lon…" + lineEnd + screenRest + screenEnd
	if b.String() != want {
		t.Errorf("%q\nwant\n%q", b.String(), want)
	}
}
