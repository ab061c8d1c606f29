package reflexive

import (
	"fmt"
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/addr"
)

// Answer is the outcome of one filtering test.
type Answer uint8

// Outcomes: the test could not be made, the packet came, the packet did not come although it was surely sent.
const (
	NotTested Answer = iota
	Received
	Silent
)

// Evidence is what was observed in one address family.
type Evidence struct {
	Port         uint16       // WireGuard's
	Local        []netip.Addr // addresses of this host
	Servers      int          // asked
	Off          bool         // STUN is switched off
	Inconclusive bool         // none answered, and nothing shows that any of them is up
	Observations []candidate.Observation
	Tests
}

// Tests are the outcomes of what was tried beyond asking.
type Tests struct {
	Sequences [][]uint16 // outside ports of fresh sockets, each in the order in which it contacted new destinations

	WireGuardPort Answer // WireGuard's port hears a contacted address from a port it never sent to
	OtherPort     Answer // a fresh socket hears a contacted address from another port
	OtherAddress  Answer // a fresh socket hears an address it never sent to
}

// Assessment is what follows from Evidence.
type Assessment struct {
	NAT        skeinv1.NatType
	Mapping    candidate.Behaviour
	Filtering  candidate.Behaviour
	Translated bool           // somebody between the servers and us rewrites addresses
	Preserving bool           // every server saw WireGuard's own port number
	PortStep   int            // from one new mapping's port to the next one's; 0: not predictable
	Mapped     netip.AddrPort // the address to publish, when Mapping allows one or as the best guess
	Advice     []string
}

// Assess says what NAT the evidence shows.
func Assess(e Evidence) Assessment {
	seen, lies := e.believed()
	a := Assessment{Mapping: mapping(seen), Filtering: filtering(e)}
	if len(seen) > 0 {
		a.Mapped = seen[0].Mapped
		a.Translated = !e.isLocal(a.Mapped)
		a.Preserving = !slices.ContainsFunc(seen, func(o candidate.Observation) bool { return o.Mapped.Port() != e.Port })
	}
	if a.dependent() {
		a.PortStep = portStep(e.Sequences)
	}
	a.NAT = e.natType(a, len(seen))
	a.Advice = e.advice(a)
	for i, o := range lies {
		if i == 0 || lies[i-1].Server.Addr() != o.Server.Addr() {
			a.Advice = append(a.Advice, fmt.Sprintf("STUN server %s sees this host as %s, unlike the others: it is not "+
				"believed; take it off stunServers, or see what runs there", o.Server, o.Mapped))
		}
	}
	return a
}

// dependent says that the mapped port differs between destinations.
func (a Assessment) dependent() bool {
	return a.Mapping == candidate.AddressDependent || a.Mapping == candidate.AddressAndPortDependent
}

func (e Evidence) natType(a Assessment, seen int) skeinv1.NatType {
	switch {
	case e.unanswered() && slices.ContainsFunc(e.Local, addr.Public):
		return skeinv1.NatType_NAT_TYPE_NONE // assumed: else the first public node would never learn that it is one
	case e.unanswered():
		return skeinv1.NatType_NAT_TYPE_UNKNOWN
	case seen == 0:
		return skeinv1.NatType_NAT_TYPE_BLOCKED
	case a.dependent():
		return skeinv1.NatType_NAT_TYPE_SYMMETRIC
	case !a.Translated && e.WireGuardPort == Silent:
		return skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE // a firewall without translation punches the same
	case !a.Translated:
		return skeinv1.NatType_NAT_TYPE_NONE
	case a.Mapping == candidate.Unknown:
		return skeinv1.NatType_NAT_TYPE_UNKNOWN
	case a.Filtering == candidate.EndpointIndependent:
		return skeinv1.NatType_NAT_TYPE_FULL_CONE
	case a.Filtering == candidate.AddressDependent:
		return skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE
	default:
		return skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE // untested: assume what is hardest to pass
	}
}

// unanswered says that nobody could be asked, for want of servers or because all seem to be away.
func (e Evidence) unanswered() bool {
	return e.Servers == 0 || e.Inconclusive && len(e.Observations) == 0
}

// isLocal reports whether a mapped address is WireGuard's port on this host itself.
func (e Evidence) isLocal(mapped netip.AddrPort) bool {
	return mapped.Port() == e.Port && slices.Contains(e.Local, mapped.Addr())
}

// vantage keeps the observations made from furthest out: a server on our side of a NAT, or between two, sees an address
// that is true for its neighbours alone and would make the NAT look symmetric.
func (e Evidence) vantage() []candidate.Observation {
	rank := func(o candidate.Observation) int {
		switch {
		case addr.Public(o.Mapped.Addr()):
			return 2
		case !e.isLocal(o.Mapped):
			return 1
		default:
			return 0
		}
	}
	best := 0
	for _, o := range e.Observations {
		best = max(best, rank(o))
	}
	var out []candidate.Observation
	for _, o := range e.Observations {
		if rank(o) == best {
			out = append(out, o)
		}
	}
	return out
}

