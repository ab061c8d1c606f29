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

// Kind is how packets travel.
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
	// Endpoint of a direct path. Of a relayed path: the port that the relay has reserved; invalid when packets travel
	// in the relay's session.
	Endpoint netip.AddrPort
	Relay    identity.ID // of a relayed path; zero for an idle pair, whose next packet takes the best relay at that time
	Since    time.Time
	RTT      time.Duration // 0: not measured
	Rule     string        // short name of the rule that decided
	Reason   string        // one plain sentence
	Alive    bool          // answered lately; a relayed path lives as long as its relay's session
	MTU      int           // largest tunnel packet that the path carries; 0: every size
	Silent   bool          // alive by WireGuard's counters alone: the peer's agent does not answer
	Suspect  bool          // alive, but answers are missing: traffic that other peers can carry avoids this path
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

// Transport is the path's kind for users: direct, relay or down.
func (p Path) Transport() string {
	switch {
	case p.Kind == Direct && p.Alive:
		return "direct"
	case p.Kind == Relay && p.Alive:
		return "relay"
	}
	return "down"
}

// FollowsDead reports whether this relay path replaced one whose pings are no longer answered. The relay may not have
// noticed yet that it cannot reach the peer either.
func (p Path) FollowsDead() bool {
	return p.Kind == Relay && (p.Rule == RuleDirectDead || p.Rule == RuleRelayDead)
}

// Settled reports whether a specific relay carries the path because the search found no direct one. False during the
// first search and for an idle pair.
func (p Path) Settled() bool {
	return p.Kind == Relay && !p.Relay.IsZero() && p.Rule != "no-record" && p.Rule != "relay-first"
}

// same reports whether two paths carry packets identically.
func (p Path) same(o Path) bool {
	return p.Kind == o.Kind && p.Endpoint == o.Endpoint && p.Relay == o.Relay && p.Alive == o.Alive &&
		p.Silent == o.Silent && p.MTU == o.MTU
}

// Candidate is one address at which a record says that the node's WireGuard port can be reached.
type Candidate struct {
	Type   skeinv1.CandidateType
	Addr   netip.AddrPort
	Source string
	// Priority orders a record's candidates, the highest first; 0: the default of the type.
	Priority uint32 `json:",omitzero"`
}

// Node is the part of a node's own record that paths depend on.
type Node struct {
	NAT        skeinv1.NatType
	Candidates []Candidate
	Site       string
	Keepalive  time.Duration // 0: the node asks for none
	PortStep   int           // port increment of a symmetric NAT that counts its ports; 0: not predictable
	Birthday   string        // enabled | disabled: predict ports at both ends, with all peers; empty: the mesh's setting
}

// Equal reports whether two nodes are the same for the purposes of this package.
func (n Node) Equal(o Node) bool {
	return n.NAT == o.NAT && n.Site == o.Site && n.Keepalive == o.Keepalive && n.PortStep == o.PortStep &&
		n.Birthday == o.Birthday && slices.Equal(n.Candidates, o.Candidates)
}

// NodeOf extracts from a record what paths need. It skips addresses that do not parse: verification of the record has
// rejected them already.
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

// Settings are the mesh's settings that affect paths; zero values mean the defaults.
type Settings struct {
	DirectRetry time.Duration // between attempts at a direct path for a relayed peer
	// HandshakeTimeout is how long WireGuard may wait for an answer on a direct path whose pings are answered; at least
	// 15 s.
	HandshakeTimeout time.Duration
	Keepalive        time.Duration  // between pings on an idle direct path
	Exclude          []netip.Prefix // addresses inside the tunnel: never an endpoint
	MTU              int            // largest packet of the tunnel; 0: no MTU probes
	Lazy             bool           // pairs without traffic stay with a relay

	NoPrediction  bool            `json:"NoGuessing"` // ports are never predicted on this host
	BirthdayBoth  bool            // two symmetric NATs predict ports at both ends
	BirthdayPeers map[string]bool // the same for single peers, by ID; counts more than BirthdayBoth
}

func (s Settings) equal(o Settings) bool {
	return s.DirectRetry == o.DirectRetry && s.HandshakeTimeout == o.HandshakeTimeout && s.Keepalive == o.Keepalive &&
		s.MTU == o.MTU && s.Lazy == o.Lazy && slices.Equal(s.Exclude, o.Exclude) && s.samePrediction(o)
}

