package events

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/dnsname"
)

// Bounds of what commands may bring into egresses.
const (
	MaxEgresses = 1024
	MaxReplicas = 64 // of an egress
	// of all egresses: with its blocks, a node that owns all of them is still revoked by one entry of the log
	MaxSlots           = 8192
	MaxDestinations    = 1024   // of an egress
	MaxAllDestinations = 65_536 // of all egresses: the state must fit into a message
	MaxProbes          = 8      // of an egress
	MaxGatewayLabels   = 16     // of an egress

	MinEgressLease = 500        // milliseconds
	MaxEgressLease = 86_400_000 // milliseconds: a day

	MinDrain = 1000       // milliseconds
	MaxDrain = 86_400_000 // milliseconds: a day
)

// egressReason starts the reason of a block that was reserved for an egress. Such a block is given back with the last
// address that an egress has in it.
const egressReason = "egress "

// checkLabel is the rule of DNS labels, which namespaces and names of egresses obey.
func checkLabel(what, name string) error {
	switch {
	case name == "":
		return refuse(InvalidArgument, "an egress needs a %s: name it NAMESPACE/NAME", what)
	case len(name) > MaxName:
		return refuse(InvalidArgument, "the egress's %s %.20q… has %d characters: at most %d are allowed", what, name,
			len(name), MaxName)
	case !dnsname.IsLabel(name):
		return refuse(InvalidArgument, "the egress's %s %q: use lower-case letters, digits and hyphens, with a letter or "+
			"digit at both ends", what, name)
	}
	return nil
}

// readEgress is an egress as a command gives it, checked as far as that needs no state, and in its one form. What is
// the leader's is left out.
func readEgress(p *skeinv1.Egress) (*skeinv1.Egress, []netip.Prefix, error) {
	if p == nil {
		return nil, nil, refuse(InvalidArgument, "the command carries no egress")
	}
	if err := checkLabel("namespace", p.GetNamespace()); err != nil {
		return nil, nil, err
	}
	if err := checkLabel("name", p.GetName()); err != nil {
		return nil, nil, err
	}
	e := proto.CloneOf(p)
	e.Endpoints, e.CreatedAt, e.CreatedIndex, e.ChangedIndex, e.Draining, e.DrainingSince = nil, 0, 0, 0, 0, 0
	e.Pool = cmp.Or(e.Pool, DefaultPool)
	ref := refOf(e)
	if e.GetReplicas() < 1 || e.GetReplicas() > MaxReplicas {
		return nil, nil, refuse(InvalidArgument, "egress %s: %d replicas are out of range; use 1 to %d", ref,
			e.GetReplicas(), MaxReplicas)
	}
	if len(e.GetGateways()) == 0 {
		return nil, nil, refuse(InvalidArgument, "egress %s names no label of its gateways: name at least one that only "+
			"nodes allowed to forward for it have", ref)
	}
	if n := len(e.GetGateways()); n > MaxGatewayLabels {
		return nil, nil, refuse(InvalidArgument, "egress %s names %d labels of its gateways: at most %d are allowed", ref, n,
			MaxGatewayLabels)
	}
	if err := checkLabels(e.GetGateways()); err != nil {
		return nil, nil, refuse(InvalidArgument, "egress %s: gateways: %s", ref, err)
	}
	if l := e.GetLeaseMillis(); l != 0 && (l < MinEgressLease || l > MaxEgressLease) {
		return nil, nil, refuse(InvalidArgument, "egress %s: a lease of %d ms is out of range; use %d to %d, or 0 for the "+
			"default of %d", ref, l, MinEgressLease, MaxEgressLease, DefaultEgressLease)
	}
	if l := e.GetDrainMillis(); l != 0 && (l < MinDrain || l > MaxDrain) {
		return nil, nil, refuse(InvalidArgument, "egress %s: a drain of at most %d ms is out of range; use %d to %d, or 0 "+
			"for the default of %d", ref, l, MinDrain, MaxDrain, DefaultDrain)
	}
	switch e.GetSpread() {
	case "", SpreadFlow:
	case SpreadClient:
		e.Spread = ""
	default:
		return nil, nil, refuse(InvalidArgument, "egress %s: spread %.20q is unknown; use %s, the default, or %s", ref,
			e.GetSpread(), SpreadClient, SpreadFlow)
	}
	destinations, err := readDestinations(ref, e.GetDestinations())
	if err != nil {
		return nil, nil, err
	}
	e.Destinations = nil
	for _, p := range destinations {
		e.Destinations = append(e.Destinations, p.String())
	}
	if e.Addresses, err = readSources(e, destinations); err != nil {
		return nil, nil, err
	}
	if e.Probes, err = readProbes(ref, e.GetProbes(), destinations); err != nil {
		return nil, nil, err
	}
	return e, destinations, nil
}

