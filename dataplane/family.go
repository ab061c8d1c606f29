package dataplane

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Family is an address family, 4 or 6.
type Family uint8

// The two families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf is an address's.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// String is ipv4 or ipv6.
func (f Family) String() string { return fmt.Sprintf("ipv%d", uint8(f)) }

// AF is the family's number in the kernel.
func (f Family) AF() int {
	if f == IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// Pick is what belongs to an address's family.
func Pick[T any](a netip.Addr, four, six T) T {
	if a.Is4() {
		return four
	}
	return six
}

// Bit is 1 for true, to order by.
func Bit(b bool) int {
	if b {
		return 1
	}
	return 0
}
