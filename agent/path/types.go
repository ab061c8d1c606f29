package path

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
)

// Kind tells how packets travel.
type Kind uint8

// The kinds of path.
const (
	None Kind = iota
	Relay
	Direct
)

// String is the kind as users read it.
func (k Kind) String() string {
	switch k {
	case Relay:
		return "relay"
	case Direct:
		return "direct"
	}
	return "none"
}

// RuleDirectDead is the rule of a path that follows a direct one whose pings are no longer answered.
const RuleDirectDead = "direct-dead"

// RuleRelayDead is the rule of a path that follows one through a relay's port whose pings are no longer answered.
const RuleRelayDead = "relay-dead"

// ruleRelayUDP is the rule of a path through a port that a relay has reserved and that has answered.
const ruleRelayUDP = "relay-udp"

// Path is how WireGuard reaches one peer.
type Path struct {
	Kind Kind
	// of a direct path; of a relayed one: the port that the relay has reserved, not valid when packets travel in its
	// session
	Endpoint netip.AddrPort
	Relay    identity.ID // of a relayed path; zero for an idle pair, whose next packet takes what is best then
	Since    time.Time
	RTT      time.Duration // 0: not measured
	Rule     string        // short name of the rule that decided
	Reason   string        // one plain sentence
	Alive    bool          // answered lately; a relayed path lives as long as its relay's session
	MTU      int           // largest packet of the tunnel that it carries; 0: all of them
	Silent   bool          // alive by WireGuard's counters alone: the peer's agent does not answer
	Suspect  bool          // alive as far as is known, but answers are missing: what others can carry shall not go by it
}

// String is the path as the journal keeps it: relay, relay:<id>, relay:<id>,<addr:port>, direct:<addr:port> or none.
func (p Path) String() string {
	switch p.Kind {
	case Relay:
		if p.Endpoint.IsValid() {
			return "relay:" + p.Relay.String() + "," + p.Endpoint.String()
		}
		if p.Relay.IsZero() {
			return "relay"
		}
		return "relay:" + p.Relay.String()
	case Direct:
		return "direct:" + p.Endpoint.String()
	}
	return "none"
}

// Transport is the path in one word: direct, relay or down.
func (p Path) Transport() string {
	switch {
	case p.Kind == Direct && p.Alive:
		return "direct"
	case p.Kind == Relay && p.Alive:
		return "relay"
	}
	return "down"
}

// FollowsDead reports whether the path is a relay's because pings over the one before are no longer answered. The relay
// may not know yet that it does not reach the peer either.
func (p Path) FollowsDead() bool {
	return p.Kind == Relay && (p.Rule == RuleDirectDead || p.Rule == RuleRelayDead)
}

// Settled reports whether the path is a certain relay's because no direct one was found: not while the first search
// goes on, and not for an idle pair.
func (p Path) Settled() bool {
	return p.Kind == Relay && !p.Relay.IsZero() && p.Rule != "no-record" && p.Rule != "relay-first"
}

// same reports whether two paths carry packets the same way.
func (p Path) same(o Path) bool {
	return p.Kind == o.Kind && p.Endpoint == o.Endpoint && p.Relay == o.Relay && p.Alive == o.Alive &&
		p.Silent == o.Silent && p.MTU == o.MTU
}

// Candidate is one way that a record offers to reach a node's WireGuard port.
type Candidate struct {
	Type   skeinv1.CandidateType
	Addr   netip.AddrPort
	Source string
	// Priority orders a record's candidates, the highest first; 0: that of the type.
	Priority uint32 `json:",omitzero"`
}

// Node is what one end of a path says of itself.
type Node struct {
	NAT        skeinv1.NatType
	Candidates []Candidate
	Site       string
	Keepalive  time.Duration // 0: not asked for
	PortStep   int           // of a symmetric NAT that counts its ports; 0: not predictable
	Birthday   string        // enabled | disabled: guessing at both ends, with all peers; empty: as the mesh has it
}

// Equal reports whether two nodes are the same as far as paths go.
func (n Node) Equal(o Node) bool {
	return n.NAT == o.NAT && n.Site == o.Site && n.Keepalive == o.Keepalive && n.PortStep == o.PortStep &&
		n.Birthday == o.Birthday && slices.Equal(n.Candidates, o.Candidates)
}

// NodeOf takes from a record what paths need. Addresses that do not parse are left out: the
// record's verification has refused them already.
func NodeOf(r *skeinv1.Record) Node {
	n := Node{NAT: r.GetNatType(), Site: r.GetSite(), Keepalive: time.Duration(r.GetPersistentKeepalive()) * time.Second,
		PortStep: portStep(r), Birthday: r.GetBirthdayAttack()}
	for _, c := range r.GetCandidates() {
		if a, err := netip.ParseAddrPort(c.GetAddress()); err == nil {
			n.Candidates = append(n.Candidates, Candidate{Type: c.GetType(), Addr: unmap(a), Source: c.GetSource(),
				Priority: candidate.Priority(c)})
		}
	}
	if a, err := netip.ParseAddrPort(r.GetForcedEndpoint()); err == nil {
		f := Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_FORCED, Addr: unmap(a), Source: "config",
			Priority: candidate.PriorityForced}
		if !slices.ContainsFunc(n.Candidates, func(c Candidate) bool { return c.Addr == f.Addr && c.Type == f.Type }) {
			n.Candidates = append(n.Candidates, f)
		}
	}
	return n
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// Settings are the mesh's settings that paths follow; zero values mean the defaults.
type Settings struct {
	DirectRetry time.Duration // between attempts at a direct path for a relayed peer
	// HandshakeTimeout is how long WireGuard may ask in vain over a direct path whose pings are answered; 15 s at least.
	HandshakeTimeout time.Duration
	Keepalive        time.Duration  // between pings on an idle direct path
	Exclude          []netip.Prefix // addresses inside the tunnel: never an endpoint
	MTU              int            // largest packet of the tunnel; 0: it is not tried what paths carry
	Lazy             bool           // pairs without traffic stay with a relay

	NoGuessing    bool            // ports are never guessed on this host
	BirthdayBoth  bool            // two symmetric NATs guess at both ends
	BirthdayPeers map[string]bool // the same for single peers, by ID; counts more than BirthdayBoth
}

