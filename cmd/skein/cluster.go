package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/cli"
)

func candidateText(t skeinv1.CandidateType) string {
	return strings.ToLower(strings.TrimPrefix(t.String(), "CANDIDATE_TYPE_"))
}

func newTokenCmd(g *globals) *cobra.Command {
	var uses uint32
	var ttl time.Duration
	var label, role string
	var agentsOnly bool
	create := &cobra.Command{
		Use: "create", Short: "Print a token that lets hosts join", Example: "  skein token create\n  skein token create " +
			"--uses 10 --ttl 24h\n  skein token create --role server", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if uses == 0 || ttl <= 0 {
				return cli.UsageError{Err: fmt.Errorf("--uses %d --ttl %s: both must be above zero", uses, ttl)}
			}
			if _, err := events.ParseRole(role); err != nil {
				return cli.UsageError{Err: fmt.Errorf("--role: %w", err)}
			}
			r, err := g.client().CreateToken(c.Context(), &skeinv1.CreateTokenRequest{Uses: uses, LifetimeNanos: int64(ttl),
				Label: label, AgentsOnly: agentsOnly, Role: role})
			return g.show(c, r, err, func(w io.Writer) { fmt.Fprintln(w, r.GetToken()) })
		},
	}
	create.Flags().Uint32Var(&uses, "uses", 1, "how many hosts may join with it")
	create.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long it is valid")
	create.Flags().StringVar(&label, "label", "", "a note, shown by skein token list")
	create.Flags().StringVar(&role, "role", string(events.RoleAgent), "what those who join with it may do: agent, admin "+
		"or server")
	create.Flags().BoolVar(&agentsOnly, "agents-only", false, "the same as --role agent")
	list := &cobra.Command{
		Use: "list", Short: "All tokens, also those that are used up or have expired",
		Example: "  skein token list", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().ListTokens(c.Context(), &skeinv1.ListTokensRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				t := table{head: []string{"ID", "USES LEFT", "EXPIRES IN", "ROLE", "LABEL"}}
				for _, k := range r.GetTokens() {
					left := "expired"
					if d := time.Until(time.Unix(0, k.GetExpiresAt())); d > 0 {
						left = short(d)
					}
					t.add(k.GetId(), fmt.Sprintf("%d of %d", k.GetUsesLeft(), k.GetUses()), left,
						cmp.Or(k.GetRole(), string(events.RoleAgent)), dash(k.GetLabel()))
				}
				t.print(w)
			})
		},
	}
	revoke := &cobra.Command{
		Use: "revoke ID", Short: "Make a token useless", Example: "  skein token revoke 0f1e2d3c4b5a6978",
		Args: cli.Exactly(1, "one token ID, as `skein token list` shows it"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := g.client().RevokeToken(c.Context(), &skeinv1.RevokeTokenRequest{TokenId: args[0]})
			return g.show(c, r, err, func(w io.Writer) { fmt.Fprintf(w, "token %s revoked\n", args[0]) })
		},
	}
	return cli.Group("token", "Tokens for joining", create, list, revoke)
}

func newNodeCmd(g *globals) *cobra.Command {
	show := &cobra.Command{
		Use: "show NODE", Short: "All that is known of a member", Example: "  skein node show home1",
		Args: cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := g.client().ShowNode(c.Context(), &skeinv1.ShowNodeRequest{Node: args[0]})
			return g.show(c, r, err, func(w io.Writer) {
				printNode(w, r.GetNode())
				printNotAsked(w, r.GetNotAsked())
			})
		},
	}
	var reason string
	var force bool
	revoke := &cobra.Command{
		Use: "revoke NODE", Short: "Throw a member out, everywhere and for good",
		Example: "  skein node revoke home1 --reason stolen", Args: cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := g.client().RevokeNode(c.Context(), &skeinv1.RevokeNodeRequest{Node: args[0], Reason: reason, Force: force})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "node %s (%s) revoked by event %d\n", r.GetNode().GetName(), r.GetNode().GetId(), r.GetIndex())
			})
		},
	}
	revoke.Flags().StringVar(&reason, "reason", "", "why, for the record")
	revoke.Flags().BoolVar(&force, "force", false, "also when it leaves only two voters")
	return cli.Group("node", "Members", show, newNodeDrainCmd(g), newRoleCmd(g, false), newRoleCmd(g, true),
		newNodeSetCmd(g),
		newNodeRotateKeyCmd(g), revoke)
}

