// Package ping sends ICMP echoes at a steady rate and keeps count: how many were answered, how fast,
// and for how long none were. It needs no ping program; the caller opens the raw socket, in whatever
// network namespace the echoes should leave from.
//
// Tally is pure. A Stream owns its socket and two goroutines; its methods may be called concurrently.
package ping
