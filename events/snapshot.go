package events

import (
	"errors"
	"fmt"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Proto is the snapshot form. It shares its entities with the state: do not change them.
func (s *State) Proto() *skeinv1.State {
	p := &skeinv1.State{
		Index: s.index, Time: s.time,
		Cluster: s.Cluster(), Settings: s.settings.get(), GossipKeys: s.GossipKeys(),
		Nodes: s.Nodes(), Revoked: s.RevokedNodes(), Servers: s.Servers(), Tokens: s.Tokens(),
		Answers: make([]*skeinv1.Answer, 0, s.order.n),
		Pools:   s.Pools(), Blocks: s.Blocks(), Freed: s.allFreed(), Statics: s.Statics(), Grants: s.Grants(),
		Egresses: s.Egresses(), Slots: s.allSlots(), PlainPeers: s.PlainPeers(),
		Translations: s.Translations(),
		SiteRanges:   list(&s.rangeTable),
	}
	for id := range s.order.all {
		p.Answers = append(p.Answers, s.stored(id))
	}
	return p
}

// FromProto rebuilds a state from its snapshot form and shares the entities with it. It refuses a
// snapshot that no sequence of events can have made.
func FromProto(p *skeinv1.State) (*State, error) {
	if p == nil {
		return nil, errors.New("the snapshot holds no state")
	}
	if len(p.ProtoReflect().GetUnknown()) > 0 {
		return nil, fmt.Errorf("snapshot at %d: it holds parts that this skein does not know (it folds schemas %d to %d); "+
			"install the version that the servers run: %w",
			p.GetIndex(), SchemaMin, SchemaMax, ErrUnknownEvent)
	}
	s := NewState()
	s.index, s.time = p.GetIndex(), p.GetTime()
	if c := p.GetCluster(); c != nil {
		setCell(s, &s.cluster, c)
	}
	s.setSettings(p.GetSettings())
	if k := p.GetGossipKeys(); k != nil {
		setCell(s, &s.gossipKeys, k)
	}
	if err := s.load(p); err != nil {
		return nil, fmt.Errorf("snapshot at %d: %w", p.GetIndex(), err)
	}
	return s, nil
}

func (s *State) load(p *skeinv1.State) error {
	for _, n := range p.GetNodes() {
		if !s.admit(n) {
			return fmt.Errorf("node %q (%q): its ID is malformed, or its ID, name, key or address is there twice",
				n.GetId(), n.GetName())
		}
	}
	for _, r := range p.GetRevoked() {
		id := r.GetNode().GetId()
		h, ok := hexKey(id)
		if !ok || find(&s.nodes, id) != nil || find(&s.revoked, id) != nil || !s.claim(r.GetNode()) {
			return fmt.Errorf("revoked node %q: its ID is malformed, or its ID, key or address is there twice", id)
		}
		s.putRevoked(h, r)
	}
	for _, v := range p.GetServers() {
		id := v.GetNodeId()
		h, ok := hexKey(id)
		if !ok || find(&s.nodes, id) == nil || find(&s.servers, id) != nil {
			return fmt.Errorf("server %q: it is not a live node, or listed twice", id)
		}
		s.putServer(h, v)
	}
	for _, t := range p.GetTokens() {
		if !s.addToken(t) {
			return fmt.Errorf("token %q: its ID is malformed or there twice", t.GetId())
		}
	}
	if n := len(p.GetAnswers()); n > MaxAnswers {
		return fmt.Errorf("it holds %d answers and may hold %d", n, MaxAnswers)
	}
	var last uint64
	for _, a := range p.GetAnswers() {
		if a.GetIndex() <= last || a.GetIndex() > p.GetIndex() || !s.remember(a) {
			return fmt.Errorf("answer to request %q: its request ID is missing or there twice, or its index %d is out of order",
				a.GetRequestId(), a.GetIndex())
		}
		last = a.GetIndex()
	}
	if err := s.loadPools(p); err != nil {
		return err
	}
	if err := s.loadRanges(p); err != nil {
		return err
	}
	if err := s.loadPodCIDRs(p); err != nil {
		return err
	}
	if err := s.loadNodeSettings(p); err != nil {
		return err
	}
	if err := s.loadPlainPeers(p); err != nil {
		return err
	}
	if err := s.loadTranslations(p); err != nil {
		return err
	}
	return s.loadEgresses(p)
}
