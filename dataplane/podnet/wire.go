package podnet

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Constants of the kernel's interface (linux/veth.h, ip.h, ipv6.h, if_link.h, rtnetlink.h) that golang.org/x/sys
// lacks.
const (
	vethInfoPeer = 1

	ipv4Forwarding        = 1
	ipv4AcceptRedirects   = 4
	ipv4SendRedirects     = 6
	ipv4RPFilter          = 8
	ipv4AcceptSourceRoute = 9

	ipv6AcceptRA    = 3
	ipv6DisableIPv6 = 26

	addrGenModeNone = 1
	skipStatistics  = 1 << 3 // RTEXT_FILTER_SKIP_STATS
)

// request is one message to the kernel, with a description for errors.
type request struct {
	what string
	m    netlink.Message
}

func message(kind uint16, flags netlink.HeaderFlags, head []byte,
	attrs func(*netlink.AttributeEncoder)) netlink.Message {
	data := head
	if attrs != nil {
		ae := netlink.NewAttributeEncoder()
		attrs(ae)
		b, err := ae.Encode()
		if err != nil { // only attributes of more than 64 KiB can fail, and no input here is that long
			panic(err)
		}
		data = append(data, b...)
	}
	return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | flags},
		Data: data}
}

const (
	create = netlink.Acknowledge | netlink.Create | netlink.Excl
	change = netlink.Acknowledge
)

// ifinfo is struct ifinfomsg.
func ifinfo(index int, flags, mask uint32) []byte {
	b := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	binary.NativeEndian.PutUint32(b[8:], flags)
	binary.NativeEndian.PutUint32(b[12:], mask)
	return b
}

// newPair makes both ends, each directly in its namespace and with its final name, so that no other program sees them
// in between.
func newPair(host string, hostMAC net.HardwareAddr, a Attachment, mac net.HardwareAddr, netns int) request {
	end := func(ae *netlink.AttributeEncoder, name string, mac net.HardwareAddr) {
		ae.String(unix.IFLA_IFNAME, name)
		ae.Uint32(unix.IFLA_MTU, uint32(a.MTU))
		ae.Bytes(unix.IFLA_ADDRESS, mac)
	}
	peer := func() ([]byte, error) {
		ae := netlink.NewAttributeEncoder()
		end(ae, a.Interface, mac)
		ae.Uint32(unix.IFLA_NET_NS_FD, uint32(netns))
		b, err := ae.Encode()
		return append(ifinfo(0, 0, 0), b...), err
	}
	return request{"making the link " + host, message(unix.RTM_NEWLINK, create, ifinfo(0, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			end(ae, host, hostMAC)
			ae.Nested(unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) error {
				ae.String(unix.IFLA_INFO_KIND, "veth")
				ae.Nested(unix.IFLA_INFO_DATA, func(ae *netlink.AttributeEncoder) error {
					ae.Do(vethInfoPeer, peer)
					return nil
				})
				return nil
			})
		})}
}

// describe sets the alias and the IPv4 settings of the host's end, without writes to /proc/sys.
func describe(host, alias string) request {
	return request{"setting up the link " + host, message(unix.RTM_SETLINK, change, ifinfo(0, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_IFNAME, host)
			ae.String(unix.IFLA_IFALIAS, alias)
			ae.Nested(unix.IFLA_AF_SPEC, func(ae *netlink.AttributeEncoder) error {
				ae.Nested(unix.AF_INET, func(ae *netlink.AttributeEncoder) error {
					ae.Nested(unix.IFLA_INET_CONF, func(ae *netlink.AttributeEncoder) error {
						ae.Uint32(ipv4Forwarding, 1)
						ae.Uint32(ipv4RPFilter, 1) // a pod sends with its own address, and its host route leads back to it
						ae.Uint32(ipv4AcceptRedirects, 0)
						ae.Uint32(ipv4SendRedirects, 0)
						ae.Uint32(ipv4AcceptSourceRoute, 0)
						return nil
					})
					return nil
				})
				return nil
			})
		})}
}

// noGeneratedAddress prevents the kernel from generating an address for the link, which would delay it.
func noGeneratedAddress(index int) request {
	return request{"setting up IPv6 of the link", message(unix.RTM_SETLINK, change, ifinfo(index, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			ae.Nested(unix.IFLA_AF_SPEC, func(ae *netlink.AttributeEncoder) error {
				ae.Nested(unix.AF_INET6, func(ae *netlink.AttributeEncoder) error {
					ae.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, addrGenModeNone)
					return nil
				})
				return nil
			})
		})}
}

func setUp(what string, index int) request {
	return request{"setting " + what + " up", message(unix.RTM_SETLINK, change,
		ifinfo(index, unix.IFF_UP, unix.IFF_UP), nil)}
}

func deleteLink(name string, index int) request {
	return request{"deleting link " + name, message(unix.RTM_DELLINK, change, ifinfo(index, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			if index == 0 {
				ae.String(unix.IFLA_IFNAME, name)
			}
		})}
}

