package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/imports/coil"
	"github.com/skeinmesh/skein/imports/kilo"
	"github.com/skeinmesh/skein/internal/cli"
)

func newImportCmd(g *globals) *cobra.Command {
	return cli.Group("import", "Take over from another system", newImportCoilCmd(g), newImportKiloCmd(g))
}

func newImportCoilCmd(g *globals) *cobra.Command {
	var dry bool
	var nodes []string
	var gateways map[string]string
	var host takeoverOptions
	var old replaceOptions
	c := &cobra.Command{
		Use: "coil FILE", Short: "Take over Coil's pools, blocks and egresses, and with --takeover this host's pods",
		Long: "Take over pools, blocks and egresses of Coil v2 as kubectl prints them, or as Coil's converter from v1 " +
			"wrote them;\n" +
			"FILE may be - for standard input. Blocks of a node stay that node's, reserved ones stay reserved, so that\n" +
			"running pods keep their addresses. All of it is taken over, or nothing; a second time nothing changes.\n" +
			"With namespaces in the file, Coil's annotations decide which of them a pool serves. Egresses come after them,\n" +
			"if --gateways names the hosts that take the place of Coil's egress pods. Notes say what has no counterpart.\n\n" +
			"--takeover puts skein into the place of Coil on this host, once Coil is stopped: running pods go on, new ones\n" +
			"start through skein, and Coil's network configuration, rules and routes go away. It needs blocks that were\n" +
			"imported, now or before, and root. What fails on the way is taken back, and --undo takes all of it back.\n\n" +
			"--replace replaces, through the apiserver, the pods that have addresses of blocks that Coil had reserved, as it\n" +
			"has those of its first version, and releases each block behind its last pod. One pod at a time is evicted, as " +
			"its\n" +
			"PodDisruptionBudget allows, and the next one when another pod of its controller is ready. A pod without a\n" +
			"controller would not come back: it is refused, unless --bare is given, which evicts it for good. The command " +
			"can\n" +
			"be ended at any moment, and given again. It needs the verbs list and watch of pods, and create of pods/eviction.",
		Example: "  kubectl get addresspools,addressblocks,namespaces,egresses.coil.cybozu.com -A -o yaml > coil.yaml\n" +
			"  skein import coil coil.yaml --gateways egress=yes --dry-run\n" +
			"  skein import coil coil.yaml --gateways egress=yes\n" +
			"  skein import coil --takeover --dry-run\n  skein import coil --takeover\n" +
			"  skein import coil --replace --kubeconfig admin.conf --dry-run",
		Args: cli.Between(0, 1, "one file, or - for standard input"),
		RunE: func(c *cobra.Command, args []string) error {
			if err := old.check(c, args); err != nil {
				return err
			}
			if old.replace {
				return g.replaceOld(c, old, dry)
			}
			if err := host.check(args, dry); err != nil {
				return err
			}
			renamed, err := parseRenames(nodes)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return g.takeOver(c, host, nil, dry)
			}
			in, err := readCoil(args[0], c.InOrStdin())
			if err != nil {
				return err
			}
			if err := renameNodes(in.Pools, renamed); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			in.SetGateways(gateways)
			for _, n := range in.Notes {
				fmt.Fprintln(c.ErrOrStderr(), wrap("note: "+n, 6))
			}
			in.Pools.DryRun = dry
			r, err := g.importCoil(c, in, dry)
			if err := g.show(c, r, err, func(w io.Writer) { printImport(w, r, dry) }); err != nil || !host.takeover {
				return err
			}
			return g.takeOver(c, host, in, dry)
		},
	}
	host.flags(c)
	old.flags(c)
	c.Flags().BoolVar(&dry, "dry-run", false, "only say what would be done")
	c.Flags().StringToStringVar(&gateways, "gateways", nil, "KEY=VALUE,…: members with these labels are the gateways of "+
		"the egresses")
	c.Flags().StringArrayVar(&nodes, "node", nil, "COIL=SKEIN: the member SKEIN is the node that Coil calls COIL; may "+
		"be repeated")
	return c
}

// importCoil takes over pools and blocks in one step, and then the egresses, one by one.
func (g *globals) importCoil(c *cobra.Command, in *coil.Import, dry bool) (*skeinv1.ImportResponse, error) {
	r := &skeinv1.ImportResponse{}
	if len(in.Pools.GetPools())+len(in.Pools.GetBlocks()) > 0 {
		var err error
		if r, err = g.client().Import(c.Context(), &skeinv1.ImportRequest{Import: in.Pools}); err != nil {
			return nil, err
		}
	}
	if len(in.Egresses) == 0 {
		return r, nil
	}
	have, err := g.client().Egresses(c.Context(), &skeinv1.EgressesRequest{})
	if err != nil {
		return nil, err
	}
	for _, e := range in.Egresses {
		name := e.GetNamespace() + "/" + e.GetName()
		i := slices.IndexFunc(have.GetEgresses(), func(s *skeinv1.EgressSummary) bool {
			return s.GetEgress().GetNamespace() == e.GetNamespace() && s.GetEgress().GetName() == e.GetName()
		})
		switch {
		case i >= 0 && sameEgress(have.GetEgresses()[i].GetEgress(), e):
			continue
		case i >= 0:
			return nil, fmt.Errorf("egress %s already exists with other settings: `skein egress show %s` shows them; change "+
				"or remove it, then import again", name, name)
		}
		r.Plan = append(r.Plan, fmt.Sprintf("define egress %s: %s, %d slots on members with %s", name,
			strings.Join(e.GetDestinations(), " "),
			e.GetReplicas(), labelsText(e.GetGateways())))
		r.Changed = true
		if dry {
			continue
		}
		made, err := g.client().CreateEgress(c.Context(), &skeinv1.CreateEgressRequest{Egress: e})
		if err != nil {
			return nil, fmt.Errorf("egress %s: %w", name, err)
		}
		r.Index = made.GetIndex()
		g.warn(c, made.GetWarnings())
	}
	return r, nil
}

