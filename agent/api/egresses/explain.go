package egresses

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

const (
	mostStrangers = 8  // nodes without the labels that an explanation names
	mostNews      = 20 // lines of what happened lately
	mostWaiting   = 5  // clients that have trouble
)

// picture is all that an explanation of an egress is made of.
type picture struct {
	egress  *skeinv1.Egress
	slots   []*skeinv1.EgressSlot
	nodes   []member                                 // all members, by name
	reports map[string]*skeinv1.EgressReportResponse // by node ID; of those that answered
	silent  map[string]string                        // why others did not, by node ID
	news    []occurrence                             // oldest first
	leader  string                                   // name; "": none is known
	client  string                                   // namespace/pod or an address; "": none was asked for
	fouPort uint32                                   // UDP, of the tunnels
	then    *events.State                            // a state of the past, of which nobody tells more; nil: now
}

// egressNews is one thing that happened to an egress.
type occurrence struct {
	at   int64
	text string
}

func (p picture) nameOf(id string) string {
	for _, n := range p.nodes {
		if n.node.GetId() == id {
			return n.name()
		}
	}
	return id
}

// gateway is what a node says of itself as a gateway of this egress, nil if nothing.
func (p picture) gateway(id string) *skeinv1.EgressGateway {
	for _, g := range p.reports[id].GetGateways() {
		if g.GetNamespace() == p.egress.GetNamespace() && g.GetName() == p.egress.GetName() {
			return g
		}
	}
	return nil
}

// Explain tells in sentences why an egress is as it is. A line that begins with two spaces belongs to the one
// above it.
func explain(p picture) []string {
	out := p.what()
	out = append(out, p.gateways()...)
	for _, s := range p.slots {
		out = append(out, p.slot(s)...)
	}
	out = append(out, p.clients()...)
	if p.client != "" {
		out = append(out, p.oneClient()...)
	}
	return append(out, p.lately()...)
}

// explainThen tells what the log knew of an egress at a moment.
func explainThen(p picture) []string {
	out := []string{
		fmt.Sprintf("As of event %d, at %s. What gateways and clients told then of leases and traffic is not kept.",
			p.then.Index(), clock(p.then.Time())),
		p.defined(),
	}
	var able []string
	for _, n := range eligible(p.egress, p.nodes) {
		able = append(able, n.name())
	}
	allowed := "no member was one"
	if len(able) > 0 {
		allowed = strings.Join(able, ", ")
	}
	out = append(out, fmt.Sprintf("Gateways were nodes with %s: %s.", labelWords(p.egress.GetGateways()), allowed))
	for _, s := range p.slots {
		out = append(out, p.given(s), p.where(s))
	}
	if p.client != "" {
		out = append(out, "Client "+p.client+":")
		out = append(out, p.falls(p.client)...)
	}
	return append(out, p.lately()...)
}

// lately is the newest of what happened.
func (p picture) lately() (out []string) {
	if len(p.news) > 0 {
		out = append(out, "Lately:")
		for _, n := range p.news[max(0, len(p.news)-mostNews):] {
			out = append(out, fmt.Sprintf("  %s %s", clock(n.at), n.text))
		}
	}
	return out
}

func clock(ns int64) string { return time.Unix(0, ns).Format("2006-01-02 15:04:05") }

// slotsText are the slots that take new flows, and those that drain.
func slotsText(e *skeinv1.Egress) string {
	text := count(int(events.Replicas(e)), "slot")
	if until, draining := events.DrainedAt(e); draining {
		text += fmt.Sprintf(" and %d more, which take no new flows and end with their last one, at %s at the latest",
			e.GetDraining(), clock(until.UnixNano()))
	}
	return text
}

// defined says what the egress is, and which event says so.
func (p picture) defined() string {
	e := p.egress
	text := fmt.Sprintf("Egress %s leads to %s, through %s. Event %d defined it, at %s",
		fullName(e.GetNamespace(), e.GetName()), strings.Join(e.GetDestinations(), ", "),
		slotsText(e), e.GetCreatedIndex(), clock(e.GetCreatedAt()))
	if e.GetChangedIndex() != e.GetCreatedIndex() {
		text += fmt.Sprintf("; event %d changed it last", e.GetChangedIndex())
	}
	return text + "."
}

