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
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
)

// member is a member as egresses see it.
type member struct {
	node   *skeinv1.Node
	site   string
	record *skeinv1.Record // nil: never heard of
	alive  bool
}

func (n member) name() string { return n.node.GetName() }

// obstacles are the reasons why a node may not be a gateway of an egress; none: it is eligible. short is how many
// labels it lacks.
func obstacles(e *skeinv1.Egress, n member) (why []string, short int) {
	for _, k := range sortedKeys(e.GetGateways()) {
		want := e.GetGateways()[k]
		switch have, ok := n.node.GetLabels()[k]; {
		case !ok:
			why, short = append(why, "it lacks the label "+k), short+1
		case have != want:
			why, short = append(why, fmt.Sprintf("its label %s is %s, not %s", k, have, want)), short+1
		}
	}
	if n.node.GetDraining() {
		why = append(why, "it is being drained")
	}
	if n.record.GetRole() == gossip.RoleRelay {
		why = append(why, "it only relays")
	}
	if len(why) == 0 && !events.Eligible(e, n.node) {
		why = append(why, "the egress asks for no label") // an egress without labels has no gateways
	}
	return why, short
}

func eligible(e *skeinv1.Egress, nodes []member) (out []member) {
	for _, n := range nodes {
		if why, _ := obstacles(e, n); len(why) == 0 {
			out = append(out, n)
		}
	}
	return out
}

// mostNear is how many nodes are named that are nearly eligible.
const mostNear = 3

// nearest says which nodes lack the fewest labels, and what they lack.
func nearest(e *skeinv1.Egress, nodes []member) []string {
	type candidate struct {
		name  string
		why   []string
		short int
	}
	var all []candidate
	for _, n := range nodes {
		if why, short := obstacles(e, n); len(why) > 0 && n.record.GetRole() != gossip.RoleRelay {
			all = append(all, candidate{n.name(), why, short})
		}
	}
	slices.SortFunc(all, func(x, y candidate) int {
		return cmp.Or(cmp.Compare(x.short, y.short), cmp.Compare(len(x.why), len(y.why)), strings.Compare(x.name, y.name))
	})
	var out []string
	for _, c := range all[:min(len(all), mostNear)] {
		out = append(out, fmt.Sprintf("%s (%s)", c.name, strings.Join(c.why, ", ")))
	}
	return out
}

// warnings are what somebody should know who defines or changes an egress.
func warnings(e *skeinv1.Egress, nodes []member) []string {
	able := eligible(e, nodes)
	if len(able) == 0 {
		text := fmt.Sprintf("no node is eligible: a gateway needs %s", labelWords(e.GetGateways()))
		if near := nearest(e, nodes); len(near) > 0 {
			text += ", and the nearest are " + strings.Join(near, ", ")
		}
		return []string{text + "; until there is one, packets for these destinations find no way out"}
	}
	var living []string
	for _, n := range able {
		if n.alive {
			living = append(living, n.name())
		}
	}
	switch {
	case len(living) == 0:
		return []string{fmt.Sprintf("none of the eligible nodes is alive: %s", namesOf(able))}
	case uint32(len(living)) < events.Replicas(e):
		return []string{fmt.Sprintf("%s for %s (%s): some hold several slots, and lose all of them when they fail; "+
			"label more nodes, or have fewer replicas",
			count(len(living), "gateway"), count(int(events.Replicas(e)), "slot"), strings.Join(living, ", "))}
	}
	return nil
}

// check says what is wrong with an egress that the log cannot know: members' own addresses. "" if nothing.
func check(e *skeinv1.Egress, nodes []member) string {
	for _, text := range e.GetDestinations() {
		p, err := netip.ParsePrefix(text)
		// the leader says what is wrong; and to everything else the mesh's own ways come first
		if err != nil || p.Bits() == 0 {
			continue
		}
		for _, n := range nodes {
			if what := api.Overlapped(p.Masked(), n.record); what != "" {
				return fmt.Sprintf("destination %s covers %s of node %s: clients would lose it through a tunnel; choose smaller "+
					"networks, or 0.0.0.0/0, which leaves the mesh's own ways alone", p, what, n.name())
			}
		}
	}
	for _, a := range e.GetAddresses() {
		for _, text := range []string{a.GetIpv4(), a.GetIpv6()} {
			at, err := netip.ParseAddr(text)
			if err != nil {
				continue
			}
			for _, n := range nodes {
				if hasAddress(n.record, at) {
					return fmt.Sprintf("address %s is node %s's own: two hosts would answer for it; choose another, or none, and "+
						"packets leave with the gateway node's own address", at, n.name())
				}
			}
		}
	}
	return ""
}

