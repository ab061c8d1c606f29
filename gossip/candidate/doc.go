// Package candidate finds out how the world can reach this host's WireGuard port. Each way of doing so is a Step in a
// small package of its own; Discoverer runs them side by side and tells of a Result only when it changed. DESIGN.md has
// the table of steps and the rules.
//
// Invariants: looks at one step never overlap; nothing is told before the NAT is known as far as it can be and the
// host's own addresses are; every candidate has the source that found it, and an address is told once.
//
// Discoverer is safe for concurrent use. Source: DESIGN.md section 8 of the project.
package candidate
