package dataplane

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
)

// Numbers are the names and numbers in a host's network namespace that one agent holds for itself: nobody else may use
// them, a second agent neither. The zero value stands for DefaultNumbers wherever one is taken; see Filled. What lies
// in namespaces of its own, those of pods and of gateways, has the same numbers everywhere and is not among them.
type Numbers struct {
	Link      string // the tunnel's
	HopLink   string // with kernel WireGuard: by which packets of Hops go, and come out
	PlainLink string // of plain WireGuard peers that this host carries

	NftTable       string // family inet, as all that follow
	HopNftTable    string // who may bring packets by HopLink
	RelayNftTable  string // of a relay that forwards in the kernel
	EgressNftTable string // of gateways' hosts
	ClientNftTable string // of a host that uses egresses itself
	RekeyNftTable  string // while the WireGuard key changes

	MarkWG    uint32 // fwmark of packets that WireGuard and the agent send outside the tunnel
	MarkRoute uint32 // fwmark of packets that shall enter the tunnel
	MarkMask  uint32 // bits of the fwmark that are ours

	RulePriority int // of what has MarkRoute: RouteTable
	RouteTable   int

	// FirstRule is the first of RuleCount priorities of all other rules, FirstTable the first of TableCount tables.
	FirstRule, FirstTable int

	// The addresses of gateways' namespaces that only their host knows, one of each for an egress. The host gives what
	// comes from there and leaves the mesh an address of its own.
	EgressLocal4, EgressLocal6 netip.Prefix
}

// How many priorities and tables follow FirstRule and FirstTable, themselves counted.
const (
	RuleCount  = 306
	TableCount = 7
)

// MaxInstance is the last instance that NumbersOf knows.
const MaxInstance = 2

// Distances between the numbers of one instance and the next.
const (
	instanceRules  = 400
	instanceTables = 10
	instanceBits   = 2
)

// DefaultNumbers are those of DESIGN.md section 9.
func DefaultNumbers() Numbers { return NumbersOf(0) }

// NumbersOf are the numbers of the i-th agent of a host, from 0 to MaxInstance. No two instances share one, and none
// has a bit of the fwmark that Calico (0xffff0000), Cilium (0xf00), Flannel (0x4000), kube-proxy (0xc000), the CNI
// plugin portmap (0x2000) or Amazon's CNI (0x80) has.
func NumbersOf(i int) Numbers {
	n := Numbers{
		Link: fmt.Sprintf("skein%d", i), HopLink: fmt.Sprintf("skeinhop%d", i), PlainLink: fmt.Sprintf("skeinplain%d", i),
		MarkWG: 0x20 >> (instanceBits * i), MarkRoute: 0x40 >> (instanceBits * i), MarkMask: 0x60 >> (instanceBits * i),
		RulePriority: 32500 + i, RouteTable: 180 + i,
		FirstRule: 1795 + instanceRules*i, FirstTable: 115 + instanceTables*i,
		EgressLocal4: netip.PrefixFrom(netip.AddrFrom4([4]byte{169, 254, byte(101 + 10*i), 0}), 24),
		EgressLocal6: netip.MustParsePrefix(fmt.Sprintf("fd73:6b65:696e:6567::%x:0/120", i)),
	}
	if i == 0 {
		return n.WithNftTable("skein")
	}
	return n.WithNftTable(fmt.Sprintf("skein%d", i))
}

// Owner tells agents that share a host apart where one name is made from another, as those of gateways' links are. It
// is empty for the default nft table.
func (n Numbers) Owner() string {
	if n.NftTable == DefaultNumbers().NftTable {
		return ""
	}
	return n.NftTable
}

// WithNftTable names all nft tables after the first one.
func (n Numbers) WithNftTable(name string) Numbers {
	n.NftTable, n.HopNftTable, n.RelayNftTable = name, name+"_hop", name+"_relay"
	n.EgressNftTable, n.ClientNftTable, n.RekeyNftTable = name+"_egress", name+"_client", name+"_rekey"
	return n
}

// Filled is n, or DefaultNumbers for the zero value.
func (n Numbers) Filled() Numbers {
	if n == (Numbers{}) {
		return DefaultNumbers()
	}
	return n
}

// EgressTable has the ways to gateways' namespaces on their host.
func (n Numbers) EgressTable() int { return n.FirstTable }

// PodTable has the host routes of pods, what no pod has of this host's blocks, and other hosts' blocks.
func (n Numbers) PodTable() int { return n.FirstTable + 1 }

// ClientNarrowTable has, on a host that uses egresses itself, their private destinations.
func (n Numbers) ClientNarrowTable() int { return n.FirstTable + 2 }

