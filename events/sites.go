package events

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Bounds of what is agreed about sites.
const (
	MaxSite           = 64 // bytes of a site's name
	MaxSiteTopologies = 256
	MaxLeadersPerSite = 16
	maxNodeKeepalive  = 3600 // seconds, as the configuration has it
	maxEndpointHost   = 253  // bytes of a DNS name
)

// siteSchema is the schema that brought topologies and the settings of nodes.
const siteSchema = 6

// CheckSite refuses what is not a name of a site; what says whose it is. The empty name is the default site's.
func CheckSite(what, site string) error {
	return checkText(fmt.Sprintf("%s: the site's name %.20q…", what, site), site, MaxSite)
}

// checkTopology bounds the settings about sites.
func checkTopology(v *skeinv1.Settings) error {
	if !isTopology(v.GetTopology()) && v.GetTopology() != "" {
		return refuse(InvalidArgument, "setting topology: %.80q is not allowed; use full or site", v.GetTopology())
	}
	if n := v.GetLeadersPerSite(); n > MaxLeadersPerSite {
		return refuse(InvalidArgument,
			"setting leaders_per_site: %d is out of range; use 1 to %d, or 0 for the default", n, MaxLeadersPerSite)
	}
	if n := len(v.GetSiteTopology()); n > MaxSiteTopologies {
		return refuse(InvalidArgument, "setting site_topology: %d sites are too many; at most %d can have their own",
			n, MaxSiteTopologies)
	}
	for _, site := range slices.Sorted(maps.Keys(v.GetSiteTopology())) {
		if err := CheckSite("setting site_topology", site); err != nil {
			return err
		}
		if t := v.GetSiteTopology()[site]; !isTopology(t) {
			return refuse(InvalidArgument, "setting site_topology: %.80q is not allowed for site %q; use full or site",
				t, site)
		}
	}
	return nil
}

func isTopology(t string) bool { return t == "full" || t == "site" }

// bySites reports whether the settings have a site speak through leaders, which versions older than siteSchema do not.
func bySites(v *skeinv1.Settings) bool {
	return v.GetTopology() == "site" || slices.Contains(slices.Collect(maps.Values(v.GetSiteTopology())), "site")
}

// checkSitesKnown refuses what is about sites while a server does not know it.
func (d *decision) checkSitesKnown(what string) error {
	behind := d.s.Holdbacks(siteSchema)
	if len(behind) == 0 {
		return nil
	}
	n := behind[0]
	return refuse(FailedPrecondition,
		"server %s folds event schemas up to %d and %s need %d: upgrade skein on %s first",
		n.GetName(), n.GetMaxSchema(), what, siteSchema, n.GetName())
}

// setsSites reports whether settings say anything about sites.
func setsSites(v *skeinv1.Settings) bool {
	return v.GetTopology() != "" || v.GetLeadersPerSite() != 0 || len(v.GetSiteTopology()) > 0
}

// checkNodeSettings refuses settings of a node that make no sense; what says whose they are.
func checkNodeSettings(what string, v *skeinv1.NodeSettings) error {
	if err := CheckSite(what, v.GetSite()); err != nil {
		return err
	}
	switch v.GetLeader() {
	case "", "yes", "no":
	default:
		return refuse(InvalidArgument, "%s: leader %.80q is not allowed; use yes or no, or leave it empty", what,
			v.GetLeader())
	}
	if e := v.GetForceEndpoint(); e != "" && !isEndpoint(e) {
		return refuse(InvalidArgument,
			"%s: forced endpoint %.80q: want host:port, such as 192.0.2.7:51820, [2001:db8::7]:51820 or edge.example.com:51820",
			what, e)
	}
	if text := v.GetInternalIp(); text != "" {
		a, err := netip.ParseAddr(text)
		if err != nil || a.String() != text || a.Zone() != "" || a.Is4In6() || !a.IsGlobalUnicast() {
			return refuse(InvalidArgument,
				"%s: internal IP %.80q: want an IP address of the host inside its site, such as 10.0.0.7", what, text)
		}
	}
	if k := v.GetPersistentKeepalive(); k > maxNodeKeepalive {
		return refuse(InvalidArgument, "%s: a keepalive every %d seconds is out of range; use 1 to %d, or 0 for none",
			what, k, maxNodeKeepalive)
	}
	if !v.GetSiteSet() && v.GetSite() != "" || len(v.ProtoReflect().GetUnknown()) > 0 {
		return refuse(InvalidArgument, "%s: the settings are not in canonical form, or have unknown fields: upgrade "+
			"skein", what)
	}
	return nil
}

