package fou

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Of linux/if_tunnel.h and linux/ip6_tunnel.h.
const (
	encapFoU       = 1
	encapChecksum4 = 1 // TUNNEL_ENCAP_FLAG_CSUM
	encapChecksum6 = 2 // TUNNEL_ENCAP_FLAG_CSUM6
	ignoreLimit    = 1 // IP6_TNL_F_IGN_ENCAP_LIMIT
)

// Addresses for trials, of RFC 5737 and RFC 3849.
var (
	trial4 = netip.MustParseAddr("192.0.2.2")
	trial6 = netip.MustParseAddr("2001:db8::2")
)

// kernel is the driver that only configures.
type kernel struct {
	ns   netns.NsHandle
	conn *rtnl.Conn
	fou  *fouConn

	listeners []listener // of the last Spec, and what could not be ended before

	mu    sync.Mutex
	names map[tunnelEnds]string // of the last Spec
}

func openKernel(ns netns.NsHandle) (*kernel, error) {
	fou, err := dialFoU(ns)
	if err != nil {
		return nil, err
	}
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		fou.Close()
		return nil, err
	}
	return &kernel{ns: ns, conn: c, fou: fou}, nil
}

// Name implements Driver.
func (k *kernel) Name() string { return Kernel }

// Link implements Driver.
func (k *kernel) Link(local, remote netip.Addr) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if name, ok := k.names[tunnelEnds{local, remote}]; ok {
		return name
	}
	return dataplane.FoULink(remote)
}

// Close implements Driver.
func (k *kernel) Close() error {
	k.conn.Close()
	return errors.Join(k.fou.Close(), k.ns.Close())
}

// Reconcile implements Driver. What fails is tried again next time; the rest is done.
func (k *kernel) Reconcile(s Spec) (writes int, err error) {
	if err := s.check(); err != nil {
		return 0, err
	}
	have, err := readDevices(k.conn)
	if err != nil {
		return 0, err
	}
	names := linkNames(s, Kernel, have)
	k.mu.Lock()
	k.names = names
	k.mu.Unlock()
	var errs []error
	for _, o := range diff(wanted(s, Kernel, names), have) {
		if err := k.apply(o); err != nil {
			errs = append(errs, err)
			continue
		}
		writes++
	}
	// Devices first: what comes before its device is there would be answered with an error.
	n, err := k.listen(s)
	return writes + n, errors.Join(append(errs, err)...)
}

// listen has the listeners of a Spec, and ends those of former ports.
func (k *kernel) listen(s Spec) (writes int, err error) {
	have, err := k.fou.list()
	if err != nil {
		return 0, err
	}
	want := ourListeners(s)
	var errs []error
	note := func(err error) {
		if errs = append(errs, err); err == nil {
			writes++
		}
	}
	for _, l := range want {
		other := slices.IndexFunc(have, func(h listener) bool { return h.family == l.family && h.port == l.port && h != l })
		switch {
		case other >= 0:
			errs = append(errs, fmt.Errorf("FoU on UDP port %d (IPv%d) leads to protocol %d, not %d: remove it (ip fou del)",
				l.port, 4+2*l.family, have[other].proto, l.proto))
		case !slices.Contains(have, l):
			note(k.fou.add(l))
		}
	}
	left := slices.Clone(want)
	for _, l := range leftListeners(have, want, k.listeners, s.Ports) {
		err := k.fou.remove(l)
		if note(err); err != nil {
			left = append(left, l)
		}
	}
	k.listeners = left
	return writes, errors.Join(errs...)
}

func (k *kernel) apply(o op) error {
	switch o.action {
	case actionRemove:
		return remove(k.conn, o.device)
	case actionAdd:
		return k.add(o.device)
	case actionReplace:
		return k.replace(o.device)
	case actionChange:
		d := o.device
		d.Index = 0 // by index and name it would be a change of name, which a device that is up refuses
		err := k.conn.One().LinkModify(d.link())
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EEXIST) {
			return k.replace(o.device) // this kernel cannot change that in place
		}
		if err != nil {
			return fmt.Errorf("changing tunnel %s: %w", o.Name, err)
		}
	}
	return set(k.conn, o.device)
}

func (k *kernel) replace(d device) error {
	if err := remove(k.conn, d); err != nil {
		return err
	}
	d.Index = 0
	return k.add(d)
}

