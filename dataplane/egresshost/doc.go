// Package egresshost makes what a host needs to be a gateway of egresses, outside the gateways' own network namespaces:
// ways to them (table 115, asked before pods' table 116), an address of the host's own for what leaves without another
// one (nft table inet skein_egress), and forwarding on the links by which answers come back.
//
// A slot's endpoint is in table 115 as long as this host serves the slot. The plane has the way to another host's slot
// in table 116; so a slot comes and goes without the two writing the same route.
//
// Reconcile reads, compares and writes what differs; nothing else of the host is touched. Watch says when that is due.
// It works in the calling thread's network namespace. A Reconciler belongs to one goroutine.
//
// Source: DESIGN.md sections 9 and 11 of the project.
package egresshost
