package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/imports/coil"
	"github.com/skeinmesh/skein/imports/coil/replace"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/kube"
)

// replaceOptions are the flags about Coil's old pods.
type replaceOptions struct {
	replace, bare    bool
	kubeconfig, pool string
	timeout          time.Duration
}

func (o *replaceOptions) flags(c *cobra.Command) {
	f := c.Flags()
	f.BoolVar(&o.replace, "replace", false,
		"replace the pods with addresses of blocks that Coil had reserved, and release these")
	f.BoolVar(&o.bare, "bare", false, "with --replace: evict pods without a controller, too, which nothing starts again")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "with --replace: how to reach the apiserver "+
		"(default: the configuration's kubernetes.kubeconfig, else $KUBECONFIG)")
	f.StringVar(&o.pool, "pool", "", "with --replace: only blocks of this pool")
	f.DurationVar(&o.timeout, "timeout", 5*time.Minute,
		"with --replace: how long one pod may take until another one is ready")
}

// check refuses flags that mean nothing together.
func (o *replaceOptions) check(c *cobra.Command, args []string) error {
	given := func(names ...string) string {
		for _, n := range names {
			if c.Flags().Changed(n) {
				return "--" + n
			}
		}
		return ""
	}
	if !o.replace {
		if f := given("bare", "kubeconfig", "pool", "timeout"); f != "" {
			return cli.UsageError{Err: fmt.Errorf("%s needs --replace: nothing else asks the apiserver", f)}
		}
		return nil
	}
	if f := given("takeover", "undo", "gateways", "node", "bin-dir", "conf-dir", "name"); f != "" {
		return cli.UsageError{Err: fmt.Errorf("--replace and %s cannot be used together: import and take the hosts over "+
			"first, then run `skein import coil --replace` by itself", f)}
	}
	if len(args) > 0 {
		return cli.UsageError{Err: errors.New("--replace takes no file: it works on blocks that were imported earlier")}
	}
	if o.timeout <= 0 {
		return cli.UsageError{Err: fmt.Errorf("--timeout %s: want a time such as 5m", o.timeout)}
	}
	return nil
}

// replaceOld replaces Coil's old pods and releases their blocks, or only says how.
func (g *globals) replaceOld(c *cobra.Command, o replaceOptions, dry bool) error {
	ctx := c.Context()
	blocks, err := g.coilBlocks(ctx, o.pool)
	if err != nil {
		return g.plain(err)
	}
	r := &replace.Replacement{Release: g.releaseSame, Timeout: o.timeout, Bare: o.bare}
	if len(blocks) > 0 {
		if r.Cluster, err = g.cluster(o.kubeconfig); err != nil {
			return err
		}
	}
	if g.output != "json" {
		r.Tell = func(line string) { fmt.Fprintln(c.OutOrStdout(), wrap(line, 4)) }
	}
	p, err := r.Plan(ctx, blocks)
	if err != nil {
		return err
	}
	var done replace.Result
	if !dry {
		done, err = r.Run(ctx, p)
		done.Left = slices.Concat(p.Notes, done.Left)
	}
	if g.output == "json" {
		out := replacedOld{none(p.Lines()), none(done.Done), p.Notes, done.Changed}
		if !dry {
			out.Left = done.Left
		}
		if err := cli.PrintJSON(c.OutOrStdout(), out); err != nil {
			return err
		}
	} else {
		for _, n := range p.Notes {
			if dry {
				fmt.Fprintln(c.ErrOrStderr(), wrap("note: "+n, 6))
			}
		}
		printReplace(c.OutOrStdout(), p, done, err, dry)
	}
	return left(err, done.Left)
}

// replacedOld is what was done of Coil's old pods, or would be.
type replacedOld struct {
	Plan    []string `json:"plan"`
	Done    []string `json:"done"`
	Left    []string `json:"left,omitempty"`
	Changed bool     `json:"changed"`
}

// none is a list that JSON has as one when it is empty.
func none(s []string) []string { return append([]string{}, s...) }

func printReplace(w io.Writer, p replace.Plan, done replace.Result, err error, dry bool) {
	switch {
	case p.Nothing() && len(p.Notes) == 0:
		fmt.Fprintln(w, "nothing to replace: no block is reserved for pods of Coil any more")
	case dry:
		printLines(w, p.Lines(), "")
		fmt.Fprintln(w, "this was a dry run: nothing has changed; repeat it without --dry-run")
	case err == nil && len(done.Left) == 0:
		fmt.Fprintln(w, "all pods of Coil are replaced, and their blocks released")
	}
}

