package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/cli"
)

func newStatusCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "This node at a glance", Example: "  skein status\n  skein status -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := g.client().Status(c.Context(), &skeinv1.StatusRequest{})
			return g.show(c, s, err, func(w io.Writer) { printStatus(w, s) })
		},
	}
}

// rolesAreNews is how long status tells of roles in a cluster that is older than they are.
const rolesAreNews = 30 * 24 * time.Hour

const (
	carriesShown = 5              // plain peers that status names
	expiresSoon  = 24 * time.Hour // status tells of the end of one
)

func printStatus(w io.Writer, s *skeinv1.StatusResponse) {
	line := func(k, format string, a ...any) {
		fmt.Fprintf(w, "%-10s %s\n", k, cut(fmt.Sprintf(format, a...), tableWidth-11))
	}
	role := dash(s.GetRole())
	switch {
	case s.GetVoter():
		role = "server (voter)"
	case s.GetServer():
		role = "server (not a voter yet)"
	}
	switch {
	case s.GetRelay() && s.GetWireguardDriver() == "":
		role += ", relays and does nothing else"
	case s.GetRelay():
		role += ", relay"
	}
	line("node", "%s (%s), %s, skein %s, up %s", s.GetName(), s.GetNodeId(), s.GetPhase(), s.GetVersion(),
		since(s.GetStartedAt()))
	line("cluster", "%s", dash(s.GetClusterId()))
	line("addresses", "%s  %s", dash(s.GetIpv4()), dash(s.GetIpv6()))
	line("role", "%s, site %q", role, s.GetSite())
	if s.GetTopology() == "site" {
		line("site", "%s", siteText(s))
	}
	leader := "none known: existing paths and addresses go on, nothing new is decided"
	if s.GetLeader() != "" {
		leader = s.GetLeaderName()
	}
	line("leader", "%s", leader)
	for _, v := range s.GetServers() {
		if v.GetWaiting() != "" {
			fmt.Fprintf(w, "%-10s %s does not vote yet: %s\n", "server", v.GetName(), v.GetWaiting())
		}
	}
	line("state", "index %d, hash %.16s", s.GetIndex(), s.GetStateHash())
	if s.GetEventsFrom() != "" || s.GetEventsStreams() > 0 {
		line("events", "%s", eventsText(s))
	}
	if g := s.GetGossip(); g != nil {
		line("gossip", "%s", gossipText(g))
	}
	if k := s.GetGossipKeys(); k != nil {
		line("gossip key", "%s", gossipKeysText(k))
	}
	line("nat", "%s, WireGuard in %s", candidate.NATName(s.GetNatType()), s.GetWireguardDriver())
	if s.GetRelayUdp() != "" {
		line("relay UDP", "forwarded by: %s", s.GetRelayUdp())
	}
	line("peers", "%d: %d direct, %d by relay, %d down (mode %s)", s.GetPeers(), s.GetPeersDirect(), s.GetPeersRelay(),
		s.GetPeersDown(), dash(s.GetTransportMode()))
	line("nodes", "%d, %d alive", s.GetNodes(), s.GetNodesAlive())
	for i, p := range s.GetCarries() {
		if i == carriesShown {
			line("carries", "%d more; skein peer list names them", len(s.GetCarries())-i)
			break
		}
		line("carries", "%s", carriesText(p, time.Now()))
	}
	if at := time.Unix(0, s.GetRolesIntroduced()); s.GetRolesIntroduced() != 0 && time.Since(at) < rolesAreNews {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", "roles", "since "+at.Format(time.DateOnly)+" cluster commands are for "+
			"servers and admins; "+
			"`skein nodes` shows who is what, and `skein node grant NAME admin`, on a server, lets others give them"), 11))
	}
	for _, p := range s.GetProblems() {
		fmt.Fprintf(w, "%-10s %s: %s\n", p.GetSeverity(), p.GetSubject(), p.GetMessage())
		if p.GetAdvice() != "" {
			fmt.Fprintf(w, "%-10s %s\n", "", p.GetAdvice())
		}
	}
}

// carriesText is a plain peer that this node carries, in a line.
func carriesText(v *skeinv1.PlainPeerView, now time.Time) string {
	text := "plain peer " + v.GetPeer().GetName()
	if at := v.GetLastHandshake(); at != 0 {
		text += ", last handshake " + short(now.Sub(time.Unix(0, at))) + " ago"
	} else {
		text += ", no handshake yet"
	}
	at := v.GetPeer().GetExpiresAt()
	switch left := time.Unix(0, at).Sub(now); {
	case at == 0 || left > expiresSoon:
	case left <= 0:
		text += ", expired"
	default:
		text += ", expires in " + short(left)
	}
	return text
}

