package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/cli"
)

// newRoleCmd is `skein node grant`, or `skein node withdraw`.
func newRoleCmd(g *globals, withdraw bool) *cobra.Command {
	var force bool
	c := &cobra.Command{
		Use: "grant NODE ROLE", Short: "Let a member give cluster commands (admin), or vote (server)",
		Long: "Give a member a role. An admin gives cluster commands: tokens, settings, pools, egresses, revocations. A " +
			"server\n" +
			"votes on what is agreed, and is an admin. Every other member is an agent and speaks for itself only.",
		Example: "  skein node grant home1 admin\n  skein node grant dc2 server",
		Args:    cli.Exactly(2, "one node's name or ID, and a role: admin or server"),
		RunE: func(c *cobra.Command, args []string) error {
			role, err := events.ParseRole(args[1])
			if err != nil {
				return cli.UsageError{Err: err}
			}
			if role == events.RoleAgent {
				return cli.UsageError{Err: errors.New("every member is an agent: name the role admin or server; " +
					"`skein node revoke` removes a member")}
			}
			r, err := g.client().SetRole(c.Context(), &skeinv1.SetRoleRequest{Node: args[0], Role: args[1],
				Withdraw: withdraw, Force: force})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "node %s is %s, as of event %d\n", r.GetNode().GetName(), roleText(r), r.GetIndex())
			})
		},
	}
	if withdraw {
		c.Use, c.Short = "withdraw NODE ROLE", "Take the role admin or server from a member"
		c.Long = "Take a role from a member, which is then an agent, or an admin if it was granted that, too. The last " +
			"server stays."
		c.Example = "  skein node withdraw home1 admin\n  skein node withdraw dc2 server"
		c.Flags().BoolVar(&force, "force", false, "also when it leaves only two voters")
	}
	return c
}

func roleText(r *skeinv1.SetRoleResponse) string {
	if r.GetRole() == string(events.RoleServer) {
		return "a server"
	}
	return "an " + r.GetRole()
}
