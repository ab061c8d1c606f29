package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent/cniserver"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/imports/coil"
	"github.com/skeinmesh/skein/imports/coil/takeover"
	"github.com/skeinmesh/skein/internal/cli"
)

// takeoverOptions are the flags about this host.
type takeoverOptions struct {
	takeover, undo bool
	install        cni.Install
}

func (o *takeoverOptions) flags(c *cobra.Command) {
	f := c.Flags()
	f.BoolVar(&o.takeover, "takeover", false, "put skein into the place of Coil on this host; FILE may be left out")
	f.BoolVar(&o.undo, "undo", false, "with --takeover: bring Coil's side of this host back as it was")
	f.StringVar(&o.install.BinDir, "bin-dir", cni.DefaultBinDir, "with --takeover: directory of plugins")
	f.StringVar(&o.install.ConfDir, "conf-dir", cni.DefaultConfDir,
		"with --takeover: directory of network configurations")
	f.StringVar(&o.install.Name, "name", "skein", "with --takeover: name of the network")
}

// check refuses flags that mean nothing together.
func (o *takeoverOptions) check(args []string, dry bool) error {
	switch {
	case o.undo && !o.takeover:
		return cli.UsageError{Err: fmt.Errorf("--undo needs --takeover: to undo an import, use `skein pool remove`")}
	case o.undo && (dry || len(args) > 0):
		return cli.UsageError{Err: fmt.Errorf("--undo takes no file and no --dry-run")}
	case !o.takeover && len(args) == 0:
		return cli.UsageError{Err: fmt.Errorf(
			"skein import coil takes one file, or - for standard input, or --takeover, or " +
				"--replace; see " +
				"`skein import coil --help`")}
	}
	return nil
}

// takeOver takes this host over, or only says how. With a file in a dry run, its blocks count as imported.
func (g *globals) takeOver(c *cobra.Command, o takeoverOptions, in *coil.Import, dry bool) error {
	cfg, err := g.load()
	if err != nil {
		return err
	}
	if o.install.Program, err = os.Executable(); err != nil {
		return fmt.Errorf("find the skein program: %w", err)
	}
	o.install.Socket = filepath.Join(cfg.RunDir, cniserver.SocketName)
	t := &takeover.Takeover{
		StateDir: cfg.StateDir, Numbers: cfg.Dataplane.Numbers(), Install: o.install, Known: g.knownPods,
		Log: func(ctx context.Context) (takeover.Log, error) { return g.agreedBlocks(ctx, in) },
	}
	if o.undo {
		return g.giveBack(c, t)
	}
	p, err := t.Plan(c.Context())
	if err != nil {
		return err
	}
	if !dry {
		if err := t.Run(c.Context(), p); err != nil {
			return err
		}
	}
	if g.output == "json" {
		return cli.PrintJSON(c.OutOrStdout(), tookOver{p.Lines(), p.Notes, !dry && !p.Nothing()})
	}
	for _, n := range p.Notes {
		fmt.Fprintln(c.ErrOrStderr(), wrap("note: "+n, 6))
	}
	printTakeover(c.OutOrStdout(), p, dry)
	return nil
}

// tookOver is what was done on this host, or would be.
type tookOver struct {
	Plan    []string `json:"plan"`
	Notes   []string `json:"notes,omitempty"`
	Changed bool     `json:"changed"`
}

func printTakeover(w io.Writer, p takeover.Plan, dry bool) {
	for _, l := range p.Lines() {
		fmt.Fprintln(w, wrap(l, 4))
	}
	switch {
	case p.Nothing():
		fmt.Fprintln(w, "nothing of Coil is left on this host, but for the links of pods that it has made")
	case dry:
		fmt.Fprintln(w, "this was a dry run: nothing has changed on this host; repeat it without --dry-run")
	default:
		fmt.Fprintln(w, "taken over: pods of this host start through skein; to go back: skein import coil --takeover --undo")
	}
}

// giveBack undoes a takeover, and says which pods Coil will not know.
func (g *globals) giveBack(c *cobra.Command, t *takeover.Takeover) error {
	if err := t.Undo(); err != nil {
		return err
	}
	fmt.Fprintln(c.OutOrStdout(), "Coil's network configuration, rules and routes are as they were before the takeover")
	r, err := g.client().Pods(c.Context(), &skeinv1.PodsRequest{})
	if err != nil {
		return err
	}
	n := 0
	for _, p := range r.GetPods() {
		if p.GetHolder().GetState() == "used" {
			n++
		}
	}
	if n > 0 {
		fmt.Fprintln(c.ErrOrStderr(), wrap(fmt.Sprintf("note: Coil does not know %s of this host that skein has started: "+
			"replace them; skein ip list shows them", plural(n, "pod")), 6))
	}
	return nil
}

// knownPods are the addresses of pods that the agent of this host knows.
func (g *globals) knownPods(ctx context.Context) (map[netip.Addr]bool, error) {
	r, err := g.client().Pods(ctx, &skeinv1.PodsRequest{Look: true})
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]bool{}
	for _, p := range r.GetPods() {
		for _, text := range []string{p.GetHolder().GetIpv4(), p.GetHolder().GetIpv6()} {
			if a, err := netip.ParseAddr(text); err == nil && p.GetHolder().GetUntil() == 0 {
				out[a] = true
			}
		}
	}
	return out, nil
}

// agreedBlocks is what the log says of this host's blocks, and what an import would add.
func (g *globals) agreedBlocks(ctx context.Context, in *coil.Import) (l takeover.Log, err error) {
	st, err := g.client().Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		return l, err
	}
	l.Node = st.GetName()
	r, err := g.client().Blocks(ctx, &skeinv1.BlocksRequest{})
	if err != nil {
		return l, err
	}
	add := func(own, reserved bool, texts ...string) {
		for _, text := range texts {
			switch p, err := netip.ParsePrefix(text); {
			case err != nil:
			case own:
				l.Blocks = append(l.Blocks, p)
			case reserved:
				l.Reserved = append(l.Reserved, p)
			}
		}
	}
	for _, b := range r.GetBlocks() {
		node := b.GetBlock().GetNodeId()
		add(node == st.GetNodeId(), node == "", b.GetBlock().GetIpv4(), b.GetBlock().GetIpv6())
	}
	if in != nil {
		for _, b := range in.Pools.GetBlocks() {
			add(b.GetNode() == l.Node, b.GetNode() == "", b.GetIpv4(), b.GetIpv6())
		}
	}
	return l, nil
}
