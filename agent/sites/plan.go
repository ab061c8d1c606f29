package sites

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"sync"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Strangers is the most nodes of unknown site that a host peers with, where sites are reached through leaders. More are
// not needed: records also come by relay, without a tunnel. Ten thousand peers at once would take half a gigabyte of
// memory each time that a host starts without records.
const Strangers = 256

// Input is everything that a host's Plan follows from.
type Input struct {
	Self     identity.ID
	Settings *skeinv1.Settings
	Members  *Members
	Records  map[identity.ID]*skeinv1.Record
	Alive    func(identity.ID) bool // never called for this host itself
	// Outdated reports whether a member has restarted since it wrote its record. Such a member does not count as a
	// leader, whatever its record says: it has lost its sessions, and its peers have new ones before they have its new
	// record. nil: no member has restarted.
	Outdated func(identity.ID) bool
	// Elsewhere returns the site that a member has announced to nodes that do not keep its record. Where it has announced
	// none, the site that the log implies counts. nil: no member has announced one.
	Elsewhere func(identity.ID) (site string, ok bool)
	// Recent are the nodes that this host saw elected within Grace: it still accepts packets from them.
	Recent map[identity.ID]bool
	// Lawful reports whether this host saw a node act as a leader by right within HandOver. Acting while it hands over,
	// or while the nodes that the log has chosen are away, is not by right. Such a node may go on for HandOver after the
	// log chooses others. nil: this host saw none.
	Lawful func(identity.ID) bool
	// Peered are the nodes that this host peered with within Grace. It keeps them as peers, so that packets in flight
	// arrive.
	Peered map[identity.ID]bool
	// Led is set when this host acted as a leader within ForwardOn, and when it is about to: it forwards before others
	// hear that it leads, and as long as some may not have heard that it has stopped.
	Led bool
	// Fresh is set for ForwardOn after this host's agent started. If the host led before, others may send through it
	// until they have its new record.
	Fresh bool

	leaders map[string][]Leader // fixed leaders of sites that hold no election; see Follower
}

// Plan is how one host takes part in the mesh of sites. It is immutable and safe for concurrent use.
type Plan struct {
	Self identity.ID
	Site string
	// Full is set while no site uses leaders: every node peers with every other, and the exported fields below are empty.
	Full bool
	// Elected is set when this host is a leader of its site, or is to become one; Forwards, while it forwards packets
	// between its site and others.
	Elected, Forwards bool
	// Next is set when this host would be elected if its site's leaders went away; see Heirs.
	Next bool
	// Term is what this host's record should name once the election has been stable for ElectionRests; see func Term.
	Term uint64
	// Leaders are the leaders of each site that is reached through leaders, the best first.
	Leaders map[string][]Leader
	// Guards say who may bring packets of other nodes to this host, sorted by From.
	Guards []Guard
	// Silent are the nodes that their witnesses find alive but not forwarding, whether they lead or not.
	Silent map[identity.ID]Finding

	in Input // the input that the plan was made from
	// lawful are the leaders that act by right: those that the log has chosen or, where it has chosen none, all that act.
	// A node that leads only while the chosen ones are away, or until they act, is not among them.
	lawful   []identity.ID
	watched  []Watched
	delivers bool     // other hosts may send to nodes through this host
	nodes    []member // in the order of in.Members
	brought  func() []Bring
	topology map[string]string
	sliced   map[string]*sliced // by site; nil: members are bound to leaders one by one
}

type member struct {
	site  string
	slice uint8
	known bool // the site is known
	gate  bool // it peers with other sites, and every host with the same view knows
	leads bool // it is one of its site's leaders, acting or not
	peer  bool // this host peers with it
	kept  bool // it is not a peer any more, but was one within Grace
}

// group identifies members to which the same Way leads.
type group struct {
	site string
	kind uint8 // of the member's slice
}

// group returns the group of a member of another site; false: the Way to the member is its own. A host that does not
// forward sends everything through the same leader. A host that forwards sends through a leader of the member's site:
// unless the member itself leads or peers with other sites, this depends only on the order in which the member's slice
// uses the leaders.
func (p *Plan) group(i int) (group, bool) {
	n := &p.nodes[i]
	switch {
	case p.Full || !n.known || n.site == p.Site:
		return group{}, false
	case p.topology[p.Site] == Site && !p.Forwards && !p.Elected:
		return group{}, true
	case n.gate || n.leads:
		return group{}, false
	}
	s := p.sliced[n.site]
	if s == nil {
		return group{}, false
	}
	return group{n.site, s.kind(n.slice)}, true
}

