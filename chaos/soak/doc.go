// Package soak kills agents of a running lab at random, for as long as one likes, and says whether the
// mesh stood it.
//
// While agents die and return, a Ledger holds every answer of every agent against the invariants: one
// state hash per index, an applied index that never goes back (not by kill -9 either), and no
// acknowledged command that is forgotten. Afterwards everything is healed, and then all of it has to come
// true: the agents agree, every pair reaches the other, the pairs that were direct are direct again, and
// no agent reports an error.
//
// A run is repeated by its seed as far as the choice of victims and pauses goes. A run that killed fewer
// agents than its time allows proves nothing and fails.
//
// Source: DESIGN.md section 15.
package soak
