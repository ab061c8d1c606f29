// Package bench measures the figures that skein promises, with real parts, and
// sets each beside its target: `make bench` and `skein-dev bench`.
//
// What happens between hosts is measured on real agents in a lab (package lab);
// what one program does by itself, with the Go benchmarks and tests that stand
// beside the code. A figure is what was measured and nothing else: one that could
// not be taken says why and does not count as reached.
//
// Invariants: every figure tells its target, what was got, how, and the load of
// the machine at that time; a lab is taken down on every way out. Run may be
// called once at a time.
//
// Source: DESIGN.md sections 8, 9 and 15, and the targets of issues 2, 3 and 14.
package bench
