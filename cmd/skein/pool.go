package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newPoolCmd(g *globals) *cobra.Command {
	return cli.Group("pool", "Pools of addresses for pods",
		newPoolCreateCmd(g), newPoolListCmd(g), newPoolShowCmd(g), newPoolExtendCmd(g), newPoolSetCmd(g), newPoolDrainCmd(g),
		newPoolRemoveCmd(g))
}

const onePool = "one pool's name"

func newPoolCreateCmd(g *globals) *cobra.Command {
	var subnets []string
	var bits uint32
	var rules poolRules
	c := &cobra.Command{
		Use: "create NAME", Short: "Make a pool",
		Long: "Make a pool of addresses. Nodes take blocks of it, and give their pods addresses out of these. The pool\n" +
			"named default serves every namespace that has no pool of its own.",
		Example: "  skein pool create default --subnet 10.64.0.0/16,fd00:64::/112\n" +
			"  skein pool create public --subnet 192.0.2.64/28 --block-size-bits 0 --namespace ingress --quota ingress=8",
		Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			pool, _, err := rules.read(c.Flags())
			if err != nil {
				return err
			}
			pool.Name, pool.BlockSizeBits = args[0], bits
			if pool.Subnets, err = parseSubnets(subnets); err != nil {
				return err
			}
			r, err := g.client().CreatePool(c.Context(), &skeinv1.CreatePoolRequest{Pool: pool})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintln(w, wrap(fmt.Sprintf("pool %s created by event %d: %s, in blocks of %s", args[0],
					r.GetPool().GetCreatedIndex(), subnetsText(r.GetPool().GetSubnets(), ", "),
					addresses(r.GetPool().GetBlockSizeBits())), 4))
			})
		},
	}
	subnetFlag(c, &subnets)
	c.Flags().Uint32Var(&bits, "block-size-bits", 5, "a block has 2^N addresses")
	rules.flags(c.Flags())
	return c
}

func newPoolExtendCmd(g *globals) *cobra.Command {
	var subnets []string
	c := &cobra.Command{
		Use: "extend NAME", Short: "Add subnets to a pool", Example: "  skein pool extend default --subnet " +
			"10.65.0.0/16,fd00:65::/112",
		Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			add, err := parseSubnets(subnets)
			if err != nil {
				return err
			}
			r, err := g.client().ChangePool(c.Context(), &skeinv1.ChangePoolRequest{Change: &skeinv1.ChangePool{Name: args[0],
				AddSubnets: add}})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintln(w, wrap(fmt.Sprintf("pool %s extended, as of event %d: %s", args[0], r.GetIndex(),
					subnetsText(r.GetPool().GetSubnets(), ", ")), 4))
			})
		},
	}
	subnetFlag(c, &subnets)
	return c
}

func newPoolSetCmd(g *globals) *cobra.Command {
	var rules poolRules
	c := &cobra.Command{
		Use: "set NAME", Short: "Change a pool's rules",
		Long: "Change a pool's rules. Each flag replaces what was there; \"\" empties a list, and 0 ends a limit or a time.",
		Example: "  skein pool set default --cooldown 5m --sticky 10m\n" +
			"  skein pool set public --namespace ingress --namespace mail --quota ''",
		Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			set, fields, err := rules.read(c.Flags())
			if err != nil {
				return err
			}
			if len(fields) == 0 {
				return cli.UsageError{Err: fmt.Errorf("nothing to set; see `%s --help`", c.CommandPath())}
			}
			r, err := g.client().ChangePool(c.Context(), &skeinv1.ChangePoolRequest{Change: &skeinv1.ChangePool{Name: args[0],
				Set: set, Fields: fields}})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "pool %s changed, as of event %d\n", args[0], r.GetIndex())
			})
		},
	}
	rules.flags(c.Flags())
	return c
}

