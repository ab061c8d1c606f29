// Package sites decides who leads each site, who peers with whom, and by which node a packet goes on.
//
// Everything here is pure: the same view (settings, members, records, who is alive) gives the same answer on every
// node. What differs from host to host is an argument: which nodes its own path machines find dead, and which nodes it
// has lately seen as leaders (Recent, Lawful). Course is what a host remembers from plan to plan, and Follower how it
// goes from one to the next; both take the time as an argument.
//
// Leaders that live and do not forward are demoted by what their witnesses say (Witnesses, Judge).
//
// Terms. A site is full (each of its nodes peers with every other site itself) or speaks through its leaders. A gate
// is a node that peers with other sites: any node of a full site, an acting leader of another one. A leader is elected
// from the view (Elect), and acts once its record says so (Record.leads): it has then had time to set up its sessions.
//
// Invariants, all tested: nodes with the same view agree on leaders and on every way. A pair of nodes has one way in
// each direction, and both pass the same leaders. A way visits only the two sites of its ends and at most two nodes
// between them. No way loops, also where views differ: a host takes a packet only from whom its Guards name, and each
// such step brings it closer. A leader more or less moves only the nodes that are bound to it; where members are
// bound by slices, hardly any others (slots.go).
//
// Source: DESIGN.md section 9, Sites; docs/sites.md; rendezvous hashing as in Thaler and Ravishankar, 1998.
package sites
