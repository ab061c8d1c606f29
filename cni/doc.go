// Package cni is the CNI plugin: it translates between a container runtime and the agent, which gives the addresses and
// makes the links (agent/cniserver). It also writes the plugin and its configuration to where runtimes look.
//
// The plugin keeps nothing. It holds what a runtime says against the specification, asks the agent on its socket, and
// prints a result or an error with one of the codes in errors.go. Without an agent ADD, CHECK and STATUS say so at
// once, while DEL and GC succeed: DEL takes the link away by itself and leaves a Note, from which the agent learns that
// the address is free.
//
// Everything that comes in (standard input, environment, notes) is bounded in size. A call of Main is one run of the
// program; the rest may be called concurrently.
//
// Source: the CNI specification, versions 0.3.1 to 1.1.0, and its CONVENTIONS.md; DESIGN.md sections 10 and 14.
package cni
