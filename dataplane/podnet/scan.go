package podnet

import (
	"cmp"
	"net/netip"
	"slices"
)

// Scan finds the addresses of all pods of this host that have, or should have, routes in a table (0: the default),
// sorted, including those of other programs. It skips routes through the overlay's link: they lead to other hosts,
// also if a block is a single address.
func Scan(overlay string, table int) ([]Found, error) {
	c, err := dial(nil)
	if err != nil {
		return nil, err
	}
	defer c.close()
	links, err := c.links()
	if err != nil {
		return nil, err
	}
	return c.pods(links, overlay, table)
}

// links reads all links of the namespace, by index.
func (c *conn) links() (map[int]link, error) {
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
	return links, nil
}

// pods reads the pods' routes, after the links. A link that was being made when the links were read was missing or
// had no alias yet. It gets its alias before its route, so it is read again here.
func (c *conn) pods(links map[int]link, overlay string, table int) ([]Found, error) {
	routes, err := c.routes(tableOr(table), 0)
	if err != nil {
		return nil, err
	}
	again := map[int]bool{}
	for _, r := range routes {
		l, known := links[r.index]
		if !r.toPod() || again[r.index] || known && (l.name == overlay || l.isPods()) {
			continue
		}
		again[r.index] = true
		switch l, there, err := c.link(getLinkAt(r.index)); {
		case err != nil:
			return nil, err
		case there:
			links[l.index] = l
		default:
			delete(links, r.index)
		}
	}
	for index, l := range links {
		if l.name == overlay {
			delete(links, index)
		}
	}
	return found(links, routes, table), nil
}

// isPods reports whether the alias is a pod's, from this package or from Coil.
func (l link) isPods() bool {
	_, ours := ParseAlias(l.alias)
	_, coils := ParseCoilAlias(l.alias)
	return ours || coils
}

// found combines links and routes.
func found(links map[int]link, routes []route, table int) []Found {
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
			f.Key, f.Namespace, f.Pod = a.Key, a.Namespace, a.Pod
		} else if a, coils := ParseCoilAlias(l.alias); coils {
			f.Key, f.OfCoil = a.Key, true
		}
		out = append(out, f)
	}
	for _, r := range routes {
		if l, there := links[r.index]; there && r.toPod() {
			add(r.dst.Addr(), l)
		}
	}
	for _, l := range links {
		if a, ours := ParseAlias(l.alias); ours && a.of(table) {
			add(a.IPv4, l)
			add(a.IPv6, l)
		}
	}
	slices.SortFunc(out, func(a, b Found) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Link, b.Link))
	})
	return out
}