// left is the error of a run that ended with one, or that has left something.
func left(err error, lines []string) error {
	if len(lines) == 0 {
		return err
	}
	what := fmt.Errorf("some of it could not be done:\n  %s", strings.Join(lines, "\n  "))
	if err == nil {
		return what
	}
	return fmt.Errorf("%w\n%w", err, what)
}

// coilBlocks are the blocks that an import has reserved since Coil had, and what of the mesh's own lies in them.
func (g *globals) coilBlocks(ctx context.Context, pool string) ([]replace.Block, error) {
	r, err := g.client().Blocks(ctx, &skeinv1.BlocksRequest{Pool: pool, Reserved: true})
	if err != nil {
		return nil, err
	}
	var out []replace.Block
	for _, v := range r.GetBlocks() {
		b := v.GetBlock()
		if b.GetNodeId() != "" || !coil.WasReserved(b.GetReason()) {
			continue
		}
		block := replace.Block{Pool: b.GetPool(), Number: b.GetNumber(), Index: b.GetIndex()}
		for _, text := range []string{b.GetIpv4(), b.GetIpv6()} {
			if p, err := netip.ParsePrefix(text); err == nil {
				block.Prefixes = append(block.Prefixes, p)
			}
		}
		if len(block.Prefixes) > 0 {
			out = append(out, block)
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return out, g.holdersIn(ctx, out)
}

// holdersIn notes which blocks hold static addresses, or addresses of egresses. A pod with one is not Coil's.
func (g *globals) holdersIn(ctx context.Context, blocks []replace.Block) error {
	hold := func(address, what, who string) {
		a, err := netip.ParseAddr(address)
		if err != nil {
			return
		}
		for i := range blocks {
			if slices.ContainsFunc(blocks[i].Prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
				blocks[i].Held = fmt.Sprintf("%s %s of %s", what, a, who)
			}
		}
	}
	statics, err := g.client().Statics(ctx, &skeinv1.StaticsRequest{})
	if err != nil {
		return err
	}
	for _, s := range statics.GetAddresses() {
		for _, a := range []string{s.GetIpv4(), s.GetIpv6()} {
			hold(a, "the static address", s.GetNamespace()+"/"+s.GetPod())
		}
	}
	egresses, err := g.client().Egresses(ctx, &skeinv1.EgressesRequest{})
	if err != nil {
		return err
	}
	for _, e := range egresses.GetEgresses() {
		for _, a := range slices.Concat(e.GetEgress().GetAddresses(), e.GetEgress().GetEndpoints()) {
			for _, text := range []string{a.GetIpv4(), a.GetIpv6()} {
				hold(text, "the address", "egress "+egressName(e.GetEgress()))
			}
		}
	}
	return nil
}

// releaseSame releases a block if the reservation is still the one that an import made.
func (g *globals) releaseSame(ctx context.Context, b replace.Block) error {
	r, err := g.client().Blocks(ctx, &skeinv1.BlocksRequest{Pool: b.Pool, Reserved: true})
	if err != nil {
		return g.plain(err)
	}
	same := func(v *skeinv1.BlockView) bool {
		have := v.GetBlock()
		return have.GetNumber() == b.Number && have.GetIndex() == b.Index && have.GetNodeId() == ""
	}
	if !slices.ContainsFunc(r.GetBlocks(), same) {
		return fmt.Errorf("%w: its reservation by event %d has changed: see `skein block list`", replace.ErrKept, b.Index)
	}
	_, err = g.client().ReleaseBlock(ctx, &skeinv1.ReleaseBlockRequest{Pool: b.Pool, Prefix: b.Prefixes[0].String()})
	if connect.CodeOf(err) == connect.CodeFailedPrecondition {
		return fmt.Errorf("%w: %w", replace.ErrKept, g.plain(err))
	}
	return g.plain(err)
}

// cluster is the apiserver that a flag, the configuration or the environment names.
func (g *globals) cluster(flag string) (replace.Cluster, error) {
	file, from := flag, "--kubeconfig"
	if file == "" {
		cfg, err := g.load()
		if err != nil {
			return nil, err
		}
		file, from = cfg.Kubernetes.Kubeconfig, "kubernetes.kubeconfig of the configuration"
	}
	if file == "" {
		file, from = os.Getenv("KUBECONFIG"), "KUBECONFIG"
	}
	switch {
	case file == "":
		return nil, errors.New("no kubeconfig is named: give --kubeconfig FILE, or set KUBECONFIG")
	case from == "KUBECONFIG" && len(filepath.SplitList(file)) > 1:
		return nil, fmt.Errorf("KUBECONFIG names several files, %s: give one of them with --kubeconfig", file)
	}
	d, err := kube.Dial(file)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s (by %s): %w: correct it, or name another one with --kubeconfig",
			file, from, err)
	}
	return replace.Kubernetes{Client: d}, nil
}
