package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/events"
)

// maxFile bounds a lab file, in bytes.
const maxFile = 1 << 20

var nameRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)

// Load reads and checks a lab file. Its error tells every mistake, one a line: file, line, key, what
// is wrong and what is allowed.
func Load(path string) (*Spec, error) {
	st, err := os.Stat(path)
	if err == nil && st.Size() > maxFile {
		err = fmt.Errorf("it has %d bytes, a lab file has at most %d", st.Size(), maxFile)
	}
	var src []byte
	if err == nil {
		src, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("lab file %s: %w", path, err)
	}
	return Parse(path, src)
}

// Parse is Load for a file that has been read; file is its name in messages.
func Parse(file string, src []byte) (*Spec, error) {
	if len(src) > maxFile {
		return nil, fmt.Errorf("lab file %s: has %d bytes, a lab file has at most %d", file, len(src), maxFile)
	}
	tree, err := parser.ParseBytes(src, 0)
	if err != nil {
		return nil, syntaxError(file, err)
	}
	d := &decoder{file: file}
	s := &Spec{File: file, Source: bytes.Clone(src)}
	root := ast.Node(nil)
	for _, doc := range tree.Docs {
		if doc.Body == nil {
			continue
		}
		if root != nil {
			return nil, fmt.Errorf("%s: holds more than one YAML document; a lab is one", file)
		}
		root = doc.Body
	}
	if root == nil {
		return nil, fmt.Errorf("%s: is empty; a lab has name, sites, nodes and steps (docs/lab.md)", file)
	}
	r := &reader{d: d, s: s, pods: map[string][]string{}}
	r.read(value{d: d, node: root})
	if len(d.errs) > 0 {
		return nil, errors.Join(d.errs...)
	}
	return s, nil
}

func syntaxError(file string, err error) error {
	var syntax *yaml.SyntaxError
	if errors.As(err, &syntax) && syntax.Token != nil && syntax.Token.Position != nil {
		return fmt.Errorf("%s:%d: no valid YAML: %s", file, syntax.Token.Position.Line, syntax.Message)
	}
	return fmt.Errorf("%s: no valid YAML: %w", file, err)
}

// reader fills a Spec from a tree. Steps are read last, when all names are known.
type reader struct {
	d     *decoder
	s     *Spec
	sites []siteDraft
	lines map[string]int      // of nodes
	pods  map[string][]string // that run on a node after the steps read so far
}

func (r *reader) read(root value) {
	var steps *value
	var nodes, named bool
	root.mapping(
		field{"name", func(v value) { named = true; r.s.Name = r.name(v, v.text("a name")) }},
		field{"sites", func(v value) { v.entries("a mapping from names to sites", r.site) }},
		field{"config", func(v value) { r.s.Config = r.config(v) }},
		field{"settings", func(v value) { r.s.Settings = r.settings(v) }},
		field{"nodes", func(v value) { nodes = true; v.entries("a mapping from names to nodes", r.node) }},
		field{"pools", func(v value) { v.entries("a mapping from names to pools", r.pool) }},
		field{"egresses", func(v value) { v.entries("a mapping from namespace/name to egresses", r.egress) }},
		field{"steps", func(v value) { steps = &v }},
	)
	if !named {
		root.fail("the key \"name\" is missing: a lab's name is part of its namespaces' names")
	}
	if !nodes {
		root.fail("the key \"nodes\" is missing: a lab has at least one node")
	} else if len(r.d.errs) == 0 { // else its findings would be consequences of those
		r.checkSites()
		r.checkNodes(root)
	}
	if steps != nil {
		if steps.node == nil || kindOf(steps.node) == "empty" {
			return
		}
		steps.each("steps", r.step)
	}
}

func (r *reader) name(v value, name string) string {
	if name != "" && !nameRule.MatchString(name) {
		v.fail("%q is not a name; allowed: up to 32 of a-z, 0-9 and -, not - at the ends", name)
	}
	return name
}

