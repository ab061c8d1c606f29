package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newRelayCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "relay", Short: "This node's relay sessions, and what it relays for others",
		Example: "  skein relay\n  skein relay -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Relay(c.Context(), &skeinv1.RelayRequest{})
			if err != nil {
				return g.plain(err)
			}
			if g.output == "json" {
				return printProto(c.OutOrStdout(), r)
			}
			printRelay(c.OutOrStdout(), r)
			return nil
		},
	}
}

func printRelay(w io.Writer, r *skeinv1.RelayResponse) {
	if len(r.GetSessions()) == 0 {
		fmt.Fprintln(w, "no relay is known: nodes with a public address, or with `relay: true` in their configuration, relay")
	} else {
		t := table{head: []string{"RELAY", "STATE", "NEED", "RTT", "PEERS", "RX", "TX", "DROPPED", "REDIALS", "ERROR"}}
		for _, s := range r.GetSessions() {
			t.add(s.GetName(), s.GetState(), s.GetNeed(), rtt(s.GetRttNanos()), fmt.Sprint(s.GetPeers()), size(s.GetRxBytes()),
				size(s.GetTxBytes()),
				fmt.Sprint(s.GetDropped()), fmt.Sprint(s.GetReconnects()), dash(s.GetError()))
		}
		t.print(w)
	}
	s := r.GetServer()
	if s == nil {
		fmt.Fprintln(w, "\nthis node does not relay for others")
		return
	}
	l := s.GetLimits()
	fmt.Fprintln(w)
	line := func(k, format string, a ...any) {
		fmt.Fprintf(w, "%-10s %s\n", k, wrap(fmt.Sprintf(format, a...), 11))
	}
	line("relays for", "%d of %d clients, %d of %d streams, %d pairs by UDP", len(s.GetClients()), l.GetSessions(),
		s.GetStreams(), l.GetStreams(), s.GetUdpPairs())
	line("carries", "%s/s now; %s in %d packets and %s in streams so far", size(s.GetBytesPerSecond()), size(s.GetBytes()),
		s.GetPackets(), size(s.GetStreamBytes()))
	line("dropped", "%d packets by slow readers, %d for nodes not here", s.GetDropped(), s.GetUnroutable())
	line("refused", "%d sessions, %d connections before TLS; slowed %d times", s.GetRefused(),
		s.GetHandshakesRefused(), s.GetLimited())
	line("memory", "%s of %s; a client's queue up to %s; a client sends %s", size(s.GetMemoryBytes()),
		size(l.GetMemoryBytes()), size(l.GetQueueBytes()), rateText(l))
	if len(s.GetClients()) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := table{head: []string{"CLIENT", "RATE", "FROM IT", "TO IT", "WAITS", "DROPPED", "SLOWED", "SINCE", "ADDRESS"}}
	for _, c := range s.GetClients() {
		t.add(c.GetName(), size(c.GetBytesPerSecond())+"/s", size(c.GetRxBytes()), size(c.GetTxBytes()),
			size(c.GetQueueBytes()), fmt.Sprint(c.GetDropped()),
			fmt.Sprint(c.GetLimited()), since(c.GetSince()), c.GetAddress())
	}
	t.print(w)
}

func rateText(l *skeinv1.RelayServerLimits) string {
	bytes, packets := l.GetClientBytesPerSecond(), l.GetClientPacketsPerSecond()
	switch {
	case bytes > 0 && packets > 0:
		return fmt.Sprintf("up to %s/s and %d packets/s", size(bytes), packets)
	case bytes > 0:
		return fmt.Sprintf("up to %s/s", size(bytes))
	case packets > 0:
		return fmt.Sprintf("up to %d packets/s", packets)
	}
	return "without limit"
}
