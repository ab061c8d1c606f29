package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// profileKinds are what the agent takes, and whether over some seconds.
var profileKinds = []struct {
	name string
	over bool
}{
	{"cpu", true}, {"heap", false}, {"goroutine", false}, {"allocs", false}, {"block", true}, {"mutex", true},
	{"threadcreate", false}, {"trace", true},
}

// maxProfileSeconds is the agent's bound.
const maxProfileSeconds = 60

func newDebugCmd(g *globals) *cobra.Command {
	return cli.Group("debug", "Look inside the agent: profiles, and a bundle for maintainers", newPprofCmd(g),
		newBundleCmd(g))
}

// profileOrder is what `skein debug pprof` was told.
type profileOrder struct {
	kind    string
	seconds uint32
	file    string // empty: a name of our own; -: standard output
}

func newPprofCmd(g *globals) *cobra.Command {
	var o profileOrder
	names := make([]string, len(profileKinds))
	for i, k := range profileKinds {
		names[i] = k.name
	}
	c := &cobra.Command{
		Use: "pprof [" + strings.Join(names, "|") + "]", Short: "Take a profile of the running agent, as root",
		Long: "Take a profile of the running agent over its unix socket, as root, and write it to a file for\n" +
			"`go tool pprof` (of kind trace, for `go tool trace`). The default is the CPU over 10 seconds. cpu, block,\n" +
			"mutex and trace take --seconds; the others are taken at once.",
		Example:   "  skein debug pprof\n  skein debug pprof cpu --seconds 30 -o cpu.pprof\n  skein debug pprof heap",
		Args:      cli.Between(0, 1, "at most one kind of profile"),
		ValidArgs: names,
		RunE: func(c *cobra.Command, args []string) error {
			o.kind = cmp.Or(strings.Join(args, ""), "cpu")
			if err := o.check(c.Flags().Changed("seconds"), names); err != nil {
				return cli.UsageError{Err: err}
			}
			return g.profile(c, o)
		},
	}
	c.Flags().Uint32Var(&o.seconds, "seconds", 10,
		fmt.Sprintf("how long a cpu, block, mutex or trace profile is taken; at most %d", maxProfileSeconds))
	c.Flags().StringVarP(&o.file, "output", "o", "",
		"the `FILE` to write; - is standard output (default skein-NODE-KIND-TIME.pprof here)")
	_ = c.MarkFlagFilename("output") // the flag is there
	return c
}

// check judges the order, and leaves the seconds out where there are none.
func (o *profileOrder) check(secondsGiven bool, names []string) error {
	i := slices.Index(names, o.kind)
	switch {
	case i < 0:
		return fmt.Errorf("there is no profile %q; allowed: %s", o.kind, strings.Join(names, ", "))
	case !profileKinds[i].over && secondsGiven:
		return fmt.Errorf("--seconds: a %s profile is taken at once; leave --seconds out", o.kind)
	case !profileKinds[i].over:
		o.seconds = 0
	case o.seconds < 1 || o.seconds > maxProfileSeconds:
		return fmt.Errorf("--seconds %d: allowed: 1 to %d", o.seconds, maxProfileSeconds)
	}
	return nil
}

// profile asks for a profile and writes it. A file is complete or not there.
func (g *globals) profile(c *cobra.Command, o profileOrder) error {
	if err := refuseTerminal(c.OutOrStdout(), o.file); err != nil {
		return err
	}
	s, err := g.client().Profile(c.Context(), &skeinv1.ProfileRequest{Kind: o.kind, Seconds: o.seconds})
	if err != nil {
		return g.plain(err)
	}
	defer s.Close()
	if !s.Receive() { // the first message says that it is being taken
		return g.plain(cmp.Or(s.Err(), errors.New("the agent ended the profile before it began: look at its log")))
	}
	node := s.Msg().GetNode()
	if o.seconds > 0 {
		fmt.Fprintf(c.ErrOrStderr(), "taking a %s profile of %s for %d seconds\n", o.kind, node, o.seconds)
	}
	if o.file == "-" {
		_, err := g.copyProfile(c.OutOrStdout(), s)
		return err
	}
	if o.file == "" {
		o.file = profileName(node, o.kind, time.Now())
	}
	n, err := g.writeProfile(o.file, s)
	if err != nil {
		return err
	}
	tool := "pprof"
	if o.kind == "trace" {
		tool = "trace"
	}
	fmt.Fprintf(c.OutOrStdout(), "%s profile of %s: %s (%s); look at it with: go tool %s %s\n", o.kind, node, o.file,
		size(uint64(n)), tool, o.file)
	return nil
}

// profileName is the file of a profile that got no name. A node's name may hold nothing that leads out of this
// directory.
func profileName(node, kind string, at time.Time) string {
	safe := strings.Map(func(r rune) rune {
		if r == '/' || r == 0 {
			return '_'
		}
		return r
	}, node)
	end := ".pprof"
	if kind == "trace" {
		end = ".trace"
	}
	return "skein-" + safe + "-" + kind + "-" + at.Format("20060102-150405") + end
}

// refuseTerminal keeps binary data off a terminal.
func refuseTerminal(out io.Writer, file string) error {
	switch f, ok := out.(*os.File); {
	case file == "-" && ok && term.IsTerminal(int(f.Fd())):
		return errors.New("a profile is binary, and standard output is a terminal: " +
			"name a file with -o FILE, or redirect the output")
	case file == "" || file == "-":
		return nil
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return nil // what is wrong with it shows when it is written
	}
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	if term.IsTerminal(int(f.Fd())) {
		return fmt.Errorf("a profile is binary, and %s is a terminal: name a file with -o FILE", file)
	}
	return nil
}

// writeProfile writes the stream to a file: beside it first, so that a profile that ends early leaves what was there
// before. What is not a plain file, such as a pipe, is written as it comes.
func (g *globals) writeProfile(file string, s *connect.ServerStreamForClient[skeinv1.ProfileResponse]) (int64, error) {
	if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			return 0, fmt.Errorf("write the profile: %w: name another file with -o FILE", err)
		}
		n, err := g.copyProfile(f, s)
		return n, errors.Join(err, f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".skein-profile-*") // 0600
	if err != nil {
		return 0, fmt.Errorf("write the profile: %w: name a file elsewhere with -o FILE", err)
	}
	n, err := g.copyProfile(f, s)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		os.Remove(f.Name())
		return 0, err
	}
	return n, nil
}

// copyProfile copies the bytes of all messages that follow.
func (g *globals) copyProfile(w io.Writer, s *connect.ServerStreamForClient[skeinv1.ProfileResponse]) (n int64,
	err error) {
	b := bufio.NewWriter(w)
	for s.Receive() {
		k, err := b.Write(s.Msg().GetData())
		if n += int64(k); err != nil {
			return n, fmt.Errorf("write the profile: %w", err)
		}
	}
	if err := s.Err(); err != nil {
		return n, g.plain(err)
	}
	if err := b.Flush(); err != nil {
		return n, fmt.Errorf("write the profile: %w", err)
	}
	return n, nil
}
