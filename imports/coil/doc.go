// Package coil reads what Coil v2 keeps of its pools, blocks and egresses, as kubectl prints it or as Coil's converter
// from v1 wrote it, and makes of it what the leader takes over (ImportPools, DefineEgress).
//
// Invariants: nothing that is not understood changes what is imported: an unknown field, another version or a
// contradiction within the file is an error, and objects of other kinds are named in a note. The same bytes give the
// same result. Everything here is pure and may be called concurrently.
//
// Source: seeds/coil-v2-design.txt, "Custom Resource Definitions" and "Upgrading from v1".
package coil
