package events

import (
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Fold takes in the next event. It fails only with ErrGap, when the event does not follow the last
// one, and with ErrUnknownEvent, when this version does not know the event and it may not be skipped;
// the state is then as before. The state keeps parts of the event: do not change it afterwards.
//
// A known event that contradicts the state (an address that is taken, a node that is not there) changes nothing but the
// index: Decide never makes one, and so no invariant can be broken by one. The same holds for a name that no command
// may bring in: a forged log cannot put a path or a terminal's control characters where a node takes a name to be one.
func (s *State) Fold(e *skeinv1.Event) error {
	if e.GetIndex() != s.index+1 {
		return fmt.Errorf("%w: the state is at %d and event %d was to follow", ErrGap, s.index, e.GetIndex())
	}
	if known := e.GetBody() != nil && e.GetSchema() <= SchemaMax; known {
		s.fold(e)
	} else if !e.GetIgnorable() {
		return fmt.Errorf("%w %d%s of schema %d: this skein folds schemas %d to %d; install the version that the servers run",
			ErrUnknownEvent, e.GetIndex(), unknownField(e), e.GetSchema(), SchemaMin, SchemaMax)
	}
	s.index, s.time = e.GetIndex(), e.GetTime()
	return nil
}

// unknownField names the body that was not understood.
func unknownField(e *skeinv1.Event) string {
	num, _, n := protowire.ConsumeTag(e.ProtoReflect().GetUnknown())
	if n < 0 {
		return ""
	}
	return fmt.Sprintf(" (body %d)", num)
}

func (s *State) fold(e *skeinv1.Event) {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_ClusterCreated:
		if s.cluster == nil && b.ClusterCreated.GetCluster() != nil {
			setCell(s, &s.cluster, b.ClusterCreated.GetCluster())
			s.setSettings(b.ClusterCreated.GetSettings())
		}
	case *skeinv1.Event_SettingsChanged:
		s.setSettings(b.SettingsChanged.GetSettings())
	case *skeinv1.Event_TokenCreated:
		s.addToken(b.TokenCreated.GetToken())
	case *skeinv1.Event_TokenUsed:
		s.useToken(b.TokenUsed.GetTokenId())
	case *skeinv1.Event_TokenRevoked:
		s.dropToken(b.TokenRevoked.GetTokenId())
	case *skeinv1.Event_NodeAdmitted:
		if n := b.NodeAdmitted.GetNode(); n.GetPodCidrs() == nil && n.GetSettings() == nil {
			s.admit(n)
		}
	case *skeinv1.Event_NodeChanged:
		s.change(b.NodeChanged.GetNode())
	case *skeinv1.Event_NodeRevoked:
		s.revoke(b.NodeRevoked, e.GetTime())
	case *skeinv1.Event_NodeKeyRotated:
		s.rotate(b.NodeKeyRotated)
	case *skeinv1.Event_ServerAdded:
		s.setServer(b.ServerAdded.GetNodeId(), false, e.GetTime())
	case *skeinv1.Event_ServerPromoted:
		s.setServer(b.ServerPromoted.GetNodeId(), true, e.GetTime())
	case *skeinv1.Event_ServerRemoved:
		s.dropServer(b.ServerRemoved.GetNodeId())
	case *skeinv1.Event_GossipKeyRotated:
		if k := b.GossipKeyRotated.GetKeys(); k != nil {
			setCell(s, &s.gossipKeys, k)
		}
	case *skeinv1.Event_CommandAnswered:
		if a := b.CommandAnswered.GetAnswer(); a.GetIndex() == e.GetIndex() {
			s.remember(a)
		}
	case *skeinv1.Event_ClockRepaired:
		s.capTimes(e.GetTime())
	case *skeinv1.Event_PodCidrsSet:
		s.setPodCIDRs(b.PodCidrsSet.GetNodeId(), b.PodCidrsSet.GetPodCidrs())
	case *skeinv1.Event_NodeSettingsSet:
		s.setNodeSettings(b.NodeSettingsSet.GetNodeId(), b.NodeSettingsSet.GetSettings())
	case *skeinv1.Event_PlainPeerSet:
		s.setPlainPeer(b.PlainPeerSet.GetPlainPeer())
	case *skeinv1.Event_PlainPeerRemoved:
		s.dropPlainPeer(b.PlainPeerRemoved.GetName())
	case *skeinv1.Event_SiteTranslationSet:
		s.setTranslation(b.SiteTranslationSet.GetTranslation())
	case *skeinv1.Event_SiteTranslationRemoved:
		s.dropTranslation(b.SiteTranslationRemoved.GetSite(), b.SiteTranslationRemoved.GetPrefix())
	case *skeinv1.Event_SiteRangeAllotted:
		if v := b.SiteRangeAllotted.GetRange(); v.GetIndex() == e.GetIndex() && !v.GetSliced() {
			s.allotRange(v)
		}
	case *skeinv1.Event_SlicedRangeAllotted:
		if v := b.SlicedRangeAllotted.GetRange(); v.GetIndex() == e.GetIndex() && v.GetSliced() {
			s.allotRange(v)
		}
	default:
		s.foldPool(e)
	}
}

