package rtnl

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Family is unix.AF_INET or AF_INET6.
func Family(a netip.Addr) int {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// FamilyName is IPv4 or IPv6.
func FamilyName(family int) string {
	if family == unix.AF_INET6 {
		return "IPv6"
	}
	return "IPv4"
}

// Metric is what the kernel makes of a route's metric 0: with IPv6 it is 1024.
func Metric(family int) int {
	if family == unix.AF_INET6 {
		return 1024
	}
	return 0
}

// Net is a prefix in the library's form; nil for none.
func Net(p netip.Prefix) *net.IPNet {
	if !p.IsValid() {
		return nil
	}
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Host is the prefix of a single address.
func Host(a netip.Addr) *net.IPNet { return Net(netip.PrefixFrom(a, a.BitLen())) }

// Anywhere is the destination of a default route.
func Anywhere(family int) *net.IPNet {
	if family == unix.AF_INET6 {
		return Net(netip.PrefixFrom(netip.IPv6Unspecified(), 0))
	}
	return Net(netip.PrefixFrom(netip.IPv4Unspecified(), 0))
}

// Prefix is a prefix of the library; not valid for nil. An IPv4 address in IPv6's form becomes an IPv4 address.
func Prefix(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(Addr(n.IP), ones)
}

// Addr is an address of the library; not valid for none. An IPv4 address in IPv6's form becomes an IPv4 address.
func Addr(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Setting is the file of a setting of a link in /proc/sys; link is also "all" and "default".
func Setting(family int, link, name string) string {
	return "/proc/sys/net/" + strings.ToLower(FamilyName(family)) + "/conf/" + link + "/" + name
}

// ReadSetting reads one that is a number; ok is false where this kernel or link has it not.
func ReadSetting(family int, link, name string) (n int, ok bool) {
	b, err := os.ReadFile(Setting(family, link, name))
	if err != nil {
		return 0, false
	}
	n, err = strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

// WriteSetting writes one.
func WriteSetting(family int, link, name string, n int) error {
	if err := os.WriteFile(Setting(family, link, name), []byte(strconv.Itoa(n)), 0o644); err != nil {
		return fmt.Errorf("writing the setting %s of link %s: %w", name, link, err)
	}
	return nil
}
