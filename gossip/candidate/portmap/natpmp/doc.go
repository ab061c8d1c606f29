// Package natpmp asks a gateway by NAT-PMP for a mapping of a UDP port (RFC 6886). It is what gateways speak that are
// older than PCP.
//
// Encoding and decoding are pure. NAT-PMP has no nonce: an answer is tied to its question by the connected socket and
// the inner port.
package natpmp
