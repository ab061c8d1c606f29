// Package reconcile keeps parts of the kernel as they are wanted: one shell for everything in this project that writes
// links, addresses, routes, rules, tables and neighbours.
//
// A Target knows how one part is read, compared and written. A Runner says when: at once when something else is wanted,
// a little after the kernel has told of a change by somebody else, at a limited rate where somebody keeps changing it,
// later and later while it fails, and now and then for notifications that were lost. What is due is decided by values
// (schedule.go); only Run has a clock. A Runner with nothing due does not wake up.
//
// Everything of a Runner runs on the goroutine that called Run, which may be locked to a thread in a network namespace.
package reconcile
