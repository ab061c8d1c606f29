// Package kube is the annotation tier: it carries records by annotations of Kubernetes Nodes, for nodes that gossip
// does not reach. It turns a signed record into an annotation's value and back, and tells which changes of a record
// are worth a write to the apiserver. It does not talk to the apiserver itself.
//
// Invariants: what an annotation says is believed no more than a packet: a record is decoded here and verified by
// package gossip, so whoever may write to a Node can show old records of a member again and nothing else. What
// changes by itself, such as counters, round-trip times and indexes, is not worth a write.
//
// Source: DESIGN.md sections 6 and 12; Talos KubeSpan and WireKube, which gossip by annotations alone.
package kube
