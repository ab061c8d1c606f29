package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/cli"
)

func newNetcheckCmd(g *globals) *cobra.Command {
	var refresh bool
	c := &cobra.Command{
		Use: "netcheck", Short: "This host's NAT, addresses and relays", Example: "  skein netcheck\n  skein netcheck " +
			"--refresh -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Netcheck(c.Context(), &skeinv1.NetcheckRequest{Refresh: refresh})
			return g.show(c, r, err, func(w io.Writer) { printNetcheck(w, r) })
		},
	}
	c.Flags().BoolVar(&refresh, "refresh", false, "look again now instead of showing the last result")
	return c
}

func printNetcheck(w io.Writer, r *skeinv1.NetcheckResponse) {
	line := func(k, format string, a ...any) {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-11s %s", k, fmt.Sprintf(format, a...)), 12))
	}
	line("NAT", "%s (mapping %s, filtering %s)", candidate.NATName(r.GetNatType()), dash(r.GetMapping()),
		dash(r.GetFiltering()))
	if traits := natTraits(r); traits != "" {
		line("", "%s", traits)
	}
	udp := yesNo(r.GetUdp())
	if !r.GetUdp() && r.GetNatType() != skeinv1.NatType_NAT_TYPE_BLOCKED {
		udp = "not tested" // nobody was there to answer
	}
	line("UDP", "%s   IPv4 %s   IPv6 %s   checked %s ago", udp, yesNo(r.GetIpv4()), yesNo(r.GetIpv6()),
		since(r.GetCheckedAt()))
	if len(r.GetGateways()) > 0 || r.GetTunnelMtu() > 0 {
		line("gateway", "%s   tunnel MTU %d", dash(strings.Join(r.GetGateways(), " ")), r.GetTunnelMtu())
	}
	for _, n := range r.GetNotes() {
		line(n.GetSource(), "%s", n.GetText())
	}
	t := table{head: []string{"ASKED", "SEES THIS HOST AS"}}
	for _, m := range r.GetMapped() {
		server, mapped, _ := strings.Cut(m, ": ")
		t.add(server, mapped)
	}
	t.print(w)
	t = table{head: []string{"CANDIDATE", "TYPE", "PRIORITY", "SOURCE"}}
	for _, k := range candidate.Sorted(r.GetCandidates()) {
		t.add(k.GetAddress(), candidateText(k.GetType()), fmt.Sprint(candidate.Priority(k)), k.GetSource())
	}
	t.print(w)
	t = table{head: []string{"RELAY", "ADDRESS", "STATE", "RTT", "ERROR"}}
	for _, k := range r.GetRelays() {
		t.add(k.GetName(), k.GetAddress(), k.GetState(), rtt(k.GetRttNanos()), dash(k.GetError()))
	}
	t.print(w)
	for _, a := range r.GetAdvice() {
		line("advice", "%s", a)
	}
}

// natTraits says in words what a NAT does beyond its kind.
func natTraits(r *skeinv1.NetcheckResponse) string {
	var out []string
	switch r.GetNatType() {
	case skeinv1.NatType_NAT_TYPE_NONE, skeinv1.NatType_NAT_TYPE_BLOCKED, skeinv1.NatType_NAT_TYPE_UNKNOWN:
		return ""
	case skeinv1.NatType_NAT_TYPE_SYMMETRIC:
		if step := r.GetPortStep(); step != 0 {
			out = append(out, fmt.Sprintf("each new port is the last one %+d", step))
		} else {
			out = append(out, "ports cannot be predicted")
		}
	default:
		if r.GetPortPreserving() {
			out = append(out, "keeps WireGuard's port number")
		} else {
			out = append(out, "changes WireGuard's port number")
		}
	}
	if r.GetHairpin() {
		out = append(out, "turns packets to its own outside address round (hairpin)")
	} else {
		out = append(out, "no hairpin")
	}
	return strings.Join(out, "; ")
}