// hasAddress reports whether a node says that an address is its own.
func hasAddress(r *skeinv1.Record, a netip.Addr) bool {
	for _, c := range r.GetCandidates() {
		if at, err := netip.ParseAddrPort(c.GetAddress()); err == nil && at.Addr().Unmap() == a {
			return true
		}
	}
	ip, err := netip.ParseAddr(r.GetInternalIp())
	return err == nil && ip == a
}

// moves tells what a change does to slots and clients that run; slots are those after it.
func moves(before, after *skeinv1.Egress, slots []*skeinv1.EgressSlot, nodes []member) (out []string) {
	if old, now := events.Replicas(before), events.Replicas(after); old < now {
		out = append(out, fmt.Sprintf("%s: about %d of 100 clients fall on what is new, the others stay where they are",
			numbered("begins", "begin", old, now), (now-old)*100/now))
	} else if old > now {
		fate := "clients of it spread over the others, whose own clients stay"
		if until, draining := events.DrainedAt(after); draining {
			fate = fmt.Sprintf("new flows of its clients go by the others, and it ends with its last flow, at %s at the latest",
				clock(until.UnixNano()))
			out = append(out, numbered("drains", "drain", now, old)+": "+fate)
		} else {
			out = append(out, numbered("ends", "end", now, old)+": "+fate)
		}
	}
	for _, s := range slots {
		owner := slices.IndexFunc(nodes, func(n member) bool { return n.node.GetId() == s.GetNodeId() })
		if owner < 0 {
			continue
		}
		if why, _ := obstacles(after, nodes[owner]); len(why) > 0 {
			out = append(out, fmt.Sprintf("slot %d leaves %s: %s; %s", s.GetNumber(), nodes[owner].name(),
				strings.Join(why, ", "), fate(after)))
		}
	}
	for i := range min(before.GetReplicas(), after.GetReplicas()) {
		if old, now := slotSource(before, i), slotSource(after, i); old != now {
			out = append(out, fmt.Sprintf("slot %d sends with %s instead of %s: connections through it end", i, now, old))
		}
	}
	if more, fewer := without(after.GetDestinations(), before.GetDestinations()), without(before.GetDestinations(),
		after.GetDestinations()); len(more)+len(fewer) > 0 {
		var parts []string
		if len(more) > 0 {
			parts = append(parts, "lead "+strings.Join(more, ", ")+" into their tunnels")
		}
		if len(fewer) > 0 {
			parts = append(parts, "no longer lead "+strings.Join(fewer, ", ")+" there")
		}
		out = append(out, "clients that run "+strings.Join(parts, ", and "))
	}
	if before.GetFouSourcePortAuto() != after.GetFouSourcePortAuto() {
		how := "is the tunnels' own again"
		if after.GetFouSourcePortAuto() {
			how = "follows from the flow"
		}
		out = append(out, "the source port of running tunnels "+how)
	}
	if old, now := leaseOf(before), leaseOf(after); old != now {
		out = append(out, fmt.Sprintf("the lease is %s instead of %s for slots that get an owner from now on; those that "+
			"have one keep theirs", now, old))
	}
	return out
}

// fate is what becomes of the connections of a slot that moves by plan.
func fate(e *skeinv1.Egress) string {
	if len(e.GetAddresses()) > 0 {
		return "its connections go along"
	}
	return "its connections end, since they have that node's own address"
}

func numbered(one, many string, from, to uint32) string {
	if to-from == 1 {
		return fmt.Sprintf("slot %d %s", from, one)
	}
	return fmt.Sprintf("slots %d to %d %s", from, to-1, many)
}

// slotSource is what a slot's packets leave with.
func slotSource(e *skeinv1.Egress, slot uint32) string {
	if uint64(slot) < uint64(len(e.GetAddresses())) {
		return addressText(e.GetAddresses()[slot])
	}
	return "the gateway node's own address"
}

func addressText(a *skeinv1.EgressAddress) string {
	if a.GetIpv4() == "" || a.GetIpv6() == "" {
		return a.GetIpv4() + a.GetIpv6()
	}
	return a.GetIpv4() + " and " + a.GetIpv6()
}

func leaseOf(e *skeinv1.Egress) time.Duration {
	if e.GetLeaseMillis() == 0 {
		return events.DefaultEgressLease * time.Millisecond
	}
	return time.Duration(e.GetLeaseMillis()) * time.Millisecond
}

func without(list, less []string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(less, s) })
}

func namesOf(nodes []member) string {
	var out []string
	for _, n := range nodes {
		out = append(out, n.name())
	}
	return strings.Join(out, ", ")
}

func sortedKeys(m map[string]string) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// labelWords are labels as a sentence has them.
func labelWords(m map[string]string) string {
	var out []string
	for _, k := range sortedKeys(m) {
		out = append(out, k+"="+m[k])
	}
	return cmp.Or(strings.Join(out, " and "), "a label, and it names none")
}

func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

func fullName(namespace, name string) string { return namespace + "/" + name }
