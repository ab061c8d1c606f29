// Package upnp asks a gateway by UPnP for a mapping of a UDP port: it finds an Internet Gateway Device by SSDP, reads
// its description and calls its WAN connection service by SOAP. Gateways whose owners know nothing else by name speak
// it.
//
// UPnP trusts the local network, this package does not: only answers from the gateway itself count, addresses in them
// must be the gateway's own, redirects and proxies are not followed, and everything that is read has a size limit. What
// is read is decoded by pure functions, each of which is fuzzed. Source: UPnP Device Architecture 1.1,
// WANIPConnection:1 and :2, WANPPPConnection:1.
package upnp
