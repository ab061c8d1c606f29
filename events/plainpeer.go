package events

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// Bounds of plain peers. Fold rests on none of them.
const (
	MaxPlainPeers     = 1024
	MaxPlainNetworks  = 16 // behind a peer
	MaxPlainCarriers  = 4  // of a peer
	MaxPlainLifetime  = 10 * 365 * 24 * time.Hour
	MaxSealedBytes    = 256 // of a carrier's secrets
	plainPeerSchema   = 6
	plainKeySize      = 32
	plainOwner        = "plain peer " // before the name, where an index tells whose an address or a key is
	plainRefusalShown = 80
)

// plainNet is a network behind a plain peer.
type plainNet struct {
	prefix netip.Prefix
	peer   string // its name
}

// PlainPeer is the plain peer of that name, or nil.
func (s *State) PlainPeer(name string) *skeinv1.PlainPeer {
	p, _ := s.plain.get(textKey(name), name)
	return p
}

// PlainPeers are all plain peers, sorted by name.
func (s *State) PlainPeers() []*skeinv1.PlainPeer {
	out := list(&s.plain)
	slices.SortFunc(out, func(a, b *skeinv1.PlainPeer) int { return strings.Compare(a.GetName(), b.GetName()) })
	return out
}

// PlainPeerAt is the plain peer that has an address or a network around it, and that prefix; nil: none.
func (s *State) PlainPeerAt(a netip.Addr) (*skeinv1.PlainPeer, netip.Prefix) {
	a = a.Unmap()
	if owner, ok := s.addresses.get(textKey(a.String()), a.String()); ok {
		if name, plain := strings.CutPrefix(owner, plainOwner); plain {
			return s.PlainPeer(name), netip.PrefixFrom(a, a.BitLen())
		}
	}
	n, ok := s.plainNetOverlapping(netip.PrefixFrom(a, a.BitLen()), "")
	if !ok {
		return nil, netip.Prefix{}
	}
	return s.PlainPeer(n.peer), n.prefix
}

// plainNetOverlapping is a network behind a plain peer that overlaps the prefix, other than one of the peer except.
func (s *State) plainNetOverlapping(p netip.Prefix, except string) (plainNet, bool) {
	for _, n := range s.plainNets {
		if n.peer != except && n.prefix.Overlaps(p) {
			return n, true
		}
	}
	return plainNet{}, false
}

// readPlainNetworks reads networks, which must be in their one form, sorted, private, and apart from each other.
func readPlainNetworks(all []string) ([]netip.Prefix, bool) {
	var out []netip.Prefix
	for i, text := range all {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.String() != text || i > 0 && all[i-1] >= text || !addr.Private(p) ||
			slices.ContainsFunc(out, p.Overlaps) {
			return nil, false
		}
		out = append(out, p)
	}
	return out, true
}

// setPlainPeer folds a plain peer, unless something of it is somebody else's; it reports whether it did.
func (s *State) setPlainPeer(p *skeinv1.PlainPeer) bool {
	name, owner := p.GetName(), plainOwner+p.GetName()
	networks, ok := readPlainNetworks(p.GetAllowedIps())
	if !ok || checkName(name) != nil || s.taken(&s.names, name, "") || len(p.GetPublicKey()) != plainKeySize ||
		len(p.GetCarrierKey()) != plainKeySize ||
		bytes.Equal(p.GetPublicKey(), p.GetCarrierKey()) || s.taken(&s.keys, string(p.GetPublicKey()), owner) ||
		s.taken(&s.keys, string(p.GetCarrierKey()), owner) {
		return false
	}
	addresses, ok := s.plainAddresses(p)
	if !ok {
		return false
	}
	for _, a := range addresses {
		if s.taken(&s.addresses, a, owner) {
			return false
		}
	}
	for _, n := range networks {
		_, pool := s.overlap(n)
		_, pods := s.podNetOverlapping(n, "")
		_, other := s.plainNetOverlapping(n, name)
		_, translated := s.translationOver(n, true)
		if pool || pods || other || translated || slices.ContainsFunc(s.overlays(), n.Overlaps) {
			return false
		}
	}
	s.dropPlainPeer(name)
	s.plain.put(s.own(), textKey(name), name, p)
	s.sizes.add(sectionPlain, p)
	s.enter(&s.keys, string(p.GetPublicKey()), owner)
	s.enter(&s.keys, string(p.GetCarrierKey()), owner)
	for _, a := range addresses {
		s.enter(&s.addresses, a, owner)
	}
	nets := slices.Clone(s.plainNets)
	for _, n := range networks {
		nets = append(nets, plainNet{n, name})
	}
	slices.SortFunc(nets, func(x, y plainNet) int { return x.prefix.Addr().Compare(y.prefix.Addr()) })
	s.plainNets = nets
	return true
}