// siteText says who speaks for this node's site.
func siteText(s *skeinv1.StatusResponse) string {
	if len(s.GetSiteLeaders()) == 0 {
		return "it speaks through leaders, and no node of it can lead: other sites cannot be reached"
	}
	text := "led by " + strings.Join(s.GetSiteLeaders(), ", then ")
	switch s.GetSiteLeads() {
	case "leader":
		text += "; this node leads"
	case "reserve":
		text += "; this node is a reserve"
	case "elected":
		text += "; this node is about to lead"
	case "silent":
		text += "; this node does not forward"
	}
	return text
}

// eventsText says whom a node has the log's events from in a site that speaks through leaders.
func eventsText(s *skeinv1.StatusResponse) string {
	from := "from nobody"
	switch name := cmp.Or(s.GetEventsFromName(), s.GetEventsFrom()); {
	case s.GetServer():
		from = "by Raft"
	case s.GetEventsByLeader():
		from = "from " + name + ", which leads this site"
	case name != "":
		from = "from server " + name
	}
	if n := s.GetEventsStreams(); n > 0 {
		from += fmt.Sprintf("; passed on to %d of this site", n)
	}
	return from
}

// gossipText says how many records this node has, and who gets its own.
func gossipText(g *skeinv1.GossipStatus) string {
	own := "this node's own is for its site"
	if g.GetBecause() != "" {
		own = "its own is for everybody: " + g.GetBecause()
	}
	return fmt.Sprintf("%d records for everybody, %d for its site; %s", g.GetRecords(), g.GetSiteRecords(), own)
}

func newNodesCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "nodes", Short: "All members, by site", Example: "  skein nodes\n  skein nodes -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Nodes(c.Context(), &skeinv1.NodesRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				printNodes(w, r.GetNodes())
				printNotAsked(w, r.GetNotAsked())
				if len(r.GetPlainPeers()) > 0 {
					fmt.Fprintln(w)
					printPlainPeers(w, r.GetPlainPeers())
				}
			})
		},
	}
}

// printNotAsked says of which sites something is missing, since they could not be asked.
func printNotAsked(w io.Writer, sites []string) {
	for _, why := range sites {
		fmt.Fprintln(w, wrap("what a node says of itself is missing: "+why, 0))
	}
}

func printNodes(w io.Writer, nodes []*skeinv1.NodeView) {
	t := table{head: []string{"SITE", "NAME", "ID", "IPV4", "NAT", "ROLE", "PATH", "MODE", "ALIVE", "RECORD"}}
	led := slices.ContainsFunc(nodes, func(n *skeinv1.NodeView) bool { return n.GetSiteLeads() != "" })
	if led {
		t.head = append(t.head, "LEADER")
	}
	pods := slices.ContainsFunc(nodes, func(n *skeinv1.NodeView) bool { return n.GetNode().GetPodCidrs() != nil })
	if pods {
		t.head = append(t.head, "POD CIDRS")
	}
	for _, n := range bySite(nodes) {
		record := "-"
		if n.GetRecord() != nil {
			record = fmt.Sprintf("%d.%d", n.GetRecord().GetEpoch(), n.GetRecord().GetSeq())
		}
		row := []string{dash(siteOf(n)), n.GetNode().GetName(), n.GetNode().GetId(), n.GetNode().GetIpv4(),
			candidate.NATName(n.GetRecord().GetNatType()), role(n), n.GetPath(), dash(n.GetRecord().GetTransportMode()),
			yesNo(n.GetAlive()), record}
		if led {
			row = append(row, siteLeads(n))
		}
		if pods {
			row = append(row, dash(strings.Join(n.GetNode().GetPodCidrs().GetCidrs(), ",")))
		}
		t.add(row...)
	}
	t.print(w)
}

// siteLeads is what a node is in its site.
func siteLeads(n *skeinv1.NodeView) string {
	if n.GetSiteLeads() == "leader" {
		return "yes"
	}
	return dash(n.GetSiteLeads())
}

// siteOf is a node's site, as the log has it or its record says.
func siteOf(n *skeinv1.NodeView) string { return cmp.Or(n.GetSite(), n.GetRecord().GetSite()) }