// destinations are the servers that answered, furthest out only, so that a sequence is one NAT's.
func (e Evidence) destinations() (out []netip.AddrPort) {
	seen, _ := e.believed()
	for _, o := range seen {
		out = append(out, o.Server)
	}
	return out
}

// mapping compares what different servers saw. One server with one port tells nothing.
func mapping(seen []candidate.Observation) candidate.Behaviour {
	same, asked := true, map[netip.AddrPort]bool{}
	byAddr := map[netip.Addr]netip.AddrPort{}
	portsAgree, twoPorts := true, false
	for _, o := range seen {
		asked[o.Server] = true
		same = same && o.Mapped == seen[0].Mapped
		if first, ok := byAddr[o.Server.Addr()]; ok {
			twoPorts = true
			portsAgree = portsAgree && first == o.Mapped
		} else {
			byAddr[o.Server.Addr()] = o.Mapped
		}
	}
	switch {
	case len(asked) < 2:
		return candidate.Unknown
	case same:
		return candidate.EndpointIndependent
	case twoPorts && portsAgree:
		return candidate.AddressDependent
	default:
		return candidate.AddressAndPortDependent
	}
}

// maxStep is the widest step between two mappings that still counts as a sequence. Others behind the same NAT widen it.
const maxStep = 32

// portStep finds the step of a NAT that hands out ports in order: the smallest one seen, if at least two of the steps
// lie close together in one direction and at most one does not, such as where the range of ports wraps round.
func portStep(sequences [][]uint16) int {
	var up, down, off int // how many
	least := maxStep + 1
	for _, s := range sequences {
		for i := 1; i < len(s); i++ {
			d := int(s[i]) - int(s[i-1])
			switch {
			case d > 0 && d <= maxStep:
				up++
				least = min(least, d)
			case d < 0 && d >= -maxStep:
				down++
				least = min(least, -d)
			default:
				off++
			}
		}
	}
	switch {
	case up >= 2 && down+off <= 1:
		return least
	case down >= 2 && up+off <= 1:
		return -least
	default:
		return 0
	}
}

// filtering weighs the three tests. WireGuard's own port has the last word, for better (a forwarding) and for worse (a
// firewall).
func filtering(e Evidence) candidate.Behaviour {
	fresh := candidate.Unknown
	switch {
	case e.OtherAddress == Received:
		fresh = candidate.EndpointIndependent
	case e.OtherPort == Received:
		fresh = candidate.AddressDependent // also when no second node could be asked: the careful reading
	case e.OtherPort == Silent:
		fresh = candidate.AddressAndPortDependent
	}
	switch {
	case e.WireGuardPort == Silent:
		return candidate.AddressAndPortDependent
	case e.WireGuardPort == Received && fresh == candidate.AddressAndPortDependent:
		return candidate.EndpointIndependent // this port alone is open: it is forwarded, or the firewall lets it in
	case e.WireGuardPort == Received && fresh == candidate.Unknown:
		return candidate.AddressDependent
	default:
		return fresh
	}
}

func (e Evidence) advice(a Assessment) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if e.Servers > 0 && e.unanswered() {
		say("none of %d STUN servers answered, and it cannot be told whether they are up: asking again", e.Servers)
		return out
	}
	if e.Off {
		say("STUN is switched off (natTraversal.stun, or the cluster's setting): what NAT is in front of this host is not " +
			"known, and candidates are tried all the same")
		return out
	}
	switch a.NAT {
	case skeinv1.NatType_NAT_TYPE_NONE:
		if e.Servers == 0 {
			say("no STUN server is known: this host counts as public because it has a public address; name stunServers, or " +
				"add a second public node, to have that checked")
		}
	case skeinv1.NatType_NAT_TYPE_UNKNOWN:
		if e.Servers == 0 {
			say("no STUN server is known: set stunServers, or run a public node with STUN")
		} else {
			say("only one STUN server with one port answered: name a second one in stunServers to learn the NAT's kind")
		}
	case skeinv1.NatType_NAT_TYPE_BLOCKED:
		say("none of %d STUN servers answered: UDP seems blocked; let UDP out, or traffic stays on relays", e.Servers)
	case skeinv1.NatType_NAT_TYPE_SYMMETRIC:
		say("the NAT gives every destination another port: public nodes and cones are reached directly; towards a " +
			"port-restricted cone or another symmetric NAT a port has to be predicted, or traffic stays on relays")
	case skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE:
		if !a.Translated {
			say("no NAT, but a firewall drops what this host did not ask for: open UDP port %d to be reachable by every node",
				e.Port)
		}
	}
	if a.Translated && a.Mapping == candidate.EndpointIndependent && e.OtherPort == NotTested &&
		e.WireGuardPort == NotTested {
		say("filtering could not be tested, because no server that answered offers RFC 5780: assumed port-restricted")
	}
	return out
}
