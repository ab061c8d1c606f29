package graph

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Lengths in pixels.
const (
	margin       = 24
	headHeight   = 64 // title and subtitle
	pad          = 12 // between a site's border and what is in it
	siteHead     = 28 // a site's title
	gap          = 10 // between nodes, and twice that between sites
	cardWidth    = 264
	cardHeight   = 60
	fanWidth     = 130 // where lines from the asked node spread
	labelWidth   = 196 // where they run straight below their labels
	bundleWidth  = 300 // the same in a large mesh
	chipWidth    = 148
	chipHeight   = 24
	wireGap      = 22  // between the lines to one site
	sessionWidth = 196 // of the labels of relay sessions
	laneWidth    = 12
	arrival      = 22 // below the middle of a row, where sessions with its relay end
	lineHeight   = 18

	cardColumns = (cardWidth - 2*pad) * 10 / 67 // of small text
	nameColumns = 29                            // of large text in a card
)

// row is what lines lead to: a node's card, or a site in a large mesh. Rows stand below each other.
type row struct {
	y, left, right int
	nodes          []int
}

// SVG is the graph as a picture that needs nothing else: no script, no font, no other file. The asked node is at
// the left, its paths lead to the right, and the sessions that nodes have with relays run at the right border,
// where they cross no path.
func (g *Graph) SVG() string {
	c := &canvas{}
	title, sub := g.headline()
	c.text("h", margin, margin+8, title)
	c.text("m", margin, margin+32, sub)
	rows, self := g.layOut(c)
	if g.Self >= 0 {
		g.fan(c, rows, self)
	}
	g.lanes(c, rows, self)
	g.legend(c)
	return c.String()
}

// block is one site in the column at the right, or in a detailed picture the asked node's.
type block struct {
	*site
	others []int // nodes that have rows of their own: not the asked one in a detailed picture
	height int
	own    bool
}

// layOut places sites and nodes, and gives the rows and where the asked node is: the middle of its card.
func (g *Graph) layOut(c *canvas) (rows []row, self row) {
	sites := g.sites()
	var blocks []block
	for i := range sites {
		b := block{site: &sites[i], others: sites[i].nodes, own: slices.Contains(sites[i].nodes, g.Self)}
		if b.own && g.detailed() {
			b.others = slices.DeleteFunc(slices.Clone(b.nodes), func(n int) bool { return n == g.Self })
		}
		b.height = g.blockHeight(&b)
		blocks = append(blocks, b)
	}
	x, y := margin+pad+cardWidth+fanWidth+labelWidth, headHeight+margin
	switch {
	case g.Self < 0:
		x = margin + pad
	case g.detailed():
		blocks = balanced(blocks)
	default:
		x += bundleWidth - labelWidth
	}
	top := y
	for i := range blocks {
		b := &blocks[i]
		if b.own && g.detailed() {
			self = g.selfRow(y + b.height/2)
		}
		if len(b.others) == 0 {
			continue // the asked node is alone in its site: placed below
		}
		rows = append(rows, g.block(c, b, x, y)...)
		y += b.height + 2*gap
	}
	bottom := max(y-2*gap, top+siteHead+cardHeight+pad)
	if g.Self < 0 {
		return rows, self
	}
	own := &blocks[slices.IndexFunc(blocks, func(b block) bool { return b.own })]
	if !g.detailed() || len(own.others) == 0 { // a box for the asked node alone, in the middle
		mid := (top + bottom) / 2
		h := siteHead + cardHeight + pad
		c.box("site", margin, mid-h/2, cardWidth+2*pad, h, 10)
		c.text("s", margin+pad, mid-h/2+siteHead/2, cut(own.title(), nameColumns+6))
		self = g.selfRow(mid)
	}
	g.card(c, g.Self, self.left, self.y)
	return rows, self
}

// selfRow is where the asked node's card is, in a box whose middle is at y.
func (g *Graph) selfRow(y int) row {
	return row{y: y + siteHead/2 - pad/2, left: margin + pad, right: margin + pad + cardWidth, nodes: []int{g.Self}}
}

func (g *Graph) blockHeight(b *block) int {
	switch n := len(b.others); {
	case n == 0:
		return 0
	case g.detailed():
		return siteHead + n*(cardHeight+gap) - gap + pad
	default:
		grid := (n + gridColumns - 1) / gridColumns * (chipHeight + 6)
		lines := len(g.bundles(b.others)) * wireGap
		return siteHead + max(grid-6, lines) + pad
	}
}

