package wireguard

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// Op is one change of a device: of itself (Peer is nil) or of one peer.
type Op struct {
	// Device fields; nil leaves them.
	PrivateKey *dataplane.Key
	Port       *int
	Mark       *uint32

	Peer *PeerOp
}

// Action says what a PeerOp does.
type Action uint8

// The three things that can happen to a peer.
const (
	Add    Action = iota // the peer is not there
	Update               // the peer is there; its session stays
	Remove
)

// PeerOp changes one peer. Nil fields stay as they are.
type PeerOp struct {
	Action       Action
	Key          dataplane.Key
	PresharedKey *dataplane.Key
	Endpoint     netip.AddrPort // invalid: as it is
	Keepalive    *time.Duration
	Gain         []netip.Prefix // taken from whoever holds them
	Lose         []netip.Prefix // nobody else gets them
	Final        []netip.Prefix // all of the peer's allowed IPs after the change; set with Lose
}

// Options of Diff.
type Options struct {
	// Prune allows removals: of peers, and of allowed IPs that nobody else gets.
	Prune bool
	// KeepEndpoints leaves the endpoints of existing peers alone, whatever they are.
	KeepEndpoints bool
}

// Diff returns what turns actual into want. First come additions and changes, which move an allowed IP
// in one step from its old owner to the new one, then losses, then removals of peers.
func Diff(want, actual State, o Options) []Op {
	var ops []Op
	if d, ok := diffDevice(want, actual); ok {
		ops = append(ops, d)
	}
	var gains, losses, removals []Op
	moved := map[netip.Prefix]bool{}
	var losers []dataplane.Key
	for _, k := range sortedKeys(want.Peers) {
		w := want.Peers[k]
		a, exists := actual.Peers[k]
		p := diffPeer(k, w, a, exists, o)
		for _, ip := range p.Gain {
			moved[ip] = true
		}
		if o.Prune && exists && lacks(w.AllowedIPs, a.AllowedIPs) {
			losers = append(losers, k)
		}
		if !p.empty() {
			gains = append(gains, Op{Peer: &p})
		}
	}
	for _, k := range losers {
		w, a := want.Peers[k], actual.Peers[k]
		var lose []netip.Prefix
		for _, ip := range a.AllowedIPs {
			if !has(w.AllowedIPs, ip) && !moved[ip] {
				lose = append(lose, ip)
			}
		}
		if len(lose) > 0 {
			losses = append(losses, Op{Peer: &PeerOp{Action: Update, Key: k, Lose: lose, Final: w.AllowedIPs}})
		}
	}
	if o.Prune {
		for _, k := range sortedKeys(actual.Peers) {
			if _, wanted := want.Peers[k]; !wanted {
				removals = append(removals, Op{Peer: &PeerOp{Action: Remove, Key: k}})
			}
		}
	}
	return append(append(append(ops, gains...), losses...), removals...)
}

func diffDevice(want, actual State) (Op, bool) {
	var d Op
	if want.PrivateKey != actual.PrivateKey {
		d.PrivateKey = &want.PrivateKey
	}
	if want.Port != actual.Port {
		d.Port = &want.Port
	}
	if want.Mark != actual.Mark {
		d.Mark = &want.Mark
	}
	return d, d.PrivateKey != nil || d.Port != nil || d.Mark != nil
}

func diffPeer(k dataplane.Key, w, a dataplane.Peer, exists bool, o Options) PeerOp {
	p := PeerOp{Action: Update, Key: k}
	if !exists {
		p.Action = Add
	}
	if w.PresharedKey != a.PresharedKey {
		p.PresharedKey = &w.PresharedKey
	}
	if w.Endpoint.IsValid() && w.Endpoint != a.Endpoint && !(exists && o.KeepEndpoints) {
		p.Endpoint = w.Endpoint
	}
	if w.Keepalive != a.Keepalive && w.Keepalive != dataplane.KeepaliveAsItIs {
		p.Keepalive = &w.Keepalive
	}
	if !slices.Equal(w.AllowedIPs, a.AllowedIPs) {
		for _, ip := range w.AllowedIPs {
			if !has(a.AllowedIPs, ip) {
				p.Gain = append(p.Gain, ip)
			}
		}
	}
	return p
}