func (s Settings) equal(o Settings) bool {
	return s.DirectRetry == o.DirectRetry && s.HandshakeTimeout == o.HandshakeTimeout && s.Keepalive == o.Keepalive &&
		s.MTU == o.MTU && s.Lazy == o.Lazy && slices.Equal(s.Exclude, o.Exclude) && s.sameGuessing(o)
}

func (s Settings) sameGuessing(o Settings) bool {
	return s.NoGuessing == o.NoGuessing && s.BirthdayBoth == o.BirthdayBoth && maps.Equal(s.BirthdayPeers, o.BirthdayPeers)
}

// RelayChoice is the relay that both ends share and that would be used now; the zero ID means none.
type RelayChoice struct {
	ID     identity.ID
	RTT    time.Duration
	Absent bool // there is none because the relays say that the peer is not there
}

// InputKind names an input.
type InputKind uint8

// The inputs of a Machine.
const (
	InputTick     InputKind = iota // time has passed
	InputSelf                      // Node: what this host now says of itself
	InputPeer                      // Node: what the peer's record says
	InputRelay                     // Relay: the relay now chosen for the pair, or none
	InputSettings                  // Settings
	InputNetwork                   // a link or address of this host changed
	InputPong                      // Endpoint, RTT, Sent: a ping to Endpoint was answered from there
	InputPing                      // Endpoint: an authenticated ping of the peer came from there
	InputPunch                     // Addresses, Reply: the peer asks to probe it now
	// WireGuard carried packets of this peer; Endpoint: it heard the peer there, after Sent
	InputTraffic
	InputSendFailed   // Endpoint, Error: a ping could not be sent
	InputEndpointSeen // Endpoint: WireGuard accepted a packet from there
	InputAdopted      // Endpoint: where WireGuard talked to the peer before this agent started
	InputGuess        // Guess: what became of guessing ports; Endpoint: a hit
	// Relay.ID, Endpoint: the port that a relay has reserved, Reply: it carries; without Endpoint, Error: there is none
	InputReserved
	InputReady // the prober has the peer's key: pings can be sent and answered
	InputGo    // the burst that was asked for may begin
	// the tunnel carried packets of the control net; Reply: some of them were the peer's
	InputControl
	InputLate        // RTT: how late this process lately woke
	InputReplaceable // Reply: others can carry what goes through the peer
	// WireGuard asks for answers over the direct path and hears none; Reply: the peer's does
	InputUnheard
)

var inputNames = [...]string{"tick", "self", "record", "relay", "settings", "network", "probe_ok", "ping_received",
	"punch", "traffic", "probe_lost", "endpoint_seen", "adopted", "guess", "reserved", "ready", "go", "control", "late",
	"replaceable", "unheard"}

// String is the kind as the journal keeps it.
func (k InputKind) String() string {
	if int(k) < len(inputNames) {
		return inputNames[k]
	}
	return fmt.Sprintf("input %d", k)
}

// Input is one observation. Which fields count depends on Kind.
type Input struct {
	Kind      InputKind
	Endpoint  netip.AddrPort   `json:",omitzero"`
	RTT       time.Duration    `json:",omitzero"`
	Size      int              `json:",omitzero"` // of the answered ping, as a packet of the tunnel; 0: it was not padded
	Sent      time.Time        `json:",omitzero"` // when the answered ping was sent, or the counters were read before
	Node      *Node            `json:",omitempty"`
	Relay     RelayChoice      `json:",omitzero"`
	Settings  *Settings        `json:",omitempty"`
	Addresses []netip.AddrPort `json:",omitempty"`
	Reply     bool             `json:",omitempty"`
	Error     string           `json:",omitempty"`
	Guess     *GuessEvent      `json:",omitempty"`
}

// ActionKind names an action.
type ActionKind uint8

// The actions of a Machine.
const (
	ActionPing     ActionKind = iota // send an authenticated ping to Endpoint
	ActionPunch                      // signal the peer to probe this host's addresses now
	ActionUse                        // WireGuard shall use Path
	ActionCheck                      // read WireGuard's counters soon, and ask the relay whether the peer is there
	ActionGuess                      // guess ports with the peer as Guess says; the zero Guess ends that
	ActionReserve                    // ask Relay to reserve a port
	ActionPortDeaf                   // tell Relay that nothing comes through its port
	ActionGiveBack                   // let Relay have its port back
	ActionBurst                      // say InputGo when there is room for another burst
	ActionWake                       // call Step with a tick at At, or Early before; replaces the earlier wish
)

// Action is what the shell shall do. Which fields count depends on Kind.
type Action struct {
	Kind     ActionKind
	Endpoint netip.AddrPort
	Size     int  // of a ping: padded as a packet of the tunnel of that size would be; 0: not
	Reply    bool // the punch answers the peer's
	Unheard  bool // the punch says that this host's WireGuard does not hear the peer's
	Path     Path
	At       time.Time
	Early    time.Duration // how much sooner a wake may come, when others are about to be woken
	Guess    Guess
	Relay    identity.ID
}