// balanced puts the asked node's site in the middle, so that lines are short.
func balanced(blocks []block) []block {
	i := slices.IndexFunc(blocks, func(b block) bool { return b.own })
	if i < 0 {
		return blocks
	}
	own := blocks[i]
	rest := slices.Delete(slices.Clone(blocks), i, i+1)
	total, above := 0, 0
	for _, b := range rest {
		total += b.height
	}
	at := 0
	for at < len(rest) && above+rest[at].height/2 < total/2 {
		above += rest[at].height
		at++
	}
	return slices.Insert(rest, at, own)
}

// block draws a site at the right, and gives the rows of it.
func (g *Graph) block(c *canvas, b *block, x, y int) (rows []row) {
	left, width := x-pad, cardWidth+2*pad
	if b.own && g.detailed() { // the box has the asked node in it as well
		left, width = margin, x+cardWidth+pad-margin
	}
	title := cut(b.title(), nameColumns+6)
	if !g.detailed() {
		width = gridColumns*(chipWidth+6) - 6 + 2*pad
		title = cut(b.title(), 80) + ", " + plural(len(b.nodes), "node")
	}
	c.box("site", left, y, width, b.height, 10)
	c.tip(cut(b.title(), 300))
	c.text("s", left+pad, y+siteHead/2, title)
	c.end()
	if !g.detailed() {
		for k, i := range b.others {
			g.chip(c, i, x+k%gridColumns*(chipWidth+6), y+siteHead+k/gridColumns*(chipHeight+6))
		}
		return []row{{y: y + (b.height+siteHead-pad)/2, left: left, right: left + width, nodes: b.others}}
	}
	for k, i := range b.others {
		mid := y + siteHead + k*(cardHeight+gap) + cardHeight/2
		g.card(c, i, x, mid)
		rows = append(rows, row{y: mid, left: x, right: x + cardWidth, nodes: b.others[k : k+1]})
	}
	return rows
}

// card draws a node with all that is known of it; y is its middle.
func (g *Graph) card(c *canvas, i, x, y int) {
	n := &g.Nodes[i]
	class, last := "card", strings.Join(n.roles(), ", ")
	if n.Unseen {
		class, last = "card unseen", "not seen by gossip · "+last
	}
	if i == g.Self {
		last += g.ownSessions(cardColumns - cells(last))
	}
	c.box(class, x, y-cardHeight/2, cardWidth, cardHeight, 6)
	c.tip(n.about())
	c.state(n.State, x+cardWidth-pad-2, y-17)
	if n.Leads == NotLeading {
		c.text("n", x+pad, y-17, cut(clean(n.Name), nameColumns))
	} else {
		c.lead(n.Leads, x+pad+6, y-17)
		c.text("n", x+pad+18, y-17, cut(clean(n.Name), nameColumns-3))
	}
	c.text("m", x+pad, y+1, cut(joined(n.Address, n.NAT), cardColumns))
	c.text("", x+pad, y+18, cut(last, cardColumns))
	c.end()
}

// ownSessions are those of the asked node, which has no place at the right border: by name if that fits.
func (g *Graph) ownSessions(columns int) string {
	all := g.Nodes[g.Self].Sessions
	if len(all) == 0 {
		return ""
	}
	var names []string
	for _, s := range all {
		name := cut(clean(g.Nodes[s.To].Name), 13)
		if s.RTT > 0 {
			name += " " + millis(s.RTT)
		}
		names = append(names, name)
	}
	if out := " · session " + strings.Join(names, ", "); cells(out) <= columns {
		return out
	}
	return " · " + plural(len(all), "session")
}

// chip draws a node of a large mesh: its state, its name, and a letter for each role.
func (g *Graph) chip(c *canvas, i, x, y int) {
	n := &g.Nodes[i]
	class := "card"
	if n.Unseen {
		class += " unseen"
	}
	c.box(class, x, y, chipWidth, chipHeight, 4)
	c.tip(n.about())
	c.state(n.State, x+11, y+chipHeight/2)
	l := n.letters()
	c.text("", x+20, y+chipHeight/2, cut(clean(n.Name), 18-len(l)))
	c.text("e t", x+chipWidth-5, y+chipHeight/2, l)
	c.end()
}

