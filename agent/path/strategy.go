package path

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/addr"
)

// Short names of NAT and candidate types, which this package uses a lot.
const (
	natUnknown        = skeinv1.NatType_NAT_TYPE_UNKNOWN
	natNone           = skeinv1.NatType_NAT_TYPE_NONE
	natFullCone       = skeinv1.NatType_NAT_TYPE_FULL_CONE
	natRestricted     = skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE
	natPortRestricted = skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE
	natSymmetric      = skeinv1.NatType_NAT_TYPE_SYMMETRIC
	natBlocked        = skeinv1.NatType_NAT_TYPE_BLOCKED

	host   = skeinv1.CandidateType_CANDIDATE_TYPE_HOST
	srflx  = skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX
	prflx  = skeinv1.CandidateType_CANDIDATE_TYPE_PRFLX
	relayC = skeinv1.CandidateType_CANDIDATE_TYPE_RELAY
	forced = skeinv1.CandidateType_CANDIDATE_TYPE_FORCED
)

// Target is a candidate that is worth pings.
type Target struct {
	Candidate
	After time.Duration // delay after the start of a burst, which gives better candidates a head start
}

// Skip is a candidate that is not probed, and the reason.
type Skip struct {
	Candidate
	Why string
}

// Plan says what a pair of nodes can try.
type Plan struct {
	Rule    string // name of the rule that decided
	Reason  string // one plain sentence
	Probe   bool   // some target is worth a ping
	Targets []Target
	Skipped []Skip
	Predict Prediction `json:"Guess"` // port prediction to use when no target answers
}

// Pair says what two types of NAT allow between their mapped addresses: the rule's name, the reason in a sentence,
// and whether probing can succeed. The order of the arguments does not matter.
func Pair(a, b skeinv1.NatType) (rule, reason string, ok bool) {
	either := func(t skeinv1.NatType) bool { return a == t || b == t }
	switch {
	case either(natBlocked):
		return "udp-blocked", "UDP does not get through at one end, so only a relay works.", false
	case either(natUnknown):
		return "nat-unknown", "The NAT of one end is not known yet, so every candidate is tried.", true
	case either(natNone):
		return "public", "One end has a public address, which the other reaches from behind any NAT.", true
	case either(natFullCone):
		return "full-cone", "One end's NAT lets everybody in at its mapped port.", true
	case a == natSymmetric && b == natSymmetric:
		return "symmetric-symmetric", "Both ends are behind symmetric NATs, which use another port for every destination, " +
			"so neither can tell the other where to send.", false
	case either(natSymmetric) && either(natPortRestricted):
		return "port-restricted-symmetric", "One end's NAT is symmetric, so its port is not known beforehand, and the " +
			"other's lets in only ports it has sent to.", false
	case either(natSymmetric):
		return "cone-symmetric", "The symmetric end reaches the other's stable mapped port once that one has sent a packet " +
			"to its address.", true
	}
	return "cone-cone", "Both NATs keep one mapped port for all destinations, so sending at the same moment opens both.",
		true
}

