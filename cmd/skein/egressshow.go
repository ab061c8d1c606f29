package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/cli"
)

// mostClients is how many clients of a node a table shows: -o json has the rest.
const mostClients = 40

func newExplainEgressCmd(g *globals) *cobra.Command {
	var client, at string
	c := &cobra.Command{
		Use: "egress [NAMESPACE/]NAME", Short: "Why an egress is as it is, or was: gateways, slots, leases, clients",
		Example: "  skein explain egress nat\n  skein explain egress internet/nat --client web/nginx-1\n" +
			"  skein explain egress nat --client 10.64.0.5\n  skein explain egress nat --at 10m",
		Args: cli.Exactly(1, oneEgress),
		RunE: func(c *cobra.Command, args []string) error {
			namespace, name, err := findEgress(args[0])
			if err != nil {
				return err
			}
			if client != "" && !strings.Contains(client, "/") {
				if _, err := parseAddress(client); err != nil {
					return cli.UsageError{Err: fmt.Errorf("--client %s: want a pod as NAMESPACE/POD, or an IP address", client)}
				}
			}
			r := &skeinv1.ExplainEgressRequest{Namespace: namespace, Name: name, Client: client}
			if r.At, r.AtTime, err = parseAt(at, time.Now()); err != nil {
				return err
			}
			answer, err := g.client().ExplainEgress(c.Context(), r)
			return g.show(c, answer, err, func(w io.Writer) { printLines(w, answer.GetLines(), "") })
		},
	}
	c.Flags().StringVar(&at, "at", "", atHelp)
	c.Flags().StringVar(&client, "client", "", "also tell of this client: NAMESPACE/POD or an address")
	return c
}

// egressName is namespace/name.
func egressName(e *skeinv1.Egress) string { return e.GetNamespace() + "/" + e.GetName() }

func printEgresses(w io.Writer, all []*skeinv1.EgressSummary) {
	if len(all) == 0 {
		fmt.Fprintln(w, "there are no egresses: make one with `skein egress create nat --destination … --gateway-label …`")
		return
	}
	t := table{head: []string{"EGRESS", "SLOTS", "ELIGIBLE", "STATE", "OWNERS", "DESTINATIONS", "SOURCE"}}
	for _, v := range all {
		owned, owners := 0, []string{}
		for _, s := range v.GetSlots() {
			if s.GetSlot().GetNodeId() != "" {
				owned++
			}
			owners = append(owners, dash(s.GetOwner()))
		}
		t.add(egressName(v.GetEgress()), fmt.Sprintf("%d/%d", owned, v.GetEgress().GetReplicas()),
			fmt.Sprint(len(v.GetEligible())), egressState(v), strings.Join(owners, " "),
			strings.Join(v.GetEgress().GetDestinations(), " "), sourcesText(v.GetEgress()))
	}
	t.print(w)
}

// egressState is an egress in a word.
func egressState(v *skeinv1.EgressSummary) string {
	free := slices.ContainsFunc(v.GetSlots(), func(s *skeinv1.SlotView) bool { return s.GetSlot().GetNodeId() == "" })
	switch {
	case len(v.GetEligible()) == 0:
		return "no gateway"
	case free || len(v.GetSlots()) < int(v.GetEgress().GetReplicas()):
		return "waits"
	case slices.ContainsFunc(v.GetSlots(), func(s *skeinv1.SlotView) bool { return !s.GetAlive() }):
		return "owner away"
	case v.GetEgress().GetDraining() > 0:
		return "draining"
	}
	return "ready"
}

// sourcesText is what packets leave with.
func sourcesText(e *skeinv1.Egress) string {
	if len(e.GetAddresses()) == 0 {
		return "gateway's own"
	}
	var out []string
	for _, a := range e.GetAddresses() {
		out = append(out, prefixes(a.GetIpv4(), a.GetIpv6()))
	}
	return strings.Join(out, ", ")
}

func leaseText(e *skeinv1.Egress) string {
	if e.GetLeaseMillis() == 0 {
		return (events.DefaultEgressLease * time.Millisecond).String()
	}
	return (time.Duration(e.GetLeaseMillis()) * time.Millisecond).String()
}

func printEgress(w io.Writer, r *skeinv1.ShowEgressResponse, names *strings.Replacer) {
	e := r.GetSummary().GetEgress()
	line := func(k, format string, a ...any) {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", k, names.Replace(fmt.Sprintf(format, a...))), 11))
	}
	line("egress", "%s, defined %s, by event %d", egressName(e), instant(e.GetCreatedAt()), e.GetCreatedIndex())
	line("to", "%s", strings.Join(e.GetDestinations(), ", "))
	eligible := strings.Join(r.GetSummary().GetEligible(), ", ")
	if eligible == "" {
		eligible = "none"
	}
	line("gateways", "nodes with %s: %s", labelsText(e.GetGateways()), eligible)
	line("source", "%s", sourcesText(e))
	at := cmp.Or(r.GetFouPort(), dataplane.FoUPort) // an older agent says none
	port := fmt.Sprintf("source port %d", at)
	if e.GetFouSourcePortAuto() {
		port = "source port by flow"
	}
	line("tunnels", "FoU, UDP %d, %s; endpoints from pool %s", at, port, e.GetPool())
	line("lease", "%s", leaseText(e))
	if e.GetSpread() != "" {
		line("spread", "%s", e.GetSpread())
	}
	if len(e.GetProbes()) > 0 {
		line("probes", "%s", strings.Join(e.GetProbes(), ", "))
	}
	fmt.Fprintln(w)
	printSlots(w, r)
	printGateways(w, r.GetGateways(), names)
	for i, s := range r.GetSilent() {
		if i == 0 {
			fmt.Fprintln(w)
		}
		line("silent", "%s: %s", dash(s.GetNode()), s.GetError())
	}
	printEgressClients(w, e, r.GetClients())
}

