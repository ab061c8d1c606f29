// Package join decides how hosts whose agents run in pods become members of one mesh: which of them makes it, when the
// others join, and which tokens the servers keep for them. It is pure: objects of the apiserver go in as values.
//
// The objects are made with the chart, empty, and by nothing that runs: Secrets skein-join and skein-join-server hold
// tokens, ConfigMap skein-cluster says which Node makes the mesh and which mesh it is.
//
// Invariants: a host makes a mesh only under the ID that it has written into the ConfigMap before, in a write that
// succeeds only where nothing changed since it was read. An ID that is there is never replaced. So there is one mesh at
// most for each ConfigMap, in whatever order hosts start and stop; and without the ConfigMap there is none.
//
// Source: docs/decisions/0051.
package join