// Strategy chooses which of the peer's candidates are probed. Argument exclude lists the prefixes inside the tunnel.
func Strategy(self, peer Node, exclude []netip.Prefix) Plan {
	rule, reason, ok := Pair(openNAT(self), openNAT(peer))
	near := samePublicIP(self, peer)
	p := Plan{Rule: rule, Reason: reason}
	switch {
	case near && ok:
		p.Rule, p.Reason = "same-public-ip", "Both ends share a public address, so the LAN is tried first and the rest "+
			"does not rely on hairpinning."
	case near:
		p.Rule, p.Reason = "same-public-ip", "Both ends share a public address, so the LAN is tried; from outside nothing "+
			"can work: "+reason
	case !ok && self.Site != "" && self.Site == peer.Site:
		near = true
		p.Rule, p.Reason = "same-site", "Both ends are in site "+self.Site+", so the LAN is tried; from outside nothing "+
			"can work: "+reason
	}
	seen := map[netip.AddrPort]bool{}
	for _, c := range sorted(peer.Candidates) {
		why := unfit(c, self, exclude)
		switch {
		case c.Type == relayC || seen[c.Addr]:
			continue
		case why != "":
		case !ok && !(near && c.Type == host) && !reachable(c, self, peer):
			why = "futile, " + rule
		case len(p.Targets) == targetsMax:
			why = "The record has more candidates than are probed."
		}
		seen[c.Addr] = true
		if why != "" {
			p.Skipped = append(p.Skipped, Skip{c, why})
			continue
		}
		t := Target{Candidate: c}
		if near && c.Type != host {
			t.After = sameIPOthers
		}
		p.Targets = append(p.Targets, t)
	}
	p.Probe = len(p.Targets) > 0
	switch {
	case p.Probe && !ok && p.Rule == rule:
		p.Rule, p.Reason = "open-endpoint", "One of the peer's endpoints is open to everybody, whatever the NATs are."
	case !p.Probe && (ok || near):
		p.Rule, p.Reason = "no-candidate", "The peer's record names no address that this host could send to."
	}
	return p
}

// reachable reports whether a candidate works although the pair's NATs do not: no NAT lies before it.
func reachable(c Candidate, self, peer Node) bool {
	if self.NAT == natBlocked || peer.NAT == natBlocked {
		return false
	}
	return isOpen(c) || c.Type == host && c.Addr.Addr().Is6() && addr.Public(c.Addr.Addr())
}

// isOpen reports whether a candidate accepts packets from any source: configured, granted by the router, or public.
func isOpen(c Candidate) bool {
	switch c.Source {
	case "pcp", "natpmp", "upnp", "imds":
		return true
	}
	return c.Type == forced || c.Type == host && c.Addr.Addr().Is4() && addr.Public(c.Addr.Addr())
}

// openNAT is the node's NAT type as peers experience it: a forwarded port makes any NAT a full cone.
func openNAT(n Node) skeinv1.NatType {
	if n.NAT != natNone && n.NAT != natBlocked && slices.ContainsFunc(n.Candidates, isOpen) {
		return natFullCone
	}
	return n.NAT
}

// unfit returns the reason why no packet may go to a candidate; empty: none.
func unfit(c Candidate, self Node, exclude []netip.Prefix) string {
	a := c.Addr.Addr()
	switch {
	case !c.Addr.IsValid() || c.Addr.Port() == 0 || !a.IsGlobalUnicast():
		return "Not an address that another host can have."
	case slices.ContainsFunc(exclude, func(p netip.Prefix) bool { return p.Contains(a) }):
		return "The address lies inside the tunnel."
	}
	family := len(self.Candidates) == 0
	for _, s := range self.Candidates {
		if s.Addr.Addr() == a && s.Type == host {
			return "This host has the same address."
		}
		family = family || s.Type != relayC && s.Addr.Addr().Is4() == a.Is4()
	}
	if !family {
		if a.Is4() {
			return "This host has no IPv4 address."
		}
		return "This host has no IPv6 address."
	}
	return ""
}

// samePublicIP reports whether two nodes are behind one public address.
func samePublicIP(a, b Node) bool {
	for _, x := range a.Candidates {
		if x.Type != srflx {
			continue
		}
		for _, y := range b.Candidates {
			if y.Type == srflx && y.Addr.Addr() == x.Addr.Addr() {
				return true
			}
		}
	}
	return false
}

// sorted returns the candidates by falling priority; equal ones keep the record's order.
func sorted(cs []Candidate) []Candidate {
	out := slices.Clone(cs)
	slices.SortStableFunc(out, func(a, b Candidate) int { return cmp.Compare(b.order(), a.order()) })
	return out
}

// order is the candidate's priority; candidates from journals of older agents have none and get their type's.
func (c Candidate) order() uint32 { return cmp.Or(c.Priority, candidate.PriorityOf(c.Type)) }
