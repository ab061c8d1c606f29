// Package plainpeer decides which node carries a plain WireGuard peer: one that runs no skein.
//
// The log says which nodes may carry a peer, in which order. A carrier with which the peer has begun a session says
// so in its record,
// with a term above all that it has seen: the highest term holds the peer, on every node that has the same records.
// When the holder
// does not answer, the next carrier that has heard the peer lately begins a session itself; the peer follows, and the
// carrier claims.
// The one that lost the peer ends its session, so that it sends nothing that the peer would follow back. A claim
// needs a session with
// the peer, so two carriers that do not hear of each other both reach it, and what is sent by the one it last heard
// of counts.
//
// Everything here is a pure function of its arguments.
package plainpeer
