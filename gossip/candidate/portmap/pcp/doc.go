// Package pcp asks a gateway by the Port Control Protocol for a mapping of a UDP port (RFC 6887: MAP and ANNOUNCE).
//
// Encoding and decoding are pure. An answer counts only if it repeats what was asked: nonce, protocol and inner port.
package pcp
