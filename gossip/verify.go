package gossip

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// Limits of a record.
const (
	MaxRecordBytes   = 8 << 10 // of the signed record
	MaxCandidates    = 64
	maxHostPorts     = 16
	maxRelayLinks    = 64
	maxLabels        = 64
	maxNodeAddresses = 32
	maxOutcomes      = 8
	maxAway          = 256
	maxPlaceBytes    = 512 // of an encoded record of scope PLACE
	maxShortString   = 64
	maxName          = 253      // a DNS name
	maxLabelKey      = 253 + 64 // prefix/name
	maxNumber        = 1 << 62  // of epoch and seq: leaves room to jump over any number seen
)

// Why a record was refused. A *RefusedError wraps one of these.
var (
	ErrTooLarge    = errors.New("record is too large")
	ErrMalformed   = errors.New("record is malformed")
	ErrUnknownNode = errors.New("record of a node that is not in the roster")
	ErrSignature   = errors.New("record's signature is bad")
	ErrAddress     = errors.New("record names an address that is not allowed")
)

// RefusedError says which record was refused and why.
type RefusedError struct {
	Node   identity.ID // zero if the record does not name one
	Reason error       // one of the sentinels
	Detail string
}

func (e *RefusedError) Error() string {
	s := "refuse record of node " + e.Node.String() + ": " + e.Reason.Error()
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

func (e *RefusedError) Unwrap() error { return e.Reason }

// Roster lists the members of the cluster, as the log has them.
type Roster interface {
	Key(identity.ID) (ed25519.PublicKey, bool)
	Members() []identity.ID
}

const signatureContext = "skein record v1\x00"

var unmarshal = proto.UnmarshalOptions{DiscardUnknown: true}

// Sign encodes and signs a record with its owner's key.
func Sign(key *identity.Key, r *skeinv1.Record) (*skeinv1.SignedRecord, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode record of node %s: %w", r.GetNodeId(), err)
	}
	return &skeinv1.SignedRecord{Record: b, Signature: key.Sign(append([]byte(signatureContext), b...))}, nil
}

// Verify reads a signed record: the signature must be by the roster's key of the node it names, and
// every field within its limits. Errors are *RefusedError.
func Verify(s *skeinv1.SignedRecord, roster Roster) (*skeinv1.Record, error) {
	r, id, err := decodeRecord(s)
	if err != nil {
		return nil, err
	}
	if err := checkSignature(s, id, roster); err != nil {
		return nil, err
	}
	return r, nil
}

// decodeRecord is Verify without the signature.
func decodeRecord(s *skeinv1.SignedRecord) (*skeinv1.Record, identity.ID, error) {
	if n := len(s.GetRecord()) + len(s.GetSignature()); n > MaxRecordBytes {
		return nil, identity.ID{}, &RefusedError{Reason: ErrTooLarge, Detail: fmt.Sprintf("%d bytes, the limit is %d", n,
			MaxRecordBytes)}
	}
	r := &skeinv1.Record{}
	if err := unmarshal.Unmarshal(s.GetRecord(), r); err != nil {
		return nil, identity.ID{}, &RefusedError{Reason: ErrMalformed, Detail: err.Error()}
	}
	id, err := parseID(r.GetNodeId())
	if err != nil {
		return nil, identity.ID{}, &RefusedError{Reason: ErrMalformed, Detail: err.Error()}
	}
	if r.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_PLACE && len(s.GetRecord()) > maxPlaceBytes {
		return nil, id, &RefusedError{Node: id, Reason: ErrTooLarge,
			Detail: fmt.Sprintf("%d bytes in a record that only names its site, the limit is %d", len(s.GetRecord()),
				maxPlaceBytes)}
	}
	if err := checkShape(r); err != nil {
		return nil, id, &RefusedError{Node: id, Reason: reasonOf(err), Detail: err.Error()}
	}
	return r, id, nil
}

func checkSignature(s *skeinv1.SignedRecord, id identity.ID, roster Roster) error {
	key, ok := roster.Key(id)
	if !ok {
		return &RefusedError{Node: id, Reason: ErrUnknownNode}
	}
	if len(key) != ed25519.PublicKeySize || identity.IDOf(key) != id {
		return &RefusedError{Node: id, Reason: ErrSignature, Detail: "the roster's key does not belong to this node ID"}
	}
	if len(s.GetSignature()) != ed25519.SignatureSize {
		return &RefusedError{Node: id, Reason: ErrSignature, Detail: fmt.Sprintf("%d bytes, want %d", len(s.GetSignature()),
			ed25519.SignatureSize)}
	}
	if !ed25519.Verify(key, append([]byte(signatureContext), s.GetRecord()...), s.GetSignature()) {
		return &RefusedError{Node: id, Reason: ErrSignature}
	}
	return nil
}

