package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// accounts is all that is said of pods' addresses: by the namespaces that exist, by each host's kernel, by each agent.
type accounts []nodeAccount

// nodeAccount is one node's part.
type nodeAccount struct {
	node        string
	pods        []podAccount   // the namespaces, with what their interfaces have
	hosts       []netip.Addr   // single addresses that the pod table leads to a link
	unreachable []netip.Prefix // of the pod table
	exported    []netip.Prefix // the table for a routing daemon
	view        *agentAccount  // nil: its agent does not run
}

// podAccount is a pod by somebody's word.
type podAccount struct {
	name        string // for messages; "" where it is not known
	containerID string
	addrs       []netip.Addr // in order
}

// agentAccount is what an agent says.
type agentAccount struct {
	blocks  []blockAccount
	statics []staticAccount
	pods    []podAccount   // its own, without those that are gone
	pools   []netip.Prefix // subnets: unreachable behind all blocks
	slots   []netip.Prefix // egress slots' endpoints and addresses: single ones, that no pod has
}

// blockAccount is a block of somebody's: of one node, or reserved.
type blockAccount struct {
	pool     string
	number   uint64
	node     string // "" for a reserved one
	unknown  string // ID of an owner that has no name any more
	prefixes []netip.Prefix
	used     uint32 // addresses; only known of an agent's own blocks
	own      bool
}

func (b blockAccount) String() string {
	var words []string
	for _, p := range b.prefixes {
		words = append(words, p.String())
	}
	return fmt.Sprintf("block %d of pool %s (%s)", b.number, b.pool, strings.Join(words, ", "))
}

// staticAccount is an address that is kept for one pod, on the node that holds it now.
type staticAccount struct {
	node  string
	addrs []netip.Addr
}

// wrong lists where the accounts contradict each other, in words; none when they agree.
func (a accounts) wrong() []string {
	out := a.twice()
	var slots, pools []netip.Prefix
	for _, n := range a {
		if n.view != nil {
			slots, pools = append(slots, n.view.slots...), append(pools, n.view.pools...)
		}
	}
	for _, n := range a {
		n.unreachable, n.exported = without(n.unreachable, slots), without(n.exported, slots)
		n.unreachable = without(n.unreachable, without(pools, n.exported)) // a block may be a whole subnet
		out = append(out, n.namespacesAndKernel()...)
		for _, by := range a {
			if by.view != nil {
				out = append(out, n.blocksBy(by.node, by.view)...)
			}
		}
		if n.view != nil {
			out = append(out, n.view.overlaps(n.node)...)
			out = append(out, n.ownPods()...)
			out = append(out, n.spare()...)
		}
	}
	return out
}

// twice finds addresses that two pods have.
func (a accounts) twice() (out []string) {
	holder := map[netip.Addr]string{}
	for _, n := range a {
		for _, p := range n.pods {
			for _, addr := range p.addrs {
				place := n.node + "/" + p.name
				if other, ok := holder[addr]; ok {
					out = append(out, fmt.Sprintf("%s is given twice: %s and %s have it", addr, other, place))
				}
				holder[addr] = place
			}
		}
	}
	return out
}

func without(ps, gone []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(ps), func(p netip.Prefix) bool { return slices.Contains(gone, p) })
}

// namespacesAndKernel compares the pods' own addresses with the routes to them.
func (n nodeAccount) namespacesAndKernel() (out []string) {
	var have []netip.Addr
	for _, p := range n.pods {
		have = append(have, p.addrs...)
	}
	for _, addr := range have {
		if !slices.Contains(n.hosts, addr) {
			out = append(out, fmt.Sprintf("%s: no route of table %d leads to pod address %s", n.node, podTable, addr))
		}
	}
	for _, addr := range n.hosts {
		if !slices.Contains(have, addr) {
			out = append(out, fmt.Sprintf("%s: a route of table %d leads to %s, which no pod has", n.node, podTable, addr))
		}
	}
	for _, p := range n.exported {
		if !slices.Contains(n.unreachable, p) && !(p.IsSingleIP() && slices.Contains(n.hosts, p.Addr())) {
			out = append(out, fmt.Sprintf("%s: %s is exported, but not unreachable in table %d: packets for what no pod has "+
				"would circle", n.node, p, podTable))
		}
	}
	for _, p := range n.unreachable {
		if !slices.Contains(n.exported, p) {
			out = append(out, fmt.Sprintf("%s: %s is unreachable in table %d, but is not a route of table %d", n.node, p,
				podTable, exportTable))
		}
	}
	return out
}