func getLink(name string) request {
	return request{"reading link " + name, message(unix.RTM_GETLINK, 0, ifinfo(0, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			ae.String(unix.IFLA_IFNAME, name)
			ae.Uint32(unix.IFLA_EXT_MASK, skipStatistics)
		})}
}

func getLinkAt(index int) request {
	return request{"reading a link", message(unix.RTM_GETLINK, 0, ifinfo(index, 0, 0), func(ae *netlink.AttributeEncoder) {
		ae.Uint32(unix.IFLA_EXT_MASK, skipStatistics)
	})}
}

func dumpLinks() request {
	return request{"reading links", message(unix.RTM_GETLINK, netlink.Dump, ifinfo(0, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			ae.Uint32(unix.IFLA_EXT_MASK, skipStatistics)
		})}
}

func family(a netip.Addr) byte { return byte(rtnl.Family(a)) }

// ifaddr is struct ifaddrmsg.
func ifaddr(family byte, bits int, flags, scope byte, index int) []byte {
	b := make([]byte, unix.SizeofIfAddrmsg)
	b[0], b[1], b[2], b[3] = family, byte(bits), flags, scope
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	return b
}

// newAddress adds an address without duplicate detection: no other host on the link can have it.
func newAddress(p netip.Prefix, scope byte, index int) request {
	var flags byte
	if p.Addr().Is6() {
		flags = unix.IFA_F_NODAD
	}
	return request{"adding address " + p.String(), message(unix.RTM_NEWADDR, create, ifaddr(family(p.Addr()), p.Bits(),
		flags, scope, index), func(ae *netlink.AttributeEncoder) {
		ae.Bytes(unix.IFA_LOCAL, p.Addr().AsSlice())
		ae.Bytes(unix.IFA_ADDRESS, p.Addr().AsSlice())
	})}
}

func dumpAddresses(index int) request {
	return request{"reading addresses", message(unix.RTM_GETADDR, netlink.Dump,
		ifaddr(unix.AF_UNSPEC, 0, 0, 0, index), nil)}
}

// rtmsg is struct rtmsg of a route.
func rtmsg(family byte, bits int, table, protocol, scope, kind byte) []byte {
	b := make([]byte, unix.SizeofRtMsg)
	b[0], b[1], b[4], b[5], b[6], b[7] = family, byte(bits), table, protocol, scope, kind
	return b
}

// newHostRoute is the host's route to a pod. Its scope is global although the pod is on the link: with scope link,
// the kernel would use the link's own address 169.254.1.1 as the host's source.
func newHostRoute(addr netip.Addr, index, table int) request {
	head := rtmsg(family(addr), addr.BitLen(), byte(table), dataplane.RouteProtocol, unix.RT_SCOPE_UNIVERSE,
		unix.RTN_UNICAST)
	return request{"adding the host's route to " + addr.String(), message(unix.RTM_NEWROUTE, create, head,
		func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_DST, addr.AsSlice())
			ae.Uint32(unix.RTA_OIF, uint32(index))
		})}
}

// newGatewayRoutes are the pod's default route and, for IPv4, the route to the gateway.
func newGatewayRoutes(gateway netip.Addr, index int) []request {
	f := family(gateway)
	var out []request
	if gateway.Is4() {
		head := rtmsg(f, 32, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_LINK, unix.RTN_UNICAST)
		out = append(out, request{"adding the pod's route to " + gateway.String(), message(unix.RTM_NEWROUTE, create, head,
			func(ae *netlink.AttributeEncoder) {
				ae.Bytes(unix.RTA_DST, gateway.AsSlice())
				ae.Uint32(unix.RTA_OIF, uint32(index))
			})})
	}
	head := rtmsg(f, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST)
	return append(out, request{"adding the pod's default route via " + gateway.String(), message(unix.RTM_NEWROUTE, create,
		head, func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_GATEWAY, gateway.AsSlice())
			ae.Uint32(unix.RTA_OIF, uint32(index))
		})})
}

// getRoute asks for the kernel's route to an IPv6 address; index: through this link, if not 0.
func getRoute(addr netip.Addr, index int) request {
	return request{"asking for the route to " + addr.String(),
		message(unix.RTM_GETROUTE, 0, rtmsg(unix.AF_INET6, 128, 0, 0, 0, 0), func(ae *netlink.AttributeEncoder) {
			ae.Bytes(unix.RTA_DST, addr.AsSlice())
			if index != 0 {
				ae.Uint32(unix.RTA_OIF, uint32(index))
			}
		})}
}

// dumpRoutes reads one family and table; index: only of this link, if not 0.
func dumpRoutes(family byte, table, index int) request {
	return request{"reading routes", message(unix.RTM_GETROUTE, netlink.Dump, rtmsg(family, 0, byte(table), 0, 0, 0),
		func(ae *netlink.AttributeEncoder) {
			ae.Uint32(unix.RTA_TABLE, uint32(table))
			if index != 0 {
				ae.Uint32(unix.RTA_OIF, uint32(index))
			}
		})}
}
