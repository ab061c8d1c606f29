package matrix

import (
	"fmt"
	"slices"
	"strings"
)

// Kind is a way of being connected.
type Kind struct {
	Name string
	Site string // what the lab file says of its sites
}

// The kinds, in the order of the table.
var kinds = []Kind{
	{Name: "none", Site: "nat: none"},
	{Name: "one-to-one", Site: "nat: one-to-one"},
	{Name: "full-cone", Site: "nat: full-cone"},
	{Name: "restricted-cone", Site: "nat: restricted-cone"},
	{Name: "port-restricted-cone", Site: "nat: port-restricted-cone"},
	{Name: "symmetric", Site: "nat: symmetric"},
	{Name: "symmetric-sequential", Site: "nat: symmetric-sequential"},
	{Name: "double", Site: "nat: double"},
	{Name: "portmap", Site: "nat: port-restricted-cone, portmap: [pcp, natpmp, upnp]"},
	{Name: "dual-stack", Site: "nat: symmetric, ipv6: true"},
	{Name: "ipv6-only", Site: "nat: port-restricted-cone, ipv4: false, ipv6: true"},
	{Name: "udp-blocked", Site: "nat: udp-blocked"},
}

// Kinds names them.
func Kinds() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	return names
}

// Quick are the kinds of a first look: those that differ most.
var Quick = []string{"none", "port-restricted-cone", "symmetric", "double", "udp-blocked"}

// Way is how a pair should come together.
type Way byte

// The ways.
const (
	Direct    Way = 'd' // by probing the addresses that records name
	Birthday  Way = 'g' // direct, by birthday probing
	Predicted Way = 'p' // direct, by predicting ports
	Relayed   Way = 'r'
)

// Path is the path that a way leads to, as agents name it.
func (w Way) Path() string {
	if w == Relayed {
		return "relay"
	}
	return "direct"
}

// String is the way in words.
func (w Way) String() string {
	switch w {
	case Birthday:
		return "direct, by birthday probing"
	case Predicted:
		return "direct, by port prediction"
	}
	return w.Path()
}

// expected has a row and a column for each kind, in their order. What it rests on:
//
//   - A packet reaches a node that is public, that any mapping of a full cone leads to, or that a router was
//     asked to let in. The other end can then be whatever lets UDP out.
//   - A restricted cone lets in whom it has sent to, from any port; so also a symmetric NAT's unknown one.
//   - A port-restricted cone lets in only addresses and ports that it has sent to. Towards another cone both
//     are known. Towards a symmetric NAT the port is not: it must be predicted, or met by birthday probing.
//   - Two symmetric NATs know nothing of each other's ports, unless both count.
//   - Two NATs in a row filter like the stricter, here the home's port-restricted one.
//   - IPv6 is not translated, only filtered: two ends that both have it punch like two cones.
//   - Without UDP, or without an address family in common, there is only the relay.
var expected = []string{
	//  n o f r p s q d m v 6 b
	/* none                 */ "dddddddddddr",
	/* one-to-one           */ "ddddddddddrr",
	/* full-cone            */ "ddddddddddrr",
	/* restricted-cone      */ "ddddddddddrr",
	/* port-restricted-cone */ "dddddgpddgrr",
	/* symmetric            */ "ddddgrrgdrrr",
	/* symmetric-sequential */ "ddddprppdrrr",
	/* double               */ "dddddgpddgrr",
	/* portmap              */ "ddddddddddrr",
	/* dual-stack           */ "ddddgrrgdddr",
	/* ipv6-only            */ "drrrrrrrrddr",
	/* udp-blocked          */ "rrrrrrrrrrrr",
}

// Expected is how two kinds should come together.
func Expected(a, b string) Way {
	names := Kinds()
	return Way(expected[slices.Index(names, a)][slices.Index(names, b)])
}

// Pair is two nodes whose path is measured.
type Pair struct {
	Kinds    [2]string // what it shows, for the table
	From, To string    // nodes
	Want     Way
}

// String names the pair by its kinds.
func (p Pair) String() string { return p.Kinds[0] + " × " + p.Kinds[1] }

// mesh is one lab and the pairs that are measured in it.
type mesh struct {
	file  string
	pairs []Pair
}

const header = `name: %s
config: {log: {level: info}}
sites:
  dc: {nat: none}
`

// groupSize is how many kinds go together into a lab with those of another group: a mesh of thirteen agents, which
// two processors carry without making each wait for the others.
const groupSize = 3

// grids are the labs that hold each pair of kinds once.
func grids(lab string, chosen []Kind) []mesh {
	groups := slices.Collect(slices.Chunk(chosen, groupSize))
	if len(groups) == 1 {
		return []mesh{grid(lab+"-0", chosen, map[[2]string]bool{})}
	}
	var out []mesh
	done := map[[2]string]bool{}
	for i, g := range groups {
		for _, h := range groups[i+1:] {
			out = append(out, grid(fmt.Sprintf("%s-%d", lab, len(out)), slices.Concat(g, h), done))
		}
	}
	return out
}

// grid puts two nodes of each kind at sites of their own, and takes the pairs that are not done.
func grid(lab string, chosen []Kind, done map[[2]string]bool) mesh {
	var sites, nodes strings.Builder
	fmt.Fprintf(&sites, header, lab)
	nodes.WriteString("nodes:\n  relay1: {site: dc, server: true, relay: true}\n")
	for _, end := range "ab" {
		for _, k := range chosen {
			fmt.Fprintf(&sites, "  %s-%c: {%s}\n", k.Name, end, k.Site)
			fmt.Fprintf(&nodes, "  %s-%c: {site: %s-%c, relay: false}\n", k.Name, end, k.Name, end)
		}
	}
	m := mesh{file: sites.String() + nodes.String()}
	for i, a := range chosen {
		for _, b := range chosen[i:] {
			if pair := [2]string{a.Name, b.Name}; !done[pair] {
				done[pair] = true
				m.pairs = append(m.pairs, Pair{pair, a.Name + "-a", b.Name + "-b", Expected(a.Name, b.Name)})
			}
		}
	}
	return m
}

// Together names the pairs that share a public address.
const Together = "one public address"

// together puts pairs of nodes behind one public address: in one LAN, and in two households with the same
// private network behind one carrier, whose NAT turns packets round or does not.
func together(lab string) mesh {
	return mesh{
		file: fmt.Sprintf(header, lab) + `  lan:     {nat: symmetric}
  isp:     {nat: full-cone, hairpin: true}
  flat-a:  {nat: port-restricted-cone, behind: isp, lan: 192.168.1.0/24}
  flat-b:  {nat: port-restricted-cone, behind: isp, lan: 192.168.1.0/24}
  deaf:    {nat: full-cone}
  house-a: {nat: port-restricted-cone, behind: deaf, lan: 192.168.1.0/24}
  house-b: {nat: port-restricted-cone, behind: deaf, lan: 192.168.1.0/24}
nodes:
  relay1: {site: dc, server: true, relay: true}
  lan1:   {site: lan, relay: false}
  lan2:   {site: lan, relay: false}
  flat1:  {site: flat-a, relay: false}
  flat2:  {site: flat-b, relay: false}
  house1: {site: house-a, relay: false}
  house2: {site: house-b, relay: false}
`,
		pairs: []Pair{
			{[2]string{Together, "the same LAN behind a symmetric NAT"}, "lan1", "lan2", Direct},
			{[2]string{Together, "two homes behind a carrier that hairpins"}, "flat1", "flat2", Direct},
			{[2]string{Together, "two homes behind a carrier that does not"}, "house1", "house2", Relayed},
		},
	}
}
