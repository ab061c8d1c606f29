// Package cniserver answers the CNI plugin on the agent's socket: it asks package ipam for addresses, has package
// podnet make the links, and takes both back.
//
// Invariants: an ADD that fails, or whose caller goes away, leaves neither an address nor a link. An address is given
// back only when its link is gone, so that nobody gets it while a pod still answers to it; what cannot be removed now
// keeps its address and is tried again. Requests for one attachment run one after the other, in the order in which they
// came; requests for different ones never wait for each other, but for a place among the threads that talk to the
// kernel.
//
// A Server may be used concurrently.
//
// Source: the CNI specification 1.1.0; DESIGN.md section 10; CNIService in api/skein/v1/cni.proto.
package cniserver
