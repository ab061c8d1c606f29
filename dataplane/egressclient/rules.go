package egressclient

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

// Family is an address family, 4 or 6.
type Family = dataplane.Family

// The two families.
const (
	IPv4 = dataplane.IPv4
	IPv6 = dataplane.IPv6
)

// Priorities without a name in dataplane: those of a host's own namespace, and of inside networks.
const (
	hostPodsRule   = 1795 // to 1798: only in a host's own namespace; Numbers.FirstRule
	hostMeshRule   = 1796
	hostMarkRule   = 1797
	hostOwnRule    = 1798
	insideRule     = 2003 // and the following, one per network
	lastInsideRule = dataplane.ClientFlowWideRule - 1
)

// Rule is a policy rule, wanted or in the kernel. Other holds unrecognised selectors of a rule in the kernel; such a
// rule is never wanted.
type Rule struct {
	Family     Family
	Priority   int
	From, To   netip.Prefix // not valid: all
	Mark, Mask uint32
	Local      bool // applies only to packets that this namespace itself sends
	Table      int
	Other      string
}

// String is the rule in the syntax of ip.
func (r Rule) String() string {
	s := fmt.Sprintf("%d: from all", r.Priority)
	if r.From.IsValid() {
		s = fmt.Sprintf("%d: from %s", r.Priority, host(r.From))
	}
	if r.To.IsValid() {
		s += " to " + host(r.To)
	}
	if r.Mask != 0 {
		s += fmt.Sprintf(" fwmark %#x/%#x", r.Mark, r.Mask)
	}
	if r.Local {
		s += " iif lo"
	}
	s += " lookup " + tableName(r.Table)
	if r.Other != "" {
		s += " " + r.Other
	}
	return s
}

// host formats a prefix like ip: a single address without its length.
func host(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

func tableName(n int) string {
	if n == unix.RT_TABLE_MAIN {
		return "main"
	}
	return fmt.Sprint(n)
}

// each says how many rules a row of the table stands for.
type each uint8

const (
	once        each = iota
	ownAddress       // a rule for each address of the host's own
	insideAway       // a rule for each inside network that this namespace has no address in
	insideOpen       // a rule for each inside network that no rule for private destinations covers
	onlyOnAHost      // once, in a host's own namespace
	flowSlot         // a rule for each slot with flows that new flows do not take
)

func (e each) host() bool { return e == ownAddress || e == insideAway || e == onlyOnAHost }

// row is one line of the table from which all rules are derived.
type row struct {
	family Family // 0: both
	each   each
	rule   Rule
	why    string
}

var (
	linkLocal4 = netip.MustParsePrefix("169.254.0.0/16")
	linkLocal6 = netip.MustParsePrefix("fe80::/10")
	private4   = []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("10.0.0.0/8")}
	private6 = []netip.Prefix{netip.MustParsePrefix("fc00::/7")}
)

// rows is the table in order of priority, with the default numbers; moved applies others.
var rows = makeRows()

func makeRows() []row {
	const main = unix.RT_TABLE_MAIN
	n := dataplane.DefaultNumbers()
	out := []row{
		{0, onlyOnAHost, Rule{Priority: hostPodsRule, Table: n.PodTable()}, "this host's pods and other hosts' blocks are " +
			"led as ever"},
		{0, onlyOnAHost, Rule{Priority: hostMeshRule, Mark: n.MarkRoute, Mask: n.MarkMask, Table: n.RouteTable},
			"what the mesh carries goes through its own tunnel"},
		{0, onlyOnAHost, Rule{Priority: hostMarkRule, Mark: n.MarkWG, Mask: n.MarkMask, Table: main},
			"what WireGuard and the agent send goes straight out"},
		{0, ownAddress, Rule{Priority: hostOwnRule, Table: main}, "answers to connections from outside leave as they came"},
		{0, insideAway, Rule{Priority: hostOwnRule, Table: main}, "so that reverse path filters find the way of what this " +
			"host passes on to pods where it was"},
		{IPv4, once, Rule{Priority: dataplane.ClientLinkLocalRule, To: linkLocal4, Table: main}, "neighbours on the link, " +
			"the namespace's gateway among them"},
		{IPv6, once, Rule{Priority: dataplane.ClientLinkLocalRule, To: linkLocal6, Table: main}, "neighbours on the link, " +
			"the namespace's gateway among them"},
		{0, flowSlot, Rule{Priority: dataplane.ClientFlowNarrowRule, Table: dataplane.ClientFlowNarrowTable},
			"the next rule's destinations, of flows that began by another slot"},
		{0, once, Rule{Priority: dataplane.ClientNarrowRule, Table: dataplane.ClientNarrowTable}, "private destinations " +
			"that an egress leads to, before the private ranges themselves"},
	}
	for i, p := range private4 {
		out = append(out, row{IPv4, once, Rule{Priority: dataplane.ClientPrivateRule + i, To: p, Table: main},
			"private networks: nodes, pods, services, and the tunnels' own packets"})
	}
	for i, p := range private6 {
		out = append(out, row{IPv6, once, Rule{Priority: dataplane.ClientPrivateRule + i, To: p, Table: main},
			"private networks: nodes, pods, services, and the tunnels' own packets"})
	}
	return append(out,
		row{0, insideOpen, Rule{Priority: insideRule, Table: main}, "networks of the mesh outside the private ranges"},
		row{0, flowSlot, Rule{Priority: dataplane.ClientFlowWideRule, Table: dataplane.ClientFlowWideTable},
			"the next rule's destinations, of flows that began by another slot"},
		row{0, once, Rule{Priority: dataplane.ClientWideRule, Table: dataplane.ClientWideTable}, "all other destinations " +
			"of egresses"})
}

