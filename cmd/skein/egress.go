package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newEgressCmd(g *globals) *cobra.Command {
	return cli.Group("egress", "Ways out of the mesh with an address of their own",
		newEgressCreateCmd(g), newEgressListCmd(g), newEgressShowCmd(g), newEgressUpdateCmd(g), newEgressRemoveCmd(g),
		newEgressAttachCmd(g), newEgressDetachCmd(g))
}

const (
	oneEgress        = "one egress's name, such as nat or internet/nat"
	defaultNamespace = "default"
)

func newEgressCreateCmd(g *globals) *cobra.Command {
	var rules egressRules
	c := &cobra.Command{
		Use: "create [NAMESPACE/]NAME", Short: "Define an egress",
		Long: "Define an egress: a way out for those pods and hosts that ask for it. Their packets for its destinations " +
			"go\n" +
			"through tunnels to gateway nodes, which are those with all the labels, and leave from there with another\n" +
			"source address: the slot's own, or the gateway node's. Each of its slots has one owner at a time.",
		Example: "  skein egress create nat --destination 0.0.0.0/0,::/0 --gateway-label egress=yes --replicas 2\n" +
			"  skein egress create internet/nat --destination 0.0.0.0/0 --gateway-label egress=yes --address 192.0.2.7 --pool " +
			"public\n" +
			"  skein egress create lab/net --destination 192.168.10.0/24 --gateway-label site=lab --probe icmp:192.168.10.1",
		Args: cli.Exactly(1, oneEgress),
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := parseEgress(args[0])
			if err != nil {
				return err
			}
			e, _, err := rules.read(c.Flags())
			switch {
			case err != nil:
				return err
			case len(e.GetDestinations()) == 0:
				return cli.UsageError{Err: errors.New("--destination is missing: name at least one, such as --destination " +
					"0.0.0.0/0,::/0 " +
					"for everything outside the mesh")}
			case len(e.GetGateways()) == 0:
				return cli.UsageError{Err: errors.New("--gateway-label is missing: name the labels of the nodes that are to " +
					"be gateways, such as --gateway-label egress=yes")}
			}
			e.Namespace, e.Name, e.Pool = namespace, name, rules.pool
			r, err := g.client().CreateEgress(c.Context(), &skeinv1.CreateEgressRequest{Egress: e})
			g.warn(c, r.GetWarnings())
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintln(w, wrap(fmt.Sprintf("egress %s defined by event %d: %s to %s", egressName(r.GetEgress()),
					r.GetEgress().GetCreatedIndex(),
					plural(int(r.GetEgress().GetReplicas()), "slot"), strings.Join(r.GetEgress().GetDestinations(), ", ")), 4))
			})
		},
	}
	rules.flags(c.Flags())
	c.Flags().StringVar(&rules.pool, "pool", "default", "where the tunnels' endpoints are taken from")
	return c
}

func newEgressUpdateCmd(g *globals) *cobra.Command {
	var rules egressRules
	c := &cobra.Command{
		Use: "update [NAMESPACE/]NAME", Short: "Change an egress, and show what moves",
		Long: "Change an egress. Each flag replaces what was there; --address '' and --probe '' empty their lists, --lease " +
			"0\n" +
			"is the default again. Clients that run take it over as they are; slots that have to move take their\n" +
			"connections along where their source address goes with them.",
		Example: "  skein egress update nat --replicas 3\n  skein egress update nat --destination 192.0.2.0/24 " +
			"--fou-source-port-auto",
		Args: cli.Exactly(1, oneEgress),
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := parseEgress(args[0])
			if err != nil {
				return err
			}
			set, fields, err := rules.read(c.Flags())
			if err != nil {
				return err
			}
			if len(fields) == 0 {
				return cli.UsageError{Err: fmt.Errorf("nothing to change; see `%s --help`", c.CommandPath())}
			}
			r, err := g.client().ChangeEgress(c.Context(),
				&skeinv1.ChangeEgressRequest{Change: &skeinv1.ChangeEgress{Namespace: namespace, Name: name, Set: set,
					Fields: fields}})
			g.warn(c, r.GetWarnings())
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "egress %s/%s changed, as of event %d\n", namespace, name, r.GetIndex())
				printLines(w, r.GetMoves(), "no slot moves")
			})
		},
	}
	rules.flags(c.Flags())
	return c
}

func newEgressRemoveCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "remove [NAMESPACE/]NAME", Short: "Remove an egress: its clients' packets for its destinations find no way out",
		Example: "  skein egress remove internet/nat", Args: cli.Exactly(1, oneEgress),
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := parseEgress(args[0])
			if err != nil {
				return err
			}
			r, err := g.client().RemoveEgress(c.Context(), &skeinv1.RemoveEgressRequest{Namespace: namespace, Name: name})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "egress %s/%s removed, as of event %d\n", namespace, name, r.GetIndex())
			})
		},
	}
}

func newEgressListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "All egresses and who owns their slots", Example: "  skein egress list\n  skein egress list -o " +
			"json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Egresses(c.Context(), &skeinv1.EgressesRequest{})
			return g.show(c, r, err, func(w io.Writer) { printEgresses(w, r.GetEgresses()) })
		},
	}
}

func newEgressShowCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "show [NAMESPACE/]NAME", Short: "All about an egress: slots, gateways, clients",
		Example: "  skein egress show internet/nat\n  skein egress show nat -o json", Args: cli.Exactly(1, oneEgress),
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := findEgress(args[0])
			if err != nil {
				return err
			}
			r, err := g.client().ShowEgress(c.Context(), &skeinv1.ShowEgressRequest{Namespace: namespace, Name: name})
			return g.show(c, r, err, func(w io.Writer) { printEgress(w, r, g.names(c)) })
		},
	}
}

func newEgressAttachCmd(g *globals) *cobra.Command {
	var container string
	c := &cobra.Command{
		Use: "attach [NAMESPACE/]POD EGRESS…", Short: "Let a running pod of this host use egresses",
		Long: "Let a running pod of this host use egresses, besides those that its annotations named when it started. The\n" +
			"first named comes first where two have the same destination.",
		Example: "  skein egress attach web/nginx-1 internet/nat\n  skein egress attach nginx-1 nat lab/net",
		Args:    cli.Between(2, 64, "a pod and one or more egresses"),
		RunE:    func(c *cobra.Command, args []string) error { return g.attach(c, args, container, false) },
	}
	c.Flags().StringVar(&container, "container", "", "the container's ID, where two pods have the same name")
	return c
}

func newEgressDetachCmd(g *globals) *cobra.Command {
	var container string
	c := &cobra.Command{
		Use: "detach [NAMESPACE/]POD EGRESS…", Short: "End that a running pod of this host uses egresses",
		Example: "  skein egress detach web/nginx-1 internet/nat", Args: cli.Between(2, 64, "a pod and one or more egresses"),
		RunE: func(c *cobra.Command, args []string) error { return g.attach(c, args, container, true) },
	}
	c.Flags().StringVar(&container, "container", "", "the container's ID, where two pods have the same name")
	return c
}

// attach adds egresses to a pod, or takes them from it.
func (g *globals) attach(c *cobra.Command, args []string, container string, detach bool) error {
	namespace, pod, err := parseName(args[0], "pod")
	if err != nil {
		return err
	}
	r := &skeinv1.AttachEgressRequest{Namespace: namespace, Pod: pod, ContainerId: container, Detach: detach}
	for _, text := range args[1:] {
		ns, name, err := parseEgress(text)
		if err != nil {
			return err
		}
		r.Egresses = append(r.Egresses, ns+"/"+name)
	}
	answer, err := g.client().AttachEgress(c.Context(), r)
	return g.show(c, answer, err, func(w io.Writer) { printAttached(w, namespace+"/"+pod, answer.GetEgresses()) })
}

// warn tells beside the answer what a user should know of it.
func (g *globals) warn(c *cobra.Command, warnings []string) {
	for _, text := range warnings {
		fmt.Fprintln(c.ErrOrStderr(), wrap("warning: "+text, 4))
	}
}

// parseEgress reads [NAMESPACE/]NAME; without a namespace it is default.
func parseEgress(s string) (namespace, name string, err error) { return parseName(s, "egress") }

// findEgress is parseEgress for those who look: without a namespace it is the only one of that name.
func findEgress(s string) (namespace, name string, err error) {
	namespace, name, err = parseEgress(s)
	if !strings.Contains(s, "/") {
		namespace = ""
	}
	return namespace, name, err
}

func parseName(s, what string) (namespace, name string, err error) {
	namespace, name, ok := strings.Cut(s, "/")
	if !ok {
		namespace, name = defaultNamespace, s
	}
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", "", cli.UsageError{Err: fmt.Errorf("%s %q: want NAME or NAMESPACE/NAME", what, s)}
	}
	return namespace, name, nil
}

// egressRules are the flags that create and update have in common.
type egressRules struct {
	destinations, labels, addresses, probes []string
	replicas                                uint32
	auto                                    bool
	lease, drain                            time.Duration
	pool, spread                            string
}

func (r *egressRules) flags(f *pflag.FlagSet) {
	f.StringSliceVar(&r.destinations, "destination", nil, "a network to reach through it, 0.0.0.0/0 and ::/0 for all "+
		"outside the mesh; may be repeated")
	f.StringSliceVar(&r.labels, "gateway-label", nil, "KEY=VALUE: a label that nodes need to be its gateways; may be "+
		"repeated")
	f.Uint32Var(&r.replicas, "replicas", 1, "slots: gateways that work at the same time")
	f.StringArrayVar(&r.addresses, "address", nil, "V4, V6 or V4,V6: source address of a slot; once for each slot, or "+
		"never: the gateway node's own")
	f.BoolVar(&r.auto, "fou-source-port-auto", false, "let the tunnels' source port follow from the flow, for routers "+
		"that spread by ports")
	f.DurationVar(&r.lease, "lease", 0, "how long a gateway goes on without the leader (0: 1.2s)")
	f.DurationVar(&r.drain, "drain", 0, "how long slots go on at most for the flows by them, when there are fewer "+
		"replicas (0: 10m)")
	f.StringVar(&r.spread, "spread", "client", "what is spread over the slots: client, each with all its flows, or "+
		"flow, each by itself")
	f.StringSliceVar(&r.probes, "probe", nil, "icmp:ADDRESS or tcp:ADDRESS:PORT behind it, by which its gateways are "+
		"judged; may be repeated")
}