// printSlots shows each slot: what is agreed, and what its owner says of it.
func printSlots(w io.Writer, r *skeinv1.ShowEgressResponse) {
	e := r.GetSummary().GetEgress()
	says := map[string]*skeinv1.EgressSlotReport{}
	for _, gw := range r.GetGateways() {
		for _, s := range gw.GetSlots() {
			says[fmt.Sprint(gw.GetNodeId(), " ", s.GetNumber())] = s
		}
	}
	t := table{head: []string{"SLOT", "OWNER", "SITE", "EPOCH", "SINCE", "FORWARDS", "CLIENTS", "OUT", "IN",
		"ENDPOINT", "WHY"}}
	for _, v := range r.GetSummary().GetSlots() {
		s := v.GetSlot()
		forwards, clients, out, in := "-", "-", "-", "-"
		if p := says[fmt.Sprint(s.GetNodeId(), " ", s.GetNumber())]; p != nil && s.GetNodeId() != "" {
			forwards, clients, out, in = yesNo(p.GetForwarding()), fmt.Sprint(p.GetClients()), size(p.GetBytesOut()),
				size(p.GetBytesIn())
		}
		endpoint := "-"
		if int(s.GetNumber()) < len(e.GetEndpoints()) {
			p := e.GetEndpoints()[s.GetNumber()]
			if endpoint = p.GetIpv4(); endpoint == "" {
				endpoint = p.GetIpv6()
			}
		}
		why := s.GetReason()
		if until, draining := events.DrainedAt(e); draining && s.GetNumber() >= events.Replicas(e) {
			why = fmt.Sprintf("drains until %s at the latest", until.Format(time.TimeOnly))
		}
		t.add(fmt.Sprint(s.GetNumber()), dash(v.GetOwner()), dash(v.GetSite()), fmt.Sprint(s.GetEpoch()), since(s.GetSince()),
			forwards, clients, out, in, endpoint, dash(why))
	}
	t.print(w)
}

func printGateways(w io.Writer, all []*skeinv1.EgressGateway, names *strings.Replacer) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := table{head: []string{"GATEWAY", "READY", "HEALTH", "FOU", "CLIENTS", "CONNECTIONS", "DROPPED", "WHY"}}
	for _, k := range all {
		connections := fmt.Sprint(k.GetConntrack())
		if k.GetConntrackMax() > 0 {
			connections = fmt.Sprintf("%d/%d", k.GetConntrack(), k.GetConntrackMax())
		}
		dropped := k.GetDroppedStrangers() + k.GetDroppedInvalid() + k.GetDroppedLease() + k.GetDroppedDestination()
		t.add(names.Replace(k.GetNodeId()), yesNo(k.GetState().GetReady()), healthText(k.GetState().GetHealth()),
			dash(k.GetDriver()), fmt.Sprint(k.GetClients()),
			connections, fmt.Sprint(dropped), dash(k.GetState().GetReason()))
	}
	t.print(w)
}

func healthText(h skeinv1.GatewayState_Health) string {
	switch h {
	case skeinv1.GatewayState_HEALTH_GOOD:
		return "good"
	case skeinv1.GatewayState_HEALTH_BAD:
		return "bad"
	}
	return "not probed"
}

func printEgressClients(w io.Writer, e *skeinv1.Egress, nodes []*skeinv1.EgressHostClients) {
	t := table{head: []string{"NODE", "CLIENT", "IPV4", "SLOT", "STATE", "OWNER", "WHY"}}
	for _, n := range nodes {
		for _, c := range n.GetClients() {
			for _, of := range c.GetEgresses() {
				if of.GetNamespace() != e.GetNamespace() || of.GetName() != e.GetName() {
					continue
				}
				t.add(dash(n.GetNode()), c.GetKey(), dash(c.GetIpv4()), fmt.Sprint(of.GetSlot()), of.GetState(),
					dash(of.GetOwner()), dash(of.GetReason()))
			}
		}
	}
	if len(t.rows) == 0 {
		return
	}
	fmt.Fprintln(w)
	more := len(t.rows) - mostClients
	t.rows = t.rows[:min(len(t.rows), mostClients)]
	t.print(w)
	if more > 0 {
		fmt.Fprintf(w, "… and %s; -o json has all\n", plural(more, "client"))
	}
}

// printAttached shows which egresses a pod has now.
func printAttached(w io.Writer, pod string, all []*skeinv1.EgressOfClient) {
	if len(all) == 0 {
		fmt.Fprintf(w, "pod %s uses no egress\n", pod)
		return
	}
	t := table{head: []string{"EGRESS", "SLOT", "OWNER", "STATE", "WHY"}}
	for _, e := range all {
		t.add(e.GetNamespace()+"/"+e.GetName(), fmt.Sprint(e.GetSlot()), dash(e.GetOwner()), e.GetState(),
			dash(e.GetReason()))
	}
	t.print(w)
}