func (p picture) what() []string {
	e := p.egress
	source := "Packets leave with the address of the gateway node that owns the slot, so connections end when a slot " +
		"moves."
	if len(e.GetAddresses()) > 0 {
		source = "Packets leave with an address of the slot's own, which moves with it."
	}
	lease := fmt.Sprintf("A gateway forwards for %s without hearing from the leader, %s.", leaseOf(e), p.leader)
	if p.leader == "" {
		lease = fmt.Sprintf("No leader is known here: no lease is renewed, and %s after its last renewal a gateway stops. "+
			"Choose a longer --lease to ride out longer outages.", leaseOf(e))
	}
	return []string{p.defined(), source + " " + lease}
}

// gateways says who may be one, and how each fares.
func (p picture) gateways() []string {
	able := eligible(p.egress, p.nodes)
	out := []string{fmt.Sprintf("Gateways are nodes with %s: %d of %s.", labelWords(p.egress.GetGateways()), len(able),
		count(len(p.nodes), "member"))}
	if len(able) == 0 {
		out[0] = fmt.Sprintf("Gateways are nodes with %s, and no member is one: packets of clients find no way out.",
			labelWords(p.egress.GetGateways()))
	}
	for _, n := range able {
		out = append(out, "  "+n.name()+" "+p.fares(n))
	}
	strangers := 0
	for _, n := range p.nodes {
		why, _ := obstacles(p.egress, n)
		if len(why) == 0 {
			continue
		}
		if strangers++; strangers <= mostStrangers {
			out = append(out, fmt.Sprintf("  %s may not be one: %s.", n.name(), strings.Join(why, ", ")))
		}
	}
	if n := strangers - mostStrangers; n > 0 {
		out = append(out, fmt.Sprintf("  %s may not be one either.", count(n, "other member")))
	}
	return out
}

// fares is how an eligible node does, by its own word.
func (p picture) fares(n member) string {
	g := p.gateway(n.node.GetId())
	switch why, silent := p.silent[n.node.GetId()]; {
	case silent:
		return "may be one, and does not tell how it fares: " + why + "."
	case g == nil:
		return "may be one, and has not begun to prepare it."
	}
	ready := "is ready"
	if !g.GetState().GetReady() {
		ready = "is not ready"
	}
	health := map[skeinv1.GatewayState_Health]string{skeinv1.GatewayState_HEALTH_GOOD: ", reaches its targets",
		skeinv1.GatewayState_HEALTH_BAD: ", does not reach its targets"}[g.GetState().GetHealth()]
	why := ""
	if g.GetState().GetReason() != "" {
		why = " (" + g.GetState().GetReason() + ")"
	}
	conns := fmt.Sprintf("%d", g.GetConntrack())
	if g.GetConntrackMax() > 0 {
		conns = fmt.Sprintf("%d of %d", g.GetConntrack(), g.GetConntrackMax())
	}
	text := fmt.Sprintf("%s%s%s; it knows %s and has %s connections, FoU in %s.", ready, health, why,
		count(int(g.GetClients()), "client"), conns, cmp.Or(g.GetDriver(), "an unknown driver"))
	if dropped := dropsText(g); dropped != "" {
		text += " It has dropped packets: " + dropped + "."
	}
	return text
}

func dropsText(g *skeinv1.EgressGateway) string {
	var out []string
	for _, d := range []struct {
		n    uint64
		text string
	}{
		{g.GetDroppedStrangers(), "of no client or with another's source"}, {g.GetDroppedInvalid(), "of no connection"},
		{g.GetDroppedLease(), "without a lease"}, {g.GetDroppedDestination(), "for what is none of its destinations"},
	} {
		if d.n > 0 {
			out = append(out, fmt.Sprintf("%d %s", d.n, d.text))
		}
	}
	return strings.Join(out, ", ")
}

// slot says who owns a slot, why, and whether it forwards.
func (p picture) slot(s *skeinv1.EgressSlot) []string {
	out := []string{p.given(s)}
	if s.GetNodeId() == "" {
		out = append(out, "  "+p.whyNobody())
	}
	out = append(out, p.where(s))
	if s.GetNodeId() != "" {
		out = append(out, "  "+p.lease(s))
	}
	if own := time.Duration(s.GetLeaseMillis()) * time.Millisecond; s.GetNodeId() != "" && own > 0 &&
		own != leaseOf(p.egress) {
		out = append(out, fmt.Sprintf("  Its lease is %s, as when it was given: the egress's counts from the next owner on.",
			own))
	}
	return out
}