func isEndpoint(text string) bool {
	host, port, err := net.SplitHostPort(text)
	if err != nil || host == "" || len(host) > maxEndpointHost ||
		strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || unicode.IsSpace(r) }) {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// mergeNodeSettings is a copy of old with the named fields of v; nil: nothing is set any more.
func mergeNodeSettings(old, v *skeinv1.NodeSettings, names []string) (*skeinv1.NodeSettings, error) {
	out := &skeinv1.NodeSettings{}
	if old != nil {
		out = proto.CloneOf(old)
	}
	for _, name := range names {
		switch name {
		case "site":
			out.SiteSet, out.Site = v.GetSiteSet(), ""
			if v.GetSiteSet() {
				out.Site = v.GetSite()
			}
		case "leader":
			out.Leader = v.GetLeader()
		case "force_endpoint":
			out.ForceEndpoint = v.GetForceEndpoint()
		case "internal_ip":
			out.InternalIp = v.GetInternalIp()
		case "persistent_keepalive":
			out.PersistentKeepalive = v.GetPersistentKeepalive()
		default:
			return nil, refuse(InvalidArgument,
				"a node has no setting %.80q; there are force_endpoint, internal_ip, leader, persistent_keepalive, site", name)
		}
	}
	if proto.Equal(out, &skeinv1.NodeSettings{}) {
		return nil, nil
	}
	return out, nil
}

// changeNodeSettings decides the part of ChangeNode that `skein node set` gives.
func (d *decision) changeNodeSettings(n *skeinv1.Node, c *skeinv1.ChangeNode) error {
	if len(c.GetSettingsFields()) == 0 {
		return nil
	}
	next, err := mergeNodeSettings(n.GetSettings(), c.GetSettings(), c.GetSettingsFields())
	if err != nil {
		return err
	}
	if err := checkNodeSettings("node "+n.GetName(), next); err != nil {
		return err
	}
	if proto.Equal(next, n.GetSettings()) {
		return nil
	}
	// Its record alone would say whose traffic it gets. A choice of before this rule stands, and its other settings
	// change.
	about := slices.Contains(c.GetSettingsFields(), "leader") || slices.Contains(c.GetSettingsFields(), "site")
	if about && next.GetLeader() == "yes" && !next.GetSiteSet() {
		return refuse(FailedPrecondition,
			"node %[1]s is chosen to lead its site, so its site must be set too: skein node set %[1]s --site SITE, "+
				"or --unset leader", n.GetName())
	}
	if err := d.checkSitesKnown("settings of nodes"); err != nil {
		return err
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeSettingsSet{NodeSettingsSet: &skeinv1.NodeSettingsSet{NodeId: n.GetId(),
		Settings: next}}})
	changed := copyNode(d.answer.GetNode())
	changed.Settings = next
	d.answer.Node = changed
	return nil
}

// setNodeSettings folds a node's settings, unless no command can have given them; it reports whether it did.
func (s *State) setNodeSettings(id string, v *skeinv1.NodeSettings) bool {
	old := find(&s.nodes, id)
	if old == nil || v != nil && !soundNodeSettings(v) {
		return false
	}
	n := copyNode(old)
	n.Settings = v
	s.replace(n)
	s.sizes.drop(sectionNodes, old)
	s.sizes.add(sectionNodes, n)
	s.countSettings(old, -1)
	s.countSettings(n, 1)
	return true
}

func soundNodeSettings(v *skeinv1.NodeSettings) bool {
	return checkNodeSettings("node", v) == nil && !proto.Equal(v, &skeinv1.NodeSettings{})
}

// countSettings keeps the number of nodes that have settings.
func (s *State) countSettings(n *skeinv1.Node, by int) {
	if n.GetSettings() != nil {
		s.nodesSet += by
	}
}

// loadNodeSettings checks the settings that a snapshot's nodes have, and counts them.
func (s *State) loadNodeSettings(p *skeinv1.State) error {
	for _, n := range p.GetNodes() {
		if n.GetSettings() != nil && !soundNodeSettings(n.GetSettings()) {
			return fmt.Errorf("node %q (%q): its settings are malformed", n.GetId(), n.GetName())
		}
		s.countSettings(n, 1)
	}
	return nil
}
