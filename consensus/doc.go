// Package consensus keeps the agreed state: the Raft node of a server with the leader's
// decide-and-append loop, the durable replica that every node keeps, the service that hands
// commands to the leader and streams the log to everybody, and the client of that service.
//
// Invariants, each with a test: an acknowledged command survives the crash of any minority; a replica's applied index
// never goes back; a batch is folded only on the index and the history that it was decided on; what a node that is no
// server passes on is kept only if a server has signed it; a repeated request ID of the same issuer gets the first
// answer; only voters write the log, each in its own name; voters are added and removed because the agreed state says
// so and never because a server failed; a damaged file is reported and never touched.
//
// Replica, Server, Service, Client and Conns are safe for concurrent use. States that Replica hands
// out are shared and must not be changed. Source: DESIGN.md of the project, sections 2, 5, 7 and 15;
// why it is built this way stands in DESIGN.md beside this file, recovery in docs/recovery.md.
package consensus