// given says who owns a slot, by which event, and why.
func (p picture) given(s *skeinv1.EgressSlot) string {
	by := fmt.Sprintf("by event %d, at %s: %s.", s.GetEpoch(), clock(s.GetSince()), api.ReasonText(s.GetReason()))
	switch {
	case s.GetNodeId() != "" && s.GetFromNodeId() != "":
		how := "since that could not hand it over"
		if s.GetPlanned() {
			how = "as planned, so that it was handed over"
		}
		return fmt.Sprintf("Slot %d belongs to %s %s It came from %s, %s.", s.GetNumber(), p.nameOf(s.GetNodeId()), by,
			p.nameOf(s.GetFromNodeId()), how)
	case s.GetNodeId() != "":
		return fmt.Sprintf("Slot %d belongs to %s %s", s.GetNumber(), p.nameOf(s.GetNodeId()), by)
	case s.GetEpoch() == 0:
		return fmt.Sprintf("Slot %d never had an owner.", s.GetNumber())
	}
	return fmt.Sprintf("Slot %d has no owner %s Before, %s had it.", s.GetNumber(), by, p.nameOf(s.GetFromNodeId()))
}

// where says which way a slot's packets take.
func (p picture) where(s *skeinv1.EgressSlot) string {
	return fmt.Sprintf("  Tunnels lead to %s; packets leave with %s.", p.endpoint(s.GetNumber()),
		slotSource(p.egress, s.GetNumber()))
}

func (p picture) endpoint(slot uint32) string {
	if uint64(slot) < uint64(len(p.egress.GetEndpoints())) {
		return addressText(p.egress.GetEndpoints()[slot])
	}
	return "no endpoint"
}

// whyNobody says what an owner is missing for.
func (p picture) whyNobody() string {
	able := eligible(p.egress, p.nodes)
	var ready []string
	for _, n := range able {
		if g := p.gateway(n.node.GetId()); n.alive && g.GetState().GetReady() &&
			g.GetState().GetHealth() != skeinv1.GatewayState_HEALTH_BAD {
			ready = append(ready, n.name())
		}
	}
	switch {
	case len(able) == 0:
		near := ""
		if list := nearest(p.egress, p.nodes); len(list) > 0 {
			near = " Nearest are " + strings.Join(list, ", ") + "."
		}
		return "No node is eligible." + near
	case len(ready) == 0:
		return "None of the eligible nodes is alive, ready and healthy: see above."
	case p.leader == "":
		return "Without a leader nobody gives it to " + strings.Join(ready, " or ") + "."
	}
	return "The leader gives it to one of " + strings.Join(ready, ", ") + " within a second."
}

// lease says whether the owner forwards.
func (p picture) lease(s *skeinv1.EgressSlot) string {
	name := p.nameOf(s.GetNodeId())
	if why, silent := p.silent[s.GetNodeId()]; silent {
		return fmt.Sprintf("Whether it forwards is not known: %s does not tell (%s).", name, why)
	}
	for _, r := range p.gateway(s.GetNodeId()).GetSlots() {
		if r.GetNumber() != s.GetNumber() {
			continue
		}
		switch {
		case r.GetEpoch() != s.GetEpoch():
			return fmt.Sprintf("%s still holds it as of event %d, and has not heard of event %d.", name,
				r.GetEpoch(), s.GetEpoch())
		case !r.GetForwarding():
			return fmt.Sprintf("%s has no lease for it and does not forward: the leader has not granted one yet, or does not "+
				"hear it.", name)
		}
		text := fmt.Sprintf("Its lease runs, and %s forwards for %s: %d packets out, %d in.", name,
			count(int(r.GetClients()), "client"), r.GetPacketsOut(), r.GetPacketsIn())
		if r.GetFailoverNanos() > 0 {
			text += fmt.Sprintf(" It began %s after the event", time.Duration(r.GetFailoverNanos()).Round(time.Millisecond))
			if r.GetTakenOver() > 0 {
				text += ", with " + count(int(r.GetTakenOver()), "connection") + " of the former owner"
			}
			text += "."
		}
		if r.GetAnnounced() != "" {
			text += " It answers for the address on " + r.GetAnnounced() + "."
		}
		return text
	}
	return fmt.Sprintf("%s does not know of it yet.", name)
}

// ours are the egresses of a client that are this one.
func (p picture) ours(c *skeinv1.EgressClientReport) *skeinv1.EgressOfClient {
	for _, e := range c.GetEgresses() {
		if e.GetNamespace() == p.egress.GetNamespace() && e.GetName() == p.egress.GetName() {
			return e
		}
	}
	return nil
}

