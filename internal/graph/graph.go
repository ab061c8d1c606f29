package graph

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// State is how the asked node reaches a node.
type State int

// The states of a path, best first, as legends and bundles list them.
const (
	Direct  State = iota
	Relay         // over the relay Via
	Hop           // no tunnel of its own: the peer Via passes packets on
	Down          // configured, and nothing answers
	Unknown       // nobody knows any more
	None          // there is no tunnel: the node only relays
	Self          // it is the asked node
)

var stateNames = [...]string{"direct", "relay", "hop", "down", "unknown", "none", "self"}

// String is the state in one word; pictures use it as a class.
func (s State) String() string { return stateNames[s] }

// Lead is what a node is in its site, where sites speak through leaders.
type Lead int

// What a node is in its site.
const (
	NotLeading Lead = iota
	Leader          // acts
	Reserve         // acts for those who find the leaders dead
	Elected         // and does not act yet
)

var leadWords = [...]string{Leader: "site leader", Reserve: "reserve leader", Elected: "elected leader"}

// Node is a member.
type Node struct {
	Name, Address, NAT string
	Site               string
	SiteKnown          bool // a node without a site is known to have none
	LogLeader          bool // leads the log (Raft)
	Voter, Server      bool
	Admin              bool
	Relays, OnlyRelays bool
	Leads              Lead
	Wishes             bool // to lead its site
	Draining           bool
	Unseen             bool // gossip does not see it

	State    State
	Via      string // the relay's name (empty: none, or not chosen yet), or of a hop, dead or alive, who passes packets on
	NoLeader bool   // it is in another site, and no node is known that passes packets on to it
	UDP      bool   // through a port that the relay has reserved
	Endpoint string
	RTT      time.Duration // 0: not measured
	Sessions []Session     // with relays
}

// Session is a node's session with a relay.
type Session struct {
	To  int // index in Graph.Nodes
	RTT time.Duration
}

// Graph is what is drawn.
type Graph struct {
	Self  int // index of the asked node in Nodes; -1: it is not a member
	Nodes []Node
	Past  bool
	Index uint64 // last event of the agreed state
	Time  time.Time
	Notes []string
}

// detailedMost is how many nodes are drawn with a labelled line each.
const detailedMost = 24

func (g *Graph) detailed() bool { return len(g.Nodes) <= detailedMost }

// site is the nodes of one site.
type site struct {
	name  string
	known bool
	nodes []int // indices, by name
}

func (s *site) title() string {
	switch {
	case !s.known:
		return "site not known"
	case s.name == "":
		return "no site"
	}
	return "site " + clean(s.name)
}

// sites groups the nodes: sites by name, then the nodes without one, then those of whose site nothing is known.
func (g *Graph) sites() []site {
	order := make([]int, len(g.Nodes))
	for i := range order {
		order[i] = i
	}
	rank := func(n *Node) int {
		switch {
		case !n.SiteKnown:
			return 2
		case n.Site == "":
			return 1
		}
		return 0
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := &g.Nodes[i], &g.Nodes[j]
		return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a.Site, b.Site), strings.Compare(a.Name, b.Name))
	})
	var out []site
	for _, i := range order {
		n := &g.Nodes[i]
		if last := len(out) - 1; last < 0 || out[last].name != n.Site || out[last].known != n.SiteKnown {
			out = append(out, site{name: n.Site, known: n.SiteKnown})
		}
		out[len(out)-1].nodes = append(out[len(out)-1].nodes, i)
	}
	return out
}

// roles are what a node is, in words.
func (n *Node) roles() []string {
	var out []string
	add := func(is bool, word string) {
		if is {
			out = append(out, word)
		}
	}
	add(n.Leads != NotLeading, leadWords[n.Leads])
	add(n.LogLeader, "log leader")
	add(n.Voter && !n.LogLeader, "voter")
	add(n.Server && !n.Voter && !n.LogLeader, "server")
	add(n.Admin && !n.Server && !n.Voter && !n.LogLeader, "admin")
	add(n.OnlyRelays, "only relays")
	add(n.Relays && !n.OnlyRelays, "relay")
	add(n.Wishes && n.Leads == NotLeading, "leader wish")
	add(n.Draining, "draining")
	if out == nil {
		out = append(out, "agent")
	}
	return out
}

// some reports whether any node is as asked. Legends leave out what the picture does not have.
func (g *Graph) some(is func(*Node) bool) bool {
	return slices.ContainsFunc(g.Nodes, func(n Node) bool { return is(&n) })
}

func (g *Graph) hops() bool { return g.some(func(n *Node) bool { return n.State == Hop }) }

// letter is one letter for a role, where there is no room for a word.
type letter struct{ text, word string }

var letters = []struct {
	letter
	has     func(*Node) bool
	ofLeads bool
}{
	{letter{"G", "log leader"}, func(n *Node) bool { return n.LogLeader }, false},
	{letter{"V", "voter"}, func(n *Node) bool { return n.Voter && !n.LogLeader }, false},
	{letter{"S", "server"}, func(n *Node) bool { return n.Server && !n.Voter && !n.LogLeader }, false},
	{letter{"R", "relay"}, func(n *Node) bool { return n.Relays || n.OnlyRelays }, false},
	{letter{"W", "leader wish"}, func(n *Node) bool { return n.Wishes && n.Leads == NotLeading }, false},
	{letter{"D", "draining"}, func(n *Node) bool { return n.Draining }, false},
	{letter{"L", "leads its site"}, func(n *Node) bool { return n.Leads == Leader }, true},
	{letter{"B", "reserve (backup) leader of its site"}, func(n *Node) bool { return n.Leads == Reserve }, true},
	{letter{"E", "elected to lead its site"}, func(n *Node) bool { return n.Leads == Elected }, true},
}

