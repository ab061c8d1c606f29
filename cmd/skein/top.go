package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/usage"
)

const (
	topInterval    = 2 * time.Second
	topIntervalMin = 100 * time.Millisecond
	topIntervalMax = time.Hour
	topPeers       = 10
)

// top shows an agent's rates until it is told to end.
type top struct {
	ask      func(context.Context) (*skeinv1.UsageResponse, error)
	wait     func(context.Context, time.Duration) error
	show     func(*skeinv1.UsageRates) error
	interval time.Duration
	once     bool
}

func newTopCmd(g *globals) *cobra.Command {
	t := top{wait: sleep}
	var peers int
	c := &cobra.Command{
		Use: "top", Short: "What this host's agent costs and does, as it goes",
		Long: "What this host's agent costs and does: rates between two samples of its counters, again and again\n" +
			"until Ctrl-C. On a terminal the figures are refreshed in place; else each interval has its lines.",
		Example: "  skein top\n  skein top --once --interval 10s -o json\n  skein top --peers 40", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if t.interval < topIntervalMin || t.interval > topIntervalMax {
				return cli.UsageError{Err: fmt.Errorf("--interval %s: allowed: %s to %s", t.interval, topIntervalMin,
					topIntervalMax)}
			}
			if peers < 0 {
				return cli.UsageError{Err: fmt.Errorf("--peers %d: want the number of peers to show, or 0 for none", peers)}
			}
			client := g.client()
			t.ask = func(ctx context.Context) (*skeinv1.UsageResponse, error) {
				u, err := client.Usage(ctx, &skeinv1.UsageRequest{})
				return u, g.plain(err)
			}
			show, restore := g.topScreen(c.OutOrStdout(), peers, t.once, t.interval)
			defer restore()
			t.show = show
			return t.run(c.Context())
		},
	}
	c.Flags().DurationVar(&t.interval, "interval", topInterval, "time between two samples")
	c.Flags().BoolVar(&t.once, "once", false, "take two samples, show what is between them, and end")
	c.Flags().IntVar(&peers, "peers", topPeers, "how many peers to show, those with the most traffic first")
	return c
}