// plainAddresses are a plain peer's overlay addresses, which lie in the overlay and are written in their one form.
func (s *State) plainAddresses(p *skeinv1.PlainPeer) (out []string, ok bool) {
	for _, text := range []string{p.GetIpv4(), p.GetIpv6()} {
		a, err := netip.ParseAddr(text)
		if err != nil || a.String() != text || a.Is4() != (len(out) == 0) ||
			!slices.ContainsFunc(s.overlays(), func(o netip.Prefix) bool { return o.Contains(a) }) {
			return nil, false
		}
		out = append(out, text)
	}
	return out, true
}

// dropPlainPeer takes a plain peer away with all that was its own.
func (s *State) dropPlainPeer(name string) {
	p := s.PlainPeer(name)
	if p == nil {
		return
	}
	s.plain.del(s.own(), textKey(name), name)
	s.sizes.drop(sectionPlain, p)
	for _, k := range [][]byte{p.GetPublicKey(), p.GetCarrierKey()} {
		s.keys.del(s.own(), textKey(string(k)), string(k))
	}
	for _, a := range []string{p.GetIpv4(), p.GetIpv6()} {
		s.addresses.del(s.own(), textKey(a), a)
	}
	s.plainNets = slices.DeleteFunc(slices.Clone(s.plainNets), func(n plainNet) bool { return n.peer == name })
}

// loadPlainPeers takes a snapshot's plain peers.
func (s *State) loadPlainPeers(p *skeinv1.State) error {
	for _, v := range p.GetPlainPeers() {
		if s.PlainPeer(v.GetName()) != nil || !s.setPlainPeer(v) {
			return fmt.Errorf("plain peer %q: it is malformed or duplicate, or its key, an address or a network belongs to "+
				"another", v.GetName())
		}
	}
	return nil
}

func (d *decision) setPlainPeer(c *skeinv1.SetPlainPeer) error {
	want := c.GetPlainPeer()
	if err := checkPlainPeer(want); err != nil {
		return err
	}
	if life := time.Duration(c.GetLifetimeNanos()); life < 0 || life > MaxPlainLifetime {
		return refuse(InvalidArgument, "plain peer %s: an expiry after %s is out of range; choose up to %s, or leave it "+
			"out", want.GetName(), life, MaxPlainLifetime)
	}
	old := d.s.PlainPeer(want.GetName())
	switch {
	case old != nil && !c.GetReplace():
		return refuse(AlreadyExists,
			"there is a plain peer %s already (%s): choose another name, or remove it first with skein peer remove %[1]s",
			old.GetName(), old.GetIpv4())
	case old == nil && d.s.plain.n >= MaxPlainPeers:
		return refuse(ResourceExhausted,
			"there are %d plain peers, the most that are allowed: remove those that are not used with skein peer remove",
			MaxPlainPeers)
	}
	next, err := d.newPlainPeer(want, old)
	if err != nil {
		return err
	}
	if c.GetLifetimeNanos() > 0 {
		next.ExpiresAt = d.c.GetTime() + c.GetLifetimeNanos()
	}
	if err := d.checkPlainPeerFree(next); err != nil {
		return err
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PlainPeerSet{PlainPeerSet: &skeinv1.PlainPeerSet{PlainPeer: next}}})
	d.answer.PlainPeer = next
	return nil
}

// checkPlainPeer checks what a command says of a plain peer, by itself.
func checkPlainPeer(p *skeinv1.PlainPeer) error {
	if p == nil {
		return refuse(InvalidArgument, "the command carries no plain peer")
	}
	if err := checkName(p.GetName()); err != nil {
		return err
	}
	for what, k := range map[string][]byte{"public key": p.GetPublicKey(), "carriers' key": p.GetCarrierKey()} {
		if len(k) != plainKeySize || bytes.Equal(k, make([]byte, plainKeySize)) {
			return refuse(InvalidArgument, "plain peer %s: its %s has %d bytes, or is zero; a WireGuard key has %d",
				p.GetName(), what, len(k), plainKeySize)
		}
	}
	switch n := len(p.GetCarriers()); {
	case n == 0:
		return refuse(InvalidArgument, "plain peer %s: no node carries it; name some with --via", p.GetName())
	case n > MaxPlainCarriers:
		return refuse(InvalidArgument, "plain peer %s: %d carriers are too many; name up to %d", p.GetName(), n,
			MaxPlainCarriers)
	case len(p.GetAllowedIps()) > MaxPlainNetworks:
		return refuse(InvalidArgument, "plain peer %s: %d networks are too many; name up to %d", p.GetName(),
			len(p.GetAllowedIps()), MaxPlainNetworks)
	}
	return nil
}