// unroutable are addresses that no packet may be sent to through an egress.
var unroutable = []struct{ prefix, why string }{
	{"0.0.0.0/8", "the host's own network"},
	{"127.0.0.0/8", "loopback"},
	{"169.254.0.0/16", "link-local"},
	{"224.0.0.0/4", "multicast"},
	{"255.255.255.255/32", "broadcast"},
	{"::/127", "loopback"},
	{"::ffff:0:0/96", "mapped IPv4"},
	{"fe80::/10", "link-local"},
	{"ff00::/8", "multicast"},
}

// isDefault reports whether a destination is everything. It leaves out the mesh and what is unroutable by itself:
// clients and gateways know better routes for those.
func isDefault(p netip.Prefix) bool { return p.Bits() == 0 }

// Destinations are an egress's destinations as the log has them: sorted, and without those that others cover.
func Destinations(texts []string) ([]string, error) {
	all, err := readDestinations(egressRef{}, texts)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = p.String()
	}
	return out, nil
}

// readDestinations parses, sorts and merges destinations.
func readDestinations(ref egressRef, in []string) ([]netip.Prefix, error) {
	switch n := len(in); {
	case n == 0:
		return nil, refuse(InvalidArgument, "egress %s has no destination: name prefixes, or 0.0.0.0/0 and ::/0 for "+
			"everything outside the mesh", ref)
	case n > MaxDestinations:
		return nil, refuse(InvalidArgument, "egress %s: %d destinations are too many; use up to %d, or larger prefixes", ref,
			n, MaxDestinations)
	}
	var all []netip.Prefix
	for _, text := range in {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() {
			return nil, refuse(InvalidArgument, "egress %s: destination %.80q is not a prefix; write one like 192.0.2.0/24 or "+
				"2001:db8::/32", ref, text)
		}
		if p != p.Masked() {
			return nil, refuse(InvalidArgument, "egress %s: destination %s has host bits set; write %s", ref, p, p.Masked())
		}
		if slices.Contains(all, p) {
			return nil, refuse(InvalidArgument, "egress %s: destination %s is there twice; write it once", ref, p)
		}
		for _, u := range unroutable {
			if !isDefault(p) && p.Overlaps(netip.MustParsePrefix(u.prefix)) {
				return nil, refuse(InvalidArgument, "egress %s: destination %s overlaps %s (%s); use other prefixes, or the "+
					"default route, which leaves that out", ref, p, u.prefix, u.why)
			}
		}
		all = append(all, p)
	}
	return mergeDestinations(all), nil
}

// private are the destinations for which clients look before those outside of them, in a table of their own. So a
// default route does not take the place of a private destination, whose packets would stay in the site without it.
var private = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("fc00::/7"),
}

func within(p, in netip.Prefix) bool { return in.Bits() <= p.Bits() && in.Contains(p.Addr()) }

func isPrivate(p netip.Prefix) bool {
	return slices.ContainsFunc(private, func(in netip.Prefix) bool { return within(p, in) })
}

