package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/cli"
)

func newSiteCmd(g *globals) *cobra.Command {
	return cli.Group("site", "Sites, and networks of theirs that others know under other addresses", newSiteListCmd(g),
		newSiteTranslateCmd(g))
}

func newSiteListCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "The sites, their nodes, and what of them is translated", Example: "  skein site list",
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().Sites(c.Context(), &skeinv1.SitesRequest{})
			return g.show(c, r, err, func(w io.Writer) {
				t := table{head: []string{"SITE", "NODES", "PREFIX", "ELSEWHERE", "BEHIND"}}
				for _, s := range r.GetSites() {
					name, count := dash(s.GetName()), fmt.Sprint(len(s.GetNodes()))
					if len(s.GetTranslations()) == 0 {
						t.add(name, count, "-", "-", "-")
					}
					for _, v := range s.GetTranslations() {
						t.add(name, count, v.GetTranslation().GetPrefix(), v.GetTranslation().GetAs(),
							dash(strings.Join(v.GetNodes(), ",")))
					}
				}
				t.print(w)
			})
		},
	}
}

func newSiteTranslateCmd(g *globals) *cobra.Command {
	var prefix, as string
	var remove bool
	c := &cobra.Command{
		Use: "translate SITE", Short: "Let other sites know a network of a site under other addresses",
		Long: "Let other sites know a network of a site under other addresses, since they have the same network or a part " +
			"of it.\n" +
			"Inside of the site nothing changes. The node that has the network behind it (nodeAddresses in its configuration, " +
			"or\n" +
			"the pods of another CNI) translates each address to the one with the same host part. The default site's name is " +
			"\"\".",
		Example: "  skein site translate home --prefix 192.168.1.0/24 --as 10.201.1.0/24\n" +
			"  skein site translate home --prefix 192.168.1.0/24 --remove",
		Args: cli.Exactly(1, "one site's name"),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case prefix == "":
				return cli.UsageError{Err: errors.New("--prefix is missing: the network of the site, such as 192.168.1.0/24")}
			case remove == (as != ""):
				return cli.UsageError{Err: errors.New("give either --as PREFIX or --remove, and not both")}
			case remove:
				r, err := g.client().RemoveSiteTranslation(c.Context(),
					&skeinv1.RemoveSiteTranslationRequest{Site: args[0], Prefix: prefix})
				return g.show(c, r, err, func(w io.Writer) {
					fmt.Fprintf(w, "%s of %s is not translated any more, as of event %d\n", prefix,
						events.SiteText(args[0]), r.GetIndex())
				})
			}
			r, err := g.client().SetSiteTranslation(c.Context(),
				&skeinv1.SetSiteTranslationRequest{Site: args[0], Prefix: prefix, As: as})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "other sites know %s of %s as %s, as of event %d\n", prefix, events.SiteText(args[0]), as,
					r.GetIndex())
			})
		},
	}
	c.Flags().StringVar(&prefix, "prefix", "", "the network, as it is inside of the site")
	c.Flags().StringVar(&as, "as", "", "a private prefix of the same length that nobody has: what other sites know it as")
	c.Flags().BoolVar(&remove, "remove", false, "end the network's translation")
	return c
}
