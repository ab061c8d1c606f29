// Package cnitable runs the installed CNI plugin against a real agent: every verb, in every version of the
// specification, under every fault that was thought of, and says what came of it: `skein-dev cni`. docs/cni.md holds
// its table.
//
// A case is tried twice in each version: by cnitool, the reference runtime of containernetworking/cni, and by the
// plugin's own command line, which alone shows the code of an error. Both must succeed or both must fail; where cnitool
// judges by itself before it asks the plugin, the case says so. After each case the attachments are deleted, and
// nothing of them may be left: no link, no route, no lease.
//
// The lab has one server and one node that is not, so that the node can lose its quorum and go on. cnitool keeps its
// results in a directory of the lab, not in this host's /var/lib/cni.
//
// Run may be called by one goroutine at a time per lab directory.
package cnitable
