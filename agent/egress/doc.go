// Package egress runs egress gateways: on the leader it keeps the leases of slots and decides who gets them; on a
// gateway it prepares a network namespace for each egress the node may serve, holds leases, hands slots over; on every
// host it leads its clients' packets into tunnels and tells the gateways of them.
//
// What is decided is pure (Leases, Choose, Placement); kernel and network stand behind interfaces.
//
// Source: DESIGN.md sections 5, 11 and 15 of the project; shared/seeds/coil-egress-nat.txt.
package egress
