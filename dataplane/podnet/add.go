package podnet

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Add makes the link of a pod with its addresses and routes. If IPv6 is disabled on the host or in the namespace, it
// adds only IPv4, or returns ErrNoIPv6 if the pod has no IPv4 address. After an error nothing remains.
func Add(a Attachment) (Link, error) {
	l, _, err := add(a)
	return l, err
}

// add also returns the number of messages sent to the kernel.
func add(a Attachment) (out Link, messages int, err error) {
	if err := a.validate(); err != nil {
		return Link{}, 0, fmt.Errorf("%s: %w", a.who(), err)
	}
	defer func() {
		if err != nil {
			out, err = Link{}, fmt.Errorf("%s: %w", a.who(), err)
		}
	}()
	ns, err := openNetNS(a.NetNS)
	if err != nil {
		return Link{}, 0, err
	}
	defer ns.Close()
	host, err := dial(nil)
	if err != nil {
		return Link{}, 0, err
	}
	defer host.close()
	pod, err := dial(ns)
	if err != nil {
		return Link{}, 0, err
	}
	defer pod.close()
	w := &work{Attachment: a, host: host, pod: pod}
	out, err = w.do(int(ns.Fd()))
	return out, host.sent + pod.sent, err
}

// work is the state of one Add.
type work struct {
	Attachment
	host, pod *conn
	hostEnd   link
	alias     string // of the host's end, if it is not a pod's
}

func (w *work) do(netns int) (out Link, err error) {
	out = Link{Host: HostLink(w.Key), HostMAC: newMAC(), MAC: newMAC()}
	if err := w.makePair(out, netns); err != nil {
		return Link{}, err
	}
	defer func() {
		if err != nil { // the pod's end, and all addresses and routes, go with it
			_, undone := w.host.do(deleteLink(out.Host, w.hostEnd.index))
			err = errors.Join(err, rtnl.Ignore(undone, unix.ENODEV))
		}
	}()
	if err := w.hostIPv6(); err != nil {
		return Link{}, err
	}
	if err := w.setUpHost(); err != nil {
		return Link{}, err
	}
	if err := w.setUpPod(); err != nil {
		return Link{}, err
	}
	if err := w.leadHere(); err != nil { // last, since the pod can answer only now
		return Link{}, err
	}
	w.awaitFirstPacket()
	if w.IPv6.IsValid() {
		out.Gateway6 = gateway6
	}
	return out, nil
}

// leadHere adds the host's routes. The repair of the data plane may have added one already, from the link's alias.
func (w *work) leadHere() error {
	missing := w.addresses()
	for {
		var reqs []request
		for _, addr := range missing {
			reqs = append(reqs, newHostRoute(addr, w.hostEnd.index, tableOr(w.Table)))
		}
		_, err := w.host.do(reqs...)
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
		have, rerr := w.host.routes(tableOr(w.Table), w.hostEnd.index)
		if rerr != nil {
			return errors.Join(err, rerr)
		}
		before := len(missing)
		missing = slices.DeleteFunc(missing, func(addr netip.Addr) bool {
			return slices.ContainsFunc(have, func(r route) bool { return r.index == w.hostEnd.index && r.dst.Addr() == addr })
		})
		switch len(missing) {
		case 0:
			return nil
		case before:
			return fmt.Errorf("%w: table %d has a route to it that leads elsewhere: %w", ErrAddressInUse, tableOr(w.Table), err)
		}
	}
}

// awaitFirstPacket waits for delayed work of the kernel, so that no first packet is lost. The host's end came up
// without a carrier and drops packets until the link watcher has run (since Linux 6.8 reading the link triggers
// that). An IPv6 address receives packets only after the worker for duplicate detection has run.
func (w *work) awaitFirstPacket() {
	const limit = time.Second // after that at most a packet is lost
	deadline := time.Now().Add(limit)
	w.host.await(deadline, getLinkAt(w.hostEnd.index), func(m netlink.Message) bool {
		l, ok := decodeLink(m)
		return ok && l.running
	})
	if !w.IPv6.IsValid() {
		return
	}
	local := func(m netlink.Message) bool {
		r, ok := decodeRoute(m)
		return ok && r.kind == unix.RTN_LOCAL
	}
	w.host.await(deadline, getRoute(gateway6, w.hostEnd.index), local)
	w.pod.await(deadline, getRoute(w.IPv6, 0), local)
}

