// Package matrix tries every kind of NAT with every other, with real agents in a lab, and says which
// path each pair got and how soon: `skein-dev matrix`. Expected is a table of its own, written down from
// what the kinds allow and not taken from package agent/path, so that the two check each other.
//
// Two nodes of each kind, at sites of their own, a server that relays and answers STUN, and all of them
// in one mesh: one lab measures all pairs at the same time. Pairs that share a public address have a
// second, small lab. Times come from the agents' own journals.
//
// Run may be called by one goroutine at a time per lab directory.
package matrix