// Guard says which packets a node may bring to this host, by the owner of their inner source: the node itself (Own),
// any node of its site (Site), or any node of another site than this host's (Foreign).
type Guard struct {
	From               identity.ID
	Own, Site, Foreign bool
}

// Way is how this host sends to a node.
type Way struct {
	Via identity.ID // a peer: the node itself, or the one that forwards to it
	// Hop is set when packets for the node are encapsulated to Via.
	Hop bool
	// Deliver is set when packets that this host forwards for others are encapsulated to the node, which is a peer:
	// WireGuard there accepts no other node's source from this host. This host's own packets go unencapsulated.
	Deliver bool
}

// Make computes the plan of one host.
func Make(in Input) *Plan {
	if in.Members == nil {
		in.Members = NewMembers(nil, nil, nil)
	}
	p := &Plan{Self: in.Self, in: in, Full: !InUse(in.Settings), nodes: make([]member, len(in.Members.ids))}
	p.brought = sync.OnceValue(p.brings)
	records := in.Members.recordsOf(in.Records)
	if i, ok := in.Members.index(in.Self); ok {
		p.Site, _ = Of(in.Members.nodes[i].Node, records[i])
	}
	if p.Full {
		for i := range p.nodes {
			p.nodes[i].site, p.nodes[i].known = Of(in.Members.nodes[i].Node, records[i])
		}
		return p
	}
	m := &maker{Plan: p, perSite: int(cmp.Or(in.Settings.GetLeadersPerSite(), DefaultLeaders)), records: records}
	m.read()
	m.elect()
	m.peer()
	m.guard()
	m.watch()
	return p
}

// maker holds what is only needed while a plan is made.
type maker struct {
	*Plan
	perSite  int
	records  []*skeinv1.Record // in the order of in.Members
	eligible []Node            // nodes whose site is known and that can lead it
	entitled map[string][]identity.ID
	heard    map[string]bool // sites of which a leader's record is here
}

// member returns what the plan holds of a node; false: it is not a member.
func (p *Plan) member(id identity.ID) (member, bool) {
	i, ok := p.in.Members.index(id)
	if !ok {
		return member{}, false
	}
	return p.nodes[i], true
}

func (m *maker) read() {
	m.topology = map[string]string{m.Site: Topology(m.in.Settings, m.Site)}
	m.note()
	for i, id := range m.in.Members.ids {
		n, r, v := m.in.Members.nodes[i].Node, m.records[i], &m.nodes[i]
		if r == nil && id != m.in.Self { // a node without a record here cannot lead, alive or not
			if v.site, v.known = Of(n, nil); !v.known {
				v.site, v.known = m.guess(i)
			}
			m.place(i)
			continue
		}
		node, known := Describe(id, n, r, id == m.in.Self || m.in.Alive(id))
		if r != nil && m.in.Outdated != nil && m.in.Outdated(id) {
			node.Term = 0
		}
		v.site, v.known = node.Site, known || id == m.in.Self
		if m.place(i) == Site && !node.Unfit {
			node.Lawful = m.in.Lawful != nil && m.in.Lawful(id)
			m.eligible = append(m.eligible, node)
		}
	}
	if m.Silent = Judge(m.eligible, m.in.Records); len(m.Silent) > 0 {
		for i := range m.eligible {
			_, m.eligible[i].Silent = m.Silent[m.eligible[i].ID]
		}
	}
}

// place sets the slice of a member whose site is known, and returns the topology of that site; empty: the site is
// unknown.
func (m *maker) place(i int) (topology string) {
	v := &m.nodes[i]
	if !v.known {
		return ""
	}
	v.slice = m.in.Members.sliceAt(i, v.site)
	topology, ok := m.topology[v.site]
	if !ok {
		topology = Topology(m.in.Settings, v.site)
		m.topology[v.site] = topology
	}
	return topology
}

// note finds the sites of which a leader's record is here.
func (m *maker) note() {
	m.heard = map[string]bool{}
	for i, r := range m.records {
		if r.GetLeads() > 0 {
			site, _ := Of(m.in.Members.nodes[i].Node, r)
			m.heard[site] = true
		}
	}
}

