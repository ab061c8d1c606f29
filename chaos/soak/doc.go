// Package soak kills agents of a running lab at random, for as long as one likes, and says whether the
// mesh stood it.
//
// While agents die and return, a Ledger holds every answer of every agent against the invariants: one
// state hash per index, an applied index that never goes back (not by kill -9 either), and no
// acknowledged command that is forgotten. Afterwards everything is healed, and then all of it has to come
// true: the agents agree, every pair reaches the other, the pairs that were direct are direct again, and
// no agent reports an error.
//
// Meanwhile it reads what agents and the kernel hold, and reports by how much that grows in an hour. At rest the mesh
// may hold no more than it held before the first fault, but for a stated slack: the rest is a leak. An agent that ends
// though nobody killed it has crashed. Either fails the run. Cores may burn, agents be frozen, and half of them killed
// at once.
//
// A run is repeated by its seed as far as the choice of victims and pauses goes. A run that killed fewer
// agents than its time allows proves nothing and fails.
//
// Source: DESIGN.md section 15.
package soak