// mergeDestinations sorts prefixes by family and address, the larger first, and leaves out those that another one
// covers.
func mergeDestinations(all []netip.Prefix) (out []netip.Prefix) {
	slices.SortFunc(all, func(x, y netip.Prefix) int {
		return cmp.Or(cmp.Compare(x.Addr().BitLen(), y.Addr().BitLen()), x.Addr().Compare(y.Addr()),
			cmp.Compare(x.Bits(), y.Bits()))
	})
	var last [2]netip.Prefix // the last one kept, public and private: whatever covers a prefix, the last of its kind does
	for _, p := range all {
		kind := 0
		if isPrivate(p) {
			kind = 1
		}
		if last[kind].IsValid() && within(p, last[kind]) {
			continue
		}
		last[kind] = p
		out = append(out, p)
	}
	return out
}

// families says which families there are among prefixes.
func families(all []netip.Prefix) (four, six bool) {
	for _, p := range all {
		four, six = four || p.Addr().Is4(), six || p.Addr().Is6()
	}
	return four, six
}

// readSources checks an egress's source addresses: none, or one for each slot, of the families that the destinations
// have.
func readSources(e *skeinv1.Egress, destinations []netip.Prefix) (out []*skeinv1.EgressAddress, err error) {
	ref, n := refOf(e), len(e.GetAddresses())
	if n == 0 {
		return nil, nil
	}
	if n != int(e.GetReplicas()) {
		return nil, refuse(InvalidArgument, "egress %s has %d addresses for %d replicas: name as many addresses as "+
			"replicas, or none to use those of the gateway nodes", ref, n, e.GetReplicas())
	}
	four, six := families(destinations)
	seen := map[netip.Addr]bool{}
	plain := func(i int, text string, is6, wanted bool) (string, error) {
		family := map[bool]string{false: "IPv4", true: "IPv6"}[is6]
		switch {
		case text == "" && wanted:
			return "", refuse(InvalidArgument, "egress %s: slot %d has no %s address, and the egress has %s destinations; "+
				"name one", ref, i, family, family)
		case text == "":
			return "", nil
		case !wanted:
			return "", refuse(InvalidArgument, "egress %s: slot %d has the %s address %.80s, and the egress has no %s "+
				"destination; leave it out", ref, i, family, text, family)
		}
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" || a.Is6() != is6 || a.Is4In6() {
			return "", refuse(InvalidArgument, "egress %s: %.80q is not an %s address", ref, text, family)
		}
		if seen[a] {
			return "", refuse(InvalidArgument, "egress %s: address %s is there twice; each slot needs its own", ref, a)
		}
		seen[a] = true
		return a.String(), nil
	}
	for i, v := range e.GetAddresses() {
		w := &skeinv1.EgressAddress{}
		if w.Ipv4, err = plain(i, v.GetIpv4(), false, four); err != nil {
			return nil, err
		}
		if w.Ipv6, err = plain(i, v.GetIpv6(), true, six); err != nil {
			return nil, err
		}
		out = append(out, w)
	}
	return out, nil
}

// probeAddr reads a probe: icmp:ADDRESS or tcp:ADDRESS:PORT, with brackets around an IPv6 address before a port.
func probeAddr(probe string) (a netip.Addr, plain string, ok bool) {
	kind, rest, _ := strings.Cut(probe, ":")
	switch kind {
	case "icmp":
		a, err := netip.ParseAddr(rest)
		return a, "icmp:" + a.String(), err == nil && a.Zone() == "" && !a.Is4In6()
	case "tcp":
		p, err := netip.ParseAddrPort(rest)
		a := p.Addr()
		return a, "tcp:" + netip.AddrPortFrom(a, p.Port()).String(), err == nil && a.Zone() == "" && !a.Is4In6() &&
			p.Port() != 0 &&
			strings.HasSuffix(rest, ":"+strconv.Itoa(int(p.Port())))
	}
	return a, "", false
}

