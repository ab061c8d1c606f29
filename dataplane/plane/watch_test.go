package plane

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

func attr(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, (4-len(b)%4)%4)...)
}

func message(kind uint16, fixed []byte, attrs ...[]byte) netlink.Message {
	m := netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: fixed}
	for _, a := range attrs {
		m.Data = append(m.Data, a...)
	}
	return m
}

// ifinfo is an ifinfomsg or ifaddrmsg: both have the link's index at offset 4.
func ifinfo(size, index int) []byte {
	b := make([]byte, size)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	return b
}

func inTable(table int) []byte {
	b := make([]byte, unix.SizeofRtMsg)
	b[4] = byte(table)
	return b
}

func TestOnlyOursIsNoticed(t *testing.T) {
	n := dataplane.DefaultNumbers()
	name := func(s string) []byte { return attr(unix.IFLA_IFNAME, append([]byte(s), 0)) }
	number := func(kind uint16, n int) []byte { return attr(kind, binary.NativeEndian.AppendUint32(nil, uint32(n))) }
	big := func(n int) []byte { return number(unix.RTA_TABLE, n) }
	inet := []byte{unix.AF_INET, 0, 0, 0} // netconfmsg
	const route, gone = ofRoute, ofRoute | ofWireGuard
	for what, c := range map[string]struct {
		m    netlink.Message
		want touched
	}{
		"our link":              {message(unix.RTM_NEWLINK, ifinfo(unix.SizeofIfInfomsg, 5), name("skein0")), route},
		"our link gone":         {message(unix.RTM_DELLINK, ifinfo(unix.SizeofIfInfomsg, 5), name("skein0")), gone},
		"our link, renamed":     {message(unix.RTM_NEWLINK, ifinfo(unix.SizeofIfInfomsg, 5), name("other")), route},
		"another link":          {message(unix.RTM_NEWLINK, ifinfo(unix.SizeofIfInfomsg, 6), name("eth0")), 0},
		"our address":           {message(unix.RTM_DELADDR, ifinfo(unix.SizeofIfAddrmsg, 5)), route},
		"another link's":        {message(unix.RTM_DELADDR, ifinfo(unix.SizeofIfAddrmsg, 6)), 0},
		"route in our table":    {message(unix.RTM_DELROUTE, inTable(n.RouteTable)), route},
		"rule to our table":     {message(unix.RTM_NEWRULE, inTable(n.RouteTable)), route},
		"route in main":         {message(unix.RTM_NEWROUTE, inTable(unix.RT_TABLE_MAIN)), 0},
		"table above 255":       {message(unix.RTM_NEWROUTE, inTable(0), big(1000)), 0},
		"our table as a number": {message(unix.RTM_NEWROUTE, inTable(0), big(n.RouteTable)), route},
		"the hops' link": {message(unix.RTM_NEWLINK, ifinfo(unix.SizeofIfInfomsg, 9),
			attr(unix.IFLA_IFNAME, []byte(n.HopLink+"\x00"))), ofHop},
		"a hop":                 {message(unix.RTM_DELROUTE, inTable(n.HopTable())), ofHop},
		"a last hop":            {message(unix.RTM_NEWRULE, inTable(n.HopLastTable())), ofHop},
		"our link's forwarding": {message(unix.RTM_NEWNETCONF, inet, number(1, 5)), route},
		"all links' forwarding": {message(unix.RTM_NEWNETCONF, inet, number(1, -1)), 0},
		"another's forwarding":  {message(unix.RTM_NEWNETCONF, inet, number(1, 6)), 0},
		"the hops' rp_filter":   {message(unix.RTM_NEWNETCONF, inet, number(1, 7)), ofHop},
		"cut short":             {message(unix.RTM_NEWLINK, []byte{1, 2}), 0},
		"something else":        {message(unix.RTM_NEWNEIGH, inTable(n.RouteTable)), 0},
	} {
		f := &linkFilter{n: n, index: 5, hop: 7}
		if got := f.classify(c.m); got != c.want {
			t.Errorf("%s: %b, want %b", what, got, c.want)
		}
	}
}