// guess returns the site of a member whose record is not here: it has not arrived yet, or only the member's own site
// keeps it. The guess counts only where a leader of that site is known, through which the member can be reached. A host
// that has just joined knows no leader, and guesses nothing.
func (m *maker) guess(i int) (site string, ok bool) {
	site, ok = m.elsewhere(i)
	return site, ok && m.heard[site]
}

// elsewhere returns the site of a member whose record is not here: as the member announced it, otherwise as the log
// implies it.
func (m *maker) elsewhere(i int) (site string, ok bool) {
	if m.in.Elsewhere != nil {
		if site, ok = m.in.Elsewhere(m.in.Members.ids[i]); ok {
			return site, true
		}
	}
	n := &m.in.Members.nodes[i]
	return n.home, n.homed
}

// elect finds the leaders and the entitled nodes. Besides the leaders, those are the nodes that this host recently saw
// elected, and up to perSite more nodes of a site that say themselves that they lead: they lead by a view that is
// slightly older or newer than this host's.
func (m *maker) elect() {
	m.Leaders = Elect(m.eligible, m.perSite)
	maps.Copy(m.Leaders, m.in.leaders)
	m.share()
	m.entitled = make(map[string][]identity.ID, len(m.Leaders))
	claim := map[string][]Node{}
	closed := map[string]bool{} // sites with a live leader that the log chose: claims do not count there
	for i := range m.eligible {
		if n := &m.eligible[i]; n.chosen() && n.Alive {
			closed[n.Site] = true
		}
	}
	for _, n := range m.eligible {
		switch {
		case slices.ContainsFunc(m.Leaders[n.Site], func(l Leader) bool { return l.ID == n.ID }), m.in.Recent[n.ID]:
			m.entitled[n.Site] = append(m.entitled[n.Site], n.ID)
		case n.Term > 0 && (n.chosen() || !closed[n.Site]):
			claim[n.Site] = append(claim[n.Site], n)
		}
	}
	m.lawful = m.byRight()
	for site, claims := range claim {
		slices.SortFunc(claims, func(a, b Node) int {
			return cmp.Or(cmp.Compare(b.Term, a.Term), a.ID.Compare(b.ID))
		})
		for _, n := range claims[:min(len(claims), m.perSite)] {
			m.entitled[site] = append(m.entitled[site], n.ID)
		}
	}
	full := false
	for site, t := range m.topology {
		full = full || t == Full
		for _, l := range m.Leaders[site] {
			if i, ok := m.in.Members.index(l.ID); ok {
				m.nodes[i].leads, m.nodes[i].gate = true, t == Site && l.Acting
			}
		}
	}
	for i := range m.nodes {
		if n := &m.nodes[i]; full && n.known && m.topology[n.site] == Full {
			n.gate = true
		}
	}
	if m.topology[m.Site] == Site {
		own := m.Leaders[m.Site]
		m.Elected = slices.ContainsFunc(own, func(l Leader) bool { return l.ID == m.Self })
		m.Next = slices.Contains(Heirs(m.eligible, m.Site, own, m.perSite), m.Self)
		m.Term = Term(m.eligible, own, m.Self)
		self, _ := m.member(m.Self)
		m.Forwards = self.gate || m.in.Led || m.in.Fresh && m.Elected
	}
}

// share gives the leaders of each site their slots, and computes who carries which slices.
func (m *maker) share() {
	if m.in.Members.slice != nil {
		m.sliced = make(map[string]*sliced, len(m.Leaders))
	}
	shares := &sharer{}
	for site, leaders := range m.Leaders {
		if _, former := m.in.leaders[site]; !former { // these have slots already, and belong to another plan
			TakeSlots(leaders, m.perSite, func(id identity.ID) uint32 { return m.in.Records[id].GetLeaderSlot() })
		}
		if m.sliced != nil {
			m.sliced[site] = newSliced(leaders, shares)
		}
	}
}

// byRight returns the leaders that act by right; see Plan.lawful.
func (m *maker) byRight() (out []identity.ID) {
	chosen, closed := map[identity.ID]bool{}, map[string]bool{}
	for i := range m.eligible {
		if n := &m.eligible[i]; n.chosen() {
			chosen[n.ID], closed[n.Site] = true, true
		}
	}
	for site, leaders := range m.Leaders {
		for _, l := range leaders {
			if l.Acting && l.Term > 0 && (chosen[l.ID] || !closed[site]) {
				out = append(out, l.ID)
			}
		}
	}
	return out
}

