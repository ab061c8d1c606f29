package plainwg

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// kernelClient is a plain peer with the kernel's WireGuard: a link in a namespace of its own. Its UDP socket is in the
// namespace from which the link was made, where the nodes are.
func kernelClient(t *testing.T, private, carrierKey, psk dataplane.Key, nodes ...*node) end {
	t.Helper()
	ns := testns.New(t, "plain")
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Namespace = "wg0", netlink.NsFd(ns.Handle)
	err := netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs})
	if errors.Is(err, unix.EOPNOTSUPP) && os.Getenv("SKEIN_WANT_KERNEL") != "1" {
		t.Skip("this kernel has no WireGuard")
	}
	if err != nil {
		t.Fatal(err)
	}
	preshared, keepalive := wgtypes.Key(psk), 25*time.Second
	config := wgtypes.Config{PrivateKey: (*wgtypes.Key)(&private)}
	peer := func(key dataplane.Key, at string, allowed ...net.IPNet) {
		endpoint, err := net.ResolveUDPAddr("udp", at)
		if err != nil {
			t.Fatal(err)
		}
		config.Peers = append(config.Peers, wgtypes.PeerConfig{PublicKey: wgtypes.Key(key), PresharedKey: &preshared,
			Endpoint: endpoint, PersistentKeepaliveInterval: &keepalive, AllowedIPs: allowed})
	}
	peer(carrierKey, nodes[0].port, net.IPNet{IP: net.IPv4(10, 4, 0, 0), Mask: net.CIDRMask(16, 32)})
	for _, n := range nodes {
		peer(n.own, n.port)
	}
	var packets *os.File
	ns.Must("configure wg0", func() (err error) {
		packets, err = openLink(attrs.Name, config)
		return err
	})
	out, done := make(chan []byte, 16), make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, dataplane.MTU)
		for {
			n, err := packets.Read(b)
			if err != nil {
				return
			}
			select {
			case out <- append([]byte(nil), b[:n]...):
			default: // nobody reads here now
			}
		}
	}()
	t.Cleanup(func() {
		packets.Close()
		<-done
	})
	return end{func(b []byte) {
		if _, err := packets.Write(b); err != nil {
			t.Error(err)
		}
	}, out}
}

// openLink sets a link up and returns what sends IPv4 packets into it, and receives those that come out.
func openLink(name string, config wgtypes.Config) (*os.File, error) {
	c, err := wgctrl.New()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.ConfigureDevice(name, config); err != nil {
		return nil, err
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return nil, err
	}
	const ip = unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8 // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, ip)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ip, Ifindex: l.Attrs().Index}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind to %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
