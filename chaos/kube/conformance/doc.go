// Conformance runs Kubernetes' own network tests, those with [sig-network] and [Conformance] in their names, against a
// cluster whose nodes are behind NATs and whose network is skein. It is what `make conformance` runs; what came out is
// kept in docs/conformance.md.
//
// The tests and ginkgo, which runs them, are built by .ci/kubernetes-tools from Kubernetes' Go module. The images that
// they want are made on this machine, of the programs that .ci/conformance unpacks; their names are asked of the tests.
package main