func printNode(w io.Writer, n *skeinv1.NodeView) {
	line := func(k, format string, a ...any) {
		fmt.Fprintln(w, wrap(fmt.Sprintf("%-10s %s", k, fmt.Sprintf(format, a...)), 11))
	}
	r := n.GetRecord()
	line("node", "%s (%s), %s", n.GetNode().GetName(), n.GetNode().GetId(), role(n))
	line("addresses", "%s  %s", n.GetNode().GetIpv4(), n.GetNode().GetIpv6())
	line("admitted", "%s, by event %d", time.Unix(0, n.GetNode().GetAdmittedAt()).Format(time.RFC3339),
		n.GetNode().GetAdmittedIndex())
	line("labels", "%s", labelsText(n.GetNode().GetLabels()))
	if n.GetNode().GetDraining() {
		line("draining", "it gets no egress slots; `skein node drain %s --undo` takes that back", n.GetNode().GetName())
	}
	if c := n.GetNode().GetPodCidrs(); c != nil {
		line("pod CIDRs", "%s, of Kubernetes Node %s", strings.Join(c.GetCidrs(), " "), c.GetKubernetesNode())
	}
	if s := n.GetNode().GetSettings(); s != nil {
		line("set", "%s", settingsText(s))
	}
	line("path", "%s, %s", n.GetPath(), map[bool]string{true: "alive", false: "not heard from lately"}[n.GetAlive()])
	if r == nil {
		line("record", "none has arrived yet")
		return
	}
	age := "its own"
	if !n.GetSelf() {
		age = "arrived " + short(time.Duration(n.GetRecordAgeNanos())) + " ago"
	}
	line("record", "%d.%d, %s, by skein %s", r.GetEpoch(), r.GetSeq(), age, dash(r.GetVersion()))
	line("site", "%s", dash(cmp.Or(n.GetSite(), r.GetSite())))
	if l := n.GetSiteLeads(); l != "" {
		line("leads", "%s", map[string]string{"leader": "its site", "reserve": "its site, as a reserve of leaders that " +
			"suit better", "elected": "its site in a moment",
			"silent": "nothing while others can: its witnesses find that it does not forward"}[l])
	}
	line("NAT", "%s", candidate.NATName(r.GetNatType()))
	line("peers", "%d direct, %d by relay", r.GetPeersDirect(), r.GetPeersRelay())
	line("applied", "index %d, hash %.16x", r.GetAppliedIndex(), r.GetStateHash())
	if r.GetRelay() != nil {
		line("relay", "%s", strings.Join(r.GetRelay().GetAddresses(), " "))
	}
	for _, k := range candidate.Sorted(r.GetCandidates()) {
		line("candidate", "%s (%s %d, from %s)", k.GetAddress(), candidateText(k.GetType()), candidate.Priority(k),
			dash(k.GetSource()))
	}
}

func newEventsCmd(g *globals) *cobra.Command {
	var from uint64
	var follow bool
	c := &cobra.Command{
		Use: "events", Short: "The log of what the cluster decided", Example: "  skein events --since 10\n  skein events " +
			"--follow", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			stream, err := g.client().Events(c.Context(), &skeinv1.EventsRequest{Since: from, Follow: follow})
			if err != nil {
				return g.plain(err)
			}
			defer stream.Close()
			names := g.names(c)
			for stream.Receive() {
				e := stream.Msg().GetEvent()
				if g.output == "json" {
					if err := printProto(c.OutOrStdout(), e); err != nil {
						return err
					}
					continue
				}
				fmt.Fprintln(c.OutOrStdout(), eventLine(e, names))
			}
			if c.Context().Err() != nil { // Ctrl-C ends --follow as it should
				return nil
			}
			return g.plain(stream.Err())
		},
	}
	c.Flags().Uint64Var(&from, "since", 0, "first index to show (default: the oldest kept)")
	c.Flags().BoolVar(&follow, "follow", false, "go on with what is decided from now on")
	return c
}