// each calls f with every client of this egress that a node has told of, by node's name and key.
func (p picture) each(f func(node string, c *skeinv1.EgressClientReport, of *skeinv1.EgressOfClient)) {
	for _, n := range p.nodes {
		for _, c := range p.reports[n.node.GetId()].GetClients() {
			if of := p.ours(c); of != nil {
				f(n.name(), c, of)
			}
		}
	}
}

func (p picture) clients() []string {
	total, states, hosts, trouble := 0, map[string]int{}, map[string]bool{}, []string{}
	p.each(func(node string, c *skeinv1.EgressClientReport, of *skeinv1.EgressOfClient) {
		total++
		states[of.GetState()]++
		hosts[node] = true
		if of.GetState() != "ready" && len(trouble) < mostWaiting {
			trouble = append(trouble, fmt.Sprintf("  %s on %s is %s: %s.", c.GetKey(), node, of.GetState(),
				api.ReasonText(of.GetReason())))
		}
	})
	if total == 0 {
		return []string{fmt.Sprintf("No host tells of a client. Pods ask for it by the annotation skein.dev/egress.%s: %s, "+
			"or by `skein egress attach`.", p.egress.GetNamespace(), p.egress.GetName())}
	}
	var parts []string
	for _, state := range []string{"ready", "waiting", "refused", "unknown"} {
		if n := states[state]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, state))
		}
	}
	return append([]string{fmt.Sprintf("%s on %s: %s.", count(total, "client"), count(len(hosts), "host"),
		strings.Join(parts, ", "))}, trouble...)
}

// oneClient tells all of the client that was asked for.
func (p picture) oneClient() (out []string) {
	found := false
	p.each(func(node string, c *skeinv1.EgressClientReport, of *skeinv1.EgressOfClient) {
		if c.GetKey() != p.client && c.GetIpv4() != p.client && c.GetIpv6() != p.client {
			return
		}
		found = true
		out = append(out, fmt.Sprintf("Client %s (%s) is on %s.", c.GetKey(),
			addressText(&skeinv1.EgressAddress{Ipv4: c.GetIpv4(), Ipv6: c.GetIpv6()}), node))
		out = append(out, p.falls(c.GetKey())...)
		if want := events.SlotFor(c.GetKey(), events.Replicas(p.egress)); of.GetSlot() != want {
			out = append(out, fmt.Sprintf("  Its host still sends it through slot %d: it has not heard of the newest change.",
				of.GetSlot()))
		}
		switch of.GetState() {
		case "ready":
			out = append(out, fmt.Sprintf("  It is ready: %s, the owner, has taken it in.", cmp.Or(of.GetOwner(), "nobody")))
		default:
			out = append(out, fmt.Sprintf("  It is %s: %s.", of.GetState(), api.ReasonText(of.GetReason())))
		}
		out = append(out, p.routes(c, of.GetSlot())...)
		if before := c.GetEgresses()[:slices.Index(c.GetEgresses(), of)]; len(before) > 0 {
			var names []string
			for _, e := range before {
				names = append(names, fullName(e.GetNamespace(), e.GetName()))
			}
			out = append(out, "  Where destinations are the same, these come first: "+strings.Join(names, ", ")+".")
		}
	})
	if found {
		return out
	}
	out = append(out, fmt.Sprintf("No host tells of the client %s: it does not run, has not asked for this egress, or "+
		"its host does not answer.", p.client))
	if strings.Contains(p.client, "/") {
		out = append(out, p.falls(p.client)...)
	}
	return out
}

// falls says which slot a client falls on, and why.
func (p picture) falls(key string) []string {
	n := events.SlotFor(key, events.Replicas(p.egress))
	owner := "which nobody owns"
	if uint64(n) < uint64(len(p.slots)) && p.slots[n].GetNodeId() != "" {
		owner = "which " + p.nameOf(p.slots[n].GetNodeId()) + " owns"
	}
	if p.egress.GetSpread() == events.SpreadFlow {
		return []string{fmt.Sprintf("  Each of its flows takes one of the %d slots by chance; those that it passes on for "+
			"others take slot %d, %s.", events.Replicas(p.egress), n, owner)}
	}
	return []string{fmt.Sprintf("  It falls on slot %d of %d, %s: hashed with each slot's number, its name %s gives the "+
		"largest number with this one. That changes only with the number of slots.", n,
		events.Replicas(p.egress), owner, key)}
}

