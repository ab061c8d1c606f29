// Package events is the agreed state of a cluster: the events that the Raft log holds, the State
// that they fold into, the decisions that turn commands into events, and the state's canonical hash.
//
// It is pure: no clock, no I/O, no randomness. Time and entropy come in the command, from the leader.
//
// Invariants, for any sequence of events whatever:
//   - no address, name, node ID or WireGuard key has two owners, and none of a revoked node comes back
//     (its name excepted);
//   - no block or address of a pool has two owners, no two pools overlap each other or the overlay, and one node at a
//     time holds a static address;
//   - no address of an egress has another use, a slot has one owner at most, and each change of a slot has a higher
//     epoch than the last;
//   - the same events give the same State and the same Hash on every machine;
//   - a State rebuilt from its snapshot equals the one that was folded, and folds on alike;
//   - Fold either takes an event or leaves the state as it was.
//
// A State may be read, hashed and cloned by many goroutines at once as long as nobody folds into it;
// Fold needs it alone. Clone costs a few words, so the usual way is: clone, fold into the clone,
// publish the clone. Messages handed out by a State are shared and must not be changed.
//
// Source: DESIGN.md sections 2, 5, 10 and 15; this package's own DESIGN.md says why it is built so.
package events