// newPlainPeer is the plain peer that the next event sets. One that is replaced keeps its addresses.
func (d *decision) newPlainPeer(want, old *skeinv1.PlainPeer) (*skeinv1.PlainPeer, error) {
	next := &skeinv1.PlainPeer{
		Name: want.GetName(), PublicKey: want.GetPublicKey(), CarrierKey: want.GetCarrierKey(), Ipv4: old.GetIpv4(),
		Ipv6:       old.GetIpv6(),
		AllowedIps: plainPrefixes(want.GetAllowedIps()), CreatedAt: d.c.GetTime(), CreatedIndex: d.nextIndex(),
	}
	for _, v := range want.GetCarriers() {
		n, err := d.node(v.GetNodeId())
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(next.GetCarriers(),
			func(o *skeinv1.PlainCarrier) bool { return o.GetNodeId() == n.GetId() }) {
			return nil, refuse(InvalidArgument, "plain peer %s: %s is named twice as its carrier", want.GetName(),
				n.GetName())
		}
		if len(v.GetSealed()) == 0 || len(v.GetSealed()) > MaxSealedBytes {
			return nil, refuse(InvalidArgument, "plain peer %s: the secrets for its carrier %s have %d bytes; want 1 to %d",
				want.GetName(), n.GetName(), len(v.GetSealed()), MaxSealedBytes)
		}
		if n.GetMaxSchema() < plainPeerSchema {
			return nil, refuse(FailedPrecondition,
				"plain peer %s: its carrier %s folds event schemas up to %d, and plain peers need %d: upgrade skein on %[2]s first",
				want.GetName(), n.GetName(), n.GetMaxSchema(), plainPeerSchema)
		}
		next.Carriers = append(next.Carriers, proto.CloneOf(v))
	}
	if old != nil {
		return next, nil
	}
	a, err := d.s.lastIPv4()
	if err != nil {
		return nil, err
	}
	cluster, err := checkClusterID(d.s.Cluster().GetId())
	if err != nil {
		return nil, err
	}
	next.Ipv4, next.Ipv6 = a.String(), plainIPv6(cluster, want.GetPublicKey()).String()
	return next, nil
}

// plainIPv6 is the IPv6 address of a plain peer: it follows from its key as a node's follows from its ID.
func plainIPv6(c identity.ClusterID, key []byte) netip.Addr {
	sum := sha256.Sum256(append([]byte("skein plain peer v1\x00"), key...))
	return identity.OverlayIPv6(c, identity.ID(sum[:8]))
}

// lastIPv4 is the free address nearest to the end of the overlay. Nodes get theirs from the start on, one after the
// other, so the
// two meet only in an overlay that is full.
func (s *State) lastIPv4() (netip.Addr, error) {
	pool, err := netip.ParsePrefix(s.Cluster().GetOverlayIpv4())
	if err != nil || !pool.Addr().Is4() || pool.Bits() > 30 {
		return netip.Addr{}, refuse(FailedPrecondition, "the cluster's overlay %q is not a usable IPv4 prefix",
			s.Cluster().GetOverlayIpv4())
	}
	first := number(pool.Masked().Addr()) + 1
	for at := first + (uint32(1)<<(32-pool.Bits()) - 3); at >= first; at-- {
		if a := address(at); !s.taken(&s.addresses, a.String(), "") {
			return a, nil
		}
	}
	return netip.Addr{}, s.overlayFull(pool)
}

// checkPlainPeerFree refuses what belongs to somebody else already.
func (d *decision) checkPlainPeerFree(p *skeinv1.PlainPeer) error {
	name, owner := p.GetName(), plainOwner+p.GetName()
	if n := d.s.NodeByName(name); n != nil {
		return refuse(AlreadyExists, "the name %s is taken by node %s (%s): choose another", name, n.GetId(),
			n.GetIpv4())
	}
	if bytes.Equal(p.GetPublicKey(), p.GetCarrierKey()) {
		return refuse(InvalidArgument, "plain peer %s: its key and its carriers' are the same; make a new one with wg "+
			"genkey", name)
	}
	for _, k := range [][]byte{p.GetPublicKey(), p.GetCarrierKey()} {
		if holder, ok := d.s.keys.get(textKey(string(k)), string(k)); ok && holder != owner {
			return refuse(AlreadyExists, "plain peer %s: its key is used by %s: make a new one with wg genkey", name,
				d.s.calledOwner(holder))
		}
	}
	for _, a := range []string{p.GetIpv4(), p.GetIpv6()} {
		if d.s.taken(&d.s.addresses, a, owner) {
			return refuse(AlreadyExists,
				"plain peer %s: the overlay address %s that follows from its key is taken: make a new key with wg genkey",
				name, a)
		}
	}
	var read []netip.Prefix
	for _, text := range p.GetAllowedIps() {
		n, err := d.checkPlainNetwork(p, text)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(read, n.Overlaps) {
			return refuse(InvalidArgument, "plain peer %s: its networks (%s) overlap", name,
				strings.Join(p.GetAllowedIps(), ", "))
		}
		read = append(read, n)
	}
	return d.s.checkNoDestination(fmt.Sprintf("plain peer %s: network", name), read)
}

