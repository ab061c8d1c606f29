// Package hopnet carries packets from node to node inside other packets (dataplane.Hops) by the kernel, for hosts
// with kernel WireGuard: it goes on without the agent. On the wire it is the same as package hop.
//
// One link (dataplane.Numbers.HopLink), an IP-in-IP link of any inner family without a far end of its own (kind sit),
// does both directions: a route's gateway says which node a packet goes to. Routes are in two tables of their own. One
// is asked for every packet but WireGuard's own; the other, which leads others' packets to the node that they are for,
// only for what came out of the link. The table inet skein_hop drops what no guard allows before the link sees it.
package hopnet