func newPoolDrainCmd(g *globals) *cobra.Command {
	var undo bool
	c := &cobra.Command{
		Use: "drain NAME", Short: "Take nothing new from a pool", Example: "  skein pool drain old\n  skein pool drain old " +
			"--undo",
		Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := g.client().ChangePool(c.Context(), &skeinv1.ChangePoolRequest{Change: &skeinv1.ChangePool{
				Name: args[0], Set: &skeinv1.Pool{Draining: !undo}, Fields: []string{"draining"}}})
			return g.show(c, r, err, func(w io.Writer) {
				if undo {
					fmt.Fprintf(w, "pool %s gives addresses again, as of event %d\n", args[0], r.GetIndex())
					return
				}
				fmt.Fprintln(w, wrap(fmt.Sprintf("pool %s gives nothing new, as of event %d; pods keep what they have until they "+
					"end (see `skein pool show %s`)", args[0], r.GetIndex(), args[0]), 4))
			})
		},
	}
	c.Flags().BoolVar(&undo, "undo", false, "let it give addresses again")
	return c
}

func newPoolListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "All pools and how full they are",
		Example: "  skein pool list\n  skein pool list -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Pools(c.Context(), &skeinv1.PoolsRequest{})
			return g.show(c, r, err, func(w io.Writer) { printPools(w, r.GetPools()) })
		},
	}
}

func newPoolShowCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "All about a pool: use, holders, quotas, static addresses",
		Example: "  skein pool show default", Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			v, err := g.poolOf(c.Context(), args[0])
			r := &skeinv1.PoolsResponse{Pools: []*skeinv1.PoolView{v}}
			return g.show(c, r, err, func(w io.Writer) { printPool(w, v, g.names(c)) })
		},
	}
}

// poolRules are the flags that create and set have in common.
type poolRules struct {
	cooldown, sticky            time.Duration
	maxBlocks                   uint32
	namespaces, allowed, quotas []string
}

func (p *poolRules) flags(f *pflag.FlagSet) {
	f.DurationVar(&p.cooldown, "cooldown", 0, "how long an address or block rests after it was given back")
	f.DurationVar(&p.sticky, "sticky", 0, "how long an address waits for the same pod to come back to its node")
	f.Uint32Var(&p.maxBlocks, "max-blocks-per-node", 0, "blocks that one node may have (0: no limit)")
	f.StringSliceVar(&p.namespaces, "namespace", nil, "a namespace whose pods get addresses from here; may be repeated")
	f.StringSliceVar(&p.allowed, "allow", nil, "a namespace whose pods may ask for this pool by name, * for all; may be "+
		"repeated")
	f.StringSliceVar(&p.quotas, "quota", nil, "NAMESPACE=N: addresses that it may have from here, in the whole cluster; "+
		"may be repeated")
}

// read gives the rules, and the names of those that were given.
func (p *poolRules) read(f *pflag.FlagSet) (pool *skeinv1.Pool, fields []string, err error) {
	pool = &skeinv1.Pool{MaxBlocksPerNode: p.maxBlocks, Namespaces: present(p.namespaces), Allowed: present(p.allowed)}
	if pool.CooldownSeconds, err = wholeSeconds("--cooldown", p.cooldown); err != nil {
		return nil, nil, err
	}
	if pool.StickySeconds, err = wholeSeconds("--sticky", p.sticky); err != nil {
		return nil, nil, err
	}
	for _, q := range present(p.quotas) {
		ns, count, _ := strings.Cut(q, "=")
		n, err := strconv.ParseUint(count, 10, 32)
		if ns == "" || err != nil {
			return nil, nil, cli.UsageError{Err: fmt.Errorf("--quota %s: want NAMESPACE=N, such as ingress=8", q)}
		}
		if _, twice := pool.Quotas[ns]; twice {
			return nil, nil, cli.UsageError{Err: fmt.Errorf("--quota %s: namespace %s has two quotas: give one", q, ns)}
		}
		if pool.Quotas == nil {
			pool.Quotas = map[string]uint32{}
		}
		pool.Quotas[ns] = uint32(n)
	}
	for _, k := range []struct{ flag, field string }{
		{"cooldown", "cooldown_seconds"}, {"sticky", "sticky_seconds"}, {"max-blocks-per-node", "max_blocks_per_node"},
		{"namespace", "namespaces"}, {"allow", "allowed"}, {"quota", "quotas"},
	} {
		if f.Changed(k.flag) {
			fields = append(fields, k.field)
		}
	}
	return pool, fields, nil
}

// present leaves out empty words: --namespace "" empties a list.
func present(words []string) []string {
	return slices.DeleteFunc(slices.Clone(words), func(s string) bool { return s == "" })
}