func (r *reader) site(name string, v value) {
	s := siteDraft{SiteSpec: fabric.SiteSpec{Name: r.name(v, name)}, value: v}
	before := len(r.d.errs)
	v.mapping(
		field{"nat", func(v value) { s.NAT = r.nat(v) }},
		field{"ipv4", func(v value) { s.NoIPv4 = !v.boolean() }},
		field{"ipv6", func(v value) { b := v.boolean(); s.ipv6 = &b }},
		field{"hairpin", func(v value) { b := v.boolean(); s.hairpin = &b }},
		field{"portmap", func(v value) { s.Portmap = r.portmap(v) }},
		field{"behind", func(v value) { s.Behind = v.text("the name of a site") }},
		field{"lan", func(v value) { s.LAN = v.network() }},
		field{"delay", func(v value) { s.Delay = v.duration() }},
	)
	if s.NAT == "" && len(r.d.errs) == before {
		v.fail("the key \"nat\" is missing; allowed: %s", natNames())
	}
	s.applyDefaults()
	r.sites = append(r.sites, s)
	r.s.Sites = append(r.s.Sites, s.SiteSpec)
}

// siteDraft is a site as it is read, with what was said of defaults.
type siteDraft struct {
	fabric.SiteSpec
	value         value
	ipv6, hairpin *bool
}

// applyDefaults fills in defaults and refuses what does not go together.
func (s *siteDraft) applyDefaults() {
	s.IPv6, s.Hairpin = s.NAT == fabric.None, s.NAT == fabric.OneToOne
	if s.ipv6 != nil {
		s.IPv6 = *s.ipv6
	}
	if s.hairpin != nil {
		s.Hairpin = *s.hairpin
	}
	switch {
	case s.NAT == "":
	case s.NoIPv4 && !s.IPv6:
		s.value.fail("has neither IPv4 nor IPv6: add ipv6: true")
	case s.NoIPv4 && (s.hairpin != nil || s.Portmap != nil || s.LAN.IsValid()):
		s.value.fail("hairpin, portmap and lan need IPv4, which it lacks: leave them out, or leave out ipv4: false")
	case s.Hairpin && !s.NAT.CanHairpin():
		s.value.fail("nat: %s cannot have hairpin: true: nothing is translated, or the filtering lets nothing in from the "+
			"NAT's own address", s.NAT)
	case s.Portmap != nil && !s.NAT.CanMap():
		s.value.fail("nat: %s cannot have portmap: its router has no ports to give away", s.NAT)
	case s.LAN.IsValid() && s.NAT == fabric.None:
		s.value.fail("nat: none cannot have lan: its hosts have public addresses")
	case s.Behind != "" && (s.NAT == fabric.None || s.NAT == fabric.OneToOne || s.NAT == fabric.Double):
		s.value.fail("nat: %s cannot be behind another site: allowed are the kinds where hosts share one address", s.NAT)
	}
}

// checkSites looks at the sites together.
func (r *reader) checkSites() {
	for _, s := range r.sites {
		if err := fabric.CheckSiteName(s.Name); err != nil {
			s.value.fail("%v", err)
		}
		if s.Behind == "" {
			continue
		}
		i := slices.IndexFunc(r.sites, func(o siteDraft) bool { return o.Name == s.Behind })
		switch {
		case i < 0 || s.Behind == s.Name:
			s.value.fail("is behind %q, which is not another site; allowed: %s", s.Behind, strings.Join(r.siteNames(), ", "))
		case r.sites[i].Behind != "":
			s.value.fail("is behind %s, which is behind %s itself; allowed is one behind another", s.Behind, r.sites[i].Behind)
		case r.sites[i].NAT == fabric.Double || r.sites[i].NoIPv4:
			s.value.fail("is behind %s, whose network no router can be in (nat: double, or ipv4: false)", s.Behind)
		}
	}
}

func (r *reader) portmap(v value) []string {
	list := v.texts(strings.Join(fabric.Portmaps(), ", "))
	for _, p := range list {
		if !slices.Contains(fabric.Portmaps(), p) {
			v.fail("%q is not known; allowed: %s", p, strings.Join(fabric.Portmaps(), ", "))
		}
	}
	if len(list) == 0 {
		v.fail("is empty; allowed: %s", strings.Join(fabric.Portmaps(), ", "))
	}
	return list
}