// makePair makes both ends and reads the state of the host's.
func (w *work) makePair(out Link, netns int) error {
	// The alias is set first, so that Scan and Purge recognise the link if this process ends now.
	alias := w.Alias()
	if w.alias != "" {
		alias = w.alias
	}
	pair := newPair(out.Host, out.HostMAC, w.Attachment, out.MAC, netns)
	if _, err := w.host.do(pair); err != nil {
		return w.explainPair(out.Host, err)
	}
	answers, err := w.host.do(describe(out.Host, alias), getLink(out.Host))
	ok := false
	if err == nil && len(answers[1]) == 1 {
		w.hostEnd, ok = decodeLink(answers[1][0])
	}
	if !ok {
		if err == nil {
			err = fmt.Errorf("reading link %s: the kernel's answer is not understood", out.Host)
		}
		_, undone := w.host.do(deleteLink(out.Host, 0))
		return errors.Join(err, rtnl.Ignore(undone, unix.ENODEV))
	}
	return nil
}

// explainPair finds out which of the two names exists.
func (w *work) explainPair(host string, err error) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		if _, there, _ := w.host.link(getLink(host)); there {
			return fmt.Errorf("link %s of this attachment %w on the host: delete the attachment first: %w", host, ErrExists, err)
		}
		return fmt.Errorf("interface %s %w in the pod: %w", w.Interface, ErrExists, err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: this kernel has no veth links: load the module veth", err)
	}
	return err
}

// hostIPv6 prepares the host and its end for the pod's IPv6 address, or drops the address if IPv6 is disabled.
func (w *work) hostIPv6() error {
	if !w.IPv6.IsValid() {
		return nil
	}
	if !w.hostEnd.ipv6 {
		return w.dropIPv6("on this host (sysctl net.ipv6.conf.default.disable_ipv6, or the kernel's ipv6.disable)")
	}
	if err := ForwardIPv6(w.hostEnd.name); err != nil {
		return err
	}
	if w.hostEnd.acceptRA == 0 {
		return nil
	}
	return writeSetting(w.hostEnd.name, "accept_ra", "0") // otherwise a pod could give the host routes
}

func (w *work) dropIPv6(where string) error {
	if !w.IPv4.IsValid() {
		return fmt.Errorf("%w %s, and the pod has no IPv4 address", ErrNoIPv6, where)
	}
	w.IPv6 = netip.Addr{}
	return nil
}

// setUpHost sets up the host's end, before the pod's end, so that the latter has a carrier at once.
func (w *work) setUpHost() error {
	i := w.hostEnd.index
	four, six := Gateways()
	var reqs []request
	if w.hostEnd.ipv6 {
		reqs = append(reqs, noGeneratedAddress(i))
	}
	reqs = append(reqs, setUp("link "+w.hostEnd.name, i))
	if w.IPv4.IsValid() {
		reqs = append(reqs, newAddress(four, unix.RT_SCOPE_LINK, i))
	}
	if w.IPv6.IsValid() {
		reqs = append(reqs, newAddress(six, unix.RT_SCOPE_LINK, i))
	}
	_, err := w.host.do(reqs...)
	return err
}

// setUpPod gives the pod's end its addresses and routes.
func (w *work) setUpPod() error {
	const lo = 1 // the first link of every namespace
	i := w.hostEnd.peer
	reqs := []request{getLinkAt(i), setUp("the pod's lo", lo), setUp("the pod's "+w.Interface, i)}
	if w.IPv4.IsValid() {
		reqs = append(reqs, newAddress(netip.PrefixFrom(w.IPv4, 32), unix.RT_SCOPE_UNIVERSE, i))
		reqs = append(reqs, newGatewayRoutes(gateway4, i)...)
	}
	answers, err := w.pod.do(reqs...)
	if err != nil {
		return explainRoute(err)
	}
	if !w.IPv6.IsValid() {
		return nil
	}
	if len(answers[0]) == 1 {
		if l, ok := decodeLink(answers[0][0]); ok && !l.ipv6 {
			return w.dropIPv6("in the pod's network namespace (sysctl net.ipv6.conf.default.disable_ipv6)")
		}
	}
	reqs = append([]request{newAddress(netip.PrefixFrom(w.IPv6, 128), unix.RT_SCOPE_UNIVERSE, i)},
		newGatewayRoutes(gateway6, i)...)
	_, err = w.pod.do(reqs...)
	return explainRoute(err)
}

func explainRoute(err error) error {
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("another interface of the pod has this already: %w", err)
	}
	return err
}

func (w *work) addresses() []netip.Addr {
	var out []netip.Addr
	for _, a := range []netip.Addr{w.IPv4, w.IPv6} {
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

// newMAC returns a random locally administered address.
func newMAC() net.HardwareAddr {
	m := make(net.HardwareAddr, 6)
	_, _ = rand.Read(m)
	const local, group = 2, 1
	m[0] = m[0]&^group | local
	return m
}
