// Package fabric builds the lab's internet out of network namespaces: a core, one router per site
// with its NAT, and one host per node. It talks netlink only; the one program that it runs is miniupnpd,
// in the routers that map ports.
//
// Invariants: nothing is made in the caller's own network namespace; the only traces outside the
// lab's namespaces are their names in /run/netns, all of the form sk<lab>-…, and Teardown removes
// them together with every process that lives inside. A Plan is a plain value made by NewPlan, so
// that addresses can be known before anything exists.
//
// NAT kinds follow RFC 4787's terms (mapping and filtering) and are checked in the tests in the
// manner of RFC 5780. Faults between two hosts work by a stamp: each host writes its number into
// the DSCP field of what it sends, which NATs preserve, and the receiver drops by number.
//
// Functions may be called from any goroutine; two callers must not change the same lab at once.
package fabric