// fan draws the paths from the asked node to all rows.
func (g *Graph) fan(c *canvas, rows []row, self row) {
	bend := self.right + fanWidth
	for _, r := range rows {
		if g.detailed() {
			n := &g.Nodes[r.nodes[0]]
			if l := n.label(); l != "" {
				c.wire(n.State, 2, self.right, self.y, bend, r.y, r.left)
				c.text("e f"+n.State.String(), r.left-pad-8, r.y-9, l)
				c.text("e m", r.left-pad-8, r.y+10, cut(clean(n.Endpoint), (labelWidth-pad-8)*10/67))
			}
			continue
		}
		all := g.bundles(r.nodes)
		for k := range all {
			y := r.y + (2*k-len(all)+1)*wireGap/2
			c.wire(all[k].state, thickness(all[k].count), self.right, self.y, bend, y, r.left)
			c.text("e f"+all[k].state.String(), r.left-8, y-9, cut(all[k].label(), (bundleWidth-8)*10/67))
		}
	}
}

// ride is the sessions that one row has with the relays of another.
type ride struct {
	from, to    int // rows; to is -1 for the asked node's card
	count       int
	least, most time.Duration
}

// rides gathers the sessions with relays, by row of the node and row of the relay. The asked node's own sessions
// are in its card; those inside of one site of a large mesh are left out.
func (g *Graph) rides(rows []row) []ride {
	at := map[int]int{g.Self: -1}
	for k, r := range rows {
		for _, i := range r.nodes {
			if i != g.Self || !g.detailed() {
				at[i] = k
			}
		}
	}
	sum := map[[2]int]*ride{}
	for k, r := range rows {
		for _, i := range r.nodes {
			for _, s := range g.Nodes[i].Sessions {
				to, ok := at[s.To]
				if !ok || to == k {
					continue
				}
				q := sum[[2]int{k, to}]
				if q == nil {
					q = &ride{from: k, to: to, least: s.RTT}
					sum[[2]int{k, to}] = q
				}
				q.count++
				q.least, q.most = min(q.least, s.RTT), max(q.most, s.RTT)
			}
		}
	}
	var out []ride
	for _, q := range sum {
		out = append(out, *q)
	}
	slices.SortFunc(out, func(a, b ride) int { return cmp.Or(a.from-b.from, a.to-b.to) })
	return out
}

// label tells with which relay the session is, or how many there are.
func (g *Graph) sessionLabel(q ride, rows []row) string {
	to := g.Self
	if q.to >= 0 {
		to = rows[q.to].nodes[0]
	}
	if g.detailed() {
		out := cut(clean(g.Nodes[to].Name), 13)
		if q.most > 0 {
			out += " " + millis(q.most)
		}
		return out
	}
	s := site{name: g.Nodes[to].Site, known: g.Nodes[to].SiteKnown}
	return plural(q.count, "session") + ", " + cut(s.title(), 24-8)
}

// ridesMost is how many of a row's sessions are drawn; the rest is a number.
const ridesMost = 3

// lanes draws sessions with relays at the right: from each row to the lane of its relay, which leads to the
// relay's row. A lane to the asked node goes around the top.
func (g *Graph) lanes(c *canvas, rows []row, self row) {
	all := g.rides(rows)
	lane := map[int]int{} // by row of the relay
	for _, q := range all {
		lane[q.to] = 0
	}
	relays := make([]int, 0, len(lane))
	for to := range lane {
		relays = append(relays, to)
	}
	slices.Sort(relays)
	right := 0
	for _, r := range rows {
		right = max(right, r.right)
	}
	for k, to := range relays {
		lane[to] = right + pad + sessionWidth + (len(relays)-1-k)*laneWidth
	}
	drawn := map[int]int{} // by row
	count := map[int]int{}
	for _, q := range all {
		count[q.from]++
	}
	for _, q := range all {
		k := drawn[q.from]
		drawn[q.from]++
		n := min(count[q.from], ridesMost)
		y := rows[q.from].y + (2*k-n+1)*8
		switch {
		case k == ridesMost-1 && count[q.from] > ridesMost:
			c.text("m", right+pad+6, y-8, fmt.Sprintf("and %d more", count[q.from]-k))
			continue
		case k >= ridesMost:
			continue
		}
		c.text("m", right+pad+6, y-8, g.sessionLabel(q, rows))
		g.session(c, rows, self, q, right, lane[q.to], y)
	}
	if len(relays) > 0 {
		c.reach(right+pad+sessionWidth+len(relays)*laneWidth, 0)
	}
}

