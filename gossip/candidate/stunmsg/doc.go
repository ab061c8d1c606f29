// Package stunmsg reads and writes the few STUN messages that skein's client and server exchange: binding requests with
// the wishes of RFC 5780 and one of our own (AttrSilentPort), and their answers.
//
// Only XOR-MAPPED-ADDRESS is believed, and only an address that the question can have come from. Everything is pure and
// may be called from any goroutine. Source: RFC 8489, RFC 5780.
package stunmsg
