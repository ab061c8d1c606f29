package sites

import (
	"slices"

	"github.com/skeinmesh/skein/identity"
)

// SliceOrder is the order in which nodes in a slice use the leaders of their site, which have slots.
func SliceOrder(leaders []Leader, slice int) []identity.ID {
	return slices.Collect(newSliced(leaders, &sharer{}).order(uint8(slice)))
}