// shapeError carries the sentinel of a field's error without repeating it in the text.
type shapeError struct {
	reason error
	text   string
}

func (e *shapeError) Error() string { return e.text }

func reasonOf(err error) error {
	var s *shapeError
	if errors.As(err, &s) {
		return s.reason
	}
	return ErrMalformed
}

func malformed(format string, args ...any) error {
	return &shapeError{ErrMalformed, fmt.Sprintf(format, args...)}
}

func badAddress(format string, args ...any) error {
	return &shapeError{ErrAddress, fmt.Sprintf(format, args...)}
}

// checkShape checks every field of a record against its limits.
func checkShape(r *skeinv1.Record) error {
	if r.GetEpoch() > maxNumber || r.GetSeq() > maxNumber {
		return malformed("epoch %d or seq %d is beyond %d", r.GetEpoch(), r.GetSeq(), uint64(maxNumber))
	}
	if n := len(r.GetWireguardKey()); n != 0 && n != 32 {
		return malformed("wireguard_key of %d bytes, want 32", n)
	}
	if n := len(r.GetStateHash()); n > 32 {
		return malformed("state_hash of %d bytes, the limit is 32", n)
	}
	if k := r.GetPersistentKeepalive(); k > 65535 {
		return malformed("persistent_keepalive %d, the limit is 65535 seconds", k)
	}
	for _, f := range []struct {
		name, value string
		max         int
	}{
		{"site", r.GetSite(), maxName},
		{"version", r.GetVersion(), maxShortString},
		{"transport_mode", r.GetTransportMode(), maxShortString},
		{"role", r.GetRole(), maxShortString},
		{"birthday_attack", r.GetBirthdayAttack(), maxShortString},
		{"kubernetes_node", r.GetKubernetesNode(), maxName},
	} {
		if err := checkText(f.name, f.value, f.max); err != nil {
			return err
		}
	}
	for _, check := range []func(*skeinv1.Record) error{checkCandidates, checkEndpoints, checkLabels,
		checkNodeAddresses, checkOutcomes, checkAway, checkPlace} {
		if err := check(r); err != nil {
			return err
		}
	}
	return nil
}

func checkText(name, s string, limit int) error {
	if len(s) > limit {
		return malformed("%s of %d bytes, the limit is %d", name, len(s), limit)
	}
	if !utf8.ValidString(s) {
		return malformed("%s is not UTF-8", name)
	}
	for _, c := range s {
		if !unicode.IsPrint(c) {
			return malformed("%s contains the character %U", name, c)
		}
	}
	return nil
}

func checkCandidates(r *skeinv1.Record) error {
	if n := len(r.GetCandidates()); n > MaxCandidates {
		return &shapeError{ErrTooLarge, fmt.Sprintf("%d candidates, the limit is %d", n, MaxCandidates)}
	}
	for i, c := range r.GetCandidates() {
		if err := checkText("candidate's source", c.GetSource(), maxShortString); err != nil {
			return err
		}
		if c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED {
			if err := checkHostPort("forced candidate", c.GetAddress()); err != nil {
				return err
			}
			continue
		}
		a, err := netip.ParseAddrPort(c.GetAddress())
		if err != nil {
			return malformed("candidate %d: address %.80q: want addr:port", i, c.GetAddress())
		}
		if err := checkEndpoint("candidate", a); err != nil {
			return err
		}
	}
	return nil
}

// checkEndpoint refuses an endpoint to which no peer could ever send a packet.
func checkEndpoint(name string, a netip.AddrPort) error {
	ip := a.Addr()
	switch {
	case a.Port() == 0:
		return malformed("%s %s: port 0", name, a)
	case ip.Zone() != "":
		return badAddress("%s %q: a zone means nothing to others", name, a.String())
	case ip.Is4In6():
		return badAddress("%s %s: write it as plain IPv4", name, a)
	case ip.IsUnspecified(), ip.IsMulticast(), ip.IsLoopback(), ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return badAddress("%s %s: not an address of a host", name, a)
	}
	return nil
}

func checkHostPort(name, s string) error {
	if err := checkText(name, s, maxName+8); err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return malformed("%s %q: want host:port", name, s)
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 {
		return malformed("%s %q: want a port from 1 to 65535", name, s)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return checkEndpoint(name, netip.AddrPortFrom(ip, uint16(p)))
	}
	for _, c := range host {
		if c > unicode.MaxASCII || !(unicode.IsLetter(c) || unicode.IsDigit(c) || c == '.' || c == '-' || c == '_') {
			return malformed("%s %q: not a host name", name, s)
		}
	}
	return nil
}