// session draws one line: along the row to the lane, along the lane, and to the relay.
func (g *Graph) session(c *canvas, rows []row, self row, q ride, right, lane, y int) {
	from := rows[q.from].right
	if q.to < 0 { // around the top, and down to the asked node's card
		top, x, end := headHeight+6, self.left+cardWidth/2, self.y-cardHeight/2
		put(&c.wires, `<path class="x" d="M%d %dH%dQ%d %d %d %dV%dQ%d %d %d %dH%dQ%d %d %d %dV%d"/>`,
			from, y, lane-6, lane, y, lane, y-6, top+6, lane, top, lane-6, top, x+6, x, top, x, top+6, end)
		put(&c.wires, `<path class="a" d="M%d %dl-4 -8h8z"/>`, x, end)
		return
	}
	to := rows[q.to]
	end := to.y + arrival
	bend := 6
	if end < y {
		bend = -6
	}
	put(&c.wires, `<path class="x" d="M%d %dH%dQ%d %d %d %dV%dQ%d %d %d %dH%d"/>`,
		from, y, lane-6, lane, y, lane, y+bend, end-bend, lane, end, lane-6, end, to.right)
	put(&c.wires, `<path class="a" d="M%d %dl8 -4v8z"/>`, to.right, end)
}

var leadLegend = [...]string{
	Leader: "leads its site", Reserve: "reserve: leads for those who find the leaders dead",
	Elected: "elected to lead, and does not act yet",
}

// legend says what the signs mean, and below what is not known.
func (g *Graph) legend(c *canvas) {
	y := c.height + 2*margin
	x := margin
	item := func(width int, s string, draw func(x, y int)) {
		if x > margin && x+width+int(float64(cells(s))*smallWidth) > max(c.width, 900) {
			x, y = margin, y+lineHeight
		}
		draw(x, y)
		c.text("m", x+width, y, s)
		x += width + int(float64(cells(s))*smallWidth) + 22
	}
	for s := Direct; s <= Unknown; s++ {
		words := [...]string{
			"direct path", "path over a relay", "no tunnel: a leader passes packets on", "path is down: nothing answers",
			"path is not known",
		}
		if s == Unknown && !g.Past || s == Hop && !g.hops() {
			continue
		}
		item(58, words[s], func(x, y int) {
			put(&c.wires, `<path class="w %s" d="M%d %dh36"/>`, s, x, y)
			c.state(s, x+46, y)
		})
	}
	item(16, "the asked node", func(x, y int) { c.state(Self, x+6, y) })
	item(16, "no path: it only relays", func(x, y int) { c.state(None, x+6, y) })
	if !g.Past {
		item(44, "session with a relay", func(x, y int) {
			put(&c.wires, `<path class="x" d="M%d %dh36"/><path class="a" d="M%d %dl-8 -4v8z"/>`, x, y, x+36, y)
		})
		item(34, "not seen by gossip", func(x, y int) { c.box("card unseen", x, y-7, 26, 14, 3) })
	}
	for l := Leader; l <= Elected; l++ { // on cards, of which a large mesh has the asked node's only
		if g.some(func(n *Node) bool { return n.Leads == l && (g.detailed() || n.State == Self) }) {
			item(18, leadLegend[l], func(x, y int) { c.lead(l, x+6, y) })
		}
	}
	if !g.detailed() {
		for _, l := range g.letters() {
			item(14, l.word, func(x, y int) { c.text("t", x, y, l.text) })
		}
	}
	y += lineHeight + 4
	about := "Paths are those of the asked node."
	if !g.Past {
		about += " Sessions are what the others' records say. A round trip over a relay is the sum of both ends'."
	}
	for _, n := range append([]string{about}, g.Notes...) {
		for _, l := range fold(clean(n), max(c.width-margin, 880)*10/67) {
			c.text("m", margin, y, l)
			y += lineHeight
		}
	}
	c.reach(900, y-lineHeight/2)
}
