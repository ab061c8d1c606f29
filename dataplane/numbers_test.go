package dataplane_test

import (
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
)

// Numbers and names that other programs on a host, and other hosts, rely on. docs/seeds.md says where they come from.
func TestNumbers(t *testing.T) {
	for name, c := range map[string]struct{ have, want any }{
		"WireGuard's port":                 {dataplane.Port, 51820},
		"WireGuard's mark":                 {dataplane.MarkWG, 0x20},
		"mark of what enters the tunnel":   {dataplane.MarkRoute, 0x40},
		"mask of marks":                    {dataplane.MarkMask, 0x60},
		"rule of marked packets":           {dataplane.RulePriority, 32500},
		"table of marked packets":          {dataplane.RouteTable, 180},
		"protocol of routes and rules":     {dataplane.RouteProtocol, 30},
		"nft table":                        {dataplane.NftTable, "skein"},
		"chain of what comes in":           {dataplane.ChainPrerouting, "skein_prerouting"},
		"chain of what is sent":            {dataplane.ChainOutgoing, "skein_outgoing"},
		"IPv4 destinations":                {dataplane.SetTargetsIPv4, "skein_targets_ipv4"},
		"IPv6 destinations":                {dataplane.SetTargetsIPv6, "skein_targets_ipv6"},
		"table of pods' routes":            {dataplane.PodTable, 116},
		"table for routing daemons":        {dataplane.ExportTable, 119},
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
		"gateway's table":                  {dataplane.GatewayTable, 118},
		"tunnel to 10.68.12.49":            {dataplane.FoULink(netip.MustParseAddr("10.68.12.49")), "fou4_0a440c31"},
		"tunnel to 10.68.124.145":          {dataplane.FoULink(netip.MustParseAddr("10.68.124.145")), "fou4_0a447c91"},
		"tunnel to 10.20.30.40":            {dataplane.FoULink(netip.MustParseAddr("10.20.30.40")), "fou4_0a141e28"},
	} {
		if c.have != c.want {
			t.Errorf("%s: %v, want %v", name, c.have, c.want)
		}
	}
}

// The bits of the fwmark that others use stay theirs.
func TestMarksOfOthers(t *testing.T) {
	for name, bits := range map[string]uint32{"Calico": 0xffff0000, "Cilium": 0xf00, "Flannel": 0x4000, "kube-proxy": 0x4000 | 0x8000} {
		if common := bits & dataplane.MarkMask; common != 0 {
			t.Errorf("%s and skein share the bits %#x", name, common)
		}
	}
	if (dataplane.MarkWG|dataplane.MarkRoute)&^dataplane.MarkMask != 0 {
		t.Error("a mark lies outside of the mask")
	}
}
