package podnet

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// Scan finds the addresses of all pods of this host, sorted, those of other programs too. What is led through the overlay's own
// link is on other hosts; a block there may be a single address, too.
func Scan(overlay string) ([]Found, error) {
	c, err := dial(nil)
	if err != nil {
		return nil, err
	}
	defer c.close()
	// Links first: one that is added meanwhile has its route after its link, and is then found by its number only.
	ms, err := c.dump(dumpLinks())
	if err != nil {
		return nil, err
	}
	links := map[int]link{}
	for _, m := range ms {
		if l, ok := decodeLink(m); ok {
			links[l.index] = l
		}
	}
	routes, err := c.routes(dataplane.PodTable, 0)
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if _, known := links[r.index]; known || !r.toPod() {
			continue
		}
		if l, there, err := c.link(getLinkAt(r.index)); err != nil {
			return nil, err
		} else if there {
			links[l.index] = l
		}
	}
	for index, l := range links {
		if l.name == overlay {
			delete(links, index)
		}
	}
	return found(links, routes), nil
}

// found joins links and routes.
func found(links map[int]link, routes []route) []Found {
	type key struct {
		addr netip.Addr
		link string
	}
	seen := map[key]bool{}
	var out []Found
	add := func(addr netip.Addr, l link) {
		if k := (key{addr, l.name}); !addr.IsValid() || seen[k] {
			return
		} else {
			seen[k] = true
		}
		f := Found{Addr: addr, Link: l.name}
		if a, ours := ParseAlias(l.alias); ours {
			f.ContainerID, f.Interface, f.Namespace, f.Pod = a.ContainerID, a.Interface, a.Namespace, a.Pod
		} else if a, coils := parseCoilAlias(l.alias); coils {
			f.ContainerID, f.Interface, f.Foreign = a.ContainerID, a.Interface, true
		}
		out = append(out, f)
	}
	for _, r := range routes {
		if l, there := links[r.index]; there && r.toPod() {
			add(r.dst.Addr(), l)
		}
	}
	for _, l := range links {
		if a, ours := ParseAlias(l.alias); ours {
			add(a.IPv4, l)
			add(a.IPv6, l)
		}
	}
	slices.SortFunc(out, func(a, b Found) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Link, b.Link))
	})
	return out
}