func natNames() string {
	var names []string
	for _, n := range fabric.NATs() {
		names = append(names, string(n))
	}
	return strings.Join(names, ", ")
}

func (r *reader) nat(v value) fabric.NAT {
	if kindOf(v.node) == "empty" {
		v.fail("is empty; allowed: %s", natNames())
		return fabric.None
	}
	return fabric.NAT(v.oneOf(strings.Split(natNames(), ", ")...))
}

// labKeys are the config keys that the lab sets itself.
var labKeys = []string{"name", "stateDir", "runDir"}

func (r *reader) config(v value) map[string]any {
	config := v.free()
	for _, k := range labKeys {
		if _, ok := config[k]; ok {
			v.fail("the key %q is set by the lab itself: leave it out", k)
		}
	}
	return config
}

// settings are those of the cluster, named as in the agent's configuration.
func (r *reader) settings(v value) *skeinv1.Settings {
	s := &skeinv1.Settings{}
	v.mapping(
		field{"topology", func(v value) { s.Topology = v.oneOf(topologies...) }},
		field{"leadersPerSite", func(v value) { s.LeadersPerSite = uint32(v.integer(1, events.MaxLeadersPerSite)) }},
		field{"siteTopology", func(v value) {
			s.SiteTopology = map[string]string{}
			v.entries("a mapping from sites to full or site", func(site string, v value) {
				s.SiteTopology[site] = v.oneOf(topologies...)
			})
		}},
	)
	return s
}

var topologies = []string{"full", "site"}

func (r *reader) node(name string, v value) {
	before := len(r.d.errs)
	n := Node{Name: r.name(v, name)}
	if r.lines == nil {
		r.lines = map[string]int{}
	}
	r.lines[name] = v.line()
	if err := fabric.CheckNodeName(name); err != nil {
		v.fail("%v", err)
	}
	if name == "all" {
		v.fail("\"all\" means all nodes in steps: choose another name")
	}
	v.mapping(
		field{"site", func(v value) {
			n.Site = v.text("the name of a site")
			if !slices.ContainsFunc(r.s.Sites, func(s fabric.SiteSpec) bool { return s.Name == n.Site }) && n.Site != "" {
				v.fail("there is no site %q above; allowed: %s", n.Site, strings.Join(r.siteNames(), ", "))
			}
		}},
		field{"server", func(v value) { n.Server = v.boolean() }},
		field{"admin", func(v value) { n.Admin = v.boolean() }},
		field{"leader", func(v value) { n.Leader = v.boolean() }},
		field{"relay", func(v value) { n.Relay = v.oneOf("auto", "true", "false") }},
		field{"role", func(v value) { n.Role = v.oneOf("agent", "relay", RoleHost) }},
		field{"late", func(v value) { n.Late = v.boolean() }},
		field{"init", func(v value) { n.Init = v.boolean() }},
		field{"labels", func(v value) { n.Labels = v.words("labels") }},
		field{"config", func(v value) { n.Config = r.config(v) }},
		field{"beside", func(v value) { n.Beside = r.beside(v) }},
		field{"mesh", func(v value) { n.Mesh = r.name(v, v.text("a name")) }},
	)
	if n.Beside != "" {
		host, _ := r.s.Node(n.Beside)
		if n.Site != "" && n.Site != host.Site {
			v.fail("is at %s and beside %s, which is at %s: leave site out", n.Site, n.Beside, host.Site)
		}
		if n.Role == RoleHost {
			v.fail("role: host has no agent, and so cannot be beside one: leave beside out")
		}
		n.Site = host.Site
	}
	if n.Role == RoleHost && (n.Server || n.Admin || n.Leader || n.Late || n.Relay != "" || n.Init || n.Labels != nil ||
		n.Config != nil || n.Mesh != "") {
		v.fail("role: host has no agent: leave out server, admin, leader, late, relay, init, labels, config and mesh")
	}
	if n.Site == "" && len(r.d.errs) == before {
		v.fail("the key \"site\" is missing; allowed: %s", strings.Join(r.siteNames(), ", "))
	}
	r.s.Nodes = append(r.s.Nodes, n)
}

