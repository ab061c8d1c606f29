// Package route keeps what leads packets into the tunnel: the link's state and addresses, a policy rule
// and two default routes for each address family.
//
// Table 180 has a default route through the link and, behind it, an unreachable one: when the link is
// gone or down, marked packets are refused instead of leaving the host in plaintext by the main table.
//
// Ours are the addresses of our link, and the rules and routes with protocol 30 and our numbers; nothing
// else is touched. A Reconciler belongs to one goroutine. Sources: DESIGN.md sections 9 and 15.
package route
