package graph

import (
	"fmt"
	"strings"
)

// Colours that are readable on white and on black, for DOT, which knows no themes.
var dotColours = [...]string{
	Direct: "#2da44e", Relay: "#bf8700", Hop: "#8957e5", Down: "#cf222e",
	Unknown: "#808080", None: "#808080", Self: "#2f81f7",
}

var dotStyles = [...]string{
	Direct: "solid", Relay: "dashed", Hop: "dashed", Down: "dotted", Unknown: "dotted", None: "dotted", Self: "solid",
}

// gridColumns is how many nodes of a large mesh's site stand side by side.
const gridColumns = 6

// DOT is the graph for Graphviz.
func (g *Graph) DOT() string {
	var b strings.Builder
	title, sub := g.headline()
	heading := []string{title, sub, g.dotLegend()}
	for _, n := range g.Notes {
		heading = append(heading, fold(clean(n), 110)...)
	}
	apart := 1.6
	if !g.detailed() {
		apart = 0.3 // between the columns of a grid; the bundles are longer by themselves
	}
	put(&b, `graph skein {`)
	put(&b, `  graph [bgcolor="white", compound=true, fontname="Helvetica", labelloc=t, rankdir=LR, style=rounded]`)
	put(&b, `  graph [nodesep=0.15, ranksep=%.1f, label=%s]`, apart, dotText(heading...))
	put(&b, `  node [fontname="Helvetica", fontsize=11, shape=box, style="rounded,filled", fillcolor="white"]`)
	put(&b, `  node [margin="0.1,0.05"]`)
	put(&b, `  edge [fontname="Helvetica", fontsize=10]`)
	sites := g.sites()
	for i := range sites {
		g.dotSite(&b, i, &sites[i])
	}
	if g.detailed() {
		g.dotPaths(&b)
		g.dotSessions(&b)
	} else {
		g.dotBundles(&b, sites)
	}
	b.WriteString("}\n")
	return b.String()
}

// dotLegend says what colours and letters mean.
func (g *Graph) dotLegend() string {
	out := "blue: the asked node · green: direct · amber, dashed: over a relay"
	if g.hops() {
		out += " · violet, dashed: by a site's leader, which passes packets on"
	}
	out += " · red, dotted: down"
	if g.Past {
		out += " · grey: not known"
	} else {
		out += " · dashed border: not seen by gossip"
	}
	if g.some(func(n *Node) bool { return n.Leads == Leader }) {
		out += " · thick border: leads its site"
	}
	if !g.detailed() {
		for _, l := range g.letters() {
			out += " · " + l.text + ": " + l.word
		}
	}
	return out
}

func (g *Graph) dotSite(b *strings.Builder, number int, s *site) {
	put(b, `  subgraph cluster_%d {`, number)
	put(b, `    label=%s`, dotText(cut(s.title(), 60)+", "+plural(len(s.nodes), "node")))
	put(b, `    color="#808080"`)
	for _, i := range s.nodes {
		n := &g.Nodes[i]
		lines := []string{cut(clean(n.Name), 30), joined(n.Address, n.NAT), strings.Join(n.roles(), ", ")}
		if !g.detailed() {
			lines = []string{cut(clean(n.Name), 16)}
			if l := n.letters(); l != "" {
				lines[0] += " [" + l + "]"
			}
		}
		style := "rounded,filled"
		if n.Unseen {
			style += ",dashed"
			if g.detailed() {
				lines = append(lines, "not seen by gossip")
			}
		}
		width := 1
		switch {
		case n.State == Self:
			width = 3
		case n.Leads == Leader:
			width = 2
		}
		put(b, `    n%d [label=%s, tooltip=%s, color="%s", style="%s", penwidth=%d]`,
			i, dotText(lines...), dotText(n.about()), dotColours[n.State], style, width)
	}
	if !g.detailed() { // invisible edges make a grid; else Graphviz puts all of them into one column
		for k := gridColumns; k < len(s.nodes); k++ {
			put(b, `    n%d -- n%d [style=invis]`, s.nodes[k-gridColumns], s.nodes[k])
		}
	}
	b.WriteString("  }\n")
}

func (g *Graph) dotPaths(b *strings.Builder) {
	if g.Self < 0 {
		return
	}
	for i := range g.Nodes {
		n := &g.Nodes[i]
		if n.State == Self || n.State == None {
			continue
		}
		lines := []string{n.label()}
		if n.Endpoint != "" {
			lines = append(lines, cut(clean(n.Endpoint), 50))
		}
		put(b, `  n%d -- n%d [label=%s, color="%s", style=%s, penwidth=2]`,
			g.Self, i, dotText(lines...), dotColours[n.State], dotStyles[n.State])
	}
}

// dotSessions draws nodes' sessions with relays, with an arrow at the relay.
func (g *Graph) dotSessions(b *strings.Builder) {
	put(b, `  edge [color="#808080", fontcolor="#808080", style=dotted, dir=forward, arrowsize=0.6, constraint=false]`)
	for i := range g.Nodes {
		for _, s := range g.Nodes[i].Sessions {
			label := "session"
			if s.RTT > 0 {
				label += " " + millis(s.RTT)
			}
			put(b, `  n%d -- n%d [label=%s]`, i, s.To, dotText(label))
		}
	}
}

// dotBundles draws one edge for each site and state; it ends at the site's border.
func (g *Graph) dotBundles(b *strings.Builder, sites []site) {
	if g.Self < 0 {
		return
	}
	for k := range sites {
		to := sites[k].nodes[0]
		if to == g.Self {
			if len(sites[k].nodes) == 1 {
				continue
			}
			to = sites[k].nodes[1]
		}
		head := fmt.Sprintf(", minlen=5, lhead=cluster_%d", k)
		for _, i := range sites[k].nodes {
			if i == g.Self {
				head = "" // Graphviz refuses an edge from inside of a cluster to its border
			}
		}
		for _, w := range g.bundles(sites[k].nodes) {
			label := dotText(w.label(), cut(sites[k].title(), 40))
			put(b, `  n%d -- n%d [label=%s, color="%s", style=%s, penwidth=%d%s]`,
				g.Self, to, label, dotColours[w.state], dotStyles[w.state], thickness(w.count), head)
		}
	}
}

// thickness is the width of a line that stands for so many.
func thickness(count int) int {
	w := 2
	for ; count >= 8; count /= 4 {
		w++
	}
	return w
}

// joined puts what there is of an address and a NAT type on one line.
func joined(address, nat string) string {
	switch {
	case nat == "":
		return clean(address)
	case address == "":
		return clean(nat)
	}
	return clean(address) + " · " + clean(nat)
}