func (s Settings) samePrediction(o Settings) bool {
	return s.NoPrediction == o.NoPrediction && s.BirthdayBoth == o.BirthdayBoth &&
		maps.Equal(s.BirthdayPeers, o.BirthdayPeers)
}

// RelayChoice is the relay that both ends share and that would be used now; the zero ID means none.
type RelayChoice struct {
	ID     identity.ID
	RTT    time.Duration
	Absent bool // no relay was chosen because the relays report that the peer has no session
}

// InputKind names an input.
type InputKind uint8

// The inputs of a Machine.
const (
	InputTick     InputKind = iota // time has passed
	InputSelf                      // Node: this host's own record, changed
	InputPeer                      // Node: what the peer's record says
	InputRelay                     // Relay: the relay now chosen for the pair, or none
	InputSettings                  // Settings
	InputNetwork                   // a link or an address of this host changed
	InputPong                      // Endpoint, RTT, Sent: a ping to Endpoint was answered from there
	InputPing                      // Endpoint: an authenticated ping of the peer came from there
	InputPunch                     // Addresses, Reply: the peer asks this host to probe it now
	// WireGuard exchanged packets with this peer; Endpoint: WireGuard received one from there, later than Sent
	InputTraffic
	InputSendFailed   // Endpoint, Error: a ping could not be sent
	InputEndpointSeen // Endpoint: WireGuard accepted a packet from there
	InputAdopted      // Endpoint: where WireGuard reached the peer before this agent started
	InputPrediction   // Prediction: progress or outcome of port prediction; Endpoint: a hit
	// Relay.ID, Endpoint: the port that a relay has reserved; Reply: both ends are proven, packets pass; without
	// Endpoint, Error: why there is no port
	InputReserved
	InputReady // the prober has the peer's key: pings can be sent and answered
	InputGo    // the manager allows the burst that ActionBurst requested
	// the tunnel carried packets of the control net; Reply: at least one came from the peer
	InputControl
	InputLate        // RTT: how late this process woke recently
	InputReplaceable // Reply: other peers can carry the traffic that goes through this one
	// WireGuard sends over the direct path and receives nothing; Reply: the peer's WireGuard does, not this host's
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

// Input is one observation. Kind determines which fields are set.
type Input struct {
	Kind       InputKind
	Endpoint   netip.AddrPort   `json:",omitzero"`
	RTT        time.Duration    `json:",omitzero"`
	Size       int              `json:",omitzero"` // size of the answered ping, as a tunnel packet; 0: not padded
	Sent       time.Time        `json:",omitzero"` // when the answered ping was sent, or the counters were last read
	Node       *Node            `json:",omitempty"`
	Relay      RelayChoice      `json:",omitzero"`
	Settings   *Settings        `json:",omitempty"`
	Addresses  []netip.AddrPort `json:",omitempty"`
	Reply      bool             `json:",omitempty"`
	Error      string           `json:",omitempty"`
	Prediction *PredictionEvent `json:"Guess,omitempty"`
}

// ActionKind names an action.
type ActionKind uint8

// The actions of a Machine.
const (
	ActionPing     ActionKind = iota // send an authenticated ping to Endpoint
	ActionPunch                      // signal the peer to probe this host's addresses now
	ActionUse                        // make WireGuard use Path
	ActionCheck                      // read WireGuard's counters soon, and ask the relay whether the peer has a session
	ActionPredict                    // predict ports with the peer as Predict says; the zero Prediction ends the attempt
	ActionReserve                    // ask Relay to reserve a port
	ActionPortDeaf                   // tell Relay that nothing passes its port
	ActionGiveBack                   // return the port to Relay
	ActionBurst                      // send InputGo when another burst may run
	ActionWake                       // call Step with a tick at At, or up to Early before; replaces the earlier request
)

// Action is what the Manager has to do. Kind determines which fields are set.
type Action struct {
	Kind     ActionKind
	Endpoint netip.AddrPort
	Size     int  // of a ping: padded like a tunnel packet of this size; 0: not padded
	Reply    bool // the punch answers the peer's
	Unheard  bool // the punch says that this host's WireGuard receives nothing from the peer
	Path     Path
	At       time.Time
	Early    time.Duration // how much sooner the wake-up may come if others are due
	Predict  Prediction
	Relay    identity.ID
}