// checkPlainNetwork refuses a network that is no private prefix, or in which somebody else has addresses.
func (d *decision) checkPlainNetwork(p *skeinv1.PlainPeer, text string) (netip.Prefix, error) {
	name := p.GetName()
	n, err := netip.ParsePrefix(text)
	switch {
	case err != nil || n.Addr().Is4In6() || n.Addr().Zone() != "":
		return n, refuse(InvalidArgument, "plain peer %s: %.*q is not a prefix; write one like 192.168.8.0/24", name,
			plainRefusalShown, text)
	case n != n.Masked():
		return n, refuse(InvalidArgument, "plain peer %s: %s has host bits set; write %s", name, n, n.Masked())
	case !addr.Private(n):
		return n, refuse(InvalidArgument,
			"plain peer %s: %s is not private, and only private networks are routed to a plain peer; use an egress to reach "+
				"others",
			name, n)
	}
	for _, o := range d.s.overlays() {
		if o.Overlaps(n) {
			return n, refuse(AlreadyExists,
				"plain peer %s: network %s overlaps the overlay %s, where nodes have their addresses; leave it out: skein "+
					"chooses the peer's own address",
				name, n, o)
		}
	}
	if o, taken := d.s.overlap(n); taken {
		return n, refuse(AlreadyExists,
			"plain peer %s: network %s overlaps %s of pool %s, whose blocks are for pods; use other addresses there",
			name, n, o.prefix, o.pool)
	}
	if o, taken := d.s.podNetOverlapping(n, ""); taken {
		return n, refuse(AlreadyExists,
			"plain peer %s: network %s overlaps %s, where another CNI runs the pods of %s; use other addresses there",
			name, n, o.prefix, d.s.called(o.node))
	}
	if o, taken := d.s.plainNetOverlapping(n, name); taken {
		return n, refuse(AlreadyExists,
			"plain peer %s: network %s overlaps %s behind plain peer %s; two peers must not have the same addresses",
			name, n, o.prefix, o.peer)
	}
	return n, d.s.checkNotTranslated(fmt.Sprintf("plain peer %s: network", name), n, true)
}

func (d *decision) removePlainPeer(c *skeinv1.RemovePlainPeer) error {
	if err := checkText("reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	p := d.s.PlainPeer(c.GetName())
	switch {
	case p == nil && c.GetCreatedIndex() != 0, p != nil && c.GetCreatedIndex() != 0 &&
		c.GetCreatedIndex() != p.GetCreatedIndex():
		return nil // it is gone already, or another has its name
	case p == nil:
		return refuse(NotFound, "there is no plain peer %.*q: skein peer list shows those that are",
			plainRefusalShown, c.GetName())
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PlainPeerRemoved{PlainPeerRemoved: &skeinv1.PlainPeerRemoved{
		Name:   p.GetName(),
		Reason: c.GetReason()}}})
	// A retry finds the peer gone, and shall be answered alike.
	d.answer.PlainPeer = &skeinv1.PlainPeer{Name: p.GetName(), CreatedIndex: p.GetCreatedIndex()}
	return nil
}

// calledOwner is whom an index names: a member, a revoked node, or a plain peer.
func (s *State) calledOwner(holder string) string {
	if strings.HasPrefix(holder, plainOwner) {
		return holder
	}
	if r := find(&s.revoked, holder); r != nil {
		return "the revoked node " + cmp.Or(r.GetNode().GetName(), holder)
	}
	return "node " + s.called(holder)
}

// NextPlainExpiry is the plain peer that expires first; nil: none ever does.
func (s *State) NextPlainExpiry() (first *skeinv1.PlainPeer) {
	for p := range s.plain.all() {
		if at := p.GetExpiresAt(); at != 0 && (first == nil || at < first.GetExpiresAt() ||
			at == first.GetExpiresAt() && p.GetName() < first.GetName()) {
			first = p
		}
	}
	return first
}
