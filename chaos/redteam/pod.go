package redteam

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	spoofPort = 9998
	spoofMark = "red team"
	// arrival is how long a packet may take to a victim.
	arrival = 700 * time.Millisecond
)

// podRaw sends raw packets from the hostile pod to its host.
func (f *Field) podRaw(v4 bool) (*raw, error) {
	via := netip.MustParseAddr("169.254.1.1")
	if !v4 {
		var err error
		if via, err = f.podGateway6(); err != nil {
			return nil, err
		}
	}
	return openRaw(f.podNS(hostilePod), "eth0", via)
}

// podGateway6 is where the pod's IPv6 default route leads.
func (f *Field) podGateway6() (via netip.Addr, err error) {
	err = fabric.In(f.podNS(hostilePod), func() error {
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V6)
		for _, r := range routes {
			if a, ok := netip.AddrFromSlice(r.Gw); ok && a.Is6() {
				via = a.WithZone("eth0")
			}
		}
		if err == nil && !via.IsValid() {
			err = errors.New("the pod has no IPv6 gateway")
		}
		return err
	})
	return via, err
}

// spoof sends a packet from the pod with a source that is not its own, and one of its own first: when not even that
// arrives, the attempt proves nothing.
func spoof(name string, v4 bool, source func(*Field) netip.Addr) Attempt {
	return Attempt{Name: name, From: Pod, Guard: PodSources,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			// systemd sets this, so that the kernel's own check lets more through.
			restore, err := f.sysctl(victim, map[string]string{"/proc/sys/net/ipv4/conf/all/rp_filter": "2"})
			if err != nil {
				return seen, err
			}
			defer restore()
			e, err := listen(f.ns(relayNode), spoofPort, spoofMark)
			if err != nil {
				return seen, err
			}
			defer e.close()
			r, err := f.podRaw(v4)
			if err != nil {
				return seen, err
			}
			defer r.close()
			to := netip.AddrPortFrom(f.overlay(relayNode, v4), spoofPort)
			own := f.podAddr(hostilePod, v4)
			send := func(from netip.Addr) error {
				return r.send(datagram(netip.AddrPortFrom(from, 4444), to, []byte(spoofMark)))
			}
			err = until(ctx, patience, func() error {
				if err := send(own); err != nil {
					return err
				}
				if !slices.Contains(e.wait(ctx, arrival), own.String()) {
					return fmt.Errorf("not even a packet with the pod's own source %s arrives", own)
				}
				return nil
			})
			if err != nil {
				return seen, err
			}
			for range 3 {
				if err := send(source(f)); err != nil {
					return seen, err
				}
			}
			pause.For(ctx, arrival)
			seen.Arrived, _ = e.heard()
			seen.Arrived = slices.DeleteFunc(seen.Arrived, func(s string) bool { return s == own.String() })
			return seen, nil
		}, Judge: arrived}
}

// arrived judges by what came through.
func arrived(s Seen) string {
	if len(s.Arrived) == 0 {
		return ""
	}
	return fmt.Sprintf("%d packets arrive from %s", len(s.Arrived), s.Arrived[0])
}

func pods() []Attempt {
	return []Attempt{
		spoof("send with its node's overlay address, IPv4", true,
			func(f *Field) netip.Addr { return f.overlay(victim, true) }),
		spoof("send with its node's overlay address, IPv6", false,
			func(f *Field) netip.Addr { return f.overlay(victim, false) }),
		spoof("send with another pod's address, IPv4", true, func(f *Field) netip.Addr { return f.podAddr(honestPod, true) }),
		spoof("send with another pod's address, IPv6", false,
			func(f *Field) netip.Addr { return f.podAddr(honestPod, false) }),
		spoof("send with another member's overlay address, IPv6", false,
			func(f *Field) netip.Addr { return f.overlay(other, false) }),
		{Name: "reach the agent's metrics on its node", From: Pod, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.fromPod(ctx, 9469)
			}, Judge: given},
		{Name: "speak to the control net without an identity", From: Pod, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(bystander)
				if err != nil {
					return seen, err
				}
				p.ns, p.tunnel = f.podNS(hostilePod), true
				for _, alpn := range []string{"skein-rpc", "skein-raft", "skein-gossip"} {
					short, cancel := context.WithTimeout(ctx, time.Second) // packets that are dropped answer nothing
					c, err := p.Dial(short, f.id(relayNode), alpn)
					cancel()
					if err != nil {
						seen.Refusal = err.Error()
						continue
					}
					_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
					seen.hear(c, alpn)
					c.Close()
				}
				return seen, nil
			}, Judge: given},
		{Name: "put packets into another pod's egress tunnel by FoU", From: Pod, Guard: FoU,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.throughFoU(ctx, f.podNS(hostilePod), f.podAddr(honestPod, true), f.podNS(honestPod),
					f.podAddr(honestPod, true))
			}, Judge: arrived},
		{Name: "put packets into its node's egress tunnel by FoU", From: Pod, Guard: FoU,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.throughFoU(ctx, f.podNS(hostilePod), f.overlay(victim, true), f.ns(victim), f.address(victim))
			}, Judge: arrived},
		{Name: "hold every place at the control net with connections that say nothing", From: Pod, Guard: Fair,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.crowd(ctx, f.podNS(hostilePod), netip.AddrPortFrom(f.overlay(relayNode, true), controlPort), 600, 256)
			}, Judge: bounded("connections held")},
	}
}

