package main

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/graph"
)

var graphFormats = []string{"dot", "svg", "json"}

func newGraphCmd(g *globals) *cobra.Command {
	var at, format string
	c := &cobra.Command{
		Use: "graph", Short: "Draw the mesh: sites, nodes, relays and paths",
		Long: "Draw the mesh as this node sees it: sites and the nodes in them, each with its NAT type and role, and\n" +
			"whether gossip sees it. Lines are the paths of this node to its peers: direct, over which relay, or\n" +
			"down. Paths between two other nodes are known to those two alone; ask one of them. Of others this\n" +
			"node knows, from their records, the relays that they have sessions with: these are drawn, too.\n" +
			"Where sites speak through leaders, the leaders are marked, and the line to a node without a tunnel\n" +
			"says which leader passes packets on to it.\n" +
			"SVG needs no other program. DOT is for Graphviz: skein graph | dot -Tpng >mesh.png\n\n" +
			"With --at it draws a moment of the past: members, servers and roles as the log had them then; sites,\n" +
			"NAT types and paths as far as this node's journal goes back. The picture says what is not known.",
		Example: "  skein graph -o svg >mesh.svg\n  skein graph | dot -Tpng >mesh.png\n" +
			"  skein graph --at 10m -o svg >before.svg",
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return g.graph(c, format, at) },
	}
	c.Flags().StringVarP(&format, "output", "o", "dot", "output: dot, svg or json")
	c.Flags().StringVar(&at, "at", "", atHelp)
	_ = c.RegisterFlagCompletionFunc("output", // the flag is there
		cobra.FixedCompletions(graphFormats, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func (g *globals) graph(c *cobra.Command, format, at string) error {
	var draw func(*graph.Graph) string
	switch format {
	case "dot":
		draw = (*graph.Graph).DOT
	case "svg":
		draw = (*graph.Graph).SVG
	case "json":
	default:
		return cli.UsageError{Err: fmt.Errorf("-o %s: allowed: dot, svg, json", format)}
	}
	r := &skeinv1.GraphRequest{}
	var err error
	if r.AtIndex, r.AtTime, err = parseAt(at, time.Now()); err != nil {
		return err
	}
	a, err := g.client().Graph(c.Context(), r)
	switch {
	case err != nil:
		return g.plain(err)
	case draw == nil:
		return printProto(c.OutOrStdout(), a)
	}
	if _, err := io.WriteString(c.OutOrStdout(), draw(graphOf(a))); err != nil {
		return fmt.Errorf("write the picture: %w", err)
	}
	return nil
}

// graphOf is what an agent answered as a picture has it.
func graphOf(a *skeinv1.GraphResponse) *graph.Graph {
	out := &graph.Graph{
		Self: -1, Past: a.GetPast(), Index: a.GetIndex(), Time: time.Unix(0, a.GetTime()), Notes: a.GetNotes(),
	}
	at := map[string]int{}
	for i, n := range a.GetNodes() {
		at[n.GetNode().GetId()] = i
	}
	paths := map[string]*skeinv1.PeerView{}
	for _, p := range a.GetPeers() {
		paths[p.GetNodeId()] = p
	}
	for i, n := range a.GetNodes() {
		record := n.GetRecord()
		d := graph.Node{
			Name: n.GetNode().GetName(), Address: n.GetNode().GetIpv4(),
			Site: cmp.Or(n.GetSite(), record.GetSite()), SiteKnown: record != nil, Leads: leadOf[n.GetSiteLeads()],
			LogLeader: n.GetLeader(), Voter: n.GetVoter(), Server: n.GetServer(), Admin: n.GetRole() == "admin",
			Relays: record.GetRelay() != nil, OnlyRelays: record.GetRole() == "relay", Wishes: record.GetLeaderWish(),
			Draining: n.GetNode().GetDraining(), Unseen: !a.GetPast() && !n.GetAlive(),
		}
		set := n.GetNode().GetSettings()
		if set.GetSiteSet() {
			d.Site, d.SiteKnown = set.GetSite(), true
		}
		if set.GetLeader() != "" {
			d.Wishes = set.GetLeader() == "yes"
		}
		if record.GetNatType() != skeinv1.NatType_NAT_TYPE_UNKNOWN {
			d.NAT = natText(record.GetNatType())
		}
		for _, l := range record.GetRelayLinks() {
			if to, ok := at[l.GetNodeId()]; ok && !d.Unseen { // the last record of a node that is gone says what was
				d.Sessions = append(d.Sessions, graph.Session{To: to, RTT: time.Duration(l.GetRttMicros()) * time.Microsecond})
			}
		}
		d.State = stateOf(n, paths[n.GetNode().GetId()])
		switch p := paths[n.GetNode().GetId()]; {
		case p.GetPath() == "hop" && d.State != graph.None:
			d.Via = p.GetRelayName()
		case p.GetRule() == "no-leader" && d.State == graph.Down:
			d.NoLeader = true
		case d.State == graph.Direct || d.State == graph.Relay:
			d.Via, d.UDP, d.Endpoint = p.GetRelayName(), p.GetDetail() == "udp", p.GetEndpoint()
			d.RTT = time.Duration(p.GetRttNanos())
		}
		if n.GetNode().GetId() == a.GetNodeId() {
			out.Self, d.State = i, graph.Self
		}
		out.Nodes = append(out.Nodes, d)
	}
	if out.Self < 0 {
		out.Notes = append(out.Notes, "The asked node was not a member then, and had no paths.")
	}
	return out
}

// leadOf is what NodeView.site_leads says.
var leadOf = map[string]graph.Lead{"leader": graph.Leader, "reserve": graph.Reserve, "elected": graph.Elected,
	"silent": graph.Reserve}

// natText is a NAT type in a picture, where the bare word "none" would not say of what.
func natText(t skeinv1.NatType) string {
	if t == skeinv1.NatType_NAT_TYPE_NONE {
		return "no NAT"
	}
	return candidate.NATName(t)
}

// stateOf is the state of the path to a node.
func stateOf(n *skeinv1.NodeView, p *skeinv1.PeerView) graph.State {
	switch {
	case n.GetPath() == "none" || p == nil:
		return graph.None
	case p.GetPath() == "unknown":
		return graph.Unknown
	case !p.GetAlive():
		return graph.Down
	case p.GetPath() == "direct":
		return graph.Direct
	case p.GetPath() == "relay":
		return graph.Relay
	case p.GetPath() == "hop":
		return graph.Hop
	}
	return graph.Down
}
