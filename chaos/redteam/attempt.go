package redteam

import (
	"context"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Place is from where an attempt is made, and with what.
type Place string

// Places.
const (
	Member    Place = "member"        // with its identity key, WireGuard key and all that the log tells members
	GossipKey Place = "gossip key"    // without an identity of a member
	Token     Place = "token"         // of a node that has not joined
	Revoked   Place = "revoked"       // a former member
	Pod       Place = "pod"           // on an honest member, root in its own network namespace
	Neighbour Place = "LAN neighbour" // a host in the network of an honest member
	Stranger  Place = "stranger"      // a host on the internet
	PlainPeer Place = "plain peer"    // with the configuration that an admin made for it
	Overheard Place = "on the path"   // somebody who hears packets between members, and sends from elsewhere
)

// Guard is what stops an attempt.
type Guard string

// Guards. holes.go has a patch without each, and an attempt that then gains something.
const (
	Roles       Guard = "roles: commands of agents and admins"
	OwnOnly     Guard = "a node's word counts for itself only"
	Issuer      Guard = "the issuer is who the stream proves, forwarded by servers alone"
	RequestIDs  Guard = "request IDs belong to their issuer"
	Tokens      Guard = "tokens: secret, uses, lifetime, role"
	RaftStreams Guard = "Raft streams of servers alone"
	Names       Guard = "names are checked"
	Limits      Guard = "sizes are bounded"
	Roster      Guard = "TLS identities against the roster"
	Signatures  Guard = "records are signed and ordered"
	Proof       Guard = "three pings without proof"
	Leases      Guard = "leases and slots of their owners"
	Clients     Guard = "clients' addresses against the blocks of their host"
	Codes       Guard = "packets by a relay carry a code"
	RelayIDs    Guard = "a relay writes the source"
	RelayLimits Guard = "a relay's quotas"
	Front       Guard = "handshakes are limited by source"
	Stun        Guard = "STUN: small answers, few of them"
	Probes      Guard = "probes carry a code and a counter"
	FoU         Guard = "FoU is taken from a slot's endpoint alone"
	PodSources  Guard = "a pod's packets carry its own source"
	LinkSources Guard = "overlay sources come by the tunnel alone"
	Filters     Guard = "filter tests go to where the asker is"
	Hops        Guard = "a leader brings its own site's packets alone"
	Passing     Guard = "a leader passes the log's events on to its own site's nodes, one stream each"
	Proven      Guard = "what a leader passes on needs a server's signature"
	Fresh       Guard = "a leader that passes events on late is left"
	SiteRecords Guard = "a site's nodes alone exchange its records"
	Away        Guard = "those that lead a site say who of it is away"
	Chosen      Guard = "where the log has chosen a site's leaders, no other leads it"
	NextKeys    Guard = "who names a next WireGuard key has it"
	PlainOwn    Guard = "a plain peer's packets carry its own source"
	PlainPort   Guard = "plain peers do not reach the control net"
	Fair        Guard = "what one caller may take is bounded"
)

// Attempt is one thing that an attacker tries.
type Attempt struct {
	Name  string
	From  Place
	Guard Guard
	Flood bool // it is about what others lose: the honest pair is measured during this one alone
	Long  bool // not in the short form
	Try   func(context.Context, *Field) (Seen, error)
	Judge func(Seen) string // what was gained; empty: nothing
}

// Seen is what victims show after an attempt. A Judge reads the fields that its attempt fills.
type Seen struct {
	Before, After *skeinv1.State    // the log as a server has it
	Records       []*skeinv1.Record // afterwards, as a server has them
	Arrived       []string          // at the victim: sources, or what else tells the attempt's packets from others
	Given         []string          // by honest nodes to the attacker, and not meant for it
	Lost          []string          // by honest nodes
	Files         []string          // that honest nodes wrote where none should be
	Count, Bound  int               // of packets or bytes at a victim, and what is allowed
	Believed      time.Duration     // that a server took a false word for true
	Refusal       string            // what the attacker was told; for the report alone
}

// All is the catalogue, in the order in which it is tried: what could spoil the lab for others comes last.
func All() []Attempt {
	var all []Attempt
	for _, list := range [][]Attempt{
		strangers(), tokens(), pods(), neighbours(), overheard(), gossipKey(), memberGossip(), relays(), memberEgress(),
		memberRPC(), sizes(), plainPeers(),
		floods(), revoked(), memberRaft(), leaders(), siteRecords(), siteNews(), siteEvents(),
	} {
		all = append(all, list...)
	}
	return all
}
