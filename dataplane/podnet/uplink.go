package podnet

import (
	"fmt"
	"net/netip"
)

// Uplink is the link to a network namespace of skein's own, not of a pod: a pair like a pod's, whose owner adds
// addresses and routes.
type Uplink struct {
	Host      string // name of the end on the host
	Alias     string // of that end; ParseAlias must not accept it
	Interface string // name of the other end
	NetNS     string // path of its network namespace
	MTU       int    // bytes
}

// AddUplink makes the pair, each end in its namespace and down, without addresses. The host's end, in the calling
// thread's namespace, forwards IPv4 and ignores redirects. After an error nothing remains.
func AddUplink(u Uplink) error {
	fail := func(err error) error { return fmt.Errorf("link %s to %s: %w", u.Host, u.NetNS, err) }
	ns, err := openNetNS(u.NetNS)
	if err != nil {
		return fail(err)
	}
	defer ns.Close()
	host, err := dial(nil)
	if err != nil {
		return fail(err)
	}
	defer host.close()
	w := &work{Attachment: Attachment{Key: Key{Interface: u.Interface}, MTU: u.MTU}, host: host, alias: u.Alias}
	if err := w.makePair(Link{Host: u.Host, HostMAC: newMAC(), MAC: newMAC()}, int(ns.Fd())); err != nil {
		return fail(err)
	}
	return nil
}

// Gateways are the addresses of each host end: IPv4's with prefix length 32, IPv6's link-local.
func Gateways() (ipv4, ipv6 netip.Prefix) {
	return netip.PrefixFrom(gateway4, 32), netip.PrefixFrom(gateway6, 64)
}
