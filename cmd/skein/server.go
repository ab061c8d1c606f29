package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/cli"
)

// serverLook is how often servers are looked at while somebody waits for one.
const serverLook = 250 * time.Millisecond

func newServerCmd(g *globals) *cobra.Command {
	return cli.Group("server", "Servers: the members that vote on what is agreed", newServerAddCmd(g),
		newServerRemoveCmd(g),
		newServerListCmd(g), newServerRecoverCmd(g))
}

func newServerAddCmd(g *globals) *cobra.Command {
	var wait time.Duration
	c := &cobra.Command{
		Use: "add NODE", Short: "Make a member a server",
		Long: "Make a member a server, which votes on what is agreed once it has kept up with the log for some seconds. " +
			"The\n" +
			"command waits for that; nothing is restarted. It is `skein node grant NODE server`, with the waiting.",
		Example: "  skein server add dc2", Args: cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			r := &skeinv1.SetRoleRequest{Node: args[0], Role: string(events.RoleServer)}
			return g.setServer(c, r, wait, func(s *skeinv1.ServerStatus) (done bool, why string) {
				return s.GetVoter(), s.GetWaiting()
			})
		},
	}
	c.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait until it votes (0: not at all)")
	return c
}

func newServerRemoveCmd(g *globals) *cobra.Command {
	var wait time.Duration
	var force bool
	c := &cobra.Command{
		Use: "remove NODE", Short: "Make a server a member like others",
		Long: "Take the role of a server from a member. It stays a member, and an admin if that was granted to it, too. " +
			"The last\n" +
			"server stays. Where two voters would be left, neither of which may fail, --force is needed. A server that leads\n" +
			"hands over. It is `skein node withdraw NODE server`, with the waiting.",
		Example: "  skein server remove dc2", Args: cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			r := &skeinv1.SetRoleRequest{Node: args[0], Role: string(events.RoleServer), Withdraw: true, Force: force}
			return g.setServer(c, r, wait, func(s *skeinv1.ServerStatus) (done bool, why string) {
				return s == nil, "it is still a server"
			})
		},
	}
	c.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait until it is none (0: not at all)")
	c.Flags().BoolVar(&force, "force", false, "also when it leaves only two voters")
	return c
}

func newServerListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "The servers, who of them leads, and who votes", Example: "  skein server list", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Status(c.Context(), &skeinv1.StatusRequest{})
			if err != nil {
				return g.plain(err)
			}
			slices.SortFunc(r.GetServers(), func(a, b *skeinv1.ServerStatus) int {
				return strings.Compare(a.GetName(), b.GetName())
			})
			if g.output == "json" {
				out := []jsonMessage{}
				for _, s := range r.GetServers() {
					out = append(out, jsonMessage{s})
				}
				return cli.PrintJSON(c.OutOrStdout(), out)
			}
			printServers(c.OutOrStdout(), r.GetServers())
			return nil
		},
	}
}

func printServers(w io.Writer, servers []*skeinv1.ServerStatus) {
	t := table{head: []string{"NAME", "VOTES", "LEADS", "ALIVE", "WAITS"}}
	for _, s := range servers {
		t.add(s.GetName(), yesNo(s.GetVoter()), yesNo(s.GetLeader()), yesNo(s.GetReachable()), dash(s.GetWaiting()))
	}
	t.print(w)
}

// setServer gives a member the role of a server or takes it, and waits until it is so. is looks at what this node knows
// of it as a server, nil when it is none, and says why that is not what was asked for yet.
func (g *globals) setServer(c *cobra.Command, r *skeinv1.SetRoleRequest, limit time.Duration,
	is func(*skeinv1.ServerStatus) (done bool, why string)) error {
	if limit < 0 {
		return cli.UsageError{Err: fmt.Errorf("--wait %s: want a time such as 60s; 0 does not wait", limit)}
	}
	set, err := g.client().SetRole(c.Context(), r)
	if err != nil {
		return g.plain(err)
	}
	name, outcome := set.GetNode().GetName(), "is a server and votes"
	switch {
	case r.GetWithdraw():
		outcome = "is not a server any more"
	case limit == 0:
		outcome = "is a server"
	}
	if limit > 0 {
		if err := g.untilServer(c, set, limit, is); err != nil {
			return err
		}
	}
	return g.show(c, set, nil, func(w io.Writer) {
		fmt.Fprintf(w, "node %s %s, as of event %d\n", name, outcome, set.GetIndex())
	})
}

// untilServer looks at a server until it is as asked for.
func (g *globals) untilServer(c *cobra.Command, set *skeinv1.SetRoleResponse, limit time.Duration,
	is func(*skeinv1.ServerStatus) (bool, string)) error {
	ctx, cancel := context.WithTimeout(c.Context(), limit)
	defer cancel()
	tick := time.NewTicker(serverLook)
	defer tick.Stop()
	name, why := set.GetNode().GetName(), ""
	for {
		st, err := g.client().Status(c.Context(), &skeinv1.StatusRequest{}) // once at least
		switch {
		case err == nil && st.GetIndex() >= set.GetIndex():
			at := slices.IndexFunc(st.GetServers(), func(s *skeinv1.ServerStatus) bool {
				return s.GetNodeId() == set.GetNode().GetId()
			})
			var server *skeinv1.ServerStatus
			if at >= 0 {
				server = st.GetServers()[at]
			}
			done, reason := is(server)
			if done {
				return nil
			}
			why = ": " + reason
		case err != nil:
			return g.plain(err)
		}
		select {
		case <-ctx.Done():
			if err := c.Context().Err(); err != nil {
				return fmt.Errorf("stopped waiting for node %s%s; event %d stands, and the change continues", name,
					why, set.GetIndex())
			}
			return fmt.Errorf("the role change of node %s is not complete after %s%s; event %d stands, and the "+
				"change continues without this command: `skein server list` shows it", name, limit, why, set.GetIndex())
		case <-tick.C:
		}
	}
}

func newServerRecoverCmd(g *globals) *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use: "recover", Short: "After the loss of a majority for good: make this stopped server the only voter",
		Long: "Make this server the only voter of its cluster, after a majority of the servers is lost for good.\n\n" +
			"The agent must be stopped. What only the lost servers knew is gone. The lost servers must never start\n" +
			"again with their old state directories. See docs/recovery.md.",
		Example: "  skein server recover --yes", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if !yes {
				return cli.UsageError{Err: errors.New("this cannot be undone: read `skein server recover --help`, then add --yes")}
			}
			cfg, err := g.load()
			if err != nil {
				return err
			}
			r, err := agent.Recover(cfg, logger(cfg.Log))
			if err != nil {
				return err
			}
			if g.output == "json" {
				return cli.PrintJSON(c.OutOrStdout(), r)
			}
			fmt.Fprintf(c.OutOrStdout(), "this server is now the only voter, at event %d; the old Raft files are in %s\nstart "+
				"it with `skein up`, then let new servers join\n", r.Index, r.Backup)
			return nil
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "really do it")
	return c
}
