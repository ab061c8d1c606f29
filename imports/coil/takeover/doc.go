// Package takeover puts skein into the place of Coil v2 on one host: the pods that run go on, new ones start through
// skein's plugin, and what Coil has left in the kernel beside them goes away.
//
// Decide is pure: from what the host has (Read) and what the log says it makes a Plan, or says what stands in its way.
// Run does it: what is to be undone is on the disk before anything changes, the agent has to know every pod before a
// configuration does, and whatever fails on the way is taken back. Undo brings Coil's side back as it was.
//
// Invariants: a pod's link and addresses are never touched, and the route to a pod is there at every moment. A second
// run finds nothing to do. What is not Coil's by its alias, its protocol and its table stays.
//
// Source: DESIGN.md section 10; seeds/coil-v2-design.txt, "Upgrading from v1".
package takeover