// fromPod asks a port of the pod's node over HTTP, at each of the node's addresses that a pod may know.
func (f *Field) fromPod(ctx context.Context, port uint16) (seen Seen, err error) {
	for _, a := range []netip.Addr{netip.MustParseAddr("169.254.1.1"), f.overlay(victim, true), f.address(victim),
		f.overlay(relayNode, true)} {
		var c net.Conn
		err := fabric.In(f.podNS(hostilePod), func() (err error) {
			d := net.Dialer{Timeout: arrival}
			c, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(a, port).String())
			return err
		})
		if err != nil {
			seen.Refusal = err.Error()
			continue
		}
		_, _ = fmt.Fprint(c, "GET /metrics HTTP/1.0\r\n\r\n")
		b, _ := heard(c, time.Second)
		c.Close()
		if len(b) > 0 {
			seen.Given = append(seen.Given, fmt.Sprintf("%d bytes from %s", len(b), netip.AddrPortFrom(a, port)))
		}
	}
	return seen, nil
}

// throughFoU sends an inner packet to UDP port 5555 of a client and listens inside it. The inner source is one that
// only the egress's tunnel may bring.
func (f *Field) throughFoU(ctx context.Context, from string, outer netip.Addr, inside string,
	inner netip.Addr) (seen Seen, err error) {
	e, err := listen(inside, spoofPort, spoofMark)
	if err != nil {
		return seen, err
	}
	defer e.close()
	c, err := dialUDP(from, netip.AddrPortFrom(outer, fouPort))
	if err != nil {
		return seen, err
	}
	defer c.Close()
	packet := datagram(netip.MustParseAddrPort("203.0.113.7:4444"), netip.AddrPortFrom(inner, spoofPort),
		[]byte(spoofMark))
	for range 5 {
		if _, err := c.Write(packet); err != nil {
			seen.Refusal = err.Error() // an ICMP refusal of the one before
		}
		pause.For(ctx, 50*time.Millisecond)
	}
	seen.Arrived = e.wait(ctx, arrival)
	return seen, nil
}

// crowd opens connections to a port of the server and says nothing. What counts is how many more than before the server
// has once it had the time to turn some away, and whether it still lets an honest member in meanwhile.
func (f *Field) crowd(ctx context.Context, ns string, to netip.AddrPort, count, bound int) (seen Seen, err error) {
	seen.Bound = bound
	before := established(f.ns(relayNode), int(to.Port()))
	var mu sync.Mutex
	var all sync.WaitGroup
	var conns []net.Conn
	gate := make(chan struct{}, 200)
	for range count {
		gate <- struct{}{}
		all.Go(func() {
			defer func() { <-gate }()
			_ = fabric.In(ns, func() error {
				d := net.Dialer{Timeout: time.Second}
				c, err := d.DialContext(ctx, "tcp", to.String())
				if err == nil {
					mu.Lock()
					conns = append(conns, c)
					mu.Unlock()
				}
				return err
			})
		})
	}
	all.Wait()
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	if len(conns) == 0 {
		seen.Refusal = "no connection was taken"
		return seen, nil
	}
	_ = until(ctx, 2*time.Second, func() error {
		if seen.Count = established(f.ns(relayNode), int(to.Port())) - before; seen.Count > bound {
			return errors.New("there are more than may be")
		}
		return nil
	})
	if err := f.greets(ctx); err != nil {
		seen.Lost = append(seen.Lost, "an honest member does not get in: "+brief(err.Error()))
	}
	return seen, nil
}
