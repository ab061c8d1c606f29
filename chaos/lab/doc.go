// Package lab runs real skein agents on one machine, behind real NATs, and lets a scenario do things
// to them: `skein lab`, the demo and the tests stand on it.
//
// Load reads a lab file (docs/lab.md) into a Spec, a plain value that has been checked whole. Up
// builds its network (package fabric), starts one agent process per node and returns a Lab, through
// which agents are asked, commanded, cut off and killed. Run executes the Spec's steps on a Lab.
//
// Invariants: a Spec that Load returned can be built and run; nothing of a lab outlives Down but the
// artifacts of a failed run; everything needed to take a lab down can be found again from its name,
// so that Down works after a crash too; only processes that live in the lab's own namespaces are ever
// killed. A Lab's methods may be called concurrently, except Down, which comes last.
//
// Source: DESIGN.md sections 14 to 16.
package lab
