// Package admission is the TLS port of a public node, where relay sessions, spliced streams and joiners come in, told
// apart by ALPN, and the bounds of what one source may take of it.
//
// Listener lets members alone past the handshake, but for joiners, who have a token instead. Limiter decides before the
// handshake, since that is what costs; the control net's port has one of its own.
package admission
