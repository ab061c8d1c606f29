package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/doctor"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// askWait is how long the agent may take to answer one question of doctor's or a bundle's.
const askWait = 10 * time.Second

// errSick is what doctor ends with when something fails.
var errSick = errors.New("something keeps skein from working here: see the findings with verdict failure")

func newDoctorCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Examine this host for what keeps skein from working well",
		Long: "Examine this host, with or without a running agent: the configuration, kernel drivers, forwarding,\n" +
			"reverse path filters, MTUs and tunnels in tunnels, conntrack, the clock, names, ports, firewall rules,\n" +
			"other networks' marks and tables, disk and limits. Each finding says what was seen, why it matters and\n" +
			"what to do.\n\n" +
			"It changes nothing, and sends nothing to the network but lookups of the host names in the\n" +
			"configuration (forceEndpoint, stunServers). As root it sees most; it tells what it could not see.\n\n" +
			"The exit status is 1 when a finding is a failure, else 0.",
		Example: "  skein doctor\n  skein doctor -o json",
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			report, _ := g.examine(c.Context())
			if g.output == "json" {
				if err := cli.PrintJSON(c.OutOrStdout(), report); err != nil {
					return err
				}
			} else {
				printDoctor(c.OutOrStdout(), report)
			}
			if report.Worst() == doctor.Failure {
				return errSick
			}
			return nil
		},
	}
}

// examine looks at this host.
func (g *globals) examine(ctx context.Context) (doctor.Report, doctor.Facts) {
	cfg := g.configuration()
	n := cfg.Value.Dataplane.Numbers()
	f := doctor.Read(ctx, doctor.Request{Config: cfg, Agent: g.askAgent(ctx), Numbers: n})
	return doctor.Judge(f, n), f
}

// configuration is the file as the agent would read it.
func (g *globals) configuration() doctor.Configuration {
	c := doctor.Configuration{File: g.config}
	_, err := os.Stat(g.config)
	c.Exists = !errors.Is(err, fs.ErrNotExist)
	if c.Value, err = g.load(); err != nil {
		c.Problem, c.Value = err.Error(), config.Default()
		c.Value.StateDir, c.Value.RunDir = g.directories()
	}
	return c
}

// askAgent asks the agent of this host for what only it knows.
func (g *globals) askAgent(ctx context.Context) (a doctor.Agent) {
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	s, err := g.client().Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		a.Why = g.plain(err).Error()
		return a
	}
	process := findAgent(g.socket())
	process.close()
	a = doctor.Agent{
		Running: true, PID: process.pid, Driver: s.GetWireguardDriver(), Relay: s.GetRelay(),
		ClockOffset: time.Duration(s.GetClockOffsetNanos()), Endpoints: map[string]netip.AddrPort{},
	}
	for _, p := range s.GetProblems() {
		a.Problems = append(a.Problems, doctor.Problem{Subject: p.GetSubject(), Message: p.GetMessage(),
			Advice:   p.GetAdvice(),
			Severity: p.GetSeverity()})
	}
	peers, err := g.client().Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return a
	}
	for _, p := range peers.GetPeers() {
		if at, err := netip.ParseAddrPort(p.GetEndpoint()); err == nil && p.GetPath() == "direct" {
			a.Endpoints[p.GetName()] = at
		}
	}
	return a
}

// printDoctor writes findings for people: all in a table, then those that need something done in full.
func printDoctor(w io.Writer, r doctor.Report) {
	t := table{head: []string{"VERDICT", "CHECK", "SEEN"}}
	for _, f := range r.Findings {
		t.add(string(f.Verdict), f.Check, f.Seen)
	}
	t.print(w)
	fmt.Fprintln(w)
	for _, v := range []doctor.Verdict{doctor.Failure, doctor.Warning, doctor.Note} {
		for _, f := range r.Findings {
			if f.Verdict != v {
				continue
			}
			fmt.Fprintln(w, wrap(fmt.Sprintf("%-8s %s: %s", v, f.Check, f.Seen), 9))
			fmt.Fprintln(w, wrap("         why: "+f.Why, 14))
			fmt.Fprintln(w, wrap("         do:  "+f.Do, 14))
		}
	}
	for _, s := range r.Skipped {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-8s %s: %s", "not seen", s.Check, s.Why), 9))
	}
	var counts []string
	for _, v := range []doctor.Verdict{doctor.Failure, doctor.Warning, doctor.Note, doctor.OK} {
		counts = append(counts, fmt.Sprintf("%d %s", r.Count(v), v))
	}
	fmt.Fprintf(w, "%s, %d not seen\n", strings.Join(counts, ", "), len(r.Skipped))
}
