package redteam

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/identity"
)

// plain is a plain peer's WireGuard without a kernel behind it: any packet can be put into its tunnel.
type plain struct {
	dev        *device.Device
	link       *queue
	ipv4, ipv6 netip.Addr
}

// queue is the link of a plain peer. What comes out of the tunnel is dropped.
type queue struct {
	packets chan []byte
	events  chan tun.Event
	closed  chan struct{}
}

func (q *queue) Read(b [][]byte, sizes []int, offset int) (int, error) {
	select {
	case p := <-q.packets:
		sizes[0] = copy(b[0][offset:], p)
		return 1, nil
	case <-q.closed:
		return 0, os.ErrClosed
	}
}

func (q *queue) Write(b [][]byte, _ int) (int, error) { return len(b), nil }

func (q *queue) Close() error {
	close(q.closed)
	close(q.events)
	return nil
}

func (q *queue) File() *os.File           { return nil }
func (q *queue) MTU() (int, error)        { return device.DefaultMTU, nil }
func (q *queue) Name() (string, error)    { return "plain", nil }
func (q *queue) Events() <-chan tun.Event { return q.events }
func (q *queue) BatchSize() int           { return 1 }

// newPlain has an admin add a plain peer that the relay carries, and starts it at the stranger's.
func (f *Field) newPlain(ctx context.Context) (*plain, error) {
	key, err := identity.NewWireGuardKey()
	if err != nil {
		return nil, err
	}
	public, err := key.Public()
	if err != nil {
		return nil, err
	}
	added, err := f.api(relayNode).AddPlainPeer(ctx, &skeinv1.AddPlainPeerRequest{Name: "phone", PublicKey: public[:],
		LifetimeNanos: int64(time.Hour), Via: []string{relayNode}, Replace: true})
	if err != nil {
		return nil, err
	}
	if len(added.GetEndpoints()) == 0 {
		return nil, errors.New("a plain peer without a carrier's endpoint")
	}
	p := &plain{link: &queue{packets: make(chan []byte), events: make(chan tun.Event, 1), closed: make(chan struct{})}}
	if p.ipv4, err = netip.ParseAddr(added.GetPeer().GetIpv4()); err == nil {
		p.ipv6, err = netip.ParseAddr(added.GetPeer().GetIpv6())
	}
	if err != nil {
		return nil, err
	}
	p.dev = device.NewDevice(p.link, conn.NewDefaultBind(), device.NewLogger(device.LogLevelSilent, ""))
	err = fabric.In(f.ns(stranger), func() error {
		return errors.Join(p.dev.IpcSet(plainConfig(added, key)), p.dev.Up())
	})
	if err != nil {
		p.close()
		return nil, fmt.Errorf("start a plain peer: %w", err)
	}
	return p, nil
}

// plainConfig is what a configuration as printed comes to.
func plainConfig(added *skeinv1.AddPlainPeerResponse, key identity.WireGuardKey) string {
	var b strings.Builder
	at := added.GetEndpoints()[0]
	fmt.Fprintf(&b, "private_key=%s\n", hex.EncodeToString(key[:]))
	for _, public := range [][]byte{added.GetPeer().GetCarrierKey(), at.GetWireguardKey()} {
		fmt.Fprintf(&b, "public_key=%s\npreshared_key=%s\nendpoint=%s\npersistent_keepalive_interval=5\n",
			hex.EncodeToString(public), hex.EncodeToString(added.GetPresharedKey()), at.GetAddress())
	}
	// The last peer keeps a way open; the first one is the mesh.
	return strings.Replace(b.String(), "persistent_keepalive_interval=5\n",
		"persistent_keepalive_interval=5\nallowed_ip=0.0.0.0/0\nallowed_ip=::/0\n", 1)
}

func (p *plain) close() { p.dev.Close() }

// send puts a packet into the tunnel.
func (p *plain) send(b []byte) error {
	select {
	case p.link.packets <- b:
		return nil
	case <-time.After(patience):
		return errors.New("the plain peer's WireGuard takes no packets")
	}
}

