package plane

import (
	"github.com/mdlayher/netlink"
	vnl "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// touched is the set of subsystems that a notification concerns: one bit each, in the order of Subsystems.
type touched uint8

const (
	ofWireGuard touched = 1 << iota
	ofRoute
	ofHop
	ofNft
	everything = ^touched(0)
)

// listen subscribes in the calling thread's network namespace. The resync finds changes without notification.
func (p *Plane) listen() {
	links := &linkFilter{n: p.opts.Numbers, pods: p.pods.Load}
	for name, index := range map[string]*int{p.opts.Numbers.Link: &links.index, p.opts.Numbers.HopLink: &links.hop} {
		if l, err := vnl.LinkByName(name); err == nil {
			*index = l.Attrs().Index
		}
	}
	p.listener.Log = p.opts.Log
	groups := uint32(rtnl.Links | rtnl.Addresses | rtnl.Routes | rtnl.Rules | rtnl.Settings)
	if err := p.listener.Routing(0, groups, p.hear(links.classify)); err != nil {
		p.opts.Log.Warn("cannot watch links and routes: their drift is repaired late", "error", err)
	}
	if err := p.listener.Tables(0, p.hear(func(m netlink.Message) touched {
		var own, ownHops uint32
		if p.nft != nil {
			own = p.nft.PortID()
		}
		if p.hop != nil {
			ownHops = p.hop.PortID()
		}
		return classifyNft(m, p.opts.Numbers, own, ownHops)
	})); err != nil {
		p.opts.Log.Warn("cannot watch nftables: its drift is repaired late", "error", err)
	}
}

// hear marks the subsystems that notifications concern.
func (p *Plane) hear(classify func(netlink.Message) touched) rtnl.Hear {
	return func(ms []netlink.Message, err error) {
		if err != nil {
			p.mark(everything)
			return
		}
		var t touched
		for _, m := range ms {
			t |= classify(m)
		}
		if t != 0 {
			p.mark(t)
		}
	}
}

// classifyNft recognises changes of skein's tables by other programs. This process writes each table from its own
// address.
func classifyNft(m netlink.Message, n dataplane.Numbers, own, ownHops uint32) (t touched) {
	switch {
	case nftable.Concerns(m, n.NftTable, own):
		return ofNft
	case nftable.Concerns(m, n.HopNftTable, ownHops):
		return ofHop
	}
	return 0
}

// linkFilter recognises changes of skein's link, its addresses, rules and routing tables. Except for pods, it cannot
// distinguish this process's own changes; rereading is cheap.
type linkFilter struct {
	n     dataplane.Numbers
	index int            // of the link, updated by notifications
	hop   int            // of the hops' link, likewise
	pods  func() *podSet // nil: none
}

func (f *linkFilter) classify(m netlink.Message) touched {
	t := f.classifyTunnel(m)
	if f.pods != nil && f.pods().lost(m, f.n) {
		t |= ofRoute
	}
	return t
}

func (f *linkFilter) classifyTunnel(m netlink.Message) touched {
	index := rtnl.Index(m)
	switch {
	case rtnl.IsLink(m) && index != 0:
		name := rtnl.LinkName(m)
		if name == f.n.HopLink {
			f.hop = index
			return ofHop
		}
		named := name == f.n.Link
		if !named && index != f.index {
			return 0
		}
		if named {
			f.index = index
		}
		if m.Header.Type == unix.RTM_DELLINK {
			return ofRoute | ofWireGuard
		}
		return ofRoute
	case index != 0 && index == f.index: // its address or setting changed
		return ofRoute
	case rtnl.IsSetting(m) && index != 0 && index == f.hop:
		return ofHop
	case rtnl.IsRoute(m) || rtnl.IsRule(m):
		switch rtnl.Table(m) {
		case f.n.RouteTable:
			return ofRoute
		case f.n.HopTable(), f.n.HopLastTable():
			return ofHop
		}
	}
	return 0
}
