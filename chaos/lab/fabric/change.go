package fabric

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Clone is a copy that can be changed without touching the original.
func (p Plan) Clone() Plan {
	p.Sites, p.Hosts = slices.Clone(p.Sites), slices.Clone(p.Hosts)
	return p
}

// Moved is the plan with a host in another site, or with another address in the same.
func (p Plan) Moved(host, site string) (Plan, error) {
	p = p.Clone()
	to := p.site(site)
	i := slices.IndexFunc(p.Hosts, func(h Host) bool { return h.Name == host })
	if i < 0 || to == nil || to.carrier {
		return p, fmt.Errorf("move %s to %s: there is no such host or site", host, site)
	}
	p.Hosts[i].place(to)
	return p, nil
}

// WithNAT is the plan with another kind of NAT in a site. Kinds where hosts share one address can take
// each other's place; the others number hosts differently.
func (p Plan) WithNAT(site string, kind NAT) (Plan, error) {
	p = p.Clone()
	s := p.site(site)
	switch {
	case s == nil || s.carrier:
		return p, fmt.Errorf("there is no site %q", site)
	case kind == s.NAT:
		return p, nil
	case !s.NAT.CanChange() || !kind.CanChange():
		return p, fmt.Errorf("site %s: %s cannot become %s while the lab is up: only kinds that give all hosts one address "+
			"can, and not double", site, s.NAT, kind)
	}
	s.NAT = kind
	s.Hairpin = s.Hairpin && kind.CanHairpin()
	return p, nil
}

// CanChange tells the kinds that can take each other's place while the lab is up.
func (n NAT) CanChange() bool { return n != None && n != OneToOne && n != Double }

// Forgotten is the plan in which a site's router has forgotten its mappings and gives out other ports.
func (p Plan) Forgotten(site string) (Plan, error) {
	p = p.Clone()
	s := p.site(site)
	if s == nil || s.NAT == None || s.NAT == OneToOne {
		return p, fmt.Errorf("site %s: its router has no mappings that it could forget", site)
	}
	s.Generation++
	return p, nil
}

// Retranslate installs a site's NAT as the plan has it now, in one transaction. Connections keep the
// mappings that they have; with forget they lose them.
func Retranslate(p Plan, site string, forget bool) error {
	s, ok := p.Site(site)
	if !ok {
		return fmt.Errorf("there is no site %q", site)
	}
	router := Router(p.Lab, site)
	if err := translate(router, s, p.clientsOf(s)); err != nil {
		return fmt.Errorf("site %s: nat %s: %w", site, s.NAT, err)
	}
	if !forget {
		return nil
	}
	return on(router, func(h *netlink.Handle) error {
		if err := h.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return fmt.Errorf("forget connections: %w", err)
		}
		return nil
	})
}

// Move carries a host from where it is in one plan to where it is in the other: its link goes down,
// comes up in the other network, and has that one's addresses. Both routers translate accordingly.
func Move(from, to Plan, host string) error {
	before, ok := from.Host(host)
	after, ok2 := to.Host(host)
	site, ok3 := to.Site(after.Site)
	if !ok || !ok2 || !ok3 {
		return fmt.Errorf("move %s: there is no such host or site", host)
	}
	if err := errors.Join(unplug(to.Lab, before), plug(to.Lab, before, site),
		on(HostNS(to.Lab, host), func(h *netlink.Handle) error {
			if err := linkUp(h, HostLink); err != nil {
				return err
			}
			return number(h, site, after)
		})); err != nil {
		return fmt.Errorf("move %s: %w", host, err)
	}
	if before.Site != after.Site {
		if err := Retranslate(to, before.Site, false); err != nil {
			return err
		}
	}
	return Retranslate(to, after.Site, false)
}

// unplug takes a host's link down, and its addresses and routes with it.
func unplug(lab string, host Host) error {
	return on(HostNS(lab, host.Name), func(h *netlink.Handle) error {
		l, err := h.LinkByName(HostLink)
		if err != nil {
			return err
		}
		if err := h.LinkSetDown(l); err != nil {
			return err
		}
		addrs, err := h.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if err := h.AddrDel(l, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return err
			}
		}
		return nil
	})
}

// plug puts the far end of a host's link into a site's LAN.
func plug(lab string, host Host, site Site) error {
	port := hostPort(host)
	if host.Site != site.Name {
		ns, err := open(Router(lab, site.Name))
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := on(Router(lab, host.Site), func(h *netlink.Handle) error {
			l, err := h.LinkByName(port)
			if err == nil {
				err = h.LinkSetNsFd(l, int(ns))
			}
			return err
		}); err != nil {
			return err
		}
	}
	return on(Router(lab, site.Name), func(h *netlink.Handle) error { return enslave(h, port, lanLink) })
}
