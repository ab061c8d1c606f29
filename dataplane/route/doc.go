// Package route keeps what leads packets into the tunnel: the link's state and addresses, a policy rule
// and two default routes for each address family.
//
// Table 180 has a default route through the link and, behind it, an unreachable one: when the link is
// gone or down, marked packets are refused instead of leaving the host in plaintext by the main table.
//
// It also keeps what leads to this host's pods: a rule to table 116, and for each block of addresses an
// unreachable route there, behind the pods' own, and one in table 119 for a routing daemon to announce. Behind all of
// these each pool's subnet is unreachable, but for what of it is not the mesh's.
//
// Ours are the addresses of our link, and the rules and routes with protocol 30 and our numbers; of those
// for pods only the kinds that Coil does not make (pods.go). Nothing else is touched. A Reconciler belongs
// to one goroutine. Sources: DESIGN.md sections 9, 10 and 15.
package route
