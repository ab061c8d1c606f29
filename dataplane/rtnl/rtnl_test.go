package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testns"
)

func attr(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}

func four(n int) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(n)) }

func message(kind uint16, fixed []byte, attrs ...[]byte) netlink.Message {
	m := netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: fixed}
	for _, a := range attrs {
		m.Data = append(m.Data, a...)
	}
	return m
}

func TestNotificationsAreRead(t *testing.T) {
	link := make([]byte, unix.SizeofIfInfomsg)
	copy(link[4:], four(7))
	copy(link[8:], four(unix.IFF_UP|unix.IFF_RUNNING))
	copy(link[12:], four(unix.IFF_UP))
	m := message(unix.RTM_NEWLINK, link, attr(unix.IFLA_MTU, four(1420)), attr(unix.IFLA_IFNAME, []byte("skein0\x00")))
	if flags, changed := LinkFlags(m); LinkName(m) != "skein0" || Index(m) != 7 || flags != unix.IFF_UP|unix.IFF_RUNNING ||
		changed != unix.IFF_UP {
		t.Errorf("link %q, index %d, flags %x, changed %x", LinkName(m), Index(m), flags, changed)
	}
	if mtu, ok := Number(m, unix.IFLA_MTU); mtu != 1420 || !ok {
		t.Errorf("MTU %d, %t", mtu, ok)
	}
	address := make([]byte, unix.SizeofIfAddrmsg)
	copy(address[4:], four(9))
	a := message(unix.RTM_DELADDR, address, attr(unix.IFA_ADDRESS, netip.MustParseAddr("fd00::1").AsSlice()))
	if Index(a) != 9 || Address(a, unix.IFA_ADDRESS) != netip.MustParseAddr("fd00::1") {
		t.Errorf("address %s of link %d", Address(a, unix.IFA_ADDRESS), Index(a))
	}
	if s := message(unix.RTM_NEWNETCONF, []byte{unix.AF_INET, 0, 0, 0}, attr(1, four(-1))); Index(s) != -1 {
		t.Errorf("a setting of all links is of link %d", Index(s))
	}
	route := func(family, bits, table byte, attrs ...[]byte) netlink.Message {
		b := make([]byte, unix.SizeofRtMsg)
		b[0], b[1], b[4] = family, bits, table
		return message(unix.RTM_NEWROUTE, b, attrs...)
	}
	for want, m := range map[string]netlink.Message{
		"10.64.0.0/27 in 116": route(unix.AF_INET, 27, 116, attr(unix.RTA_DST, []byte{10, 64, 0, 0})),
		"0.0.0.0/0 in 180":    route(unix.AF_INET, 0, 180),
		"::/0 in 1000":        route(unix.AF_INET6, 0, 252, attr(unix.RTA_TABLE, four(1000))),
	} {
		if got := fmt.Sprintf("%s in %d", Destination(m), Table(m)); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	rule := message(unix.RTM_DELRULE, make([]byte, unix.SizeofRtMsg), attr(6, four(1999)), attr(unix.RTA_TABLE, four(115)))
	if Priority(rule) != 1999 || Table(rule) != 115 || Destination(rule).IsValid() {
		t.Errorf("rule %d to table %d", Priority(rule), Table(rule))
	}
}

// TestDamagedNotificationsAreNothing: what is cut short, or is of another kind, is read as nothing.
func TestDamagedNotificationsAreNothing(t *testing.T) {
	whole := message(unix.RTM_NEWLINK, make([]byte, unix.SizeofIfInfomsg), attr(unix.IFLA_IFNAME, []byte("skein0\x00")))
	for _, kind := range []uint16{unix.RTM_NEWLINK, unix.RTM_NEWADDR, unix.RTM_NEWROUTE, unix.RTM_NEWRULE,
		unix.RTM_NEWNETCONF, unix.RTM_NEWNEIGH} {
		for n := range len(whole.Data) - 1 { // the last byte is padding
			m := message(kind, whole.Data[:n])
			flags, _ := LinkFlags(m)
			if LinkName(m) == "skein0" || flags != 0 || Index(m) != 0 || Table(m) != 0 || Priority(m) != 0 ||
				Destination(m).Bits() > 0 || Address(m, unix.IFA_ADDRESS).IsValid() {
				t.Errorf("type %d of %d bytes is read as something", kind, n)
			}
		}
	}
	m := message(unix.RTM_NEWLINK, append(make([]byte, unix.SizeofIfInfomsg), 2, 0, 3, 0))
	if Attribute(m, unix.IFLA_IFNAME) != nil {
		t.Error("an attribute that is shorter than its head was read")
	}
	if n := testing.AllocsPerRun(100, func() { _, _ = LinkName(whole) == "skein0", Table(whole) }); n > 1 {
		t.Errorf("%v allocations for a notification", n)
	}
}

func TestConversions(t *testing.T) {
	for _, text := range []string{"10.64.0.0/27", "0.0.0.0/0", "192.0.2.1/32", "fd00::/64", "::/0", "fd00::1/128"} {
		p := netip.MustParsePrefix(text)
		if got := Prefix(Net(p)); got != p {
			t.Errorf("%s comes back as %s", p, got)
		}
		if p.IsSingleIP() && Prefix(Host(p.Addr())) != p {
			t.Errorf("%s as a host is %s", p.Addr(), Prefix(Host(p.Addr())))
		}
		if p.Bits() == 0 && Prefix(Anywhere(Family(p.Addr()))) != p {
			t.Errorf("anywhere is %s, want %s", Prefix(Anywhere(Family(p.Addr()))), p)
		}
	}
	if Net(netip.Prefix{}) != nil || Prefix(nil).IsValid() || Addr(nil).IsValid() {
		t.Error("nothing is something")
	}
	if got := Prefix(&net.IPNet{IP: net.ParseIP("10.0.0.1"), Mask: net.CIDRMask(32, 32)}); got.String() != "10.0.0.1/32" {
		t.Errorf("an IPv4 address in IPv6's form is %s", got)
	}
	if Ignore(unix.EEXIST, unix.ENOENT, unix.EEXIST) != nil || !errors.Is(Ignore(unix.EEXIST, unix.ENOENT), unix.EEXIST) {
		t.Error("Ignore")
	}
}

// TestListenerHears of both kinds in a namespace of its own, and of nothing after Close.
func TestListenerHears(t *testing.T) {
	ns := testns.New(t, "rt")
	var l Listener
	links, tables := make(chan netlink.Message, 1000), make(chan netlink.Message, 1000)
	to := func(c chan netlink.Message) Hear {
		return func(ms []netlink.Message, err error) {
			if err != nil {
				t.Error(err)
			}
			for _, m := range ms {
				c <- m
			}
		}
	}
	at := int(ns.Handle)
	if err := errors.Join(l.Routing(at, Links|Settings, to(links)), l.Tables(at, to(tables))); err != nil {
		t.Fatal(err)
	}
	ns.Must("a link", func() error { return exec.Command("ip", "link", "add", "d0", "type", "veth").Run() })
	ns.Sysctl("net.ipv4.conf.d0.forwarding", "1")
	ns.Must("a table", func() error { return exec.Command("nft", "add", "table", "inet", "one").Run() })
	await := func(c chan netlink.Message, what string, is func(netlink.Message) bool) {
		t.Helper()
		for deadline := time.After(10 * time.Second); ; {
			select {
			case m := <-c:
				if is(m) {
					return
				}
			case <-deadline:
				t.Fatalf("%s: not heard of", what)
			}
		}
	}
	index := 0
	await(links, "a link", func(m netlink.Message) bool { index = Index(m); return LinkName(m) == "d0" })
	await(links, "its setting", func(m netlink.Message) bool { return IsSetting(m) && Index(m) == index })
	await(tables, "a table", func(m netlink.Message) bool { return strings.Contains(string(m.Data), "one\x00") })
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
}

func TestConnReadsOneTable(t *testing.T) {
	ns := testns.New(t, "rt")
	c, err := OpenAt(ns.Handle)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if rs, err := c.Routes(unix.AF_INET, 77); err != nil || len(rs) > 0 {
		t.Errorf("a table that is not there: %v, %v", rs, err)
	}
	for dst, table := range map[string]string{"192.0.2.0/24": "77", "198.51.100.0/24": "78"} {
		ns.Must("a route", func() error {
			return exec.Command("ip", "route", "add", "unreachable", dst, "table", table).Run()
		})
	}
	rs, err := c.Routes(unix.AF_INET, 77)
	if err != nil || len(rs) != 1 || Prefix(rs[0].Dst).String() != "192.0.2.0/24" {
		t.Errorf("table 77: %v, %v", rs, err)
	}
	if _, there, err := c.Link("lo"); !there || err != nil {
		t.Errorf("lo: %t, %v", there, err)
	}
	if _, there, err := c.Link("none"); there || err != nil {
		t.Errorf("a link that is not there: %t, %v", there, err)
	}
}
