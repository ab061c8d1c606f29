// Package rtnl asks and changes links, addresses, routes and rules by rtnetlink, hears of their changes, and turns
// addresses into the kernel's forms and back. Every request is counted by internal/nlcount.
//
// It also opens network namespaces, runs functions in them, and opens TUN devices there.
//
// A Conn works in the network namespace in which it was opened, whatever thread uses it. It belongs to one goroutine. A
// Listener hears from several namespaces, of rtnetlink and of nftables.
package rtnl