// bySite sorts by site, then name; nodes without a site, or of whom nothing has been heard, come last.
func bySite(nodes []*skeinv1.NodeView) []*skeinv1.NodeView {
	last := func(n *skeinv1.NodeView) int {
		if siteOf(n) == "" {
			return 1
		}
		return 0
	}
	return slices.SortedStableFunc(slices.Values(nodes), func(x, y *skeinv1.NodeView) int {
		return cmp.Or(last(x)-last(y), strings.Compare(siteOf(x), siteOf(y)),
			strings.Compare(x.GetNode().GetName(), y.GetNode().GetName()))
	})
}

func role(n *skeinv1.NodeView) string {
	role := cmp.Or(n.GetRole(), "agent")
	switch {
	case n.GetLeader():
		role = "leader"
	case n.GetVoter():
		role = "voter"
	case n.GetServer():
		role = "server"
	}
	switch {
	case n.GetRecord().GetRole() == "relay":
		return "relay"
	case n.GetRecord().GetRelay() != nil:
		role += "+relay"
	}
	return role
}

func newPeersCmd(g *globals) *cobra.Command {
	var node, at string
	c := &cobra.Command{
		Use: "peers", Short: "How each peer is reached", Args: cli.NoArgs,
		Example: "  skein peers\n  skein peers --node home1\n  skein peers --at 5m\n  skein peers -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			q := &skeinv1.PeersRequest{Node: node}
			var err error
			if q.At, q.AtTime, err = parseAt(at, time.Now()); err != nil {
				return err
			}
			r, err := g.client().Peers(c.Context(), q)
			return g.show(c, r, err, func(w io.Writer) {
				printPeers(w, r.GetPeers())
				printNotAsked(w, r.GetNotAsked())
			})
		},
	}
	c.Flags().StringVar(&node, "node", "", "ask this member, by name or ID, how it reaches its peers; for admins and "+
		"servers")
	c.Flags().StringVar(&at, "at", "", atHelp)
	return c
}

func printPeers(w io.Writer, peers []*skeinv1.PeerView) {
	t := table{head: []string{"NAME", "PATH", "VIA", "RTT", "SINCE", "RX", "TX", "WHY"}}
	for _, p := range peers {
		via, path := p.GetEndpoint(), p.GetPath()
		if p.GetRelayName() != "" {
			via = p.GetRelayName()
		}
		if p.GetDetail() == "udp" {
			via += " (udp)"
		}
		if !p.GetAlive() && path == "direct" {
			path = "down"
		}
		t.add(p.GetName(), path, dash(via), rtt(p.GetRttNanos()), since(p.GetSince()), size(p.GetRxBytes()),
			size(p.GetTxBytes()), dash(p.GetRule()))
	}
	t.print(w)
}

func newExplainCmd(g *globals) *cobra.Command {
	var at string
	peer := &cobra.Command{
		Use: "peer NODE", Short: "Why a peer is reached the way it is", Example: "  skein explain peer home1\n  skein " +
			"explain peer home1 --at 5m\n  skein explain peer home1 --at 2026-01-02T15:04:05Z",
		Args: cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			ns, err := parseTime(at, time.Now())
			if err != nil {
				return cli.UsageError{Err: err}
			}
			r, err := g.client().ExplainPeer(c.Context(), &skeinv1.ExplainPeerRequest{Peer: args[0], At: ns})
			return g.show(c, r, err, func(w io.Writer) {
				printExplain(w, r, g.names(c), ns > 0)
				printNotAsked(w, r.GetNotAsked())
			})
		},
	}
	peer.Flags().StringVar(&at, "at", "", "a time (RFC 3339) or an age (such as 5m) instead of now")
	return cli.Group("explain", "Say why something is as it is", peer, newExplainAddressCmd(g), newExplainEgressCmd(g))
}

// parseTime reads a time or an age; empty is 0, for now.
func parseTime(s string, now time.Time) (int64, error) {
	if s == "" {
		return 0, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d).UnixNano(), nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return 0, errors.New("--at " + s + ": want a time such as 2026-01-02T15:04:05Z or an age such as 5m")
	}
	return t.UnixNano(), nil
}

