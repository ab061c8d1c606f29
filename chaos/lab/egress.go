package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Ref names an egress.
type Ref struct{ Namespace, Name string }

// String is namespace/name; "" for none.
func (r Ref) String() string {
	if r == (Ref{}) {
		return ""
	}
	return r.Namespace + "/" + r.Name
}

// parseRef reads namespace/name.
func parseRef(v value, s string) Ref {
	ns, name, ok := strings.Cut(s, "/")
	if s != "" && (!ok || ns == "" || name == "" || strings.Contains(name, "/")) {
		v.fail("%q names no egress; allowed: namespace/name", s)
		return Ref{}
	}
	return Ref{ns, name}
}

// annotation is what a pod asks for egresses of a namespace with; its value lists their names.
func (r Ref) annotation() string { return "skein.dev/egress." + r.Namespace }

// egressAnnotations reads egresses as the annotations that ask for them.
func egressAnnotations(v value) map[string]string {
	out := map[string]string{}
	for _, s := range v.texts("an egress, as namespace/name") {
		ref := parseRef(v, s)
		if key := ref.annotation(); out[key] != "" {
			out[key] += "," + ref.Name
		} else {
			out[key] = ref.Name
		}
	}
	return out
}

func (s *StartPods) annotate(more map[string]string) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	for k, v := range more {
		s.Annotations[k] = v
	}
}

// egress reads an egress that the lab makes after the pools. Whether it fits is the cluster's to say.
func (r *reader) egress(name string, v value) {
	ref := parseRef(v, name)
	e := &skeinv1.Egress{Namespace: ref.Namespace, Name: ref.Name, Replicas: 1}
	before := len(r.d.errs)
	v.mapping(
		field{"destinations", func(v value) {
			for _, s := range v.texts("a subnet such as 0.0.0.0/0 or '::/0'") {
				if _, err := netip.ParsePrefix(s); err != nil {
					v.fail("%q is not a subnet; allowed: one such as 0.0.0.0/0 or '::/0'", s)
				}
				e.Destinations = append(e.Destinations, s)
			}
		}},
		field{"gateways", func(v value) { e.Gateways = v.words("labels") }},
		field{"replicas", func(v value) { e.Replicas = uint32(v.integer(1, 64)) }},
		field{"addresses", func(v value) {
			v.each("addresses such as 198.18.2.208 or {ipv4: 198.18.2.208, ipv6: '2001:db8:2::d0'}",
				func(_ int, v value) { e.Addresses = append(e.Addresses, egressAddress(v)) })
		}},
		field{"pool", func(v value) { e.Pool = r.name(v, v.text("the name of a pool")) }},
		field{"lease", func(v value) { e.LeaseMillis = uint32(min(v.duration(), time.Hour) / time.Millisecond) }},
		field{"probes", func(v value) { e.Probes = v.texts("icmp:ADDRESS or tcp:ADDRESS:PORT") }},
		field{"spread", func(v value) { e.Spread = v.text("client or flow") }},
		field{"fouSourcePortAuto", func(v value) { e.FouSourcePortAuto = v.boolean() }},
	)
	if len(e.Destinations) == 0 && len(r.d.errs) == before {
		v.fail("the key \"destinations\" is missing: list the subnets that it leads to")
	}
	r.s.Egresses = append(r.s.Egresses, e)
}

// egressAddress reads a slot's source address: of one family as a text, or a mapping for both.
func egressAddress(v value) *skeinv1.EgressAddress {
	out := &skeinv1.EgressAddress{}
	read := func(v value) netip.Addr {
		s := v.text("an address")
		a, err := netip.ParseAddr(s)
		if s != "" && err != nil {
			v.fail("%q is not an address", s)
		}
		return a
	}
	if !v.isMapping() {
		if a := read(v); a.Is4() {
			out.Ipv4 = a.String()
		} else if a.IsValid() {
			out.Ipv6 = a.String()
		}
		return out
	}
	v.mapping(
		field{"ipv4", func(v value) { out.Ipv4 = read(v).String() }},
		field{"ipv6", func(v value) { out.Ipv6 = read(v).String() }},
	)
	return out
}

// makeEgresses makes the file's egresses. They have owners a moment later.
func (l *Lab) makeEgresses(ctx context.Context, on *agent) error {
	for _, e := range l.Spec.Egresses {
		r, err := on.client.CreateEgress(ctx, &skeinv1.CreateEgressRequest{Egress: e})
		if err != nil {
			return fmt.Errorf("make egress %s/%s: %w", e.GetNamespace(), e.GetName(), err)
		}
		for _, w := range r.GetWarnings() {
			l.progress("egress %s/%s: %s", e.GetNamespace(), e.GetName(), w)
		}
	}
	return nil
}

// Egress is what an agent of the lab that runs says of an egress: definition, slots and their owners.
func (l *Lab) Egress(ctx context.Context, ref Ref) (*skeinv1.EgressSummary, error) {
	var last error
	for _, a := range l.agents {
		if a.record().Condition != Running {
			continue
		}
		r, err := func() (*skeinv1.EgressesResponse, error) {
			ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			return a.client.Egresses(ctx, &skeinv1.EgressesRequest{})
		}()
		if err != nil {
			last = fmt.Errorf("node %s: %w", a.node.Name, err)
			continue
		}
		for _, e := range r.GetEgresses() {
			if e.GetEgress().GetNamespace() == ref.Namespace && e.GetEgress().GetName() == ref.Name {
				return e, nil
			}
		}
		return nil, fmt.Errorf("node %s knows no egress %s", a.node.Name, ref)
	}
	if last == nil {
		last = fmt.Errorf("no agent runs")
	}
	return nil, fmt.Errorf("ask for egress %s: %w", ref, last)
}

// sources lists the addresses with which an egress's packets come to a host: those of its slots, or where a slot has
// none those of its owner.
func (l *Lab) sources(ctx context.Context, ref Ref, at string) ([]netip.Addr, error) {
	e, err := l.Egress(ctx, ref)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, s := range e.GetSlots() {
		if s.GetOwner() == "" {
			continue
		}
		own := e.GetEgress().GetAddresses()
		if n := int(s.GetSlot().GetNumber()); n < len(own) {
			for _, text := range []string{own[n].GetIpv4(), own[n].GetIpv6()} {
				if a, err := netip.ParseAddr(text); err == nil {
					out = append(out, a)
				}
			}
			continue
		}
		out = append(out, l.seenFrom(s.GetOwner(), at)...)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no slot of egress %s has an owner", ref)
	}
	return out, nil
}

// seenFrom lists a node's addresses as another host sees them: its own ones at the same site, else those that its NAT
// gives it.
func (l *Lab) seenFrom(node, at string) []netip.Addr {
	plan := l.Network()
	n, _ := plan.Host(node)
	o, _ := plan.Host(nodeOf(at))
	out := []netip.Addr{n.Public, n.Addr6}
	if n.Site == o.Site {
		out[0] = n.Addr
	}
	return slices.DeleteFunc(out, func(a netip.Addr) bool { return !a.IsValid() })
}
