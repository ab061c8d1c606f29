package redteam

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// neighbour is the hardware address of a host on a link. A datagram to it makes the kernel ask. Call it inside the
// namespace.
func neighbour(l *net.Interface, via netip.Addr) (net.HardwareAddr, error) {
	family := netlink.FAMILY_V4
	network := "udp4"
	if via.Is6() {
		family, network = netlink.FAMILY_V6, "udp6"
	}
	c, err := net.Dial(network, netip.AddrPortFrom(via, 9).String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		_, _ = c.Write([]byte{0}) // refused or not: the kernel has asked for the address
		list, err := netlink.NeighList(l.Index, family)
		if err != nil {
			return nil, err
		}
		for _, n := range list {
			if a, ok := netip.AddrFromSlice(n.IP); ok && a.Unmap() == via.WithZone("") && len(n.HardwareAddr) == 6 {
				return n.HardwareAddr, nil
			}
		}
	}
	return nil, fmt.Errorf("%s does not answer on %s", via, l.Name)
}