// outward reports whether this host peers with other sites. It does so before it acts, so that its sessions are up by
// then, and as long as others may believe that it leads.
func (m *maker) outward() bool {
	return m.topology[m.Site] == Full || m.Forwards || slices.Contains(m.entitled[m.Site], m.Self)
}

func (m *maker) peer() {
	outward := m.outward()
	m.delivers = m.topology[m.Site] == Site && outward
	for i := range m.nodes {
		n := &m.nodes[i]
		switch {
		case !n.known:
		case n.site == m.Site:
			n.peer = true
		case outward:
			n.peer = m.topology[n.site] == Full || slices.Contains(m.entitled[n.site], m.in.Members.ids[i])
		}
	}
	for _, i := range m.strangers() {
		m.nodes[i].peer = true
	}
	if i, ok := m.in.Members.index(m.Self); ok {
		m.nodes[i].peer = false
	}
	for id, peered := range m.in.Peered {
		if i, member := m.in.Members.index(id); member && peered && id != m.Self && !m.nodes[i].peer {
			m.nodes[i].kept = true
		}
	}
}

// strangers returns the nodes of unknown site that this host peers with. Nodes that may be of its own site come first,
// since it must reach these itself, then those that were admitted last, since a node that has just joined may know
// nobody else.
func (m *maker) strangers() (out []int) {
	type stranger struct {
		at       int
		own      bool
		admitted int64
	}
	var all []stranger
	for i := range m.nodes {
		if m.nodes[i].known {
			continue
		}
		site, ok := m.elsewhere(i)
		all = append(all, stranger{i, ok && site == m.Site, m.in.Members.nodes[i].GetAdmittedAt()})
	}
	if len(all) > Strangers {
		slices.SortFunc(all, func(a, b stranger) int {
			return cmp.Or(compareFlags(b.own, a.own), cmp.Compare(b.admitted, a.admitted), a.at-b.at)
		})
		all = all[:Strangers]
	}
	for _, s := range all {
		out = append(out, s.at)
	}
	return out
}

func (m *maker) guard() {
	led, outward := m.topology[m.Site] == Site, m.outward()
	for i, id := range m.in.Members.ids {
		n, g := m.nodes[i], Guard{From: id}
		if id == m.Self || !n.known || n.site != m.Site && !outward {
			continue
		}
		entitled := slices.Contains(m.entitled[n.site], id)
		switch {
		case n.site == m.Site:
			g.Foreign = led && entitled
			g.Own = m.delivers
		case m.topology[n.site] == Full:
			g.Own = led
		default:
			g.Site = entitled
		}
		if g.Own || g.Site || g.Foreign {
			m.Guards = append(m.Guards, g)
		}
	}
}

// Peer reports whether this host peers with a node, or did so within Grace.
func (p *Plan) Peer(id identity.ID) bool {
	if p.Full {
		return id != p.Self
	}
	n, _ := p.member(id)
	return n.peer || n.kept
}

// Peers yields the members for which Peer holds.
func (p *Plan) Peers() iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for i, id := range p.in.Members.ids {
			if n := &p.nodes[i]; (n.peer || n.kept || p.Full && id != p.Self) && !yield(id) {
				return
			}
		}
	}
}

// Peering yields the nodes that this host is to peer with now, without former peers. The caller notes them for
// Input.Peered. In a plan that is Full they are all other nodes.
func (p *Plan) Peering() iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for i, id := range p.in.Members.ids {
			if (p.nodes[i].peer || p.Full && id != p.Self) && !yield(id) {
				return
			}
		}
	}
}

// SiteOf returns a node's site; known is false while it is unknown.
func (p *Plan) SiteOf(id identity.ID) (site string, known bool) {
	n, _ := p.member(id)
	return n.site, n.known
}

// Topology returns the topology of a site; Full if no member is known to be in it.
func (p *Plan) Topology(site string) string {
	if t, ok := p.topology[site]; ok {
		return t
	}
	return Full
}

// Delivers reports whether other hosts may send to nodes through this host.
func (p *Plan) Delivers() bool { return p.delivers }

// SameTopology reports whether two plans of a host place it in the same site, and agree on the topology of each site
// that both know.
func (p *Plan) SameTopology(o *Plan) bool {
	if p.Full != o.Full || p.Site != o.Site {
		return false
	}
	for site, t := range p.topology {
		if u, ok := o.topology[site]; ok && u != t {
			return false
		}
	}
	return true
}

