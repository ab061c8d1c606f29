package plane

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Notification groups of rtnetlink, as RTMGRP bits.
const rtGroups = 1<<(unix.RTNLGRP_LINK-1) |
	1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
	1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
	1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)

// touched says which subsystems a notification concerns.
type touched struct{ wireguard, nft, route, hop bool }

func (t touched) any() bool { return t.wireguard || t.nft || t.route || t.hop }

var everything = touched{wireguard: true, nft: true, route: true, hop: true}

// watcher receives the kernel's notifications. A connection that could not be opened is nil: then the
// resync finds what changed.
type watcher struct {
	rt, nf *netlink.Conn
}

// openWatcher subscribes in the calling thread's network namespace.
func openWatcher(log *slog.Logger) *watcher {
	const buffer = 2 << 20 // bytes; what overflows is made good by reading everything
	w := &watcher{}
	var err error
	if w.rt, err = netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: rtGroups}); err != nil {
		log.Warn("no notifications of links and routes: foreign changes are repaired late", "error", err)
		w.rt = nil
	} else {
		_ = w.rt.SetReadBuffer(buffer)
	}
	if w.nf, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err == nil {
		if err = w.nf.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
			_ = w.nf.Close()
		}
	}
	if err != nil {
		log.Warn("no notifications of nftables: foreign changes are repaired late", "error", err)
		w.nf = nil
	} else {
		_ = w.nf.SetReadBuffer(buffer)
	}
	return w
}

func (w *watcher) close() (err error) {
	for _, c := range []*netlink.Conn{w.rt, w.nf} {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	return err
}

// watch calls report for every notification that concerns us, until the connection is closed.
func watch(c *netlink.Conn, classify func(netlink.Message) touched, report func(touched)) {
	for {
		msgs, err := c.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS): // some were lost
			report(everything)
			continue
		case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EBADF):
			return
		case err != nil:
			report(everything)
			return
		}
		nlcount.Heard(len(msgs))
		var t touched
		for _, m := range msgs {
			n := classify(m)
			t.wireguard, t.nft, t.route, t.hop = t.wireguard || n.wireguard, t.nft || n.nft, t.route || n.route, t.hop || n.hop
		}
		if t.any() {
			report(t)
		}
	}
}

// classifyNft looks for changes of our tables by others than ourselves, who write to each under an address of its own.
func classifyNft(m netlink.Message, n dataplane.Numbers, own, ownHops uint32) touched {
	f, table, ok := nft.ForeignTable(m.Data)
	if !ok || f != unix.NFPROTO_INET {
		return touched{}
	}
	return touched{nft: table == n.NftTable && m.Header.PID != own, hop: table == n.HopNftTable && m.Header.PID != ownHops}
}

// linkFilter looks for changes of our link, its addresses, our rules and our tables. Our own changes
// cannot be told apart, but for those of pods; reading back is cheap.
type linkFilter struct {
	n     dataplane.Numbers
	index int            // of the link, follows its notifications
	pods  func() *podSet // nil: none
}

func (f *linkFilter) classify(m netlink.Message) touched {
	t := f.classifyTunnel(m)
	t.route = t.route || f.pods != nil && f.pods().lost(m, f.n)
	return t
}

func (f *linkFilter) classifyTunnel(m netlink.Message) touched {
	const ifinfo, ifaddr = unix.SizeofIfInfomsg, unix.SizeofIfAddrmsg
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) < ifinfo {
			return touched{}
		}
		index := int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
		name := linkName(m)
		if name == f.n.HopLink {
			return touched{hop: true}
		}
		named := name == f.n.Link
		if !named && index != f.index {
			return touched{}
		}
		if named {
			f.index = index
		}
		return touched{route: true, wireguard: m.Header.Type == unix.RTM_DELLINK}
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		if len(m.Data) >= ifaddr && f.index != 0 && int(int32(binary.NativeEndian.Uint32(m.Data[4:]))) == f.index {
			return touched{route: true}
		}
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE, unix.RTM_NEWRULE, unix.RTM_DELRULE:
		table := int(tableOf(m))
		return touched{route: table == f.n.RouteTable, hop: table == f.n.HopTable() || table == f.n.HopLastTable()}
	}
	return touched{}
}

// linkName is the name in a notification of a link.
func linkName(m netlink.Message) string {
	return strings.TrimRight(string(attribute(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME)), "\x00")
}

// attribute returns the first attribute of this type, nil if there is none or the bytes are no attributes.
func attribute(b []byte, kind uint16) []byte {
	const head, typeMask = 4, 0x3fff
	for len(b) >= head {
		n := int(binary.NativeEndian.Uint16(b))
		if n < head || n > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&typeMask == kind {
			return b[head:n]
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}
