// Package egress runs egress gateways. On the leader it grants the leases of slots and decides which node gets which
// slot. On a gateway it prepares a network namespace for each egress that the node may serve, holds leases, and hands
// slots over. On every host it sends its clients' packets into tunnels and informs the gateways about these clients.
//
// The decisions are pure (Leases, Choose, Placement); interfaces hide kernel and network.
//
// Source: DESIGN.md sections 5, 11 and 15 of the project; shared/seeds/coil-egress-nat.txt.
package egress