// run samples until ctx ends, which is how it is told to end: that is not an error, unless one answer was wanted and
// never came.
func (t top) run(ctx context.Context) error {
	before, err := t.ask(ctx)
	for err == nil {
		if err = t.wait(ctx, t.interval); err != nil {
			break
		}
		var after *skeinv1.UsageResponse
		if after, err = t.ask(ctx); err != nil {
			break
		}
		var r *skeinv1.UsageRates
		r, err = usage.Between(before, after)
		switch {
		case errors.Is(err, usage.ErrRestarted) && !t.once:
			err = nil // its counters began anew: the next two samples are of one run
		case err != nil:
			return fmt.Errorf("compare two samples: %w", err)
		default:
			err = t.show(r)
		}
		if t.once && err == nil {
			return nil
		}
		before = after
	}
	if ctx.Err() != nil {
		if t.once {
			return errors.New("interrupted before the second sample")
		}
		return nil
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	if !pause.For(ctx, d) {
		return ctx.Err()
	}
	return nil
}

// topScreen is where rates are shown: as JSON, refreshed in place on a terminal, or line by line. restore gives the
// terminal back.
func (g *globals) topScreen(w io.Writer, peers int, once bool, interval time.Duration) (
	show func(*skeinv1.UsageRates) error, restore func(),
) {
	nothing := func() {}
	if g.output == "json" {
		return func(r *skeinv1.UsageRates) error {
			r.Peers = r.Peers[:min(peers, len(r.Peers))]
			return printProto(w, r)
		}, nothing
	}
	f, ok := w.(*os.File)
	if once || !ok || !term.IsTerminal(int(f.Fd())) {
		first := true
		return func(r *skeinv1.UsageRates) error {
			if !first {
				fmt.Fprintln(w)
			}
			first = false
			return printTop(w, r, peers)
		}, nothing
	}
	s := &screen{w: f, size: func() (int, int) {
		width, height, err := term.GetSize(int(f.Fd()))
		if err != nil || width == 0 || height == 0 { // some terminals do not know
			return tableWidth, 24
		}
		return width, height
	}}
	s.begin(fmt.Sprintf("the first figures come in %s; Ctrl-C ends", interval))
	return func(r *skeinv1.UsageRates) error {
		var b bytes.Buffer
		if err := printTop(&b, r, peers); err != nil {
			return err
		}
		return s.draw(b.String())
	}, s.end
}

// screen refreshes a terminal in place, on its other screen, so that what was there is there again afterwards.
type screen struct {
	w    io.Writer
	size func() (width, height int)
}

const (
	screenBegin = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J" // the other screen, no cursor, empty
	screenEnd   = "\x1b[?25h\x1b[?1049l"
	screenHome  = "\x1b[H"
	lineEnd     = "\x1b[K\n" // forget what the line had before
	screenRest  = "\x1b[J"
)

func (s *screen) begin(text string) { fmt.Fprint(s.w, screenBegin+text) }
func (s *screen) end()              { fmt.Fprint(s.w, screenEnd) }

// draw shows as much of a text as fits, in one write, so that it does not flicker.
func (s *screen) draw(text string) error {
	width, height := s.size()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	lines = lines[:min(len(lines), max(height-1, 1))]
	var b strings.Builder
	b.WriteString(screenHome)
	for _, l := range lines {
		b.WriteString(cut(l, max(width, 1)) + lineEnd)
	}
	b.WriteString(screenRest)
	_, err := io.WriteString(s.w, b.String())
	return err
}

// printTop writes one block: the agent, what it costs, what it does, and the busiest peers.
func printTop(w io.Writer, r *skeinv1.UsageRates, peers int) error {
	var b bytes.Buffer
	line := func(k, format string, a ...any) {
		fmt.Fprintf(&b, "%-8s %s\n", k, cut(fmt.Sprintf(format, a...), tableWidth-9))
	}
	u := r.GetUsage()
	line("node", "%s (%s), skein %s, up %s, process %d, %s", u.GetName(), u.GetNodeId(), u.GetVersion(),
		short(time.Duration(u.GetUptimeNanos())), u.GetPid(), time.Unix(0, u.GetAt()).Format(time.TimeOnly))
	line("costs", "CPU %.1f %%, wake-ups %s, preempted %s, GC %s taking %.1f %% CPU", r.GetCpuPercent(),
		perSecond(r.GetWakeupsPerSecond()),
		perSecond(r.GetPreemptionsPerSecond()), perSecond(r.GetGcCyclesPerSecond()), r.GetGcCpuPercent())
	line("holds", "RSS %s, heap %s, goroutines %d, threads %d, files %d", size(u.GetRssBytes()), size(u.GetHeapBytes()),
		u.GetGoroutines(),
		u.GetThreads(), u.GetFiles())
	line("pings", "sent %s, received %s; pongs sent %s, received %s", perSecond(r.GetPingsSentPerSecond()),
		perSecond(r.GetPingsReceivedPerSecond()), perSecond(r.GetPongsSentPerSecond()),
		perSecond(r.GetPongsReceivedPerSecond()))
	line("netlink", "requests %s, notifications %s; changes to the kernel %s",
		perSecond(r.GetNetlinkRequestsPerSecond()),
		perSecond(r.GetNetlinkNotificationsPerSecond()), perSecond(r.GetKernelWritesPerSecond()))
	line("records", "published %s, taken %s; paths changed %s", perSecond(r.GetRecordsPublishedPerSecond()),
		perSecond(r.GetRecordsTakenPerSecond()), perSecond(r.GetPathChangesPerSecond()))
	line("peers", "%d: %d direct, %d by relay, %d down; rx %s/s, tx %s/s", len(r.GetPeers()), r.GetPeersDirect(),
		r.GetPeersRelay(),
		r.GetPeersDown(), size(uint64(r.GetRxBytesPerSecond())), size(uint64(r.GetTxBytesPerSecond())))
	if peers > 0 && len(r.GetPeers()) > 0 {
		t := table{head: []string{"PEER", "PATH", "RX/S", "TX/S", "RX", "TX"}}
		for _, p := range r.GetPeers()[:min(peers, len(r.GetPeers()))] {
			path := p.GetPeer().GetPath()
			if p.GetPeer().GetDetail() == "udp" {
				path += " (udp)"
			}
			t.add(p.GetPeer().GetName(), path, size(uint64(p.GetRxBytesPerSecond()))+"/s",
				size(uint64(p.GetTxBytesPerSecond()))+"/s",
				size(p.GetPeer().GetRxBytes()), size(p.GetPeer().GetTxBytes()))
		}
		t.print(&b)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// perSecond is a rate with as many digits as say something.
func perSecond(v float64) string {
	switch {
	case v == 0:
		return "0/s"
	case v < 0.1:
		return fmt.Sprintf("%.2f/s", v)
	case v < 100:
		return fmt.Sprintf("%.1f/s", v)
	}
	return fmt.Sprintf("%.0f/s", v)
}