// letters are those that a legend explains: of leaders only what there is.
func (g *Graph) letters() (out []letter) {
	for _, l := range letters {
		if !l.ofLeads || g.some(l.has) {
			out = append(out, l.letter)
		}
	}
	return out
}

func (n *Node) letters() string {
	out := ""
	for _, l := range letters {
		if l.has(n) {
			out += l.text
		}
	}
	return out
}

// label tells how the node is reached.
func (n *Node) label() string {
	out := ""
	switch n.State {
	case Direct:
		out = "direct"
	case Relay:
		out = "relay, idle"
		if n.Via != "" {
			out = "relay " + cut(clean(n.Via), 12)
		}
		if n.UDP {
			out += " (udp)"
		}
	case Hop:
		return "hop by " + cut(clean(n.Via), 18)
	case Down:
		switch {
		case n.NoLeader:
			return "down, no leader"
		case n.Via != "":
			return "down, hop by " + cut(clean(n.Via), 12)
		}
		return "down"
	case Unknown:
		return "not known"
	case None, Self:
		return ""
	}
	if n.RTT > 0 {
		out += " " + millis(n.RTT)
	}
	return out
}

// about is everything about a node, for a tooltip.
func (n *Node) about() string {
	lines := []string{cut(clean(n.Name), 300), clean(n.Address), clean(n.NAT), strings.Join(n.roles(), ", ")}
	if n.Wishes && n.Leads != NotLeading { // on the card there is no room for both
		lines = append(lines, "leader wish")
	}
	if n.Unseen {
		lines = append(lines, "not seen by gossip")
	}
	if l := n.label(); l != "" {
		lines = append(lines, l)
	}
	if n.Endpoint != "" {
		lines = append(lines, clean(n.Endpoint))
	}
	for i, l := range lines[1:] {
		lines[i+1] = cut(l, 80)
	}
	return strings.Join(slices.DeleteFunc(lines, func(s string) bool { return s == "" }), " · ")
}

// bundle is the paths of one state to the nodes of one site.
type bundle struct {
	state       State
	count       int
	least, most time.Duration // of those measured
	via         []string      // relays, or the nodes of hops, most used first
}

// bundles groups the paths to some nodes by their state, best first. None and Self are not paths.
func (g *Graph) bundles(nodes []int) []bundle {
	var out []bundle
	for s := Direct; s <= Unknown; s++ {
		b := bundle{state: s}
		used := map[string]int{}
		for _, i := range nodes {
			n := &g.Nodes[i]
			if n.State != s {
				continue
			}
			b.count++
			if n.Via != "" {
				used[n.Via]++
			}
			if n.RTT > 0 {
				if b.least == 0 || n.RTT < b.least {
					b.least = n.RTT
				}
				b.most = max(b.most, n.RTT)
			}
		}
		for name := range used {
			b.via = append(b.via, name)
		}
		slices.SortFunc(b.via, func(x, y string) int { return cmp.Or(used[y]-used[x], strings.Compare(x, y)) })
		if b.count > 0 {
			out = append(out, b)
		}
	}
	return out
}

func (b *bundle) label() string {
	switch b.state {
	case Down:
		return fmt.Sprintf("%d down", b.count)
	case Unknown:
		return fmt.Sprintf("%d not known", b.count)
	}
	out := fmt.Sprintf("%d %s", b.count, b.state)
	if b.state == Relay || b.state == Hop {
		out = fmt.Sprintf("%d by %s", b.count, b.state)
		if b.state == Hop && len(b.via) > 0 {
			out = fmt.Sprintf("%d hop by", b.count)
		}
		if len(b.via) > 0 {
			out += " " + cut(clean(b.via[0]), 14)
		}
		if more := len(b.via) - 1; more > 0 {
			out += fmt.Sprintf(" +%d", more)
		}
	}
	switch {
	case b.most == 0:
	case millis(b.least) == millis(b.most):
		out += " " + millis(b.most)
	default:
		out += " " + strings.TrimSuffix(millis(b.least), " ms") + "–" + millis(b.most)
	}
	return out
}

// headline says what is drawn, and when.
func (g *Graph) headline() (title, sub string) {
	title = "mesh"
	if g.Self >= 0 {
		title = "mesh as " + cut(clean(g.Nodes[g.Self].Name), 40) + " sees it"
		if g.Past {
			title = "mesh as " + cut(clean(g.Nodes[g.Self].Name), 40) + " saw it"
		}
	}
	all := make([]int, len(g.Nodes))
	for i := range all {
		all[i] = i
	}
	parts := []string{
		g.Time.UTC().Format("2006-01-02 15:04:05 UTC"), fmt.Sprintf("event %d", g.Index),
		plural(len(g.Nodes), "node") + " in " + plural(len(g.sites()), "site"),
	}
	for _, b := range g.bundles(all) {
		b.via, b.most = nil, 0
		parts = append(parts, b.label())
	}
	return title, strings.Join(parts, " · ")
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func millis(d time.Duration) string {
	ms := float64(d) / 1e6
	switch {
	case d <= 0:
		return ""
	case ms < 0.05: // 0.0 would look like a time that was not measured
		return "<0.1 ms"
	case ms >= 99.95:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f ms", ms)
}
