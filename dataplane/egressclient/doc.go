// Package egressclient makes one network namespace use egresses: policy rules, routes into tunnels, and the tunnels'
// devices (package fou). It keeps them so while others change what is ours, and takes away exactly what is ours.
//
// Invariants. Nothing that an egress shall carry leaves the namespace another way while its tunnel is being made,
// replaced or cannot be made: its destination is unreachable meanwhile. What carries a tunnel's own packets never leads
// into a tunnel. A namespace that is as it should be is read and not written. A route of a tunnel is the only one of
// its destination once the tunnel stands, so that tables and rules read as they are documented; a device that somebody
// else deletes takes its routes along, and until they are repaired, which begins with the kernel's notice, the
// destination is led as if there were no egress.
//
// Nobody but the ends of tunnels sends to the tunnels' port (filter.go): the filter is there before the port is open,
// and lets a new end in before anything leads there.
//
// Ours are the table "inet skein_client", the routes with protocol 30 in tables 117 and 118, and the rules with
// protocol 30 and our priorities. What is to be is decided by pure functions (Want, Before, After). A Client may be
// used concurrently.
//
// Source: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt.
package egressclient
