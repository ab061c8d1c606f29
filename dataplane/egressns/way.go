package egressns

import (
	"fmt"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// Rule is one rule of the namespace's table, for documents.
type Rule struct {
	Hook  string // of its chain, with the priority; empty for a chain reached by goto
	Chain string
	Text  string // in nft's syntax
}

// Rules returns all rules as they are written to the kernel, in the order in which a packet passes their chains.
func Rules() []Rule {
	var out []Rule
	for _, c := range chains(hold.Native) {
		for _, r := range c.rules {
			out = append(out, Rule{c.at(), c.name, r.Text})
		}
		if c.drop {
			out = append(out, Rule{c.at(), c.name, "policy drop"})
		}
	}
	return out
}

func (c chain) at() string {
	if c.hook == nil {
		return ""
	}
	return fmt.Sprintf("%s %d", nftable.HookName(c.hook), c.priority)
}

// Step is one station of a packet in the namespace.
type Step struct {
	Where string // the hook with its priority, or another part of the kernel
	Chain string // empty outside nftables
	Text  string
	Depth int // number of gotos before it
}

// Way is the path of a packet through the namespace: from a client to its destination or, with back, that of the
// answer. It includes other steps of the kernel, and the IPv4 rules that such a packet can meet.
func Way(back bool) []Step {
	way := outward
	var out []Step
	kernel := func(where, text string) { out = append(out, Step{Where: where, Text: text}) }
	base := func(name string) { out = append(out, stepsOf(name, way, "", 0)...) }
	if back {
		way = inward
		kernel(Uplink, "the answer comes to the slot's address, which the host leads here")
		base(chainIn)
		kernel("conntrack", "the connection is found: the destination is the client again")
		base(chainRecall)
		kernel("routing", "rule 2000: iif eth0 lookup 118: the client's tunnel; before it, of a flow by another slot than "+
			"the client's, rule 1999: the slot's table")
		base(chainForward)
		kernel("tunnel", "the packet is put into UDP, from the slot's endpoint to the client")
		way = wrapped
		base(chainLocal)
		kernel("routing", "no iif: the main table, default via 169.254.1.1 dev eth0")
		return out
	}
	way = wrapped
	kernel(Uplink, "a UDP datagram comes to the slot's endpoint, at the tunnels' port")
	base(chainIn)
	base(chainInput)
	kernel("tunnel", "the client's packet is taken out; it comes in by the tunnel's device")
	way = outward
	base(chainIn)
	kernel("conntrack", "the connection is found or begun")
	kernel("routing", "the main table: default via 169.254.1.1 dev eth0")
	base(chainForward)
	base(chainSource)
	base(chainLast)
	return out
}

// stepsOf lists a chain's rules for one direction, each followed by those of the chain it jumps to.
func stepsOf(name string, way direction, at string, depth int) []Step {
	var out []Step
	for _, c := range chains(hold.Native) {
		if c.name != name {
			continue
		}
		if c.hook != nil {
			at = c.at()
		}
		for _, r := range c.rules {
			if r.way&way == 0 || r.sixth {
				continue
			}
			out = append(out, Step{Where: at, Chain: name, Text: r.Text, Depth: depth})
			if r.next != "" {
				out = append(out, stepsOf(r.next, way, at, depth+1)...)
			}
		}
	}
	return out
}
