package podnet

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// link is the kernel's state of a link.
type link struct {
	index, peer int // peer: index of a veth's other end, in its namespace
	name, kind  string
	alias       string
	up, running bool // running: it can send
	mtu         int
	mac         net.HardwareAddr
	forwarding4 bool
	ipv6        bool // IPv6 exists on the link and is not disabled
	acceptRA    int
}

func decodeLink(m netlink.Message) (l link, ok bool) {
	if m.Header.Type != unix.RTM_NEWLINK || len(m.Data) < unix.SizeofIfInfomsg {
		return l, false
	}
	l.index = int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
	flags := binary.NativeEndian.Uint32(m.Data[8:])
	l.up, l.running = flags&unix.IFF_UP != 0, flags&unix.IFF_RUNNING != 0
	ad, err := netlink.NewAttributeDecoder(m.Data[unix.SizeofIfInfomsg:])
	if err != nil {
		return l, false
	}
	for ad.Next() {
		switch ad.Type() {
		case unix.IFLA_IFNAME:
			l.name = ad.String()
		case unix.IFLA_IFALIAS:
			l.alias = ad.String()
		case unix.IFLA_MTU:
			l.mtu = int(ad.Uint32())
		case unix.IFLA_ADDRESS:
			l.mac = ad.Bytes()
		case unix.IFLA_LINK:
			l.peer = int(ad.Uint32())
		case unix.IFLA_LINKINFO:
			ad.Nested(func(ad *netlink.AttributeDecoder) error {
				for ad.Next() {
					if ad.Type() == unix.IFLA_INFO_KIND {
						l.kind = ad.String()
					}
				}
				return nil
			})
		case unix.IFLA_AF_SPEC:
			ad.Nested(l.decodeFamilies)
		}
	}
	return l, ad.Err() == nil
}

// decodeFamilies reads the settings of IPv4, numbered from 1, and IPv6, numbered from 0.
func (l *link) decodeFamilies(ad *netlink.AttributeDecoder) error {
	setting := func(b []byte, n int) int {
		if len(b) < 4*(n+1) {
			return 0
		}
		return int(int32(binary.NativeEndian.Uint32(b[4*n:])))
	}
	for ad.Next() {
		f := ad.Type()
		ad.Nested(func(ad *netlink.AttributeDecoder) error {
			for ad.Next() {
				switch {
				case f == unix.AF_INET && ad.Type() == unix.IFLA_INET_CONF:
					l.forwarding4 = setting(ad.Bytes(), ipv4Forwarding-1) != 0
				case f == unix.AF_INET6 && ad.Type() == unix.IFLA_INET6_CONF:
					l.ipv6 = setting(ad.Bytes(), ipv6DisableIPv6) == 0
					l.acceptRA = setting(ad.Bytes(), ipv6AcceptRA)
				}
			}
			return nil
		})
	}
	return nil
}

// address is one address of a link.
type address struct {
	index  int
	prefix netip.Prefix
}

func decodeAddress(m netlink.Message) (a address, ok bool) {
	if m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg {
		return a, false
	}
	a.index = int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
	ad, err := netlink.NewAttributeDecoder(m.Data[unix.SizeofIfAddrmsg:])
	if err != nil {
		return a, false
	}
	var local, addr netip.Addr
	for ad.Next() {
		switch ad.Type() {
		case unix.IFA_LOCAL:
			local, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.IFA_ADDRESS:
			addr, _ = netip.AddrFromSlice(ad.Bytes())
		}
	}
	if !local.IsValid() { // IPv6 has only the other attribute
		local = addr
	}
	a.prefix = netip.PrefixFrom(local, int(m.Data[1]))
	return a, ad.Err() == nil && local.IsValid()
}

// route is one route of a table.
type route struct {
	table   int
	kind    byte
	dst     netip.Prefix
	gateway netip.Addr
	index   int // of the link it leads through
}

func decodeRoute(m netlink.Message) (r route, ok bool) {
	if m.Header.Type != unix.RTM_NEWROUTE || len(m.Data) < unix.SizeofRtMsg {
		return r, false
	}
	r.table, r.kind = int(m.Data[4]), m.Data[7]
	dst := netip.IPv4Unspecified()
	if m.Data[0] == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[unix.SizeofRtMsg:])
	if err != nil {
		return r, false
	}
	for ad.Next() {
		switch ad.Type() {
		case unix.RTA_TABLE:
			r.table = int(ad.Uint32())
		case unix.RTA_DST:
			dst, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.RTA_GATEWAY:
			r.gateway, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.RTA_OIF:
			r.index = int(ad.Uint32())
		}
	}
	r.dst = netip.PrefixFrom(dst, int(m.Data[1]))
	return r, ad.Err() == nil && r.dst.IsValid()
}

// toPod reports whether the route leads to a single address through a link.
func (r route) toPod() bool {
	return r.kind == unix.RTN_UNICAST && r.dst.IsSingleIP() && r.index != 0
}