// beside reads the name of a node above that has a network namespace of its own.
func (r *reader) beside(v value) string {
	s := v.text("the name of a node above")
	if n, ok := r.s.Node(s); s != "" && (!ok || n.Beside != "") {
		v.fail("%q is not a node above that has a network namespace of its own; allowed: %s", s,
			strings.Join(r.s.placeNames(), ", "))
		return ""
	}
	return s
}

func (r *reader) siteNames() []string {
	var names []string
	for _, s := range r.s.Sites {
		names = append(names, s.Name)
	}
	return names
}

// checkNodes looks at the nodes together, and settles who creates the cluster of each mesh.
func (r *reader) checkNodes(root value) {
	if len(r.s.Nodes) > fabric.MaxHosts {
		root.fail("%d nodes; allowed: up to %d", len(r.s.Nodes), fabric.MaxHosts)
	}
	if len(r.s.Sites) > fabric.MaxSites {
		root.fail("%d sites; allowed: up to %d", len(r.s.Sites), fabric.MaxSites)
	}
	for _, mesh := range r.s.meshes() {
		r.checkMesh(root, mesh)
	}
}

func (r *reader) checkMesh(root value, mesh string) {
	var asked []string
	server := -1
	for i, n := range r.s.Nodes {
		if n.Mesh != mesh {
			continue
		}
		if n.Init {
			asked = append(asked, n.Name)
			if !n.Server {
				r.d.failAt(r.lines[n.Name], "nodes."+n.Name, "creates the cluster (init: true) and so must be a server: add "+
					"server: true")
			}
		}
		if n.Server && server < 0 {
			server = i
		}
	}
	switch {
	case server < 0 && mesh != "":
		root.fail("no node of mesh %s is a server: add server: true to one of them", mesh)
		return
	case server < 0:
		root.fail("no node is a server: add server: true to at least one of %s", strings.Join(r.s.NodeNames(), ", "))
		return
	case len(asked) > 1:
		root.fail("%s all have init: true; one node creates the cluster, the others join", strings.Join(asked, ", "))
		return
	case len(asked) == 0:
		r.s.Nodes[server].Init = true
	}
	first := r.s.initialiser(mesh)
	if first.Late && mesh != "" {
		return // none of it starts with the lab, or somebody makes it in a step
	}
	if first.Late {
		r.d.failAt(r.lines[first.Name], "nodes."+first.Name, "creates the cluster and so cannot be late: leave late out, "+
			"or give another server init: true")
	}
	r.checkReachable(first)
}

// checkReachable makes sure that the others can join through the initialiser.
func (r *reader) checkReachable(first Node) {
	i := slices.IndexFunc(r.s.Sites, func(s fabric.SiteSpec) bool { return s.Name == first.Site })
	if i < 0 {
		return
	}
	at := r.s.Sites[i]
	for _, n := range r.s.Nodes {
		i := slices.IndexFunc(r.s.Sites, func(s fabric.SiteSpec) bool { return s.Name == n.Site })
		if i < 0 || n.Site == first.Site || n.Role == RoleHost || n.Mesh != first.Mesh {
			continue
		}
		from, common := r.s.Sites[i], ""
		switch {
		case at.NAT != fabric.None && at.NAT != fabric.OneToOne:
			r.d.failAt(r.lines[first.Name], "nodes."+first.Name,
				"creates the cluster behind a NAT (%s), where %s could not reach it to join: put it, or the node with init: "+
					"true, into a site with nat: none or one-to-one", at.NAT, n.Name)
			return
		case from.NoIPv4 && !at.IPv6:
			common = "IPv6"
		case at.NoIPv4 && !from.IPv6:
			common = "IPv4"
		}
		if common != "" {
			r.d.failAt(r.lines[first.Name], "nodes."+first.Name, "creates the cluster, and %s could not reach it to join: %s "+
				"has %s only", n.Name, n.Site, common)
			return
		}
	}
}