// blocksBy compares a node's pods and exported routes with its blocks by an agent's state.
func (n nodeAccount) blocksBy(agent string, v *agentAccount) (out []string) {
	var blocks []netip.Prefix
	for _, b := range v.blocks {
		if b.node == n.node {
			blocks = append(blocks, b.prefixes...)
		}
	}
	var statics []netip.Addr
	for _, s := range v.statics {
		if s.node == n.node {
			statics = append(statics, s.addrs...)
		}
	}
	inside := func(addr netip.Addr) bool {
		return slices.Contains(statics, addr) || slices.ContainsFunc(blocks, func(p netip.Prefix) bool {
			return p.Contains(addr)
		})
	}
	for _, p := range n.pods {
		for _, addr := range p.addrs {
			if !inside(addr) {
				out = append(out, fmt.Sprintf("%s/%s has %s, which is in no block of %s as %s sees it", n.node, p.name,
					addr, n.node, agent))
			}
		}
	}
	for _, b := range blocks {
		if !slices.Contains(n.exported, b) {
			out = append(out, fmt.Sprintf("%s: its block %s, as %s sees it, is not in table %d", n.node, b, agent, exportTable))
		}
	}
	for _, p := range n.exported {
		if !slices.Contains(blocks, p) && !(p.IsSingleIP() && slices.Contains(statics, p.Addr())) {
			out = append(out, fmt.Sprintf("%s: table %d has %s, which is not a block of its as %s sees it", n.node,
				exportTable, p, agent))
		}
	}
	return out
}

// overlaps finds blocks of which an agent's state says what cannot be.
func (v *agentAccount) overlaps(agent string) (out []string) {
	for i, b := range v.blocks {
		if b.unknown != "" {
			out = append(out, fmt.Sprintf("%s belongs to %s as %s sees it, which is not a node", b, b.unknown, agent))
		}
		for _, c := range v.blocks[:i] {
			if slices.ContainsFunc(b.prefixes, func(p netip.Prefix) bool {
				return slices.ContainsFunc(c.prefixes, p.Overlaps)
			}) {
				out = append(out, fmt.Sprintf("%s and %s overlap as %s sees them", c, b, agent))
			}
		}
	}
	return out
}

// ownPods compares what an agent says of its pods with the namespaces that exist.
func (n nodeAccount) ownPods() (out []string) {
	said := map[string]podAccount{}
	for _, p := range n.view.pods {
		said[p.containerID] = p
	}
	for _, p := range n.pods {
		s, ok := said[p.containerID]
		switch {
		case !ok:
			out = append(out, fmt.Sprintf("%s/%s has %s, and its agent does not know it", n.node, p.name, list(p.addrs)))
		case !slices.Equal(s.addrs, p.addrs):
			out = append(out, fmt.Sprintf("%s/%s has %s, and its agent says %s", n.node, p.name, list(p.addrs), list(s.addrs)))
		}
		delete(said, p.containerID)
	}
	for _, p := range n.view.pods {
		if _, left := said[p.containerID]; left {
			out = append(out, fmt.Sprintf("%s: its agent keeps %s for container %q, which is gone", n.node,
				list(p.addrs), p.containerID))
		}
	}
	return out
}

// spare finds pools of which a node keeps more than one empty block.
func (n nodeAccount) spare() (out []string) {
	empty := map[string][]string{}
	var pools []string
	for _, b := range n.view.blocks {
		if b.own && b.used == 0 {
			if empty[b.pool] == nil {
				pools = append(pools, b.pool)
			}
			empty[b.pool] = append(empty[b.pool], fmt.Sprint(b.number))
		}
	}
	for _, p := range pools {
		if len(empty[p]) > 1 {
			out = append(out, fmt.Sprintf("%s keeps %d empty blocks of pool %s (%s), one is its to keep", n.node, len(empty[p]),
				p, strings.Join(empty[p], ", ")))
		}
	}
	return out
}
