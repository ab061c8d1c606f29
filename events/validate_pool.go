package events

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/dnsname"
)

// Bounds of what commands may bring into pools.
const (
	MaxPoolRest       = 30 * 24 * time.Hour // of a cooldown and of sticky addresses
	MaxPoolNamespaces = 1024                // that a pool serves, and as many that may name it
	MaxQuotas         = 1024                // of a pool
	MaxNamespace      = 253                 // characters of a namespace or a pod's name, as in Kubernetes
	// of a node in all pools: as many events revoke it at once, and an entry of the log holds 65,536
	MaxNodeBlocks  = 16_384
	MaxGrants      = 16_384  // in all pools
	MaxNodeGrants  = 1024    // of a node in all pools
	MaxStatics     = 16_384  // in all pools
	MaxNodeStatics = 1024    // that a node holds in all pools
	MaxPodStatics  = 16      // static addresses of one pod
	MaxNumbers     = 1 << 18 // blocks in all pools that belong to somebody or did
	// blocks of a pool that were given back, before they come again ahead of new ones
	MaxFreed        = 1 << 16
	MaxBlocksAtOnce = 16   // given by one command
	MaxReleased     = 1024 // given back by one command
)

func checkPoolName(name string) error {
	switch {
	case name == "":
		return refuse(InvalidArgument, "a pool needs a name, like %s", DefaultPool)
	case len(name) > MaxName:
		return refuse(InvalidArgument, "pool name %.20q… has %d characters: at most %d are allowed", name, len(name), MaxName)
	case !dnsname.IsLabel(name):
		return refuse(InvalidArgument, "pool name %q: use lower-case letters, digits and hyphens, with a letter or digit "+
			"at both ends", name)
	}
	return nil
}

// checkKubeName bounds the name of a namespace or a pod. It is wider than Kubernetes' own rule, since other
// runtimes name pods, too.
func checkKubeName(what, name string) error {
	const ends = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	switch {
	case name == "":
		return refuse(InvalidArgument, "the %s is missing: name it", what)
	case len(name) > MaxNamespace:
		return refuse(InvalidArgument, "%s %.20q… has %d characters: at most %d are allowed", what, name,
			len(name), MaxNamespace)
	case strings.Trim(name, ends+"-._") != "" || !strings.Contains(ends, name[:1]) ||
		!strings.Contains(ends, name[len(name)-1:]):
		return refuse(InvalidArgument, "%s %q: use letters, digits, hyphens, underscores and dots, with a letter or digit "+
			"at both ends", what, name)
	}
	return nil
}

// readPool is a pool as a command gives it, checked and in its one form.
func readPool(p *skeinv1.Pool) (*skeinv1.Pool, *layout, error) {
	if p == nil {
		return nil, nil, refuse(InvalidArgument, "the command carries no pool")
	}
	if err := checkPoolName(p.GetName()); err != nil {
		return nil, nil, err
	}
	out := proto.CloneOf(p)
	out.CreatedAt, out.CreatedIndex = 0, 0
	out.Subnets = plainSubnets(out.Subnets)
	out.Namespaces = plainNames(out.Namespaces)
	out.Allowed = plainNames(out.Allowed)
	l, err := newLayout(out)
	if err != nil {
		return nil, nil, err
	}
	if err := checkUsable(out.GetName(), l.prefixes()); err != nil {
		return nil, nil, err
	}
	return out, l, checkPool(out)
}

// plainSubnets writes prefixes in their one form, where they are prefixes.
func plainSubnets(in []*skeinv1.PoolSubnet) []*skeinv1.PoolSubnet {
	plain := func(s string) string {
		if p, err := netip.ParsePrefix(s); err == nil {
			return p.String()
		}
		return s
	}
	out := make([]*skeinv1.PoolSubnet, 0, len(in))
	for _, s := range in {
		out = append(out, &skeinv1.PoolSubnet{Ipv4: plain(s.GetIpv4()), Ipv6: plain(s.GetIpv6())})
	}
	return out
}

func plainNames(in []string) []string { return slices.Compact(slices.Sorted(slices.Values(in))) }

// unusable are addresses that no pod can have.
var unusable = []struct{ prefix, why string }{
	{"0.0.0.0/8", "the host's own network"},
	{"127.0.0.0/8", "loopback"},
	{"169.254.0.0/16", "link-local, and the pods' gateway is there"},
	{"224.0.0.0/4", "multicast"},
	{"240.0.0.0/4", "reserved"},
	{"::/8", "loopback and mapped IPv4"},
	{"fe80::/10", "link-local"},
	{"ff00::/8", "multicast"},
}