// sameEgress compares what an import says of an egress.
func sameEgress(a, b *skeinv1.Egress) bool {
	destinations, err := events.Destinations(b.GetDestinations())
	return err == nil && slices.Equal(a.GetDestinations(), destinations) && events.Replicas(a) == events.Replicas(b) &&
		a.GetFouSourcePortAuto() == b.GetFouSourcePortAuto() && maps.Equal(a.GetGateways(), b.GetGateways())
}

// readCoil reads a file or standard input, no more of it than may be.
func readCoil(name string, stdin io.Reader) (*coil.Import, error) {
	data, what, err := readImport(name, stdin)
	if err != nil {
		return nil, err
	}
	in, err := coil.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return in, nil
}

// readImport reads a file or standard input, and says which.
func readImport(name string, stdin io.Reader) (data []byte, what string, err error) {
	from, what := stdin, "standard input"
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, name, err
		}
		defer f.Close()
		from, what = f, name
	}
	if data, err = io.ReadAll(io.LimitReader(from, coil.MaxBytes+1)); err != nil {
		return nil, what, fmt.Errorf("read %s: %w", what, err)
	}
	return data, what, nil
}

func parseRenames(flags []string) (map[string]string, error) {
	out := map[string]string{}
	for _, f := range flags {
		from, to, ok := strings.Cut(f, "=")
		if !ok || from == "" || to == "" {
			return nil, cli.UsageError{Err: fmt.Errorf("--node %s: want COIL=SKEIN, such as node1.example.com=node1", f)}
		}
		if _, twice := out[from]; twice {
			return nil, cli.UsageError{Err: fmt.Errorf("--node %s: Coil's node %s is given twice: give it once", f, from)}
		}
		out[from] = to
	}
	return out, nil
}

// renameNodes gives blocks to the members that are Coil's nodes. Each name has to be met, since a mistyped one would
// leave blocks where they must not be.
func renameNodes(in *skeinv1.ImportPools, renamed map[string]string) error {
	met := map[string]bool{}
	for _, b := range in.GetBlocks() {
		if to := renamed[b.GetNode()]; to != "" {
			met[b.GetNode()], b.Node = true, to
		}
	}
	for _, from := range slices.Sorted(maps.Keys(renamed)) {
		if !met[from] {
			return fmt.Errorf("--node %s=%s: no block in the file belongs to a node named %s: correct the name",
				from, renamed[from], from)
		}
	}
	return nil
}

func printImport(w io.Writer, r *skeinv1.ImportResponse, dry bool) {
	for _, l := range r.GetPlan() {
		fmt.Fprintln(w, wrap(l, 4))
	}
	switch {
	case !r.GetChanged():
		fmt.Fprintln(w, "nothing changes: all of it is there already")
	case dry:
		fmt.Fprintln(w, "this was a dry run: nothing has changed; repeat it without --dry-run")
	default:
		fmt.Fprintf(w, "imported, by the events up to %d\n", r.GetIndex())
	}
}

func newImportKiloCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "kilo FILE", Short: "Check what of Kilo is understood as it is, and how to move",
		Long: "Read Nodes and Peers of Kilo as kubectl prints them, and say what agents make of the Nodes' annotations, " +
			"what has\n" +
			"no counterpart, and in which order to move. FILE may be - for standard input. Nothing is changed, and no agent\n" +
			"is asked: annotations act as they are, once agents know the apiserver.",
		Example: "  kubectl get nodes,peers.kilo.squat.ai -o yaml > kilo.yaml\n  skein import kilo kilo.yaml",
		Args:    cli.Exactly(1, "one file, or - for standard input"),
		RunE: func(c *cobra.Command, args []string) error {
			data, what, err := readImport(args[0], c.InOrStdin())
			if err != nil {
				return err
			}
			r, err := kilo.Parse(data)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if g.output == "json" {
				return cli.PrintJSON(c.OutOrStdout(), r)
			}
			printKilo(c.OutOrStdout(), r)
			return nil
		},
	}
}

func printKilo(w io.Writer, r *kilo.Report) {
	if len(r.Nodes) > 0 {
		t := table{head: []string{"NODE", "SITE", "LEADER", "ENDPOINT", "INTERNAL IP", "KEEPALIVE"}}
		for _, n := range r.Nodes {
			keepalive := "-"
			if n.Keepalive > 0 {
				keepalive = fmt.Sprintf("%d s", n.Keepalive)
			}
			t.add(n.Name, dash(n.Site), yesNo(n.Leader), dash(n.Endpoint), dash(n.Internal), keepalive)
		}
		t.print(w)
	}
	if len(r.Peers) > 0 {
		t := table{head: []string{"PEER", "ALLOWED IPS", "ENDPOINT", "PUBLIC KEY"}}
		for _, p := range r.Peers {
			t.add(p.Name, dash(strings.Join(p.AllowedIPs, ",")), dash(p.Endpoint), dash(p.PublicKey))
		}
		t.print(w)
	}
	for _, n := range r.Nodes {
		for _, p := range n.Problems {
			fmt.Fprintln(w, wrap(fmt.Sprintf("Node %s: %s", n.Name, p), 6))
		}
	}
	for _, n := range r.Notes {
		fmt.Fprintln(w, wrap("note: "+n, 6))
	}
	for i, s := range r.Steps {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%d. %s", i+1, s), 3))
	}
}
