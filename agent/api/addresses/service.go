// Package addresses answers the commands about single addresses: who has one or had it (`skein ip who`), which pods of
// this host have which, and under which addresses other sites know the networks of a site.
package addresses

import (
	"context"
	"net/netip"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// AddressService is that part of the API.
type AddressService struct {
	Agent api.Agent
	// Host has the addresses of this host's pods; nil: this node only relays.
	Host Host
	// Journal is this node's.
	Journal api.Journal
	// Ask asks another member which of its pods has, or had, an address.
	Ask func(ctx context.Context, node identity.ID, r *skeinv1.HolderRequest) (*skeinv1.HolderResponse, error)
}

// Host is who gives this host's pods their addresses.
type Host interface {
	// Leases are the addresses in use, and those that rest.
	Leases() []ipam.Lease
	// Holders are those of one address.
	Holders(netip.Addr) []ipam.Lease
	// Look has the kernel read anew soon.
	Look()
}
