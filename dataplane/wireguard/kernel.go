package wireguard

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/nlcount"
)

type kernelDevice struct {
	name   string
	client *wgctrl.Client
}

func openKernel(c OpenConfig) (Device, int, error) {
	_, kind, err := linkKind(c.Link)
	if err != nil {
		return nil, 0, err
	}
	created := 0
	switch kind {
	case "wireguard":
	case "":
		a := netlink.NewLinkAttrs()
		a.Name = c.Link
		err := netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: a})
		switch {
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EPROTONOSUPPORT):
			return nil, 0, fmt.Errorf("creating WireGuard link %s: %w", c.Link, ErrNoKernel)
		case errors.Is(err, unix.EPERM):
			return nil, 0, fmt.Errorf("creating WireGuard link %s: %w: run as root or with CAP_NET_ADMIN", c.Link, err)
		case err != nil && !errors.Is(err, unix.EEXIST):
			return nil, 0, fmt.Errorf("creating WireGuard link %s: %w", c.Link, err)
		}
		created++
	case "tuntap":
		return nil, 0, fmt.Errorf("link %s exists and is a TUN link, held by a running userspace agent: stop it first",
			c.Link)
	default:
		return nil, 0, foreignLink(c.Link, kind)
	}
	client, err := wgctrl.New()
	if err != nil {
		return nil, created, fmt.Errorf("opening WireGuard's netlink family: %w", err)
	}
	return &kernelDevice{name: c.Link, client: client}, created, nil
}

func (d *kernelDevice) Driver() string        { return Kernel }
func (d *kernelDevice) SetMTU(int)            {}
func (d *kernelDevice) Done() <-chan struct{} { return nil }
func (d *kernelDevice) Close() error          { return d.client.Close() }

func (d *kernelDevice) Read() (State, []dataplane.PeerStatus, error) {
	nlcount.Sent(1)
	dev, err := d.client.Device(d.name)
	if errors.Is(err, os.ErrNotExist) {
		return State{}, nil, ErrGone
	}
	if err != nil {
		return State{}, nil, fmt.Errorf("reading WireGuard device %s: %w", d.name, err)
	}
	s := State{PrivateKey: dataplane.Key(dev.PrivateKey), Port: dev.ListenPort, Mark: uint32(dev.FirewallMark),
		Peers: make(map[dataplane.Key]dataplane.Peer, len(dev.Peers))}
	status := make([]dataplane.PeerStatus, 0, len(dev.Peers))
	for _, p := range dev.Peers {
		k := dataplane.Key(p.PublicKey)
		peer := dataplane.Peer{PresharedKey: dataplane.Key(p.PresharedKey), Endpoint: fromUDPAddr(p.Endpoint),
			Keepalive: p.PersistentKeepaliveInterval}
		for _, n := range p.AllowedIPs {
			peer.AllowedIPs = append(peer.AllowedIPs, rtnl.Prefix(&n))
		}
		peer.AllowedIPs = normal(peer.AllowedIPs)
		s.Peers[k] = peer
		status = append(status, dataplane.PeerStatus{PublicKey: k, Endpoint: peer.Endpoint,
			LastHandshake: p.LastHandshakeTime,
			RxBytes:       uint64(p.ReceiveBytes), TxBytes: uint64(p.TransmitBytes)})
	}
	sortStatus(status)
	return s, status, nil
}

func (d *kernelDevice) Status() (*State, []dataplane.PeerStatus, error) {
	s, peers, err := d.Read()
	return &s, peers, err
}

func (d *kernelDevice) Write(batch []Op) error {
	var c wgtypes.Config
	for _, op := range batch {
		if op.PrivateKey != nil {
			c.PrivateKey = (*wgtypes.Key)(op.PrivateKey)
		}
		if op.Port != nil {
			c.ListenPort = op.Port
		}
		if op.Mark != nil {
			m := int(*op.Mark)
			c.FirewallMark = &m
		}
		if op.Peer != nil {
			c.Peers = append(c.Peers, peerConfig(*op.Peer))
		}
	}
	nlcount.Sent(1)
	err := d.client.ConfigureDevice(d.name, c)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return ErrGone
	case errors.Is(err, unix.EADDRINUSE) && c.ListenPort != nil:
		return portInUse(*c.ListenPort, err)
	case err != nil:
		return fmt.Errorf("configuring WireGuard device %s: %w", d.name, err)
	}
	return nil
}

// SetHops does nothing: with this driver package hopnet has them.
func (d *kernelDevice) SetHops(dataplane.Hops) []string { return nil }

// HasHops is always true: there is nothing to change.
func (d *kernelDevice) HasHops(dataplane.Hops) bool { return true }

// HopCounts are none.
func (d *kernelDevice) HopCounts() hop.Counts { return hop.Counts{} }

func portInUse(port int, err error) error {
	return fmt.Errorf("UDP port %d for WireGuard: %w: stop the other program or set ports.wireguard", port, err)
}

func peerConfig(p PeerOp) wgtypes.PeerConfig {
	c := wgtypes.PeerConfig{PublicKey: wgtypes.Key(p.Key), Remove: p.Action == Remove, UpdateOnly: p.Action != Add,
		PresharedKey: (*wgtypes.Key)(p.PresharedKey), PersistentKeepaliveInterval: p.Keepalive}
	if p.Endpoint.IsValid() {
		c.Endpoint = net.UDPAddrFromAddrPort(p.Endpoint)
	}
	ips := p.Gain
	if len(p.Lose) > 0 { // no message takes one allowed IP away: say all that remain
		c.ReplaceAllowedIPs = true
		ips = p.Final
	}
	for _, ip := range ips {
		c.AllowedIPs = append(c.AllowedIPs, *rtnl.Net(ip))
	}
	return c
}

func fromUDPAddr(a *net.UDPAddr) netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	return unmapped(a.AddrPort())
}

func sortStatus(s []dataplane.PeerStatus) {
	slices.SortFunc(s, func(a, b dataplane.PeerStatus) int { return a.PublicKey.Compare(b.PublicKey) })
}
