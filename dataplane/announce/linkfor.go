package announce

import "net/netip"

// Link is a host's link with the networks that its addresses connect it to.
type Link struct {
	Name     string
	Networks []netip.Prefix
}

// LinkFor is the link whose connected network holds the address: the narrowest, and of equals the first. A network of a
// single address connects nothing.
func LinkFor(addr netip.Addr, links []Link) (name string, ok bool) {
	addr = addr.Unmap()
	best := -1
	for _, l := range links {
		for _, p := range l.Networks {
			if !p.IsSingleIP() && p.Contains(addr) && p.Bits() > best {
				best, name = p.Bits(), l.Name
			}
		}
	}
	return name, best >= 0
}
