package dataplane_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
)

// Numbers and names that other programs on a host, and other hosts, rely on. docs/seeds.md says where they come from.
func TestNumbers(t *testing.T) {
	for name, c := range map[string]struct{ have, want any }{
		"WireGuard's port":                 {dataplane.Port, 51820},
		"WireGuard's mark":                 {dataplane.DefaultNumbers().MarkWG, uint32(0x20)},
		"mark of what enters the tunnel":   {dataplane.DefaultNumbers().MarkRoute, uint32(0x40)},
		"mask of marks":                    {dataplane.DefaultNumbers().MarkMask, uint32(0x60)},
		"rule of marked packets":           {dataplane.DefaultNumbers().RulePriority, 32500},
		"table of marked packets":          {dataplane.DefaultNumbers().RouteTable, 180},
		"protocol of routes and rules":     {dataplane.RouteProtocol, 30},
		"nft table":                        {dataplane.DefaultNumbers().NftTable, "skein"},
		"chain of what comes in":           {dataplane.ChainPrerouting, "skein_prerouting"},
		"chain of what is sent":            {dataplane.ChainOutgoing, "skein_outgoing"},
		"IPv4 destinations":                {dataplane.SetTargetsIPv4, "skein_targets_ipv4"},
		"IPv6 destinations":                {dataplane.SetTargetsIPv6, "skein_targets_ipv6"},
		"table of pods' routes":            {dataplane.DefaultNumbers().PodTable(), 116},
		"table for routing daemons":        {dataplane.DefaultNumbers().ExportTable(), 119},
		"gateway of pods":                  {dataplane.PodGateway, "169.254.1.1"},
		"FoU's port":                       {dataplane.FoUPort, 5555},
		"TTL of tunnels":                   {dataplane.FoUTTL, 225},
		"client's rule for the link":       {dataplane.ClientLinkLocalRule, 1800},
		"client's rule for private ones":   {dataplane.ClientNarrowRule, 1900},
		"client's rule for the own ranges": {dataplane.ClientPrivateRule, 2000},
		"client's rule for the rest":       {dataplane.ClientWideRule, 2100},
		"client's table of private ones":   {dataplane.ClientNarrowTable, 117},
		"client's table of the rest":       {dataplane.ClientWideTable, 118},
		"gateway's rule":                   {dataplane.GatewayRule, 2000},
		"client's rules for other slots": {[2]int{dataplane.ClientFlowNarrowRule, dataplane.ClientFlowWideRule},
			[2]int{1899, 2099}},
		"client's tables for other slots": {[2]int{dataplane.ClientFlowNarrowTable, dataplane.ClientFlowWideTable},
			[2]int{11700, 11800}},
		"bits of flows' marks":            {dataplane.FlowMask, 0x101f},
		"gateway's rule of other slots":   {dataplane.GatewaySlotRule, 1999},
		"gateway's tables of other slots": {dataplane.GatewaySlotTable, 120},
		"gateway's table":                 {dataplane.GatewayTable, 118},
		"tunnel to 10.68.12.49":           {dataplane.FoULink(netip.MustParseAddr("10.68.12.49")), "fou4_0a440c31"},
		"tunnel to 10.68.124.145":         {dataplane.FoULink(netip.MustParseAddr("10.68.124.145")), "fou4_0a447c91"},
		"tunnel to 10.20.30.40":           {dataplane.FoULink(netip.MustParseAddr("10.20.30.40")), "fou4_0a141e28"},
	} {
		if c.have != c.want {
			t.Errorf("%s: %v, want %v", name, c.have, c.want)
		}
	}
}

// The bits of the fwmark that others use stay theirs.
func TestMarksOfOthers(t *testing.T) {
	for name, bits := range map[string]uint32{"Calico": 0xffff0000, "Cilium": 0xf00, "Flannel": 0x4000,
		"kube-proxy": 0x4000 | 0x8000,
		"portmap":    0x2000, "Amazon's CNI": 0x80, "Tailscale": 0xff0000} {
		for i := range dataplane.MaxInstance + 1 {
			if common := bits & (dataplane.NumbersOf(i).MarkMask | dataplane.FlowMask); common != 0 {
				t.Errorf("%s and skein's instance %d, or flows, share the bits %#x", name, i, common)
			}
		}
	}
}

