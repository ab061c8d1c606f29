package egressclient

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Values of reverse path filters, net.ipv4.conf.*.rp_filter. The kernel uses the higher of a device's value and
// conf.all's.
const (
	filterOff   = "0"
	filterLoose = "2"
)

// letIn prevents the reverse path filter from dropping packets of a device whose senders are reached by another
// tunnel: the device for answers from other addresses, and each of several tunnels. If conf.all has a filter, the
// device's value cannot disable it, and the loose filter drops everything on a device without an address. Then the
// device gets the client's address, which nothing there selects as source.
func (c *Client) letIn(device string, self netip.Addr) (writes int, err error) {
	all, own, err := c.filters(device, "")
	if err != nil || own == "" {
		return 0, err
	}
	want := filterOff
	if all != filterOff {
		want = filterLoose
		if writes, err = c.k.address(device, self); err != nil {
			return writes, err
		}
	}
	if own != want {
		writes++
		_, _, err = c.filters(device, want)
	}
	return writes, err
}

// filters reads the filters of conf.all and of a device; with set not empty it sets the latter instead.
func (c *Client) filters(device, set string) (all, own string, err error) {
	err = rtnl.Inside(c.ns, func() (err error) {
		path := func(device string) string { return rtnl.Setting(unix.AF_INET, device, "rp_filter") }
		if set != "" {
			return os.WriteFile(path(device), []byte(set), 0o644)
		}
		var aerr error
		all, aerr = readSetting(path("all"))
		own, err = readSetting(path(device))
		return errors.Join(aerr, err)
	})
	return all, own, err
}

// readSetting reads a sysctl; empty: it does not exist.
func readSetting(path string) (string, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

// address gives a device without an IPv4 address one that has no other effect.
func (k *kernel) address(device string, a netip.Addr) (writes int, err error) {
	l, err := k.c.One().LinkByName(device)
	if err != nil {
		return 0, err
	}
	have, err := k.c.One().AddrList(l, netlink.FAMILY_V4)
	if err != nil || len(have) > 0 {
		return 0, err
	}
	return 1, k.c.One().AddrAdd(l, &netlink.Addr{IPNet: rtnl.Host(a), Scope: unix.RT_SCOPE_HOST,
		Flags: unix.IFA_F_NOPREFIXROUTE})
}