func (p *plain) own(v4 bool) netip.Addr {
	if v4 {
		return p.ipv4
	}
	return p.ipv6
}

// joinedPlain starts a plain peer, and returns when a packet of its own arrives at its carrier: without, an attempt
// proves nothing.
func (f *Field) joinedPlain(ctx context.Context) (*plain, error) {
	p, err := f.newPlain(ctx)
	if err != nil {
		return nil, err
	}
	const mark = "a plain peer's own"
	e, err := listen(f.ns(relayNode), spoofPort+1, mark)
	if err != nil {
		p.close()
		return nil, err
	}
	defer e.close()
	err = until(ctx, 6*patience, func() error {
		for _, v4 := range []bool{true, false} {
			if err := p.send(datagram(netip.AddrPortFrom(p.own(v4), 4444),
				netip.AddrPortFrom(f.overlay(relayNode, v4), spoofPort+1), []byte(mark))); err != nil {
				return err
			}
		}
		if from := e.wait(ctx, arrival); !slices.Contains(from, p.ipv4.String()) || !slices.Contains(from, p.ipv6.String()) {
			return fmt.Errorf("not even packets with the plain peer's own sources %s and %s arrive", p.ipv4, p.ipv6)
		}
		return nil
	})
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// fromPlain has a plain peer send a packet with somebody else's source to its carrier.
func fromPlain(name string, v4 bool, source func(*Field) netip.Addr) Attempt {
	return Attempt{Name: name, From: PlainPeer, Guard: PlainOwn, Judge: arrived,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			p, err := f.joinedPlain(ctx)
			if err != nil {
				return seen, err
			}
			defer p.close()
			e, err := listen(f.ns(relayNode), spoofPort, spoofMark)
			if err != nil {
				return seen, err
			}
			defer e.close()
			from, to := source(f), netip.AddrPortFrom(f.overlay(relayNode, v4), spoofPort)
			for range 3 {
				if err := p.send(datagram(netip.AddrPortFrom(from, 4444), to, []byte(spoofMark))); err != nil {
					return seen, err
				}
			}
			pause.For(ctx, arrival)
			seen.Arrived, _ = e.heard()
			return seen, nil
		}}
}

// plainPeers are attempts of a plain peer that an admin has added, with all that its configuration holds.
func plainPeers() []Attempt {
	return []Attempt{
		fromPlain("send with a member's overlay address, IPv4", true,
			func(f *Field) netip.Addr { return f.overlay(victim, true) }),
		fromPlain("send with a member's overlay address, IPv6", false,
			func(f *Field) netip.Addr { return f.overlay(victim, false) }),
		fromPlain("send with a pod's address", true,
			func(f *Field) netip.Addr { return f.podAddr(honestPod, true) }),
		fromPlain("send with the carrier's own overlay address", true,
			func(f *Field) netip.Addr { return f.overlay(relayNode, true) }),
		{Name: "reach the control net", From: PlainPeer, Guard: PlainPort, Judge: arrived,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) { return f.plainToControl(ctx) }},
	}
}

// plainToControl has a plain peer send to the port of the control net. Gained is an answer: a host without the rule
// answers the first packet of a TCP connection.
func (f *Field) plainToControl(ctx context.Context) (seen Seen, err error) {
	p, err := f.joinedPlain(ctx)
	if err != nil {
		return seen, err
	}
	defer p.close()
	control := netip.AddrPortFrom(f.overlay(relayNode, true), controlPort)
	err = sniff(f.ns(relayNode), func(b []byte, out bool) {
		if from, to, ok := tcpOf(b); ok && out && from == control && to.Addr() == p.ipv4 {
			seen.Arrived = append(seen.Arrived, from.String())
		}
	}, func() error {
		for range 3 {
			if err := p.send(opening(netip.AddrPortFrom(p.ipv4, 4444), control)); err != nil {
				return err
			}
		}
		pause.For(ctx, arrival)
		return nil
	})
	return seen, err
}