func (p PeerOp) empty() bool {
	return p.Action == Update && p.PresharedKey == nil && !p.Endpoint.IsValid() && p.Keepalive == nil &&
		len(p.Gain) == 0 && len(p.Lose) == 0
}

// lacks says whether some prefix of all is missing in set. Both are sorted.
func lacks(set, all []netip.Prefix) bool {
	return slices.ContainsFunc(all, func(ip netip.Prefix) bool { return !has(set, ip) })
}

func has(sorted []netip.Prefix, ip netip.Prefix) bool {
	_, ok := slices.BinarySearchFunc(sorted, ip, netip.Prefix.Compare)
	return ok
}

// Apply is what a device does with the operations, as a pure function.
func (s State) Apply(ops []Op) State {
	s = s.clone()
	owner := map[netip.Prefix]dataplane.Key{}
	gains := false
	for _, op := range ops {
		gains = gains || op.Peer != nil && len(op.Peer.Gain) > 0
	}
	if gains {
		for k, p := range s.Peers {
			for _, ip := range p.AllowedIPs {
				owner[ip] = k
			}
		}
	}
	for _, op := range ops {
		s.applyDevice(op)
		if op.Peer != nil {
			s.applyPeer(*op.Peer, owner)
		}
	}
	return s
}

func (s *State) applyDevice(op Op) {
	if op.PrivateKey != nil {
		s.PrivateKey = *op.PrivateKey
	}
	if op.Port != nil {
		s.Port = *op.Port
	}
	if op.Mark != nil {
		s.Mark = *op.Mark
	}
}

func (s *State) applyPeer(op PeerOp, owner map[netip.Prefix]dataplane.Key) {
	if op.Action == Remove {
		for _, ip := range s.Peers[op.Key].AllowedIPs {
			delete(owner, ip)
		}
		delete(s.Peers, op.Key)
		return
	}
	p := s.Peers[op.Key]
	if op.PresharedKey != nil {
		p.PresharedKey = *op.PresharedKey
	}
	if op.Endpoint.IsValid() {
		p.Endpoint = op.Endpoint
	}
	if op.Keepalive != nil {
		p.Keepalive = *op.Keepalive
	}
	for _, ip := range op.Gain {
		if o, ok := owner[ip]; ok && o != op.Key {
			other := s.Peers[o]
			other.AllowedIPs = without(other.AllowedIPs, ip)
			s.Peers[o] = other
		}
		owner[ip] = op.Key
	}
	if len(op.Gain) > 0 {
		p.AllowedIPs = normal(slices.Concat(p.AllowedIPs, op.Gain))
	}
	for _, ip := range op.Lose {
		p.AllowedIPs = without(p.AllowedIPs, ip)
		delete(owner, ip)
	}
	s.Peers[op.Key] = p
}

func without(ips []netip.Prefix, ip netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(ips), func(x netip.Prefix) bool { return x == ip })
}

// String tells the operation in one line, without secrets.
func (o Op) String() string {
	if o.Peer != nil {
		return o.Peer.String()
	}
	b := strings.Builder{}
	b.WriteString("device")
	if o.PrivateKey != nil {
		b.WriteString(" private-key")
	}
	if o.Port != nil {
		fmt.Fprintf(&b, " port=%d", *o.Port)
	}
	if o.Mark != nil {
		fmt.Fprintf(&b, " mark=%#x", *o.Mark)
	}
	return b.String()
}

// String tells the operation in one line, without secrets.
func (p PeerOp) String() string {
	b := strings.Builder{}
	b.WriteString([]string{"add", "update", "remove"}[p.Action] + " peer " + p.Key.Short())
	if p.PresharedKey != nil && !p.PresharedKey.IsZero() {
		b.WriteString(" preshared-key")
	} else if p.PresharedKey != nil {
		b.WriteString(" no-preshared-key")
	}
	if p.Endpoint.IsValid() {
		fmt.Fprintf(&b, " endpoint=%s", p.Endpoint)
	}
	if p.Keepalive != nil {
		fmt.Fprintf(&b, " keepalive=%s", *p.Keepalive)
	}
	for _, ip := range p.Gain {
		fmt.Fprintf(&b, " +%s", ip)
	}
	for _, ip := range p.Lose {
		fmt.Fprintf(&b, " -%s", ip)
	}
	return b.String()
}