// read gives the egress, and the names of the fields that were given. Whether they fit is the leader's to say.
func (r *egressRules) read(f *pflag.FlagSet) (e *skeinv1.Egress, fields []string, err error) {
	e = &skeinv1.Egress{Replicas: r.replicas, FouSourcePortAuto: r.auto}
	if f.Changed("replicas") && r.replicas == 0 {
		return nil, nil,
			cli.UsageError{Err: errors.New("--replicas 0: an egress has at least one slot; `skein egress remove` removes it")}
	}
	for _, text := range present(r.destinations) {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil || p.Addr().Is4In6() {
			return nil, nil, cli.UsageError{Err: fmt.Errorf("--destination %s: this is not a network; write one such "+
				"as 192.0.2.0/24, or 0.0.0.0/0 for everything", text)}
		}
		e.Destinations = append(e.Destinations, p.String())
	}
	if e.Gateways, err = parseLabels(present(r.labels)); err != nil {
		return nil, nil, err
	}
	for _, text := range present(r.addresses) {
		a, err := parseSource(text)
		if err != nil {
			return nil, nil, err
		}
		e.Addresses = append(e.Addresses, a)
	}
	if r.lease < 0 || r.lease%time.Millisecond != 0 || r.lease/time.Millisecond > math.MaxUint32 {
		return nil, nil, cli.UsageError{Err: fmt.Errorf("--lease %s: want whole milliseconds, such as 1.2s", r.lease)}
	}
	e.LeaseMillis = uint32(r.lease / time.Millisecond)
	if r.drain < 0 || r.drain%time.Millisecond != 0 || r.drain/time.Millisecond > math.MaxUint32 {
		return nil, nil, cli.UsageError{Err: fmt.Errorf("--drain %s: want whole milliseconds, such as 10m", r.drain)}
	}
	e.DrainMillis = uint32(r.drain / time.Millisecond)
	if f.Changed("spread") {
		e.Spread = r.spread
	}
	for _, text := range present(r.probes) {
		if err := checkProbe(text); err != nil {
			return nil, nil, err
		}
		e.Probes = append(e.Probes, text)
	}
	for _, k := range []struct{ flag, field string }{
		{"destination", "destinations"}, {"gateway-label", "gateways"}, {"replicas", "replicas"}, {"address", "addresses"},
		{"fou-source-port-auto", "fou_source_port_auto"}, {"lease", "lease_millis"}, {"drain", "drain_millis"},
		{"spread", "spread"}, {"probe", "probes"},
	} {
		if f.Changed(k.flag) {
			fields = append(fields, k.field)
		}
	}
	return e, fields, nil
}

func parseLabels(texts []string) (map[string]string, error) {
	out := map[string]string{}
	for _, text := range texts {
		k, v, ok := strings.Cut(text, "=")
		if !ok || k == "" {
			return nil, cli.UsageError{Err: fmt.Errorf("--gateway-label %s: want KEY=VALUE, such as egress=yes", text)}
		}
		if _, twice := out[k]; twice {
			return nil, cli.UsageError{Err: fmt.Errorf("--gateway-label %s: label %s is given twice: give it once", text, k)}
		}
		out[k] = v
	}
	return out, nil
}

// parseSource reads the --address of one slot.
func parseSource(text string) (*skeinv1.EgressAddress, error) {
	out := &skeinv1.EgressAddress{}
	for part := range strings.SplitSeq(text, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		if err != nil || a.Zone() != "" || a.Is4In6() {
			return nil, cli.UsageError{Err: fmt.Errorf("--address %s: %q is not an IP address; write one such as 192.0.2.7, "+
				"or 192.0.2.7,2001:db8::7", text, part)}
		}
		to := &out.Ipv6
		if a.Is4() {
			to = &out.Ipv4
		}
		if *to != "" {
			return nil, cli.UsageError{Err: fmt.Errorf("--address %s: a comma joins the IPv4 and the IPv6 address of one "+
				"slot; repeat "+
				"--address for the next", text)}
		}
		*to = a.String()
	}
	return out, nil
}

func checkProbe(text string) error {
	kind, target, _ := strings.Cut(text, ":")
	var err error
	switch kind {
	case "icmp":
		_, err = netip.ParseAddr(target)
	case "tcp":
		_, err = netip.ParseAddrPort(target)
	default:
		err = errors.New("no such kind")
	}
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--probe %s: want icmp:ADDRESS or tcp:ADDRESS:PORT, such as icmp:192.0.2.1 or "+
			"tcp:[2001:db8::1]:443", text)}
	}
	return nil
}
