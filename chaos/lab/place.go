package lab

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// place finds the namespace that a place means: a node's, or for NODE/POD a pod's.
func (l *Lab) place(name string) (a *agent, ns string, err error) {
	node, pod, isPod := strings.Cut(name, "/")
	if !isPod {
		a, err = l.host(node)
	} else {
		a, err = l.agent(node)
	}
	if err != nil || !isPod {
		if a != nil {
			ns = a.ns
		}
		return a, ns, err
	}
	if _, err := a.pod(pod); err != nil {
		return nil, "", err
	}
	return a, fabric.PodNS(l.Spec.Name, node, pod), nil
}

// addresses lists where a place is reached through the overlay: a node's overlay addresses or a pod's own, of one
// family or both. A host without an agent is reached by its addresses at its site.
func (l *Lab) addresses(name, family string) ([]netip.Addr, error) {
	node, pod, isPod := strings.Cut(name, "/")
	if n, ok := l.Spec.Node(node); ok && n.Role == RoleHost {
		return l.underlay(node, family)
	}
	if !isPod {
		return l.overlay(node, family)
	}
	a, err := l.agent(node)
	if err != nil {
		return nil, err
	}
	p, err := a.pod(pod)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, addr := range p.Addresses {
		if family == "" || (family == "ipv4") == addr.Is4() {
			out = append(out, addr)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("pod %s has no %s address", name, family)
	}
	return out, nil
}

// underlay lists a node's addresses at its site, of one family or both.
func (l *Lab) underlay(node, family string) ([]netip.Addr, error) {
	h, ok := l.Network().Host(node)
	var out []netip.Addr
	if h.Addr.IsValid() && family != "ipv6" {
		out = append(out, h.Addr)
	}
	if h.Addr6.IsValid() && family != "ipv4" {
		out = append(out, h.Addr6)
	}
	if !ok || len(out) == 0 {
		return nil, fmt.Errorf("node %s has no %s address at its site", node, family)
	}
	return out, nil
}

// target is one address of a place, IPv4 where it has one.
func (l *Lab) target(name string) (netip.Addr, error) {
	all, err := l.addresses(name, "")
	if err != nil {
		return netip.Addr{}, err
	}
	for _, a := range all {
		if a.Is4() {
			return a, nil
		}
	}
	return all[0], nil
}

// common leaves the targets that a place can send to: those of a family in which it has an address itself.
func (l *Lab) common(from string, targets []netip.Addr) ([]netip.Addr, error) {
	own, err := l.addresses(from, "")
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, t := range targets {
		for _, o := range own {
			if o.Is4() == t.Is4() {
				out = append(out, t)
				break
			}
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%s has %s, but no address of the family of %s", from, list(own), list(targets))
	}
	return out, nil
}