func newSettingsCmd(g *globals) *cobra.Command {
	var direct, handshake, keepalive uint32
	var route bool
	var birthday string
	var podRanges, stunServers []string
	var stun string
	var topology string
	var leaders, fouPort uint32
	var siteTopologies []string
	c := &cobra.Command{
		Use: "settings", Short: "Show or change the cluster's settings", Example: "  skein settings\n  skein settings " +
			"--direct-retry 60\n  skein settings --pod-ranges 10.244.0.0/16,fd00:244::/48\n  skein settings --topology site " +
			"--site-topology dc=full", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			siteTopology, err := readSiteTopology(siteTopologies)
			if err != nil {
				return cli.UsageError{Err: err}
			}
			r := &skeinv1.SettingsRequest{Change: &skeinv1.Settings{HandshakeTimeoutSeconds: handshake,
				DirectRetryIntervalSeconds: direct, PersistentKeepaliveSeconds: keepalive, RouteNodeAddresses: route,
				BirthdayAttack: birthday, PodRanges: nonEmpty(podRanges), StunServers: nonEmpty(stunServers), Stun: stun,
				Topology: topology, LeadersPerSite: leaders, SiteTopology: siteTopology, FouPort: fouPort}}
			for flag, field := range map[string]string{"handshake-timeout": "handshake_timeout_seconds",
				"direct-retry": "direct_retry_interval_seconds", "keepalive": "persistent_keepalive_seconds",
				"route-node-addresses": "route_node_addresses", "birthday-attack": "birthday_attack", "pod-ranges": "pod_ranges",
				"stun-server": "stun_servers", "stun": "stun",
				"topology": "topology", "leaders-per-site": "leaders_per_site", "site-topology": "site_topology",
				"fou-port": "fou_port"} {
				if c.Flags().Changed(flag) {
					r.Fields = append(r.Fields, field)
				}
			}
			s, err := g.client().Settings(c.Context(), r)
			return g.show(c, s, err, func(w io.Writer) {
				t := table{head: []string{"SETTING", "VALUE"}}
				m := s.GetSettings().ProtoReflect()
				for i := range m.Descriptor().Fields().Len() {
					f := m.Descriptor().Fields().Get(i)
					value := m.Get(f).String()
					switch {
					case f.IsList():
						value = textsOf(m.Get(f).List())
					case f.IsMap():
						value = labelsText(s.GetSettings().GetSiteTopology()) // the only map
					case f.Message() != nil:
						value = portChangeText(s.GetSettings().GetFouPortChange()) // the only message
					}
					t.add(string(f.Name()), value)
				}
				t.print(w)
			})
		},
	}
	c.Flags().Uint32Var(&direct, "direct-retry", 0, "seconds between attempts at a direct path for a relayed pair")
	c.Flags().Uint32Var(&handshake, "handshake-timeout", 0, "seconds without an answer to WireGuard, after which a "+
		"direct path is left although pings pass")
	c.Flags().Uint32Var(&keepalive, "keepalive", 0, "seconds between keepalives behind NAT")
	c.Flags().BoolVar(&route, "route-node-addresses", false, "route the private prefixes that nodes offer")
	c.Flags().StringSliceVar(&podRanges, "pod-ranges", nil, "where another CNI has its pods: Nodes' pod CIDRs in these "+
		"ranges are led through the mesh; \"\": none")
	c.Flags().StringSliceVar(&stunServers, "stun-server", nil, "STUN servers that nodes ask, host:port; \"\": the "+
		"mesh's own public nodes")
	c.Flags().StringVar(&stun, "stun", "", "whether nodes ask STUN servers and answer STUN: enabled or disabled")
	c.Flags().StringVar(&topology, "topology", "", "who peers with whom: full (everybody), or site (the own site, and "+
		"leaders with leaders)")
	c.Flags().Uint32Var(&leaders, "leaders-per-site", 0, "how many nodes of a site lead it at once")
	c.Flags().StringSliceVar(&siteTopologies, "site-topology", nil, "sites with a topology of their own, such as "+
		"dc=full,home=site; all of them, \"\": none")
	c.Flags().Uint32Var(&fouPort, "fou-port", 0, "UDP port of egresses' tunnels; their flows go on while it changes")
	c.Flags().StringVar(&birthday, "birthday-attack", "", "predict ports at both ends between two symmetric NATs: "+
		"enabled or disabled")
	return c
}

// portChangeText is the last change of the tunnels' port as people read it.
func portChangeText(c *skeinv1.FouPortChange) string {
	if c == nil {
		return ""
	}
	return fmt.Sprintf("from %d, %s", c.GetFormer(), time.Unix(0, c.GetSince()).Format(time.DateTime))
}

// nonEmpty leaves out empty texts: a flag's "" is an empty list.
func nonEmpty(in []string) []string {
	return slices.DeleteFunc(in, func(s string) bool { return s == "" })
}

// textsOf is a list of texts as people read it.
func textsOf(l protoreflect.List) string {
	var out []string
	for i := range l.Len() {
		out = append(out, l.Get(i).String())
	}
	return strings.Join(out, ",")
}

// readSiteTopology reads SITE=TOPOLOGY; the default site's name is empty.
func readSiteTopology(all []string) (map[string]string, error) {
	out := map[string]string{}
	for _, text := range all {
		if text == "" {
			continue
		}
		i := strings.LastIndexByte(text, '=')
		if i < 0 {
			return nil, fmt.Errorf("--site-topology %q: want SITE=full or SITE=site", text)
		}
		out[text[:i]] = text[i+1:]
	}
	return out, nil
}
