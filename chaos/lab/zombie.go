package lab

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/dataplane"
)

// What a zombie drops of that which it passes on from the tunnel into the tunnel.
const (
	DropsNew       = "new"       // packets that begin a flow
	DropsDirection = "direction" // packets to other nodes of its own site, and to their pods
	DropsLarge     = "large"     // packets of more than largeAbove bytes
)

// zombieForms are the words that a step may say.
var zombieForms = []string{DropsNew, DropsDirection, DropsLarge}

const (
	largeAbove = 1200 // bytes, with the IP header
	// learnFlows is how long conntrack takes down which flows there are before new ones are dropped.
	learnFlows = time.Second
)

// NotForwarded is what a node that lives drops of that which it passes on.
type NotForwarded struct {
	Node  string `json:"node"`
	Drops string `json:"drops"` // new, direction, large
}

func sortNotForwarded(all map[NotForwarded]bool) []NotForwarded {
	return slices.SortedFunc(maps.Keys(all), func(a, b NotForwarded) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Drops, b.Drops))
	})
}

// forwardDrops translates what one node does not forward. own are the addresses that lie in its site.
func forwardDrops(node string, all map[NotForwarded]bool, own []netip.Addr) []fabric.ForwardDrop {
	var out []fabric.ForwardDrop
	for _, n := range sortNotForwarded(all) {
		if n.Node != node {
			continue
		}
		switch n.Drops {
		case DropsNew:
			out = append(out, fabric.ForwardDrop{New: true})
		case DropsLarge:
			out = append(out, fabric.ForwardDrop{Above: largeAbove})
		case DropsDirection:
			if len(own) > 0 { // else it would be everything
				out = append(out, fabric.ForwardDrop{To: own})
			}
		}
	}
	return out
}

// Zombie makes nodes live on and drop a part of what they pass on, over what they drop already: what is for them, and
// what they send, goes on. Flows that had packets both ways within a second before are not new.
func (l *Lab) Zombie(ctx context.Context, drops string, nodes ...string) error {
	if !slices.Contains(zombieForms, drops) {
		return fmt.Errorf("a zombie cannot drop %q; allowed: %s", drops, strings.Join(zombieForms, ", "))
	}
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	if drops == DropsNew {
		for _, a := range agents {
			if err := fabric.TrackForwarded(l.Spec.Name, a.node.Name); err != nil {
				return err
			}
		}
		select {
		case <-time.After(learnFlows):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return l.setNotForwarded(nodes, func(all map[NotForwarded]bool) {
		for _, n := range nodes {
			all[NotForwarded{n, drops}] = true
		}
	})
}

// forwardAgain ends what nodes drop of that which they pass on.
func (l *Lab) forwardAgain(nodes []string) error {
	l.mu.Lock()
	var those []string
	for n := range l.zombies {
		if slices.Contains(nodes, n.Node) {
			those = append(those, n.Node)
		}
	}
	l.mu.Unlock()
	return l.setNotForwarded(union(those), func(all map[NotForwarded]bool) {
		maps.DeleteFunc(all, func(n NotForwarded, _ bool) bool { return slices.Contains(those, n.Node) })
	})
}

// setNotForwarded changes what these nodes do not forward.
func (l *Lab) setNotForwarded(nodes []string, change func(map[NotForwarded]bool)) error {
	if len(nodes) == 0 {
		return nil
	}
	l.mu.Lock()
	want := maps.Clone(l.zombies)
	l.mu.Unlock()
	change(want)
	for _, n := range nodes {
		own, err := l.siteAddresses(n)
		if err != nil {
			return err
		}
		numbers := dataplane.DefaultNumbers()
		links := []string{numbers.Link, numbers.HopLink}
		if err := fabric.SetForwardDrops(l.Spec.Name, n, links, forwardDrops(n, want, own)); err != nil {
			return err
		}
	}
	l.mu.Lock()
	l.zombies = want
	l.mu.Unlock()
	return l.save()
}

// siteAddresses lists the overlay addresses of the other nodes that are in a node's site now, and of their pods.
func (l *Lab) siteAddresses(node string) ([]netip.Addr, error) {
	now := l.Network()
	self, _ := now.Host(node)
	var out []netip.Addr
	for _, a := range l.agents {
		if h, _ := now.Host(a.node.Name); h.Name == node || h.Site != self.Site {
			continue
		}
		rec := a.record()
		for _, addr := range []netip.Addr{rec.IPv4, rec.IPv6} {
			if addr.IsValid() {
				out = append(out, addr)
			}
		}
		pods, err := l.Pods(a.node.Name)
		if err != nil {
			return nil, err
		}
		for _, p := range pods {
			out = append(out, p.Addresses...)
		}
	}
	return out, nil
}

func (r *reader) zombie(v value) Action {
	var z Zombie
	v.mapping(
		field{"node", func(v value) { z.Nodes = r.who(v) }},
		field{"drops", func(v value) { z.Drops = v.oneOf(zombieForms...) }},
	)
	if len(z.Nodes) == 0 || z.Drops == "" {
		v.fail("needs both node and drops: %s", strings.Join(zombieForms, ", "))
	}
	return z
}