func readProbes(ref egressRef, in []string, destinations []netip.Prefix) (out []string, err error) {
	if len(in) > MaxProbes {
		return nil, refuse(InvalidArgument, "egress %s: %d probes are too many; use up to %d", ref, len(in), MaxProbes)
	}
	for _, text := range in {
		a, plain, ok := probeAddr(text)
		switch {
		case !ok:
			return nil, refuse(InvalidArgument, "egress %s: probe %.80q is not valid; write icmp:ADDRESS, or "+
				"tcp:ADDRESS:PORT with an IPv6 address in brackets", ref, text)
		case slices.Contains(out, plain):
			return nil, refuse(InvalidArgument, "egress %s: probe %s is there twice; write it once", ref, plain)
		case !slices.ContainsFunc(destinations, func(p netip.Prefix) bool { return p.Contains(a) }):
			return nil, refuse(InvalidArgument, "egress %s: probe %s lies in none of its destinations, so no gateway could "+
				"reach it; probe an address inside them", ref, plain)
		}
		for _, u := range unroutable {
			if netip.MustParsePrefix(u.prefix).Contains(a) {
				return nil, refuse(InvalidArgument, "egress %s: probe %s lies in %s (%s), which no egress leads to; probe "+
					"another address", ref, plain, u.prefix, u.why)
			}
		}
		out = append(out, plain)
	}
	return out, nil
}

// checkOutside refuses destinations and probes that lie in the mesh.
func (s *State) checkOutside(e *skeinv1.Egress, destinations []netip.Prefix) error {
	ref := refOf(e)
	for _, p := range destinations {
		if isDefault(p) {
			continue
		}
		if o, inside := s.overlap(p); inside {
			return refuse(InvalidArgument, "egress %s: destination %s overlaps %s of pool %s, which is in the mesh; use other "+
				"prefixes, or the default route, which leaves the mesh out", ref, p, o.prefix, o.pool)
		}
		if o, inside := s.podNetOverlapping(p, ""); inside {
			return refuse(InvalidArgument, "egress %s: destination %s overlaps %s, the pods of %s, which are in the mesh; use "+
				"other prefixes, or the default route, which leaves the mesh out",
				ref, p, o.prefix, s.called(o.node))
		}
		if o, inside := s.plainNetOverlapping(p, ""); inside {
			return refuse(InvalidArgument, "egress %s: destination %s overlaps %s behind plain peer %s, which is in the mesh; "+
				"use other prefixes, or the default route, which leaves the mesh out", ref, p, o.prefix, o.peer)
		}
		if err := s.checkNotTranslated("egress "+ref.String()+": destination", p, false); err != nil {
			return err
		}
		for _, o := range s.overlays() {
			if p.Overlaps(o) {
				return refuse(InvalidArgument, "egress %s: destination %s overlaps the overlay %s, where nodes have their "+
					"addresses; use other prefixes, or the default route, which leaves the mesh out", ref, p, o)
			}
		}
	}
	for _, probe := range e.GetProbes() {
		a, plain, _ := probeAddr(probe)
		p := netip.PrefixFrom(a, a.BitLen())
		if o, inside := s.overlap(p); inside {
			return refuse(InvalidArgument, "egress %s: probe %s lies in pool %s, which is in the mesh; probe an address outside",
				ref, plain, o.pool)
		}
		for _, o := range s.overlays() {
			if o.Contains(a) {
				return refuse(InvalidArgument, "egress %s: probe %s lies in the overlay %s; probe an address outside the mesh", ref,
					plain, o)
			}
		}
	}
	return nil
}

// checkNoDestination refuses prefixes of pods that an egress leads to or probes: their packets would stay in the mesh.
func (s *State) checkNoDestination(what string, prefixes []netip.Prefix) error {
	for _, ref := range s.egressNames {
		o := s.outlet(ref)
		for _, prefix := range prefixes {
			for _, d := range o.destinations {
				if !isDefault(d) && d.Overlaps(prefix) {
					return refuse(FailedPrecondition, "%s %s overlaps the destination %s of egress %s, whose packets would stay in "+
						"the mesh; use other addresses, or change that egress first", what, prefix, d, ref)
				}
			}
			for _, probe := range o.egress.get().GetProbes() {
				if a, plain, _ := probeAddr(probe); prefix.Contains(a) {
					return refuse(FailedPrecondition, "%s %s holds %s, which egress %s probes; use other addresses, or change that "+
						"egress first", what, prefix, plain, ref)
				}
			}
		}
	}
	return nil
}
