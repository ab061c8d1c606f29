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
	"github.com/skeinmesh/skein/imports/coil"
)

func newImportCmd(g *globals) *cobra.Command {
	return group("import", "Take over the addresses of another system", newImportCoilCmd(g))
}

func newImportCoilCmd(g *globals) *cobra.Command {
	var dry bool
	var nodes []string
	c := &cobra.Command{
		Use: "coil FILE", Short: "Take over Coil's pools and blocks",
		Long: "Take over pools and blocks of Coil v2 as kubectl prints them, or as Coil's converter from v1 wrote them;\n" +
			"FILE may be - for standard input. Blocks of a node stay that node's, reserved ones stay reserved, so that\n" +
			"running pods keep their addresses. All of it is taken over, or nothing; a second time nothing changes.\n" +
			"With namespaces in the file, Coil's annotations decide which of them a pool serves.",
		Example: "  kubectl get addresspools,addressblocks,namespaces -o yaml > coil.yaml\n  skein import coil coil.yaml --dry-run\n  skein import coil coil.yaml",
		Args:    exactly(1, "one file, or - for standard input"),
		RunE: func(c *cobra.Command, args []string) error {
			renamed, err := parseRenames(nodes)
			if err != nil {
				return err
			}
			in, err := readCoil(args[0], c.InOrStdin())
			if err != nil {
				return err
			}
			if err := renameNodes(in.Pools, renamed); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			for _, n := range in.Notes {
				fmt.Fprintln(c.ErrOrStderr(), wrap("note: "+n, 6))
			}
			in.Pools.DryRun = dry
			r, err := g.client().Import(c.Context(), &skeinv1.ImportRequest{Import: in.Pools})
			return g.show(c, r, err, func(w io.Writer) { printImport(w, r, dry) })
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "only say what would be done")
	c.Flags().StringArrayVar(&nodes, "node", nil, "COIL=SKEIN: the member SKEIN is the node that Coil calls COIL; may be repeated")
	return c
}

// readCoil reads a file or standard input, no more of it than may be.
func readCoil(name string, stdin io.Reader) (*coil.Import, error) {
	from, what := stdin, "standard input"
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from, what = f, name
	}
	data, err := io.ReadAll(io.LimitReader(from, coil.MaxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	in, err := coil.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return in, nil
}

func parseRenames(flags []string) (map[string]string, error) {
	out := map[string]string{}
	for _, f := range flags {
		from, to, ok := strings.Cut(f, "=")
		if !ok || from == "" || to == "" {
			return nil, usageError{fmt.Errorf("--node %s: want COIL=SKEIN, such as node1.example.com=node1", f)}
		}
		if _, twice := out[from]; twice {
			return nil, usageError{fmt.Errorf("--node %s: %s is named twice", f, from)}
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
			return fmt.Errorf("--node %s=%s: no block in it is of a node named %s", from, renamed[from], from)
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
