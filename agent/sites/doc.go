// Package sites decides who leads each site, who peers with whom, and through which node each packet is forwarded.
//
// Everything here is pure: nodes with the same view (settings, members, records, liveness) compute the same result.
// What differs from host to host is an argument: the nodes that its own path machines find dead, and the nodes that it
// recently saw as leaders (Recent, Lawful). Course holds what a host remembers between plans. Follower takes a host
// from one plan to the next. Both take the current time as an argument.
//
// Leaders that are alive but do not forward are demoted when enough of their witnesses report it (Witnesses, Judge).
//
// Terms. In a full site each node peers with every other site itself; any other site is reached through its leaders. A
// gate is a node that peers with other sites: any node of a full site, or an acting leader. A leader is elected from
// the view (Elect), and acts once its record names a term (Record.leads): by then it has set up its sessions.
//
// Invariants, all tested: nodes with the same view agree on the leaders and on the route of every packet. Two nodes use
// one route in each direction, and both directions pass the same leaders. A route visits only the sites of its two
// ends, and at most two nodes between them. No route loops, even where views differ: a host accepts a packet only from
// the nodes that its Guards name, and each such step brings the packet closer to its destination. Adding or removing a
// leader moves only the nodes that are bound to it; where members are bound by slices, few others move (slots.go).
//
// Source: DESIGN.md section 9, Sites; docs/sites.md; rendezvous hashing as in Thaler and Ravishankar, 1998.
package sites