func checkUsable(pool string, prefixes []netip.Prefix) error {
	for _, p := range prefixes {
		for _, u := range unusable {
			if p.Overlaps(netip.MustParsePrefix(u.prefix)) {
				return refuse(InvalidArgument, "pool %s: subnet %s overlaps %s (%s); use other addresses", pool, p, u.prefix, u.why)
			}
		}
	}
	return nil
}

// checkPool bounds what a pool says besides its subnets.
func checkPool(p *skeinv1.Pool) error {
	for _, r := range []struct {
		name   string
		value  uint32
		utmost uint32
	}{
		{"cooldown_seconds", p.GetCooldownSeconds(), uint32(MaxPoolRest / time.Second)},
		{"sticky_seconds", p.GetStickySeconds(), uint32(MaxPoolRest / time.Second)},
		{"max_blocks_per_node", p.GetMaxBlocksPerNode(), MaxNodeBlocks},
		{"namespaces", uint32(len(p.GetNamespaces())), MaxPoolNamespaces},
		{"allowed", uint32(len(p.GetAllowed())), MaxPoolNamespaces},
		{"quotas", uint32(len(p.GetQuotas())), MaxQuotas},
	} {
		if r.value > r.utmost {
			return refuse(InvalidArgument, "pool %s: %s: %d is out of range; use up to %d", p.GetName(), r.name,
				r.value, r.utmost)
		}
	}
	return checkPoolNames(p)
}

// checkPoolNames holds a pool's own name, and those of namespaces that it mentions, to their rules. Fold asks it, too.
func checkPoolNames(p *skeinv1.Pool) error {
	if err := checkPoolName(p.GetName()); err != nil {
		return err
	}
	names := slices.Concat(p.GetNamespaces(), slices.Sorted(maps.Keys(p.GetQuotas())))
	for _, ns := range p.GetAllowed() {
		if ns != "*" {
			names = append(names, ns)
		}
	}
	for _, ns := range names {
		if err := checkKubeName(fmt.Sprintf("pool %s: namespace", p.GetName()), ns); err != nil {
			return err
		}
	}
	return nil
}

// checkPoolFree refuses addresses that belong to a pool or the overlay, and namespaces that another pool serves.
func (s *State) checkPoolFree(p *skeinv1.Pool, prefixes []netip.Prefix) error {
	for _, prefix := range prefixes {
		if o, taken := s.overlap(prefix); taken {
			return refuse(AlreadyExists, "pool %s: subnet %s overlaps %s of pool %s; use other addresses, or remove that pool",
				p.GetName(), prefix, o.prefix, o.pool)
		}
		for _, o := range s.overlays() {
			if prefix.Overlaps(o) {
				return refuse(InvalidArgument, "pool %s: subnet %s overlaps the overlay %s, where nodes have their addresses; "+
					"use other addresses", p.GetName(), prefix, o)
			}
		}
	}
	for _, prefix := range prefixes {
		if o, taken := s.podNetOverlapping(prefix, ""); taken {
			return refuse(AlreadyExists, "pool %s: subnet %s overlaps %s, where another CNI runs the pods of %s; use other "+
				"addresses",
				p.GetName(), prefix, o.prefix, s.called(o.node))
		}
	}
	for _, prefix := range prefixes {
		if o, taken := s.plainNetOverlapping(prefix, ""); taken {
			return refuse(AlreadyExists, "pool %s: subnet %s overlaps %s behind plain peer %s; use other addresses, or remove "+
				"that peer first", p.GetName(), prefix, o.prefix, o.peer)
		}
	}
	for _, prefix := range prefixes {
		if err := s.checkNotTranslated(fmt.Sprintf("pool %s: subnet", p.GetName()), prefix, true); err != nil {
			return err
		}
	}
	if err := s.checkNoDestination(fmt.Sprintf("pool %s: subnet", p.GetName()), prefixes); err != nil {
		return err
	}
	if !s.apart(prefixes) {
		return refuse(InvalidArgument, "pool %s: the address of a node lies in its subnets; use other addresses", p.GetName())
	}
	for _, ns := range p.GetNamespaces() {
		if other, ok := s.namespaces.get(textKey(ns), ns); ok && other != p.GetName() {
			return refuse(AlreadyExists, "pool %s: namespace %s is served by pool %s, and only one pool may serve it; "+
				"take it from there first", p.GetName(), ns, other)
		}
	}
	return nil
}
