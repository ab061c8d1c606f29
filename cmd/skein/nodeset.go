package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/addr"
	"github.com/skeinmesh/skein/internal/cli"
)

// nodeFields are what `skein node set` sets, as its flags and as the API calls them.
var nodeFields = map[string]string{
	"site": "site", "leader": "leader", "force-endpoint": "force_endpoint", "internal-ip": "internal_ip",
	"persistent-keepalive": "persistent_keepalive",
}

func newNodeSetCmd(g *globals) *cobra.Command {
	var name, site, endpoint, internal string
	var noSite, leader, noLeader bool
	var keepalive uint32
	var unset []string
	c := &cobra.Command{
		Use: "set NODE [LABEL=VALUE | LABEL-]…", Short: "Change a member's name, labels, and how it is reached",
		Long: "Change a member's name and labels, or say its site, whether it shall lead it, and how it is reached.\n" +
			"LABEL=VALUE sets a label, LABEL- removes one. What is set here comes before the node's own configuration\n" +
			"and annotations. See docs/egress.md for labels and docs/sites.md for the rest.",
		Example: "  skein node set gw3 egress=yes rack-\n  skein node set home1 --name attic\n" +
			"  skein node set home1 --site home\n" +
			"  skein node set edge1 --leader --force-endpoint edge.example.com:51820\n" +
			"  skein node set edge1 --unset leader,force-endpoint",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.UsageError{Err: fmt.Errorf("%s takes one node's name or ID, then labels to set or remove; "+
					"see `%s --help`", c.CommandPath(), c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			r := &skeinv1.SetNodeRequest{Node: args[0], Settings: &skeinv1.NodeSettings{}, Name: name}
			if err := readLabelChanges(r, args[1:]); err != nil {
				return err
			}
			if c.Flags().Changed("name") && name == "" {
				return cli.UsageError{Err: errors.New("--name \"\": a node needs a name")}
			}
			set := func(flag string) bool {
				if !c.Flags().Changed(flag) {
					return false
				}
				r.Fields = append(r.Fields, nodeFields[flag])
				return true
			}
			if noSite {
				unset = append(unset, "site")
			}
			if set("site") {
				r.Settings.SiteSet, r.Settings.Site = true, site
			}
			if leader || noLeader {
				r.Fields = append(r.Fields, "leader")
				r.Settings.Leader = map[bool]string{true: "yes", false: "no"}[leader]
			}
			if set("force-endpoint") {
				r.Settings.ForceEndpoint = orNothing(endpoint)
			}
			if set("internal-ip") {
				ip, err := addr.Internal(internal)
				if err != nil {
					return cli.UsageError{Err: fmt.Errorf("--internal-ip: %w", err)}
				}
				if ip.IsValid() {
					r.Settings.InternalIp = ip.String()
				}
			}
			if set("persistent-keepalive") {
				r.Settings.PersistentKeepalive = keepalive
			}
			if leader && noLeader {
				return cli.UsageError{Err: errors.New("--leader and --no-leader cannot be used together: give one of them")}
			}
			for _, flag := range unset {
				field, ok := nodeFields[flag]
				if !ok {
					return cli.UsageError{Err: fmt.Errorf(
						"--unset %q: want one or more of site, leader, force-endpoint, internal-ip, "+
							"persistent-keepalive", flag)}
				}
				if slices.Contains(r.Fields, field) {
					return cli.UsageError{Err: fmt.Errorf("%s cannot be set and unset at once: leave out one of the two flags",
						flag)}
				}
				r.Fields = append(r.Fields, field)
			}
			if len(r.GetFields())+len(r.GetSetLabels())+len(r.GetRemoveLabels()) == 0 && name == "" {
				return cli.UsageError{Err: errors.New("nothing to set: give LABEL=VALUE, LABEL-, --name, --site, " +
					"--leader, --no-leader, --force-endpoint, --internal-ip, --persistent-keepalive, or --unset")}
			}
			a, err := g.client().SetNode(c.Context(), r)
			return g.show(c, a, err, func(w io.Writer) {
				fmt.Fprintf(w, "node %s: %s, as of event %d\n", a.GetNode().GetName(), strings.Join(setText(r, a), "; "),
					a.GetIndex())
			})
		},
	}
	f := c.Flags()
	f.StringVar(&name, "name", "", "its name from now on")
	f.StringVar(&site, "site", "", "its site; \"\": the default site")
	f.BoolVar(&noSite, "no-site", false, "take the site back: what the host itself says holds again")
	f.BoolVar(&leader, "leader", false, "it shall lead its site")
	f.BoolVar(&noLeader, "no-leader", false, "it leads its site only where nobody else can")
	f.StringVar(&endpoint, "force-endpoint", "",
		"host:port at which others reach its WireGuard; \"\" or -: none is set")
	f.StringVar(&internal, "internal-ip", "", "its address inside its site, the only private one that is offered then; "+
		"\"\" or -: none is set")
	f.Uint32Var(&keepalive, "persistent-keepalive", 0, "seconds between its keepalives to every peer; 0: none is set")
	f.StringSliceVar(&unset, "unset", nil,
		"take back: any of site, leader, force-endpoint, internal-ip, persistent-keepalive")
	return c
}

// readLabelChanges adds to a request the labels that are to be set (KEY=VALUE) and removed (KEY-).
func readLabelChanges(r *skeinv1.SetNodeRequest, texts []string) error {
	for _, text := range texts {
		key, value, sets := strings.Cut(text, "=")
		if !sets {
			bare, removes := strings.CutSuffix(text, "-")
			if !removes || bare == "" {
				return cli.UsageError{Err: fmt.Errorf("%q: want LABEL=VALUE to set a label, or LABEL- to remove one", text)}
			}
			key = bare
		}
		_, twice := r.GetSetLabels()[key]
		switch {
		case key == "":
			return cli.UsageError{Err: fmt.Errorf("%q: a label needs a key: want LABEL=VALUE, such as egress=yes", text)}
		case twice || slices.Contains(r.GetRemoveLabels(), key):
			return cli.UsageError{Err: fmt.Errorf("label %s is given twice: give it once", key)}
		case !sets:
			r.RemoveLabels = append(r.RemoveLabels, key)
		default:
			if r.SetLabels == nil {
				r.SetLabels = map[string]string{}
			}
			r.SetLabels[key] = value
		}
	}
	return nil
}

// setText says of all kinds that were asked for what a member has now.
func setText(r *skeinv1.SetNodeRequest, a *skeinv1.SetNodeResponse) (out []string) {
	if r.GetName() != "" {
		out = append(out, "it was called "+a.GetWas())
	}
	if len(r.GetSetLabels())+len(r.GetRemoveLabels()) > 0 {
		out = append(out, "labels "+labelsText(a.GetNode().GetLabels()))
	}
	if len(r.GetFields()) > 0 {
		out = append(out, settingsText(a.GetNode().GetSettings()))
	}
	return out
}

// orNothing reads Kilo's "-".
func orNothing(s string) string {
	if s == "-" {
		return ""
	}
	return s
}

// settingsText says what is set of a node.
func settingsText(s *skeinv1.NodeSettings) string {
	var out []string
	if s.GetSiteSet() {
		out = append(out, fmt.Sprintf("site %q", s.GetSite()))
	}
	switch s.GetLeader() {
	case "yes":
		out = append(out, "it shall lead its site")
	case "no":
		out = append(out, "it shall not lead its site")
	}
	if s.GetForceEndpoint() != "" {
		out = append(out, "endpoint "+s.GetForceEndpoint())
	}
	if s.GetInternalIp() != "" {
		out = append(out, "internal IP "+s.GetInternalIp())
	}
	if s.GetPersistentKeepalive() != 0 {
		out = append(out, fmt.Sprintf("a keepalive each %d seconds", s.GetPersistentKeepalive()))
	}
	if len(out) == 0 {
		return "nothing is set; what the host itself says holds"
	}
	return strings.Join(out, ", ")
}