// Acting yields the leaders of all sites that act and say so in their records. The caller notes them for Input.Recent
// and Led. Leaders that act only because no record says that anybody leads are left out: a host that has just started
// knows nobody else, finds itself elected, and must not keep forwarding because of that.
func (p *Plan) Acting() iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for _, site := range slices.Sorted(maps.Keys(p.Leaders)) {
			for _, l := range p.Leaders[site] {
				if l.Acting && l.Term > 0 && !yield(l.ID) {
					return
				}
			}
		}
	}
}

// Leads returns a node's part in its site: "leader", "reserve", "elected" (it does not act yet), "silent" (it is found
// not to forward), or empty.
func (p *Plan) Leads(id identity.ID) string {
	if p == nil {
		return ""
	}
	if _, found := p.Silent[id]; found {
		return "silent"
	}
	site, _ := p.SiteOf(id)
	for _, l := range p.Leaders[site] {
		switch {
		case l.ID != id:
		case !l.Acting:
			return "elected"
		case l.Reserve:
			return "reserve"
		default:
			return "leader"
		}
	}
	return ""
}

// Way returns how this host sends to a node, given the nodes that it finds dead; false: there is no way. If all leaders
// of a site are dead, the way through the first one stays, so that packets do not leave by another route.
func (p *Plan) Way(to identity.ID, dead func(identity.ID) bool) (Way, bool) {
	if to == p.Self {
		return Way{}, false
	}
	n, ok := p.member(to)
	switch {
	case p.Full:
		return Way{Via: to}, true
	case !ok:
		return Way{}, false
	case !n.known:
		return Way{Via: to}, n.peer || n.kept
	case n.site == p.Site:
		return Way{Via: to, Deliver: p.delivers}, true
	}
	if p.topology[p.Site] == Site && !p.Forwards {
		via, ok := p.first(p.Self, dead)
		if !ok || via != p.Self {
			return Way{Via: via, Hop: true}, ok
		}
	}
	if n.gate {
		return Way{Via: to, Deliver: p.delivers}, true
	}
	via, ok := p.first(to, dead)
	return Way{Via: via, Hop: via != to, Deliver: via == to && p.delivers}, ok
}

// Carries reports whether a node forwards for its site by this plan: it acts, and its witnesses do not find it silent.
func (p *Plan) Carries(id identity.ID) bool {
	_, silent := p.Silent[id]
	n, _ := p.member(id)
	return n.gate && !silent
}

// Replaceable returns the leaders among this host's peers whose part another leader can take for this host's packets.
func (p *Plan) Replaceable() map[identity.ID]bool {
	out := map[identity.ID]bool{}
	for site, leaders := range p.Leaders {
		if site == p.Site && p.Forwards {
			continue // this host sends to its own site directly
		}
		var carry []identity.ID
		for _, l := range leaders {
			if p.Carries(l.ID) {
				carry = append(carry, l.ID)
			}
		}
		for _, id := range carry {
			if len(carry) > 1 && id != p.Self && p.Peer(id) {
				out[id] = true
			}
		}
	}
	return out
}

// Order yields the leaders of a node's site in the order in which the node uses them, and in which others use them to
// reach it.
func (p *Plan) Order(node identity.ID) iter.Seq[identity.ID] {
	n, _ := p.member(node)
	if s := p.sliced[n.site]; s != nil {
		return s.order(n.slice)
	}
	return slices.Values(Order(p.Leaders[n.site], node))
}

// Slot returns the share of its site that this host carries; 0: none.
func (p *Plan) Slot() uint32 {
	if p == nil {
		return 0
	}
	for _, l := range p.Leaders[p.Site] {
		if l.ID == p.Self {
			return l.Slot
		}
	}
	return 0
}

// first returns the leader of its site through which a node sends and is reached: the first in its order that is not
// dead, or the very first if all are. While all acting leaders are dead, an elected node is its own leader.
func (p *Plan) first(bound identity.ID, dead func(identity.ID) bool) (identity.ID, bool) {
	n, _ := p.member(bound)
	elected := slices.ContainsFunc(p.Leaders[n.site], func(l Leader) bool { return l.ID == bound })
	var best identity.ID
	ok := false
	for id := range p.Order(bound) {
		n, _ := p.member(id)
		switch {
		case elected && !n.gate:
			return bound, true
		case !dead(id):
			return id, true
		case !ok:
			best, ok = id, true
		}
	}
	return best, ok
}