// Changes by podnet and the plane concern objects that the Spec does not have, and are thus distinguished from
// foreign ones.
func TestOnlyLossOfTheSpecsPodsIsNoticed(t *testing.T) {
	n := dataplane.DefaultNumbers()
	pods := newPodSet(dataplane.Pods{Blocks: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/27")},
		Routes: []dataplane.PodRoute{{Addr: netip.MustParseAddr("10.64.0.1"), Link: "sk1"}}})
	route := func(kind uint16, flags netlink.HeaderFlags, table int, dst string) netlink.Message {
		p := netip.MustParsePrefix(dst)
		head := inTable(table)
		head[1] = byte(p.Bits())
		m := message(kind, head, attr(unix.RTA_DST, p.Addr().AsSlice()))
		m.Header.Flags = flags
		return m
	}
	link := func(name string, flags, changed uint32) netlink.Message {
		b := ifinfo(unix.SizeofIfInfomsg, 9)
		binary.NativeEndian.PutUint32(b[8:], flags)
		binary.NativeEndian.PutUint32(b[12:], changed)
		return message(unix.RTM_NEWLINK, b, attr(unix.IFLA_IFNAME, append([]byte(name), 0)))
	}
	for what, c := range map[string]struct {
		m    netlink.Message
		want bool
	}{
		"block deleted":           {route(unix.RTM_DELROUTE, 0, n.PodTable(), "10.64.0.0/27"), true},
		"export deleted":          {route(unix.RTM_DELROUTE, 0, n.ExportTable(), "10.64.0.0/27"), true},
		"way to a pod deleted":    {route(unix.RTM_DELROUTE, 0, n.PodTable(), "10.64.0.1/32"), true},
		"export replaced":         {route(unix.RTM_NEWROUTE, netlink.Replace, n.ExportTable(), "10.64.0.0/27"), true},
		"rule deleted":            {message(unix.RTM_DELRULE, inTable(n.PodTable())), true},
		"pod's link came up":      {link("sk1", unix.IFF_UP, unix.IFF_UP), true},
		"pod's link went down":    {link("sk1", 0, unix.IFF_UP), false},
		"pod's link, otherwise":   {link("sk1", unix.IFF_UP, 0), false},
		"a new pod's link":        {link("sk2", unix.IFF_UP, unix.IFF_UP), false},
		"block added, by us":      {route(unix.RTM_NEWROUTE, netlink.Create, n.PodTable(), "10.64.0.0/27"), false},
		"given block deleted":     {route(unix.RTM_DELROUTE, 0, n.PodTable(), "10.64.0.32/27"), false},
		"way to a new pod":        {route(unix.RTM_NEWROUTE, netlink.Create, n.PodTable(), "10.64.0.2/32"), false},
		"way to a gone pod":       {route(unix.RTM_DELROUTE, 0, n.PodTable(), "10.64.0.2/32"), false},
		"the block in main":       {route(unix.RTM_DELROUTE, 0, unix.RT_TABLE_MAIN, "10.64.0.0/27"), false},
		"rule added, by us":       {message(unix.RTM_NEWRULE, inTable(n.PodTable())), false},
		"route without a message": {message(unix.RTM_DELROUTE, []byte{2}), false},
	} {
		f := &linkFilter{n: n, index: 5, pods: func() *podSet { return pods }}
		if got := f.classify(c.m); (got == ofRoute) != c.want || got&^ofRoute != 0 {
			t.Errorf("%s: %b, want %t", what, got, c.want)
		}
		f.pods = func() *podSet { return newPodSet(dataplane.Pods{}) }
		if got := f.classify(c.m); got != 0 {
			t.Errorf("%s, without pods: %b", what, got)
		}
	}
}

func TestOwnNftChangesAreNoDrift(t *testing.T) {
	const own, ownHops = 77, 78
	n := dataplane.DefaultNumbers()
	head := func(family byte) []byte { return []byte{family, 0, 0, 0} }
	ours := message(0, head(unix.NFPROTO_INET), attr(1, []byte(n.NftTable+"\x00")))
	if got := classifyNft(ours, n, own, ownHops); got != ofNft {
		t.Error("a foreign change of our table was not noticed")
	}
	ours.Header.PID = own
	if got := classifyNft(ours, n, own, ownHops); got != 0 {
		t.Error("our own change was taken for a foreign one")
	}
	hops := message(0, head(unix.NFPROTO_INET), attr(1, []byte(n.HopNftTable+"\x00")))
	if got := classifyNft(hops, n, own, ownHops); got != ofHop {
		t.Errorf("a foreign change of the table of hops was taken for %b", got)
	}
	hops.Header.PID = ownHops
	if got := classifyNft(hops, n, own, ownHops); got != 0 {
		t.Error("our own change of the table of hops was taken for a foreign one")
	}
	for what, m := range map[string]netlink.Message{
		"another table":  message(0, head(unix.NFPROTO_INET), attr(1, []byte("filter\x00"))),
		"another family": message(0, head(unix.NFPROTO_IPV4), attr(1, []byte(n.NftTable+"\x00"))),
	} {
		if got := classifyNft(m, n, own, ownHops); got != 0 {
			t.Errorf("%s was taken for ours", what)
		}
	}
}

func FuzzClassify(f *testing.F) {
	f.Add(uint16(unix.RTM_NEWLINK), message(0, ifinfo(unix.SizeofIfInfomsg, 5),
		attr(unix.IFLA_IFNAME, []byte("skein0\x00"))).Data)
	f.Add(uint16(unix.RTM_NEWROUTE), message(0, inTable(0), attr(unix.RTA_TABLE, []byte{180, 0, 0, 0})).Data)
	f.Fuzz(func(t *testing.T, kind uint16, b []byte) {
		m := message(kind, b)
		n := dataplane.DefaultNumbers()
		pods := newPodSet(dataplane.Pods{Blocks: []netip.Prefix{netip.MustParsePrefix("10.64.0.0/27")}})
		(&linkFilter{n: n, index: 5, pods: func() *podSet { return pods }}).classify(m)
		classifyNft(m, n, 1, 2)
	})
}