// printExplain shows what explains a path: now, or past, when only the journal speaks.
func printExplain(w io.Writer, r *skeinv1.ExplainPeerResponse, names *strings.Replacer, past bool) {
	p := r.GetPeer()
	line := func(k, format string, a ...any) {
		if text := fmt.Sprintf(format, a...); text != "" {
			fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", k, names.Replace(text)), 11))
		}
	}
	way := p.GetPath()
	switch {
	case p.GetRelayName() != "":
		way += " over " + p.GetRelayName()
		if p.GetDetail() == "udp" {
			way += " by UDP through " + p.GetEndpoint()
		}
	case p.GetEndpoint() != "":
		way += " to " + p.GetEndpoint()
	}
	fmt.Fprintf(w, "%-10s %s (%s)\n", "peer", p.GetName(), p.GetNodeId())
	if past {
		line("path", "%s, since %s", way, moment(p.GetSince()))
	} else {
		line("path", "%s, for %s, RTT %s", way, since(p.GetSince()), rtt(p.GetRttNanos()))
	}
	line("decided", "%s", r.GetDecided())
	if !strings.HasPrefix(r.GetDecided(), r.GetStrategy()) {
		line("strategy", "%s", r.GetStrategy())
	}
	if past {
		printHistory(w, r.GetHistory(), names)
		return
	}
	line("NAT", "here %s, there %s", candidate.NATName(r.GetSelf().GetNatType()),
		candidate.NATName(r.GetRecord().GetNatType()))
	if q := r.GetGuess(); q != nil {
		line("prediction", "%s", predictionText(q))
	}
	for _, end := range []struct {
		who    string
		record *skeinv1.Record
	}{{"here", r.GetSelf()}, {"there", r.GetRecord()}} {
		for _, k := range candidate.Sorted(end.record.GetCandidates()) {
			line("candidate", "%s %s (%s %d, from %s)", end.who, k.GetAddress(), candidateText(k.GetType()),
				candidate.Priority(k), dash(k.GetSource()))
		}
	}
	for _, s := range r.GetWouldChange() {
		line("to change", "%s", s)
	}
	if len(r.GetProbes()) > 0 {
		t := table{head: []string{"PROBED", "SOURCE", "SENT", "ANSWERED", "LAST", "RTT", "OUTCOME"}}
		for _, b := range r.GetProbes() {
			t.add(b.GetEndpoint(), dash(b.GetSource()), fmt.Sprint(b.GetSent()), fmt.Sprint(b.GetAnswered()),
				since(b.GetLastAnswered()), rtt(b.GetRttNanos()), dash(b.GetOutcome()))
		}
		t.print(w)
	}
	printHistory(w, r.GetHistory(), names)
}

// predictionText tells how port prediction goes: rule, tries, outcome, next try.
func predictionText(q *skeinv1.PortGuessView) string {
	out := q.GetRule() + " (" + q.GetRole() + ")"
	switch {
	case q.GetRunning():
		out += ", an attempt is under way"
	case q.GetTries() > 0:
		out += fmt.Sprintf(", %d failed, the next in %s", q.GetTries(), short(time.Until(time.Unix(0, q.GetNext()))))
	}
	if q.GetOutcome() != "" {
		out += fmt.Sprintf("; %s ago: %s", since(q.GetAt()), q.GetOutcome())
	}
	return out
}

func printHistory(w io.Writer, entries []*skeinv1.JournalEntry, names *strings.Replacer) {
	for _, e := range entries {
		if d := e.GetPathDecision(); d != nil {
			way := d.GetFrom() + " -> " + d.GetTo()
			if d.GetFrom() == d.GetTo() {
				way = d.GetTo()
			}
			fmt.Fprintln(w, wrap(names.Replace(fmt.Sprintf("%s  %s  %s: %s", moment(e.GetTime()), way, d.GetRule(),
				d.GetReason())), 25))
		}
	}
}

// moment is a time of day to the millisecond, with its date.
func moment(ns int64) string {
	if ns == 0 {
		return "never"
	}
	return time.Unix(0, ns).Format("2006-01-02 15:04:05.000")
}

// names turns node IDs into names, as far as this node knows them.
func (g *globals) names(c *cobra.Command) *strings.Replacer {
	var pairs []string
	if r, err := g.client().Nodes(c.Context(), &skeinv1.NodesRequest{}); err == nil {
		for _, n := range r.GetNodes() {
			pairs = append(pairs, n.GetNode().GetId(), n.GetNode().GetName())
		}
	}
	return strings.NewReplacer(pairs...)
}
