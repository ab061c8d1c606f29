// Package identity holds what a node is: its Ed25519 identity key, the node ID and overlay
// addresses that follow from it, the TLS 1.3 configuration that proves it, and the keys that
// two nodes derive from what they know of each other.
//
// It is a leaf: every package may import it and it imports none. Values are immutable and safe
// for concurrent use. Source: DESIGN.md sections 7, 8 and 13.
package identity