// add makes a device that is up, with one message.
func (k *kernel) add(d device) error {
	err := k.conn.One().LinkAdd(d.link())
	switch {
	case errors.Is(err, unix.EEXIST):
		return fmt.Errorf("making tunnel %s from %s to %s: %w: another device of this network namespace is such a tunnel; "+
			"remove it", d.Name, d.Local, d.Remote, err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("making tunnel %s: %w: this kernel lacks the module %s, or fou", d.Name, err,
			map[string]string{kindIPIP: "ipip", kindIP6Tnl: "ip6_tunnel"}[d.Kind])
	case err != nil:
		return fmt.Errorf("making tunnel %s from %s to %s: %w", d.Name, d.Local, d.Remote, err)
	}
	return nil
}

// link is a device as netlink takes it.
func (d device) link() netlink.Link {
	a := netlink.NewLinkAttrs()
	a.Name, a.Index, a.MTU, a.Flags = d.Name, d.Index, d.MTU, net.FlagUp
	if d.Kind == kindIPIP {
		return &netlink.Iptun{LinkAttrs: a, FlowBased: d.Any, Local: d.Local.AsSlice(), Remote: d.Remote.AsSlice(),
			Ttl: d.TTL, Proto: d.Proto, PMtuDisc: 1,
			EncapType: encapFoU, EncapFlags: encapChecksum4, EncapSport: d.SourcePort, EncapDport: d.DestPort}
	}
	return &netlink.Ip6tnl{LinkAttrs: a, FlowBased: d.Any, Local: d.Local.AsSlice(), Remote: d.Remote.AsSlice(),
		Ttl: d.TTL, Proto: d.Proto, Flags: ignoreLimit,
		EncapType: encapFoU, EncapFlags: encapChecksum6, EncapSport: d.SourcePort, EncapDport: d.DestPort}
}

// fromLink is the reverse of link.
func fromLink(l netlink.Link) device {
	a := l.Attrs()
	d := device{Name: a.Name, Kind: l.Type(), Index: a.Index, MTU: a.MTU, Up: a.Flags&net.FlagUp != 0}
	switch l := l.(type) {
	case *netlink.Iptun:
		if d.Any = l.FlowBased; !d.Any {
			d.tunnel = tunnel{Local: address(l.Local), Remote: address(l.Remote), SourcePort: l.EncapSport,
				DestPort: l.EncapDport, TTL: l.Ttl, Proto: l.Proto,
				FoU: l.EncapType == encapFoU, Checksum: l.EncapFlags == encapChecksum4, PMTU: l.PMtuDisc != 0, OtherTOS: l.Tos != 0,
				OtherParent: a.ParentIndex != 0}
		}
	case *netlink.Ip6tnl:
		if d.Any = l.FlowBased; !d.Any {
			d.tunnel = tunnel{Local: address(l.Local), Remote: address(l.Remote), SourcePort: l.EncapSport,
				DestPort: l.EncapDport, TTL: l.Ttl, Proto: l.Proto,
				FoU: l.EncapType == encapFoU, Checksum: l.EncapFlags == encapChecksum6, WithoutLimit: l.Flags&ignoreLimit != 0,
				OtherTOS: l.Tos != 0 || l.FlowInfo != 0 || l.Flags&^(ignoreLimit|ownFlags) != 0, OtherParent: a.ParentIndex != 0}
		}
	}
	return d
}

// ownFlags are those that the kernel adds itself: IP6_TNL_F_CAP_XMIT, _RCV and _PER_PACKET.
const ownFlags = 0x70000

func address(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a
}

// Stats implements Driver.
func (k *kernel) Stats() (s Stats, err error) {
	links, err := k.conn.One().LinkList()
	if err != nil {
		return s, fmt.Errorf("reading tunnels' counters: %w", err)
	}
	for _, l := range links {
		c := l.Attrs().Statistics
		if !ours(l.Attrs().Name) || c == nil {
			continue
		}
		s.RxPackets += c.RxPackets
		s.RxBytes += c.RxBytes
		s.TxPackets += c.TxPackets
		s.TxBytes += c.TxBytes
		s.DroppedMalformed += c.RxErrors
		s.DroppedTx += c.TxErrors + c.TxDropped
	}
	return s, nil
}
