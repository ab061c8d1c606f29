// Package egressclient makes one network namespace use egresses: policy rules, routes into tunnels, and the tunnels'
// devices (package fou). It repairs changes by other programs, and removes only its own objects.
//
// Invariants. While a tunnel is being made or replaced, or cannot be made, its egress's destinations are unreachable,
// so that no packet for them leaves another way. A tunnel's own packets never enter a tunnel. A namespace in the
// wanted state is only read, not written. Once a tunnel works, its route is the only one of its destination, so that
// tables and rules read as documented. If another program deletes a tunnel's device, its routes vanish with it; until
// the repair, which the kernel's notification starts, the destination is routed as if there were no egress.
//
// Only the ends of tunnels can send to the tunnels' port (filter.go): the filter exists before the port is open, and
// admits a new end before any route leads there.
//
// This package owns the table "inet skein_client", routes with protocol 30 in tables 117 and 118, and rules with
// protocol 30 and this package's priorities. Pure functions decide the wanted state (Want, Before, After). A Client
// is safe for concurrent use.
//
// Source: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt.
package egressclient
