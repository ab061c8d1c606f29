// Package redteam attacks a running lab: as a member that holds its real keys, with a gossip key or a token alone, as a
// revoked identity, from a pod, from a host in a member's LAN, and as a stranger. What an attempt gained is judged by
// what the victims show: the log on a server, their gossip records, packets that arrive at them, their files and
// processes. An attacker's own return code is shown in the report and decides nothing.
//
// An Attempt has two halves. Try acts and observes, and is thin; Judge is pure, over the values in Seen. For each guard
// that attempts meet, holes.go has a patch that takes the guard away: a lab built with it must show that the attempt
// gains something, else the attempt proves nothing. No switch in the product weakens a guard.
//
// Run uses one lab and is not safe for concurrent use. See docs/decisions/0044-the-red-team.md.
package redteam