func wholeSeconds(flag string, d time.Duration) (uint32, error) {
	if d < 0 || d%time.Second != 0 || d/time.Second > math.MaxUint32 {
		return 0, cli.UsageError{Err: fmt.Errorf("%s %s: want whole seconds, such as 90s or 5m", flag, d)}
	}
	return uint32(d / time.Second), nil
}

func subnetFlag(c *cobra.Command, to *[]string) {
	c.Flags().StringArrayVar(to, "subnet", nil, "V4, V6, or V4,V6 with as many addresses each; may be repeated")
}

// parseSubnets reads the --subnet flags. Whether subnets fit to one another, and to what there is, is the leader's to
// say.
func parseSubnets(flags []string) ([]*skeinv1.PoolSubnet, error) {
	if len(flags) == 0 {
		return nil, cli.UsageError{Err: errors.New("--subnet is missing: name at least one, such as --subnet " +
			"10.64.0.0/16,fd00:64::/112")}
	}
	var out []*skeinv1.PoolSubnet
	for _, flag := range flags {
		s := &skeinv1.PoolSubnet{}
		for part := range strings.SplitSeq(flag, ",") {
			p, err := netip.ParsePrefix(strings.TrimSpace(part))
			if err != nil || p.Addr().Is4In6() {
				return nil, cli.UsageError{Err: fmt.Errorf("--subnet %s: %q is not a subnet; write one such as 10.64.0.0/16, "+
					"or 10.64.0.0/16,fd00:64::/112", flag, part)}
			}
			to := &s.Ipv6
			if p.Addr().Is4() {
				to = &s.Ipv4
			}
			if *to != "" {
				return nil, cli.UsageError{Err: fmt.Errorf("--subnet %s: a comma joins one IPv4 and one IPv6 subnet; repeat "+
					"--subnet for "+
					"more", flag)}
			}
			*to = p.String()
		}
		out = append(out, s)
	}
	return out, nil
}

// prefixes is a pair of prefixes or addresses, of which one may be missing.
func prefixes(ipv4, ipv6 string) string { return dash(strings.TrimSpace(ipv4 + " " + ipv6)) }

func subnetsText(subnets []*skeinv1.PoolSubnet, sep string) string {
	var out []string
	for _, s := range subnets {
		out = append(out, prefixes(s.GetIpv4(), s.GetIpv6()))
	}
	return strings.Join(out, sep)
}

// addresses is how many a block has.
func addresses(bits uint32) string {
	switch {
	case bits == 0:
		return "1 address"
	case bits < 32:
		return fmt.Sprintf("%d addresses", uint64(1)<<bits)
	}
	return fmt.Sprintf("2^%d addresses", bits)
}

func printPools(w io.Writer, pools []*skeinv1.PoolView) {
	if len(pools) == 0 {
		fmt.Fprintln(w, "there are no pools: make one with `skein pool create default --subnet …`")
		return
	}
	t := table{head: []string{"NAME", "BLOCKS", "OWNED", "RESERVED", "RESTING", "FREE", "NODES", "HERE",
		"STATE", "SUBNETS"}}
	for _, v := range pools {
		here := "-"
		if l := v.GetLocal(); l != nil {
			here = fmt.Sprintf("%d/%d", l.GetUsed(), l.GetUsed()+l.GetFree()+l.GetResting())
		}
		state := "ready"
		switch {
		case v.GetPool().GetDraining():
			state = "draining"
		case v.GetFree() == 0:
			state = "full"
		}
		t.add(v.GetPool().GetName(), blocksText(v.GetBlocks()), fmt.Sprint(v.GetOwned()), fmt.Sprint(v.GetReserved()),
			fmt.Sprint(v.GetResting()),
			blocksText(v.GetFree()), fmt.Sprint(v.GetNodes()), here, state, subnetsText(v.GetPool().GetSubnets(), ", "))
	}
	t.print(w)
}

// blocksText shortens what IPv6 makes of a count.
func blocksText(n uint64) string {
	if n < 1e9 {
		return fmt.Sprint(n)
	}
	return ">10⁹"
}

