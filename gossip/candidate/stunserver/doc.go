// Package stunserver is the STUN server that public nodes run, so that a mesh needs nobody else's. It answers binding
// requests on a primary and an alternate port and from a third that is never named, and has another node answer where a
// client wishes for another address (RFC 5780).
//
// Invariants: an answer is never longer than its request, except that the smallest one always goes out; every source
// has a budget; all tables are bounded. respond decides and is pure; Server is the thin shell, safe for concurrent use.
// Source: RFC 8489, RFC 5780.
package stunserver
