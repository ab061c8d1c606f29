// Package e2e holds the tests of what users and strangers get wrong: real skein processes in network
// namespaces of a lab are given bad input, and the tests assert what they print and how they exit.
//
// Every case shares one lab of three hosts. `seed` leads a cluster, `peer` is a member, and `spare` has
// no agent of its own: the tests start processes there, one test after another. docs/bad-input.md lists
// the cases.
package e2e
