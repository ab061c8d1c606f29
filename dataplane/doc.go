// Package dataplane says what the host's kernel should hold for skein: the Spec. The packages
// below it make it so, one per kernel subsystem; plane puts them together.
//
// A Spec is a plain value, made by agent/projection and compared with what the kernel has. Nothing
// here knows of events, gossip or paths. Source: DESIGN.md section 9.
package dataplane
