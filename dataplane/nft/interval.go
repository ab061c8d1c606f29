package nft

import (
	"net/netip"

	"github.com/google/nftables"
)

// Intervals are the elements of interval sets that hold these prefixes, by family.
func Intervals(ps []netip.Prefix) (four, six []nftables.SetElement) {
	r4, r6 := ranges(ps)
	return toElements(r4), toElements(r6)
}