func checkEndpoints(r *skeinv1.Record) error {
	if s := r.GetForcedEndpoint(); s != "" {
		if err := checkHostPort("forced_endpoint", s); err != nil {
			return err
		}
	}
	if s := r.GetInternalIp(); s != "" {
		ip, err := netip.ParseAddr(s)
		if err != nil {
			p, perr := netip.ParsePrefix(s)
			if perr != nil {
				return malformed("internal_ip %.80q: want an address", s)
			}
			ip = p.Addr()
		}
		if ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast() || ip.IsLoopback() {
			return badAddress("internal_ip %q: not an address of a host", ip.String())
		}
	}
	for name, list := range map[string][]string{"relay address": r.GetRelay().GetAddresses(),
		"stun_addresses": r.GetStunAddresses(), "join_addresses": r.GetJoinAddresses()} {
		if len(list) > maxHostPorts {
			return malformed("%d of %s, the limit is %d", len(list), name, maxHostPorts)
		}
		for _, s := range list {
			if err := checkHostPort(name, s); err != nil {
				return err
			}
		}
	}
	if n := len(r.GetRelayLinks()); n > maxRelayLinks {
		return malformed("%d relay_links, the limit is %d", n, maxRelayLinks)
	}
	for _, l := range r.GetRelayLinks() {
		if _, err := parseID(l.GetNodeId()); err != nil {
			return malformed("relay_links: %v", err)
		}
	}
	return nil
}

func checkLabels(r *skeinv1.Record) error {
	if n := len(r.GetLabels()); n > maxLabels {
		return malformed("%d labels, the limit is %d", n, maxLabels)
	}
	for k, v := range r.GetLabels() {
		if k == "" {
			return malformed("a label without a name")
		}
		if err := checkText("label's name", k, maxLabelKey); err != nil {
			return err
		}
		if err := checkText("label "+k, v, maxName); err != nil {
			return err
		}
	}
	return nil
}

func checkOutcomes(r *skeinv1.Record) error {
	if n := len(r.GetOutcomes()); n > maxOutcomes {
		return malformed("%d outcomes, the limit is %d", n, maxOutcomes)
	}
	for _, o := range r.GetOutcomes() {
		ip, ok := netip.AddrFromSlice(o.GetAddress())
		if !ok {
			return malformed("outcomes: address of %d bytes, want 4 or 16", len(o.GetAddress()))
		}
		if err := checkEndpoint("outcomes", netip.AddrPortFrom(ip, 1)); err != nil {
			return err
		}
	}
	return nil
}

// checkNodeAddresses accepts private networks only: a node may ask others to route no others to it.
func checkNodeAddresses(r *skeinv1.Record) error {
	if n := len(r.GetNodeAddresses()); n > maxNodeAddresses {
		return malformed("%d node_addresses, the limit is %d", n, maxNodeAddresses)
	}
	for _, s := range r.GetNodeAddresses() {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return malformed("node_addresses: %.80q: want a prefix", s)
		}
		if p != p.Masked() {
			return malformed("node_addresses: %s has host bits, want %s", p, p.Masked())
		}
		if !addr.Private(p) {
			return badAddress("node_addresses: %s is not private (%s)", p, addr.PrivateText)
		}
	}
	return nil
}

// checkAway requires a sorted list without duplicates, which can be searched.
func checkAway(r *skeinv1.Record) error {
	if n := len(r.GetAway()); n > maxAway {
		return malformed("%d away, the limit is %d", n, maxAway)
	}
	for i, b := range r.GetAway() {
		if len(b) != len(identity.ID{}) {
			return malformed("away: a node ID of %d bytes, want %d", len(b), len(identity.ID{}))
		}
		if i > 0 && bytes.Compare(r.GetAway()[i-1], b) >= 0 {
			return malformed("away: not sorted, or a node twice")
		}
	}
	return nil
}

// checkPlace refuses a record of scope PLACE that says more than where its owner is.
func checkPlace(r *skeinv1.Record) error {
	if r.GetScope() != skeinv1.RecordScope_RECORD_SCOPE_PLACE {
		return nil
	}
	place := &skeinv1.Record{NodeId: r.GetNodeId(), Epoch: r.GetEpoch(), Seq: r.GetSeq(), Time: r.GetTime(),
		Site: r.GetSite(), Scope: r.GetScope()}
	if !proto.Equal(place, r) {
		return malformed("a record for all sites may only name the site of its node, and this one says more")
	}
	return nil
}