func (s *State) setSettings(v *skeinv1.Settings) {
	if v != nil {
		setCell(s, &s.settings, v)
	}
}

func (s *State) addToken(t *skeinv1.Token) bool {
	h, ok := hexKey(t.GetId())
	if !ok || find(&s.tokens, t.GetId()) != nil {
		return false
	}
	s.tokens.put(s.own(), h, t.GetId(), t)
	s.sizes.add(sectionTokens, t)
	return true
}

func (s *State) useToken(id string) {
	t := find(&s.tokens, id)
	if t.GetUsesLeft() == 0 {
		return
	}
	used := proto.CloneOf(t)
	used.UsesLeft--
	h, _ := hexKey(id)
	s.tokens.put(s.own(), h, id, used)
	s.sizes.drop(sectionTokens, t)
	s.sizes.add(sectionTokens, used)
}

func (s *State) dropToken(id string) {
	if t := find(&s.tokens, id); t != nil {
		h, _ := hexKey(id)
		s.tokens.del(s.own(), h, id)
		s.sizes.drop(sectionTokens, t)
	}
}

// admit adds a node, unless something of it is taken; it reports whether it did.
func (s *State) admit(n *skeinv1.Node) bool {
	id := n.GetId()
	h, ok := hexKey(id)
	if !ok || find(&s.nodes, id) != nil || find(&s.revoked, id) != nil || s.taken(&s.names, n.GetName(), "") ||
		s.PlainPeer(n.GetName()) != nil || !s.claim(n) {
		return false
	}
	s.nodes.put(s.own(), h, id, n)
	s.sizes.add(sectionNodes, n)
	s.enter(&s.names, n.GetName(), id)
	return true
}

// claim takes a node's key and addresses into the indexes of what may never be given again, unless one is taken or the
// name is none.
func (s *State) claim(n *skeinv1.Node) bool {
	if checkName(n.GetName()) != nil {
		return false
	}
	key := string(n.GetWireguardKey())
	if s.taken(&s.keys, key, "") || s.taken(&s.addresses, n.GetIpv4(), "") || s.taken(&s.addresses, n.GetIpv6(), "") {
		return false
	}
	if n.GetIpv4() != "" && n.GetIpv4() == n.GetIpv6() || s.pooled(n.GetIpv4()) || s.pooled(n.GetIpv6()) {
		return false
	}
	s.enter(&s.keys, key, n.GetId())
	s.enter(&s.addresses, n.GetIpv4(), n.GetId())
	s.enter(&s.addresses, n.GetIpv6(), n.GetId())
	if a, err := netip.ParseAddr(n.GetIpv4()); err == nil && a.Is4() {
		last := s.newest
		if n.GetAdmittedIndex() > last.index || n.GetAdmittedIndex() == last.index && last.ipv4.Less(a) {
			s.newest = admission{index: n.GetAdmittedIndex(), ipv4: a}
		}
	}
	return true
}

// taken reports whether somebody other than the node holds the key. Nobody holds the empty key.
func (s *State) taken(t *index, key, except string) bool {
	if key == "" {
		return false
	}
	id, ok := t.get(textKey(key), key)
	return ok && id != except
}

func (s *State) enter(t *index, key, id string) {
	if key != "" {
		t.put(s.own(), textKey(key), key, id)
	}
}

// change replaces a node. Its key, addresses, pod CIDRs and settings stay: they have events of their own or never
// change.
func (s *State) change(n *skeinv1.Node) {
	old := find(&s.nodes, n.GetId())
	if old == nil || checkName(n.GetName()) != nil || s.taken(&s.names, n.GetName(), n.GetId()) ||
		s.PlainPeer(n.GetName()) != nil || n.GetIpv4() != old.GetIpv4() || n.GetIpv6() != old.GetIpv6() ||
		n.GetAdmittedIndex() != old.GetAdmittedIndex() || !proto.Equal(n.GetPodCidrs(), old.GetPodCidrs()) ||
		!proto.Equal(n.GetSettings(), old.GetSettings()) ||
		string(n.GetWireguardKey()) != string(old.GetWireguardKey()) ||
		string(n.GetIdentityKey()) != string(old.GetIdentityKey()) {
		return
	}
	if n.GetName() != old.GetName() {
		s.names.del(s.own(), textKey(old.GetName()), old.GetName())
		s.enter(&s.names, n.GetName(), n.GetId())
	}
	s.replace(n)
	s.sizes.drop(sectionNodes, old)
	s.sizes.add(sectionNodes, n)
}