// routes says where the client's namespace should lead which destination.
func (p picture) routes(c *skeinv1.EgressClientReport, slot uint32) []string {
	if uint64(slot) >= uint64(len(p.egress.GetEndpoints())) {
		return nil
	}
	to := p.egress.GetEndpoints()[slot]
	var out []string
	for _, text := range p.egress.GetDestinations() {
		d, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		end, own := to.GetIpv4(), c.GetIpv4()
		if d.Addr().Is6() {
			end, own = to.GetIpv6(), c.GetIpv6()
		}
		remote, err := netip.ParseAddr(end)
		if err != nil || own == "" {
			out = append(out, fmt.Sprintf("  %s is not led there: the client or the slot has no address of that family.", d))
			continue
		}
		table, rule, why := routeTable(d)
		out = append(out, fmt.Sprintf("  %s goes by table %d, dev %s, to %s: rule %d, %s.", d, table,
			dataplane.FoULink(remote), remote, rule, why))
	}
	return out
}

var privateRanges = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("fc00::/7"),
}

// routeTable is the table of a client's namespace that a destination's route is in, and the rule that leads there.
func routeTable(d netip.Prefix) (table, rule int, why string) {
	for _, r := range privateRanges {
		if r.Bits() <= d.Bits() && r.Contains(d.Addr()) {
			return dataplane.ClientNarrowTable, dataplane.ClientNarrowRule, "before the private ranges go their usual way"
		}
	}
	return dataplane.ClientWideTable, dataplane.ClientWideRule, "after the private ranges went their usual way"
}

// slotHeldText is a journal entry as a sentence.
func slotHeldText(node string, h *skeinv1.SlotHeld) string {
	slot := fmt.Sprintf("slot %d", h.GetNumber())
	text := ""
	switch h.GetWhat() {
	case "held":
		text = fmt.Sprintf("%s forwards for %s", node, slot)
		if h.GetTookNanos() > 0 {
			text += fmt.Sprintf(", %s after event %d", time.Duration(h.GetTookNanos()).Round(time.Millisecond), h.GetEpoch())
		}
	case "lost":
		text = fmt.Sprintf("%s lost the lease of %s", node, slot)
	case "released":
		text = fmt.Sprintf("%s let %s go", node, slot)
	case "denied":
		text = fmt.Sprintf("%s was denied the lease of %s", node, slot)
	case "handed-over":
		text = fmt.Sprintf("%s handed over %s with %s", node, slot, count(int(h.GetConnections()), "connection"))
	case "taken-over":
		text = fmt.Sprintf("%s took over %s with %s", node, slot, count(int(h.GetConnections()), "connection"))
	case "announced":
		text = fmt.Sprintf("%s announced the address of %s", node, slot)
	default:
		text = fmt.Sprintf("%s: %s %s", node, slot, h.GetWhat())
	}
	if h.GetReason() != "" {
		text += ": " + h.GetReason()
	}
	return text + "."
}

// eventText is an event of the log as a sentence; "" if it is not about the egress.
func eventText(e *skeinv1.Event, namespace, name string, nameOf func(id string) string) string {
	slot := func(s *skeinv1.EgressSlot, text string) string {
		if s.GetNamespace() != namespace || s.GetName() != name {
			return ""
		}
		return fmt.Sprintf("event %d: slot %d %s: %s.", e.GetIndex(), s.GetNumber(), text, api.ReasonText(s.GetReason()))
	}
	mine := func(x *skeinv1.Egress) bool { return x.GetNamespace() == namespace && x.GetName() == name }
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_EgressDefined:
		if mine(b.EgressDefined.GetEgress()) {
			return fmt.Sprintf("event %d: defined.", e.GetIndex())
		}
	case *skeinv1.Event_EgressChanged:
		if mine(b.EgressChanged.GetEgress()) {
			return fmt.Sprintf("event %d: changed (%s).", e.GetIndex(), b.EgressChanged.GetChange())
		}
	case *skeinv1.Event_EgressRemoved:
		if b.EgressRemoved.GetNamespace() == namespace && b.EgressRemoved.GetName() == name {
			return fmt.Sprintf("event %d: removed.", e.GetIndex())
		}
	case *skeinv1.Event_SlotAssigned:
		return slot(b.SlotAssigned.GetSlot(), "to "+nameOf(b.SlotAssigned.GetSlot().GetNodeId()))
	case *skeinv1.Event_SlotMoved:
		s := b.SlotMoved.GetSlot()
		return slot(s, fmt.Sprintf("from %s to %s", nameOf(s.GetFromNodeId()), nameOf(s.GetNodeId())))
	case *skeinv1.Event_SlotReleased:
		return slot(b.SlotReleased.GetSlot(), "taken from "+nameOf(b.SlotReleased.GetSlot().GetFromNodeId()))
	}
	return ""
}
