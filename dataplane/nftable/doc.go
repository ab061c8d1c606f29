// Package nftable keeps tables of nftables, of family inet, as they are declared: chains, tagged rules, sets, maps and
// counters as data.
//
// A Table is what is wanted, State what the kernel has. Diff computes the fewest steps from one to the other,
// State.Apply what the kernel has after them; both are pure. A Conn reads and writes; a Reconciler remembers what it
// read and wrote, so that a table that is unchanged costs no message.
//
// The expressions that rules of several tables are made of are in expr.go, each with the register that all work in.
//
// A rule carries a tag as its comment, a digest of its text and its expressions. By that it is known again: the kernel
// does not give all expressions back as they were sent.
package nftable