// kubeSpan is what Talos KubeSpan holds by its own documents.
func kubeSpan() dataplane.Numbers {
	return dataplane.Numbers{Link: "kubespan", NftTable: "talos_kubespan", MarkWG: 0x20, MarkRoute: 0x40, MarkMask: 0x60,
		RulePriority: 32500,
		RouteTable:   180, FirstRule: 1 << 20, FirstTable: 1 << 20}
}

// Each instance is valid and shares nothing with the others; all but the first can stand beside KubeSpan.
func TestInstances(t *testing.T) {
	for i := range dataplane.MaxInstance + 1 {
		n := dataplane.NumbersOf(i)
		if err := n.Check(); err != nil {
			t.Errorf("instance %d: %v", i, err)
		}
		for j := range dataplane.MaxInstance + 1 {
			if err := n.Overlap(dataplane.NumbersOf(j)); (err != nil) != (i == j) {
				t.Errorf("instances %d and %d: %v", i, j, err)
			}
		}
		if err := n.Overlap(kubeSpan()); (err != nil) != (i == 0) {
			t.Errorf("instance %d and KubeSpan: %v", i, err)
		}
	}
	if got := (dataplane.Numbers{}).Filled(); got != dataplane.DefaultNumbers() {
		t.Errorf("no numbers are %+v", got)
	}
}

// Each of the kinds of numbers is missed when two agents have it in common.
func TestOverlap(t *testing.T) {
	for want, change := range map[string]func(n *dataplane.Numbers, o dataplane.Numbers){
		"link skein0": func(n *dataplane.Numbers, o dataplane.Numbers) { n.PlainLink = o.Link },
		"nft table skein": func(n *dataplane.Numbers, o dataplane.Numbers) {
			n.EgressNftTable = o.NftTable
		},
		"fwmark bits 0x20":                func(n *dataplane.Numbers, _ dataplane.Numbers) { n.MarkMask |= 0x20 },
		"routing table 180":               func(n *dataplane.Numbers, _ dataplane.Numbers) { n.FirstTable = 174 },
		"routing table 121":               func(n *dataplane.Numbers, _ dataplane.Numbers) { n.RouteTable = 121 },
		"rule priorities from 2100 on":    func(n *dataplane.Numbers, _ dataplane.Numbers) { n.FirstRule = 2100 },
		"rule priorities 2000 and 32500":  func(n *dataplane.Numbers, _ dataplane.Numbers) { n.RulePriority = 2000 },
		"rule priorities 32500 and 32500": func(n *dataplane.Numbers, _ dataplane.Numbers) { n.RulePriority = 32500 },
		"addresses of gateways' namespaces 16": func(n *dataplane.Numbers, o dataplane.Numbers) {
			n.EgressLocal4 =
				o.EgressLocal4
		},
	} {
		n, o := dataplane.NumbersOf(1), dataplane.DefaultNumbers()
		change(&n, o)
		for _, err := range []error{n.Overlap(o), o.Overlap(n)} {
			if err == nil || !strings.HasPrefix(err.Error(), want) && !strings.HasPrefix(want, "rule priorities 2000") {
				t.Errorf("want %q, got %v", want, err)
			}
		}
	}
}

