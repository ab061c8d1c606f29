package redteam

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/internal/pause"

	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const meshLink = "skein0"

// throughLeaders has sites speak through leaders from now on. mallory is alone in its site, so it leads it, and the
// victim's host takes its packets of that site's.
func (f *Field) throughLeaders(ctx context.Context) error {
	if _, err := f.api(relayNode).Settings(ctx, &skeinv1.SettingsRequest{Fields: []string{"topology"},
		Change: &skeinv1.Settings{Topology: "site"}}); err != nil {
		return fmt.Errorf("topology site: %w", err)
	}
	for _, n := range []string{attacker, victim, relayNode} {
		if err := until(ctx, 6*patience, func() error {
			s, err := f.api(n).Status(ctx, &skeinv1.StatusRequest{})
			if err == nil && s.GetTopology() != "site" {
				err = fmt.Errorf("%s is not told of the topology", n)
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// wrapped is a packet inside another one, as leaders pass them on.
func wrapped(from, to netip.Addr, inner []byte) []byte {
	h := make([]byte, 20, 20+len(inner))
	h[0], h[8], h[9] = 0x45, 64, unix.IPPROTO_IPIP
	if inner[0]>>4 == 6 {
		h[9] = unix.IPPROTO_IPV6
	}
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(inner)))
	binary.BigEndian.PutUint16(h[6:], 0x4000) // not to be cut
	copy(h[12:], from.AsSlice())
	copy(h[16:], to.AsSlice())
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(h, inner...)
}

// openMesh sends whole packets into a node's own tunnel, past that node's rules.
func openMesh(ns string) (r *raw, err error) {
	r = &raw{}
	err = fabric.In(ns, func() error {
		l, err := net.InterfaceByName(meshLink)
		if err != nil {
			return err
		}
		if r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		for i, proto := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
			r.addr[i] = unix.SockaddrLinklayer{Protocol: proto>>8 | proto<<8, Ifindex: l.Index}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("send raw packets into the tunnel of %s: %w", ns, err)
	}
	return r, nil
}

// hop has mallory bring the victim packets of somebody else inside of others. One of its own goes first: when not even
// that arrives, the attempt proves nothing.
func hop(name string, v4 bool, source func(*Field) netip.Addr) Attempt {
	return Attempt{Name: name, From: Member, Guard: Hops, Judge: arrived,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if err := f.throughLeaders(ctx); err != nil {
				return seen, err
			}
			e, err := listen(f.ns(victim), spoofPort, spoofMark)
			if err != nil {
				return seen, err
			}
			defer e.close()
			r, err := openMesh(f.ns(attacker))
			if err != nil {
				return seen, err
			}
			defer r.close()
			own, to := f.overlay(attacker, v4), netip.AddrPortFrom(f.overlay(victim, v4), spoofPort)
			send := func(from netip.Addr) error {
				return r.send(wrapped(f.overlay(attacker, true), f.overlay(victim, true),
					datagram(netip.AddrPortFrom(from, 4444), to, []byte(spoofMark))))
			}
			if err := until(ctx, 6*patience, func() error {
				if err := send(own); err != nil {
					return err
				}
				if !slices.Contains(e.wait(ctx, arrival), own.String()) {
					return fmt.Errorf("not even a packet with the leader's own source %s arrives", own)
				}
				return nil
			}); err != nil {
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
		}}
}

// hopFrom has somebody who is not a member send a node a packet inside of another one, which names whoever outer gives
// as the hop before. Inside is a packet of a member of another site.
func hopFrom(name string, place Place, guard Guard, to string, open func(context.Context, *Field) (sender, error),
	outer func(*Field, sender) netip.Addr) Attempt {
	return Attempt{Name: name, From: place, Guard: guard, Judge: arrived,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if err := f.throughLeaders(ctx); err != nil {
				return seen, err
			}
			restore, err := f.forwards(victim) // what comes from its LAN goes into the tunnel then
			if err != nil {
				return seen, err
			}
			defer restore()
			e, err := listen(f.ns(to), spoofPort, spoofMark)
			if err != nil {
				return seen, err
			}
			defer e.close()
			s, err := open(ctx, f)
			if err != nil {
				return seen, err
			}
			defer s.close()
			for range 3 {
				for _, v4 := range []bool{true, false} { // of the packet inside
					if err := s.send(wrapped(outer(f, s), f.overlay(to, true),
						datagram(netip.AddrPortFrom(f.overlay(other, v4), 4444),
							netip.AddrPortFrom(f.overlay(to, v4), spoofPort), []byte(spoofMark)))); err != nil {
						return seen, err
					}
				}
			}
			pause.For(ctx, arrival)
			seen.Arrived, _ = e.heard()
			return seen, nil
		}}
}

// sender sends whole packets.
type sender interface {
	send([]byte) error
	close()
}

// leaders are attempts with the packets that leaders pass on. They change the topology for what comes after them.
func leaders() []Attempt {
	pod := func(_ context.Context, f *Field) (sender, error) { return f.podRaw(true) }
	plainPeer := func(ctx context.Context, f *Field) (sender, error) { return f.joinedPlain(ctx) }
	lan := func(_ context.Context, f *Field) (sender, error) {
		return openRaw(f.ns(lodger), "eth0", f.address(victim))
	}
	leader := func(f *Field, _ sender) netip.Addr { return f.overlay("dc3", true) }
	return []Attempt{
		hop("bring a packet of another site's member as a leader, IPv4", true,
			func(f *Field) netip.Addr { return f.overlay(other, true) }),
		hop("bring a packet of another site's member as a leader, IPv6", false,
			func(f *Field) netip.Addr { return f.overlay(other, false) }),
		hop("bring the victim a packet of its own as a leader", true,
			func(f *Field) netip.Addr { return f.overlay(victim, true) }),
		hop("bring a packet of the victim's own pod as a leader", true,
			func(f *Field) netip.Addr { return f.podAddr(honestPod, true) }),
		hop("bring a packet of a server as a leader", true,
			func(f *Field) netip.Addr { return f.overlay(relayNode, true) }),
		hopFrom("send a packet inside another one, as leaders do", Pod, Hops, relayNode, pod,
			func(f *Field, _ sender) netip.Addr { return f.podAddr(hostilePod, true) }),
		hopFrom("send a packet inside one of a leader's", Pod, PodSources, relayNode, pod, leader),
		hopFrom("send a packet inside another one, as leaders do", PlainPeer, Hops, "dc2", plainPeer,
			func(_ *Field, s sender) netip.Addr { return s.(*plain).ipv4 }),
		hopFrom("send a packet inside one of a leader's", PlainPeer, PlainOwn, "dc2", plainPeer, leader),
		hopFrom("send a packet inside one of a leader's", Neighbour, LinkSources, victim, lan, leader),
	}
}