// ClientWideTable has their other destinations.
func (n Numbers) ClientWideTable() int { return n.FirstTable + 3 }

// ExportTable has this host's blocks, for a routing daemon to announce; no rule leads here.
func (n Numbers) ExportTable() int { return n.FirstTable + 4 }

// HopTable has the ways by other nodes.
func (n Numbers) HopTable() int { return n.FirstTable + 5 }

// HopLastTable has the ways to nodes that others' packets are for.
func (n Numbers) HopLastTable() int { return n.FirstTable + 6 }

// Offsets of rules from FirstRule. Those of a host that uses egresses itself lie around the others.
const (
	offsetHopLast = 202
	offsetHop     = 203
	offsetEgress  = 204
	offsetPods    = 205
)

// HopLastRule leads what comes by HopLink to HopLastTable, before pods' addresses are looked for.
func (n Numbers) HopLastRule() int { return n.FirstRule + offsetHopLast }

// HopRule leads everything but WireGuard's packets to HopTable.
func (n Numbers) HopRule() int { return n.FirstRule + offsetHop }

// EgressRule leads everything to EgressTable, before pods' addresses are looked for.
func (n Numbers) EgressRule() int { return n.FirstRule + offsetEgress }

// PodRule makes every packet ask PodTable first.
func (n Numbers) PodRule() int { return n.FirstRule + offsetPods }

// LastRule is the last priority that is ours, RulePriority aside.
func (n Numbers) LastRule() int { return n.FirstRule + RuleCount - 1 }

// Tables are all routing tables, without an order that means anything.
func (n Numbers) Tables() []int {
	out := []int{n.RouteTable}
	for i := range TableCount {
		out = append(out, n.FirstTable+i)
	}
	return out
}

// NftTables are all nft tables, family inet.
func (n Numbers) NftTables() []string {
	return []string{n.NftTable, n.HopNftTable, n.RelayNftTable, n.EgressNftTable, n.ClientNftTable, n.RekeyNftTable}
}

// Links are the names of all links, but for those of pods and gateways.
func (n Numbers) Links() []string { return []string{n.Link, n.HopLink, n.PlainLink} }

// OwnsRule reports whether a policy rule with our protocol is of these numbers; main is the table of that name.
func (n Numbers) OwnsRule(priority, table, main int) bool {
	switch priority {
	case n.RulePriority:
		return table == n.RouteTable
	case n.HopLastRule():
		return table == n.HopLastTable()
	case n.HopRule():
		return table == n.HopTable()
	case n.EgressRule():
		return table == n.EgressTable()
	case n.PodRule(): // a host that uses egresses has the first of its rules for private destinations here
		return table == n.PodTable() || table == main
	}
	flows := table >= ClientFlowNarrowTable && table < ClientFlowNarrowTable+ClientFlowSlots ||
		table >= ClientFlowWideTable && table < ClientFlowWideTable+ClientFlowSlots
	return priority >= n.FirstRule && priority <= n.LastRule() && (table == main || flows ||
		slices.Contains(n.Tables(), table))
}

// ErrNumbers says which number cannot be, and why. Field is its name in Numbers.
type ErrNumbers struct{ Field, Problem string }

// Error is the problem without the field, which callers name as their users know it.
func (e *ErrNumbers) Error() string { return e.Problem }