// A number that cannot be is refused, and named.
func TestCheckNumbers(t *testing.T) {
	for want, change := range map[string]func(n *dataplane.Numbers){
		"Link: \"a b\" is not an interface name": func(n *dataplane.Numbers) { n.Link = "a b" },
		"HopLink: \"sixteen-letters-\" is not an interface name": func(n *dataplane.Numbers) {
			n.HopLink = "sixteen-letters-"
		},
		"PlainLink: \"skein0\" is also the name of WireGuard's link": func(n *dataplane.Numbers) { n.PlainLink = n.Link },
		"NftTable: \"0a\" is not a name of an nft table": func(n *dataplane.Numbers) {
			*n = n.WithNftTable("0a")
		},
		"NftTable: \"\": want 1 to 24 characters": func(n *dataplane.Numbers) { *n = n.WithNftTable("") },
		"NftTable: \"aaaaaaaaaaaaaaaaaaaaaaaaa\": want 1 to 24": func(n *dataplane.Numbers) {
			*n = n.WithNftTable(strings.Repeat("a", 25))
		},
		"MarkMask: 0x40: want at least two bits":            func(n *dataplane.Numbers) { n.MarkMask = 0x40 },
		"MarkWG: 0x80 has bits outside of the mask 0x60":    func(n *dataplane.Numbers) { n.MarkWG = 0x80 },
		"MarkRoute: 0x80 has bits outside of the mask 0x60": func(n *dataplane.Numbers) { n.MarkRoute = 0x80 },
		"MarkWG: 0 is the mark of all other packets":        func(n *dataplane.Numbers) { n.MarkWG = 0 },
		"MarkRoute: 0 is the mark of all other packets":     func(n *dataplane.Numbers) { n.MarkRoute = 0 },
		"MarkRoute: 0x20 is also the mark of packets that do not enter": func(n *dataplane.Numbers) {
			n.MarkRoute = n.MarkWG
		},
		"RouteTable: 254 cannot be used; want 1 to 252":   func(n *dataplane.Numbers) { n.RouteTable = 254 },
		"RouteTable: 0 cannot be used; want 1 to 252":     func(n *dataplane.Numbers) { n.RouteTable = 0 },
		"RouteTable: 121 is one of the tables 115 to 121": func(n *dataplane.Numbers) { n.RouteTable = 121 },
		"FirstTable: 247: want 1 to 246":                  func(n *dataplane.Numbers) { n.FirstTable = 247 },
		"FirstRule: 0: want 1 or more":                    func(n *dataplane.Numbers) { n.FirstRule = 0 },
		"RulePriority: 32766: want less than 32766":       func(n *dataplane.Numbers) { n.RulePriority = 32766 },
		"FirstRule: 32195: 306 priorities begin there":    func(n *dataplane.Numbers) { n.FirstRule = 32195 },
	} {
		n := dataplane.DefaultNumbers()
		change(&n)
		var err *dataplane.ErrNumbers
		if e := n.Check(); !errors.As(e, &err) || !strings.HasPrefix(err.Field+": "+err.Problem, want) {
			t.Errorf("want %q, got %v", want, e)
		}
	}
}

// What is ours of rules is told by priority and table together.
func TestOwnsRule(t *testing.T) {
	const main = 254
	n, second := dataplane.DefaultNumbers(), dataplane.NumbersOf(1)
	for _, c := range []struct {
		priority, table int
		first, second   bool
	}{
		{32500, 180, true, false}, {32500, 181, false, false}, {32501, 181, false, true}, {2000, 116, true, false},
		{2000, main, true, false},
		{2000, 115, false, false}, {1999, 115, true, false}, {1998, 120, true, false}, {1997, 121, true, false},
		{1795, 116, true, false},
		{2100, 118, true, false}, {2101, 118, false, false}, {1794, main, false, false}, {1850, 7, false, false},
		{2400, 126, false, true}, {1899, 11762, true, false}, {2099, 11800, true, false}, {2099, 11863, false, false},
	} {
		if n.OwnsRule(c.priority, c.table, main) != c.first || second.OwnsRule(c.priority, c.table, main) != c.second {
			t.Errorf("rule %d to table %d: %t and %t, want %t and %t", c.priority, c.table,
				n.OwnsRule(c.priority, c.table, main),
				second.OwnsRule(c.priority, c.table, main), c.first, c.second)
		}
	}
}

// Each slot has a mark of its own, beside the default numbers' marks.
func TestFlowMarks(t *testing.T) {
	if common := dataplane.DefaultNumbers().MarkMask & dataplane.FlowMask; common != 0 {
		t.Errorf("marks of flows and others of ours share the bits %#x", common)
	}
	seen := map[uint32]bool{0: true}
	for slot := range dataplane.ClientFlowSlots {
		m := dataplane.FlowMark(slot)
		if got, ok := dataplane.FlowSlot(m | ^uint32(dataplane.FlowMask)); seen[m] || m&^dataplane.FlowMask != 0 ||
			!ok || got != slot {
			t.Errorf("slot %d has the mark %#x, which is read as slot %d", slot, m, got)
		}
		seen[m] = true
	}
	if _, ok := dataplane.FlowSlot(^uint32(dataplane.FlowMask)); ok {
		t.Error("others' bits are read as a slot")
	}
}