func printPool(w io.Writer, v *skeinv1.PoolView, names *strings.Replacer) {
	p := v.GetPool()
	line := func(k, format string, a ...any) {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", k, fmt.Sprintf(format, a...)), 11))
	}
	what := "serves namespaces that are given it"
	if p.GetName() == "default" {
		what = "serves every namespace that has no pool of its own"
	}
	if p.GetDraining() {
		what = "draining: nothing new is taken from it"
	}
	line("pool", "%s, %s", p.GetName(), what)
	for i, s := range p.GetSubnets() {
		line(only(i == 0, "subnets"), "%s", prefixes(s.GetIpv4(), s.GetIpv6()))
	}
	line("blocks", "%s of %s: %d owned by %s, %d reserved, %d resting, %s free", blocksText(v.GetBlocks()),
		addresses(p.GetBlockSizeBits()), v.GetOwned(),
		plural(int(v.GetNodes()), "node"), v.GetReserved(), v.GetResting(), blocksText(v.GetFree()))
	line("rules", "%s", rulesText(p))
	if len(p.GetNamespaces()) > 0 {
		line("serves", "%s", strings.Join(p.GetNamespaces(), ", "))
	}
	if len(p.GetAllowed()) > 0 {
		line("allows", "%s, when a pod's network asks for it", strings.ReplaceAll(strings.Join(p.GetAllowed(), ", "), "*",
			"every namespace"))
	}
	for i, text := range quotaTexts(v, names) {
		line(only(i == 0, "quotas"), "%s", text)
	}
	if l := v.GetLocal(); l != nil {
		line("here", "%s: %d addresses used, %d free, %d resting", plural(int(l.GetBlocks()), "block"), l.GetUsed(),
			l.GetFree(), l.GetResting())
	}
	line("created", "%s, by event %d", instant(p.GetCreatedAt()), p.GetCreatedIndex())
	if len(v.GetHolders()) > 0 {
		t := table{head: []string{"NODE", "ID", "BLOCKS"}}
		for _, h := range v.GetHolders() {
			t.add(dash(h.GetName()), h.GetNodeId(), fmt.Sprint(h.GetBlocks()))
		}
		t.print(w)
	}
	if len(v.GetStatics()) > 0 {
		printStatics(w, v.GetStatics(), names)
	}
}

// rulesText tells times and limits in words.
func rulesText(p *skeinv1.Pool) string {
	after := func(seconds uint32, none, some string) string {
		if seconds == 0 {
			return none
		}
		return some + " " + span(seconds)
	}
	limit := "no limit of blocks per node"
	if n := p.GetMaxBlocksPerNode(); n > 0 {
		limit = fmt.Sprintf("at most %s per node", plural(int(n), "block"))
	}
	return strings.Join([]string{after(p.GetCooldownSeconds(), "no cooldown", "cooldown"),
		after(p.GetStickySeconds(), "not sticky", "sticky for"), limit}, ", ")
}

// span is whole seconds without empty units: 5m and not 5m0s.
func span(seconds uint32) string {
	s := (time.Duration(seconds) * time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// quotaTexts are the quotas and who has what of them, a namespace each.
func quotaTexts(v *skeinv1.PoolView, names *strings.Replacer) []string {
	granted := map[string][]*skeinv1.Grant{}
	all := map[string]bool{}
	for ns := range v.GetPool().GetQuotas() {
		all[ns] = true
	}
	for _, grant := range v.GetGrants() {
		granted[grant.GetNamespace()], all[grant.GetNamespace()] = append(granted[grant.GetNamespace()], grant), true
	}
	var out []string
	for _, ns := range slices.Sorted(maps.Keys(all)) {
		sum, who := uint32(0), []string{}
		for _, grant := range granted[ns] {
			sum += grant.GetAddresses()
			who = append(who, fmt.Sprintf("%s %d", names.Replace(grant.GetNodeId()), grant.GetAddresses()))
		}
		text := ns + " has no quota"
		if quota, ok := v.GetPool().GetQuotas()[ns]; ok {
			text = fmt.Sprintf("%s %d", ns, quota)
		}
		text += fmt.Sprintf(", of which %d are granted", sum)
		if len(who) > 0 {
			text += ": " + strings.Join(who, ", ")
		}
		out = append(out, text)
	}
	return out
}

func only(is bool, s string) string {
	if is {
		return s
	}
	return ""
}

func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// instant is a time to the second, for what the log says.
func instant(ns int64) string {
	return cmp.Or(only(ns != 0, time.Unix(0, ns).Format("2006-01-02 15:04:05")), "never")
}
