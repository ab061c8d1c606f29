// Package resource decides what custom resources mean for the agreed state: which command a resource's wish becomes,
// and what its status says. It is pure.
//
// The log is the truth and a resource is a wish. The rule for those who wish at the same time is that the newest word
// wins: each generation of a resource is taken to the log once, and what a command changes after that stays until the
// resource changes again. The condition Synced says so while the two differ.
//
// Invariants: a resource that is gone without being deleted, since its definition was removed or etcd was lost,
// changes nothing. The same resource and state give the same command with the same request ID, so that two nodes that
// decide at once do no more than one. Fields that the resource leaves out are the log's own.
//
// Source: DESIGN.md section 12; the Coil seed for pools and egresses.
package resource