// copyNode is a node of its own that shares what it points to, which nobody changes.
func copyNode(n *skeinv1.Node) *skeinv1.Node {
	out := &skeinv1.Node{
		Id: n.Id, Name: n.Name, IdentityKey: n.IdentityKey, WireguardKey: n.WireguardKey, Ipv4: n.Ipv4, Ipv6: n.Ipv6,
		Labels:     n.Labels,
		AdmittedAt: n.AdmittedAt, AdmittedIndex: n.AdmittedIndex, MinSchema: n.MinSchema, MaxSchema: n.MaxSchema,
		AgentsOnly: n.AgentsOnly, Draining: n.Draining, Admin: n.Admin, PodCidrs: n.PodCidrs, Settings: n.Settings,
	}
	if u := n.ProtoReflect().GetUnknown(); len(u) > 0 {
		out.ProtoReflect().SetUnknown(u)
	}
	return out
}

func (s *State) replace(n *skeinv1.Node) {
	h, _ := hexKey(n.GetId())
	s.nodes.put(s.own(), h, n.GetId(), n)
}

func (s *State) rotate(r *skeinv1.NodeKeyRotated) {
	old := find(&s.nodes, r.GetNodeId())
	key := string(r.GetWireguardKey())
	if old == nil || key == "" || s.taken(&s.keys, key, "") {
		return
	}
	n := copyNode(old)
	n.WireguardKey = r.GetWireguardKey()
	s.keys.del(s.own(), textKey(string(old.GetWireguardKey())), string(old.GetWireguardKey()))
	s.enter(&s.keys, key, n.GetId())
	s.replace(n)
	if len(old.GetWireguardKey()) != len(key) { // in any log that a leader wrote they are equal
		s.sizes.drop(sectionNodes, old)
		s.sizes.add(sectionNodes, n)
	}
}

func (s *State) revoke(r *skeinv1.NodeRevoked, at int64) {
	n := find(&s.nodes, r.GetNodeId())
	if n == nil {
		return
	}
	h, _ := hexKey(n.GetId())
	s.nodes.del(s.own(), h, n.GetId())
	s.names.del(s.own(), textKey(n.GetName()), n.GetName())
	s.sizes.drop(sectionNodes, n)
	s.dropServer(n.GetId())
	s.countSettings(n, -1)
	if n.GetPodCidrs() != nil { // they are free for another
		s.dropPodNets(n.GetId())
	}
	s.putRevoked(h, &skeinv1.RevokedNode{Node: withoutSettings(n), RevokedAt: at, Reason: r.GetReason()})
}

// withoutSettings is a node as it is kept once it was revoked.
func withoutSettings(n *skeinv1.Node) *skeinv1.Node {
	if n.GetPodCidrs() == nil && n.GetSettings() == nil {
		return n
	}
	n = copyNode(n)
	n.PodCidrs, n.Settings = nil, nil
	return n
}

func (s *State) putRevoked(h uint64, r *skeinv1.RevokedNode) {
	s.revoked.put(s.own(), h, r.GetNode().GetId(), r)
	s.sizes.add(sectionNodes, r)
}

func (s *State) putServer(h uint64, v *skeinv1.Server) {
	if old := find(&s.servers, v.GetNodeId()); old != nil {
		s.sizes.drop(sectionServers, old)
	}
	s.servers.put(s.own(), h, v.GetNodeId(), v)
	s.sizes.add(sectionServers, v)
}

// setServer makes a live node a server, or a server a voter.
func (s *State) setServer(id string, voter bool, at int64) {
	h, ok := hexKey(id)
	if !ok || find(&s.nodes, id) == nil {
		return
	}
	if old := find(&s.servers, id); (old != nil) == voter && !old.GetVoter() {
		s.putServer(h, &skeinv1.Server{NodeId: id, Voter: voter, Since: at})
	}
}

func (s *State) dropServer(id string) {
	if v := find(&s.servers, id); v != nil {
		h, _ := hexKey(id)
		s.servers.del(s.own(), h, id)
		s.sizes.drop(sectionServers, v)
	}
}

// remember keeps an answer and forgets the oldest above MaxAnswers. The first answer stands.
func (s *State) remember(a *skeinv1.Answer) bool {
	id := a.GetRequestId()
	if id == "" || s.stored(id) != nil {
		return false
	}
	s.answers.put(s.own(), textKey(id), id, a)
	bytes := entrySize(sectionAnswers, sizeOf(a))
	s.sizes[sectionAnswers] += bytes
	s.order.push(s.own(), queued{id, bytes})
	if s.order.n > MaxAnswers {
		oldest := s.order.pop()
		s.sizes[sectionAnswers] -= oldest.bytes
		s.answers.remove(s.own(), textKey(oldest.id), oldest.id)
	}
	return true
}
