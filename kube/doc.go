// Package kube makes the agent part of a Kubernetes cluster: it is an agent's part (package agent/part) that watches
// the apiserver and acts by the agent.
//
// It reads Nodes as metadata alone, which is small and does not change with heartbeats, keeps a copy of what it uses
// on disk, and goes on with that copy while the apiserver is away. It writes to its own Node and nothing else: its
// record, by server-side apply, and Events about annotations that cannot be used. It tells the agent which pool a
// pod's Namespace has chosen, and which egresses a pod's annotations name. On one admin node at a time a controller
// takes custom resources to the log, and shows the log in them (package kube/resource decides).
//
// Invariants: nothing that the apiserver says or leaves unsaid takes a path, an address or a member away by itself.
// An apiserver that is away, slow, or wrong costs news. What is not under this package's names on a Node stays as it
// is. A Node is written to only if it is the one that was seen (its UID), so that none is made by a write.
//
// Source: DESIGN.md section 12; FIELD.md, "Kubernetes: what adopters need".
package kube