// moved replaces the default numbers in a rule by others.
func moved(r Rule, to dataplane.Numbers) Rule {
	from := dataplane.DefaultNumbers()
	r.Priority += to.FirstRule - from.FirstRule
	r.Table = movedTable(r.Table, to)
	switch r.Mark {
	case from.MarkRoute:
		r.Mark, r.Mask = to.MarkRoute, to.MarkMask
	case from.MarkWG:
		r.Mark, r.Mask = to.MarkWG, to.MarkMask
	}
	return r
}

func movedTable(table int, to dataplane.Numbers) int {
	from := dataplane.DefaultNumbers()
	switch table {
	case unix.RT_TABLE_MAIN:
		return table
	case from.RouteTable:
		return to.RouteTable
	}
	return table + to.FirstTable - from.FirstTable
}

// RuleInfo describes a rule for documents.
type RuleInfo struct {
	Priority int
	Family   Family
	Text     string // in the syntax of ip, without the priority; NETWORK and ADDRESS are placeholders
	Why      string
	Host     bool // only in a host's own namespace; there all rules have iif lo besides
}

// Rules lists every rule that a namespace may get, with the default numbers, in the kernel's order of evaluation,
// IPv4 first.
func Rules() []RuleInfo {
	var out []RuleInfo
	for _, f := range []Family{IPv4, IPv6} {
		for _, r := range rows {
			if r.family != 0 && r.family != f {
				continue
			}
			_, text, _ := strings.Cut(r.rule.String(), ": ")
			switch r.each {
			case ownAddress:
				text = strings.Replace(text, "from all", "from ADDRESS", 1)
			case insideAway:
				text = strings.Replace(text, "from all", "from NETWORK", 1)
			case insideOpen:
				text = strings.Replace(text, "from all", "from all to NETWORK", 1)
			case flowSlot:
				text = fmt.Sprintf("from all fwmark SLOT/%#x lookup %d + slot", dataplane.FlowMask, r.rule.Table)
			}
			out = append(out, RuleInfo{Priority: r.rule.Priority, Family: f, Text: text, Why: r.why, Host: r.each.host()})
		}
	}
	return out
}

// ground is the input for rules besides the table.
type ground struct {
	numbers dataplane.Numbers
	host    bool
	own     []netip.Addr   // the host's addresses outside the mesh
	self    []netip.Addr   // the client's addresses
	inside  []netip.Prefix // the mesh's networks
	flows   []int          // slots with flows that new flows do not take
}

// rulesOf derives the rules of one family.
func rulesOf(f Family, g ground) []Rule {
	var out []Rule
	for _, r := range rows {
		if r.family != 0 && r.family != f || r.each.host() && !g.host {
			continue
		}
		rule := moved(r.rule, g.numbers)
		rule.Family, rule.Local = f, g.host // packets that a host forwards for others do not use its own egresses
		switch r.each {
		case ownAddress:
			for _, a := range g.own {
				if dataplane.FamilyOf(a) == f {
					rule.From = netip.PrefixFrom(a, a.BitLen())
					out = append(out, rule)
				}
			}
		case insideAway:
			for _, p := range g.inside {
				if dataplane.FamilyOf(p.Addr()) == f && !slices.ContainsFunc(g.self, p.Contains) {
					rule.From = p
					out = append(out, rule)
				}
			}
		case insideOpen:
			for _, p := range g.inside {
				if dataplane.FamilyOf(p.Addr()) == f && !private(p) {
					rule.To = p
					out = append(out, rule)
					rule.Priority = min(rule.Priority+1, lastInsideRule+g.numbers.FirstRule-hostPodsRule)
				}
			}
		case flowSlot:
			for _, slot := range g.flows {
				rule.Mark, rule.Mask, rule.Table = dataplane.FlowMark(slot), dataplane.FlowMask, r.rule.Table+slot
				out = append(out, rule)
			}
		default:
			out = append(out, rule)
		}
	}
	return out
}

// private reports whether a prefix lies in one of the private ranges.
func private(p netip.Prefix) bool {
	return slices.ContainsFunc(append(private4, private6...), func(r netip.Prefix) bool { return covers(r, p) })
}

func covers(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// ours reports whether a rule with skein's protocol belongs to this package. In a host's own namespace other rules of
// skein lie among them: those for pods, gateways and nodes of other sites.
func ours(priority, table int, n dataplane.Numbers) bool {
	if priority < n.FirstRule || priority > n.LastRule() {
		return false
	}
	return table == unix.RT_TABLE_MAIN || table == n.ClientNarrowTable() || table == n.ClientWideTable() ||
		flowTable(table) ||
		priority < n.FirstRule+dataplane.ClientLinkLocalRule-hostPodsRule
}
