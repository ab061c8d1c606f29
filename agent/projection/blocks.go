package projection

import (
	"fmt"
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// blocksOf are the pieces of pools that lead to a node, sorted: its blocks, and the static addresses that it holds.
func blocksOf(s *events.State, node string) []netip.Prefix {
	var out []netip.Prefix
	for _, b := range s.BlocksOf(node) {
		out = append(out, prefixesOf(b)...)
	}
	for _, a := range s.StaticsOf(node) {
		out = append(out, addressesOf(a)...)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// podCIDRsOf are the networks of the pods that another CNI runs on a node.
func podCIDRsOf(n *skeinv1.Node) (out []netip.Prefix) {
	for _, text := range n.GetPodCidrs().GetCidrs() {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

func podCIDRs(nodes []*skeinv1.Node) (out []netip.Prefix) {
	for _, n := range nodes {
		out = append(out, podCIDRsOf(n)...)
	}
	return out
}

// PodCIDRs are the networks of the pods that other CNIs run on members.
func PodCIDRs(s *events.State) []netip.Prefix { return podCIDRs(s.Nodes()) }

// endpointsByNode are the tunnels' ends of all egress slots, sorted, by the node that they lead to. Those under "" lead
// to nobody: packets for them are refused and do not leave the mesh.
func endpointsByNode(s *events.State, inGrace map[uint64]bool) map[string][]netip.Prefix {
	out := map[string][]netip.Prefix{}
	for _, e := range s.Egresses() {
		for _, slot := range s.Slots(e.GetNamespace(), e.GetName()) {
			node := slot.GetNodeId()
			if inGrace[slot.GetEpoch()] {
				node = slot.GetFromNodeId()
			}
			out[node] = append(out[node], endpointsOf(e, slot.GetNumber())...)
		}
	}
	for _, ps := range out {
		slices.SortFunc(ps, netip.Prefix.Compare)
	}
	return out
}

// endpointsOf are a slot's own, of both families.
func endpointsOf(e *skeinv1.Egress, number uint32) (out []netip.Prefix) {
	all := e.GetEndpoints()
	if int(number) >= len(all) {
		return nil
	}
	return addressesOf(all[number])
}

// mayLead refuses a peer's block that would take the traffic of this host's own network away from it.
func (h *Host) mayLead(block netip.Prefix) error {
	for _, c := range h.Connected {
		if c.Overlaps(block) {
			return fmt.Errorf("block %s overlaps %s, the network on a link of this host", block, c)
		}
	}
	return nil
}

func comparePodRoutes(a, b dataplane.PodRoute) int { return a.Addr.Compare(b.Addr) }
