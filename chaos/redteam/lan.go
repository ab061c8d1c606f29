package redteam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/vishvananda/netlink"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/identity"
)

// bounded judges by a count at the victim, and by what others lost.
func bounded(what string) func(Seen) string {
	return func(s Seen) string {
		if s.Count > s.Bound {
			return plural(s.Count) + " " + what + ", the bound is " + plural(s.Bound)
		}
		return lost(s)
	}
}

// established counts the TCP connections that are open at a port of a namespace.
func established(ns string, port int) (n int) {
	const open = 1 // TCP_ESTABLISHED
	_ = fabric.In(ns, func() error {
		for _, family := range []uint8{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			list, err := netlink.SocketDiagTCP(family)
			if err != nil {
				return err
			}
			for _, s := range list {
				if s.State == open && int(s.ID.SourcePort) == port {
					n++
				}
			}
		}
		return nil
	})
	return n
}

// greets has an honest member, the prey, ask the server something over a new stream.
func (f *Field) greets(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	p := f.person(f.prey.key, f.prey.wg, f.ns(bystander), false)
	defer p.conns.Close()
	_, err := p.cluster(relayNode).ReadEvents(ctx, &skeinv1.ReadEventsRequest{Limit: 1})
	return err
}

// inject sends a packet into the victim's host from its LAN with a source of the mesh, to be forwarded into the tunnel.
// One with a source of the LAN goes first: when the host does not even forward that, the attempt proves nothing.
func inject(name string, v4 bool, source func(*Field) netip.Addr) Attempt {
	return Attempt{Name: name, From: Neighbour, Guard: LinkSources,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			// A host with pods forwards; what is asked is whether it forwards this.
			restore, err := f.forwards(victim)
			if err != nil {
				return seen, err
			}
			defer restore()
			e, err := listen(f.ns(relayNode), spoofPort, spoofMark)
			if err != nil {
				return seen, err
			}
			defer e.close()
			r, err := openRaw(f.ns(lodger), "eth0", f.address(victim))
			if err != nil {
				return seen, err
			}
			defer r.close()
			to := netip.AddrPortFrom(f.overlay(relayNode, v4), spoofPort)
			if err := f.leavesByTunnel(ctx, r, to); err != nil {
				return seen, err
			}
			for range 3 {
				if err := r.send(datagram(netip.AddrPortFrom(source(f), 4444), to, []byte(spoofMark))); err != nil {
					return seen, err
				}
			}
			pause.For(ctx, arrival)
			seen.Arrived, _ = e.heard()
			return seen, nil
		}, Judge: arrived}
}

// leavesByTunnel sends a packet with a source of the LAN to a node's overlay address, and returns when the victim's
// host has forwarded it to there. At the other end WireGuard drops it.
func (f *Field) leavesByTunnel(ctx context.Context, r *raw, to netip.AddrPort) error {
	const mark = "a packet of the LAN"
	from := f.address(lodger)
	if to.Addr().Is6() {
		from = netip.MustParseAddr("2001:db8:6e::1") // the site has no IPv6: any address that is nobody's
	}
	var left atomic.Bool
	return sniff(f.ns(victim), func(b []byte, out bool) {
		if _, at, payload, ok := udpOf(b); ok && out && at == to && string(payload) == mark {
			left.Store(true)
		}
	}, func() error {
		return until(ctx, patience, func() error {
			if err := r.send(datagram(netip.AddrPortFrom(from, 4444), to, []byte(mark))); err != nil {
				return err
			}
			if pause.For(ctx, arrival/4); !left.Load() {
				return fmt.Errorf("the host does not even forward a packet from %s to %s", from, to)
			}
			return nil
		})
	})
}

// forwards switches forwarding on for all links of a host, as Kubernetes does, and the loose check of sources, as
// systemd does.
func (f *Field) forwards(host string) (restore func(), err error) {
	return f.sysctl(host, map[string]string{"/proc/sys/net/ipv4/ip_forward": "1",
		"/proc/sys/net/ipv6/conf/all/forwarding": "1", "/proc/sys/net/ipv4/conf/all/rp_filter": "2"})
}

// sysctl sets values on a host, all or none, and takes them back.
func (f *Field) sysctl(host string, values map[string]string) (restore func(), err error) {
	return writeFiles(func(do func() error) error { return fabric.In(f.ns(host), do) }, values)
}

// writeFiles writes what each file is to hold, all or none, and takes that back. It does so by in.
func writeFiles(in func(do func() error) error, values map[string]string) (restore func(), err error) {
	before := map[string]string{}
	write := func(values map[string]string) error {
		return in(func() error {
			var errs []error
			for file, v := range values {
				b, err := os.ReadFile(file)
				if _, known := before[file]; !known && err == nil {
					before[file] = strings.TrimSpace(string(b))
				}
				errs = append(errs, err, os.WriteFile(file, []byte(v), 0o644))
			}
			return errors.Join(errs...)
		})
	}
	restore = func() { _ = write(maps.Clone(before)) }
	if err = write(values); err != nil {
		restore()
		return nil, err
	}
	return restore, nil
}

func neighbours() []Attempt {
	return []Attempt{
		inject("send into the mesh as the member next door, IPv4", true,
			func(f *Field) netip.Addr { return f.overlay(victim, true) }),
		inject("send into the mesh as the member next door, IPv6", false,
			func(f *Field) netip.Addr { return f.overlay(victim, false) }),
		inject("send into the mesh as a pod of the member next door, IPv4", true,
			func(f *Field) netip.Addr { return f.podAddr(honestPod, true) }),
		inject("send into the mesh as a pod of the member next door, IPv6", false,
			func(f *Field) netip.Addr { return f.podAddr(honestPod, false) }),
		{Name: "put packets into the host's egress tunnel by FoU", From: Neighbour, Guard: FoU,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.throughFoU(ctx, f.ns(lodger), f.address(victim), f.ns(victim), f.address(victim))
			}, Judge: arrived},
		{Name: "send to a service of the host as another member", From: Neighbour, Guard: LinkSources,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				e, err := listen(f.ns(victim), spoofPort, spoofMark)
				if err != nil {
					return seen, err
				}
				defer e.close()
				r, err := openRaw(f.ns(lodger), "eth0", f.address(victim))
				if err != nil {
					return seen, err
				}
				defer r.close()
				for range 3 {
					for _, to := range []netip.Addr{f.overlay(victim, true), f.address(victim)} {
						if err := r.send(datagram(netip.AddrPortFrom(f.overlay(relayNode, true), 4444), netip.AddrPortFrom(to, spoofPort),
							[]byte(spoofMark))); err != nil {
							return seen, err
						}
					}
				}
				pause.For(ctx, arrival)
				seen.Arrived, _ = e.heard()
				return seen, nil
			}, Judge: arrived},
		{Name: "open a control stream to the member next door", From: Neighbour, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(lodger)
				if err != nil {
					return seen, err
				}
				for _, a := range []netip.Addr{f.address(victim), f.overlay(victim, true)} {
					c, err := p.connect(ctx, netip.AddrPortFrom(a, controlPort))
					if err != nil {
						seen.Refusal = err.Error()
						continue
					}
					t, err := p.secure(ctx, c, identity.ALPNRPC, nil)
					if err != nil {
						seen.Refusal = err.Error()
						continue
					}
					b, _ := heard(t, time.Second)
					t.Close()
					if len(b) > 0 {
						seen.Given = append(seen.Given, "bytes of the control net")
					}
				}
				return seen, nil
			}, Judge: given},
	}
}