// Check says what is wrong, as an *ErrNumbers.
func (n Numbers) Check() error {
	for _, check := range []func() *ErrNumbers{n.checkNames, n.checkMarks, n.checkTables, n.checkRules} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func problem(field, format string, args ...any) *ErrNumbers {
	return &ErrNumbers{Field: field, Problem: fmt.Sprintf(format, args...)}
}

func (n Numbers) checkNames() *ErrNumbers {
	seen := map[string]string{}
	for _, l := range []struct{ field, name, what string }{{"Link", n.Link, "WireGuard's link"},
		{"HopLink", n.HopLink, "the link to other sites"}, {"PlainLink", n.PlainLink, "the link of plain peers"}} {
		if !ValidLink(l.name) {
			return problem(l.field, "%q is not an interface name; want 1 to 15 characters without / : or blanks, and neither . "+
				"nor ..", l.name)
		}
		if other, ok := seen[l.name]; ok {
			return problem(l.field, "%q is also the name of %s", l.name, other)
		}
		seen[l.name] = l.what
	}
	const longest = 31 // as long as firewalls and their tools show names
	for i, r := range n.NftTable {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (i == 0 || r != '_' && (r < '0' || r > '9')) {
			return problem("NftTable", "%q is not a name of an nft table; want a letter, then letters, digits and _", n.NftTable)
		}
	}
	if n.NftTable == "" || len(n.ClientNftTable) > longest {
		return problem("NftTable", "%q: want 1 to %d characters, since suffixes such as _client are added", n.NftTable,
			longest-len("_client"))
	}
	return nil
}

// ValidLink reports whether the kernel takes a name for a link.
func ValidLink(s string) bool {
	return len(s) > 0 && len(s) <= 15 && s != "." && s != ".." && !strings.ContainsFunc(s, func(r rune) bool {
		return r <= ' ' || r == '/' || r == ':' || r == '%' || r == 0x7f
	})
}

func (n Numbers) checkMarks() *ErrNumbers {
	switch {
	case bits.OnesCount32(n.MarkMask) < 2:
		return problem("MarkMask", "%#x: want at least two bits: one marks WireGuard's own packets, one those that enter "+
			"the tunnel", n.MarkMask)
	case n.MarkWG&^n.MarkMask != 0:
		return problem("MarkWG", "%#x has bits outside of the mask %#x", n.MarkWG, n.MarkMask)
	case n.MarkRoute&^n.MarkMask != 0:
		return problem("MarkRoute", "%#x has bits outside of the mask %#x", n.MarkRoute, n.MarkMask)
	case n.MarkWG == 0:
		return problem("MarkWG", "0 is the mark of all other packets")
	case n.MarkRoute == 0:
		return problem("MarkRoute", "0 is the mark of all other packets")
	case n.MarkWG == n.MarkRoute:
		return problem("MarkRoute", "%#x is also the mark of packets that do not enter the tunnel", n.MarkRoute)
	}
	return nil
}

func (n Numbers) checkTables() *ErrNumbers {
	const last = 252 // 253 to 255 are the kernel's own, and 0 is none
	switch {
	case n.RouteTable < 1 || n.RouteTable > last:
		return problem("RouteTable", "%d cannot be used; want 1 to %d", n.RouteTable, last)
	case n.FirstTable < 1 || n.FirstTable+TableCount-1 > last:
		return problem("FirstTable", "%d: want 1 to %d, since %d tables begin there", n.FirstTable,
			last-TableCount+1, TableCount)
	case n.RouteTable >= n.FirstTable && n.RouteTable < n.FirstTable+TableCount:
		return problem("RouteTable", "%d is one of the tables %d to %d of this agent", n.RouteTable, n.FirstTable,
			n.FirstTable+TableCount-1)
	}
	return nil
}

func (n Numbers) checkRules() *ErrNumbers {
	const main = 32766 // the priority of the kernel's rule for the main table; 0 is its rule for local addresses
	switch {
	case n.FirstRule < 1:
		return problem("FirstRule", "%d: want 1 or more, after the kernel's rule for local addresses", n.FirstRule)
	case n.RulePriority >= main:
		return problem("RulePriority", "%d: want less than %d, so that it comes before the main table", n.RulePriority, main)
	case n.LastRule() >= n.RulePriority:
		return problem("FirstRule", "%d: %d priorities begin there, and all have to come before %d, that of marked packets",
			n.FirstRule, RuleCount, n.RulePriority)
	}
	return nil
}

// Overlap says what two agents' numbers have in common; nil: they can share a network namespace.
func (n Numbers) Overlap(o Numbers) error {
	var errs []error
	both := func(what string, a, b []string) {
		for _, x := range a {
			if slices.Contains(b, x) {
				errs = append(errs, fmt.Errorf("%s %s", what, x))
			}
		}
	}
	both("link", n.Links(), o.Links())
	both("nft table", n.NftTables(), o.NftTables())
	if common := n.MarkMask & o.MarkMask; common != 0 {
		errs = append(errs, fmt.Errorf("fwmark bits %#x", common))
	}
	for _, t := range n.Tables() {
		if slices.Contains(o.Tables(), t) {
			errs = append(errs, fmt.Errorf("routing table %d", t))
		}
	}
	inside := func(p int, x Numbers) bool { return p >= x.FirstRule && p <= x.LastRule() || p == x.RulePriority }
	if inside(n.FirstRule, o) || inside(o.FirstRule, n) {
		errs = append(errs, fmt.Errorf("rule priorities from %d on", max(n.FirstRule, o.FirstRule)))
	}
	if inside(n.RulePriority, o) || inside(o.RulePriority, n) {
		errs = append(errs, fmt.Errorf("rule priorities %d and %d", n.RulePriority, o.RulePriority))
	}
	if n.EgressLocal4.Overlaps(o.EgressLocal4) || n.EgressLocal6.Overlaps(o.EgressLocal6) {
		errs = append(errs, errors.New("addresses of gateways' namespaces "+n.EgressLocal4.String()))
	}
	return errors.Join(errs...)
}
