package events

import (
	"cmp"
	"fmt"
	"net/netip"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The state remembers MaxAnswers answers, so each has to be small whatever it is about: a pool may have 500 KB. What is
// remembered names things: the node, the token, the pool with the index that made it, the block with the index that
// gave it, the slot with its epoch. AnswerTo looks the things up again. The event that brings an answer into the state
// carries the same names, so replicas of every version remember the same.

// Reference is what the state remembers of an answer: the names of what it is about.
func Reference(a *skeinv1.Answer) *skeinv1.Answer {
	out := &skeinv1.Answer{RequestId: a.GetRequestId(), Index: a.GetIndex(), Grant: a.GetGrant()}
	if v := a.GetNode(); v != nil {
		out.Node = &skeinv1.Node{Id: v.GetId()}
	}
	if v := a.GetToken(); v != nil {
		out.Token = &skeinv1.Token{Id: v.GetId()}
	}
	if v := a.GetPool(); v != nil {
		out.Pool = &skeinv1.Pool{Name: v.GetName(), CreatedIndex: v.GetCreatedIndex()}
	}
	for i, v := range a.GetBlocks() {
		ref := &skeinv1.Block{Number: v.GetNumber(), Index: v.GetIndex()}
		if i == 0 { // all blocks of an answer are of one pool
			ref.Pool = v.GetPool()
		}
		out.Blocks = append(out.Blocks, ref)
	}
	if v := a.GetStatic(); v != nil {
		out.Static = &skeinv1.StaticAddress{Pool: v.GetPool(), Ipv4: v.GetIpv4(), Ipv6: v.GetIpv6(), Index: v.GetIndex()}
	}
	if v := a.GetEgress(); v != nil {
		out.Egress = &skeinv1.Egress{Namespace: v.GetNamespace(), Name: v.GetName(), CreatedIndex: v.GetCreatedIndex()}
	}
	if v := a.GetSlot(); v != nil {
		out.Slot = &skeinv1.EgressSlot{Namespace: v.GetNamespace(), Name: v.GetName(), Number: v.GetNumber(),
			Epoch: v.GetEpoch()}
	}
	if v := a.GetPlainPeer(); v != nil {
		out.PlainPeer = &skeinv1.PlainPeer{Name: v.GetName(), CreatedIndex: v.GetCreatedIndex()}
	}
	if plan := a.GetPlan(); len(plan) > 0 {
		out.Plan = plan[:1]
		if len(plan) > 1 {
			out.Plan = []string{plan[0],
				fmt.Sprintf("the changes are the events up to %d: skein events shows them", a.GetIndex())}
		}
	}
	return out
}

// AnswerTo is what the command with that key, of answerKey, returned, or nil if it is unknown or forgotten. What the
// answer is about is shown as it is now. What is gone, or was made anew since, is only named: the command was carried
// out at the answer's index.
func (s *State) AnswerTo(key string) *skeinv1.Answer {
	return s.Complete(s.stored(key))
}

// stored is the answer as the state has it.
func (s *State) stored(key string) *skeinv1.Answer {
	a, _ := s.answers.get(textKey(key), key)
	return a
}

// Complete looks up what an answer names and does not show. Answers that are whole, as leaders of earlier versions give
// them to retries, stay as they are.
func (s *State) Complete(a *skeinv1.Answer) *skeinv1.Answer {
	if a == nil {
		return nil
	}
	out := &skeinv1.Answer{
		RequestId: a.GetRequestId(), Index: a.GetIndex(), Node: a.GetNode(), Token: a.GetToken(), ErrorCode: a.GetErrorCode(),
		ErrorMessage: a.GetErrorMessage(),
		Pool:         a.GetPool(), Static: a.GetStatic(), Grant: a.GetGrant(), Plan: a.GetPlan(), Egress: a.GetEgress(),
		Slot: a.GetSlot(), PlainPeer: a.GetPlainPeer(),
	}
	if n := a.GetNode(); n != nil && len(n.GetIdentityKey()) == 0 {
		out.Node = cmp.Or(find(&s.nodes, n.GetId()), find(&s.revoked, n.GetId()).GetNode(), n)
	}
	if t := a.GetToken(); t != nil && len(t.GetSecretHash()) == 0 {
		out.Token = cmp.Or(find(&s.tokens, t.GetId()), t)
	}
	if p := a.GetPool(); p != nil && len(p.GetSubnets()) == 0 {
		if have := s.Pool(p.GetName()); have.GetCreatedIndex() == p.GetCreatedIndex() {
			out.Pool = cmp.Or(have, p)
		}
	}
	for _, b := range a.GetBlocks() {
		out.Blocks = append(out.Blocks, s.completeBlock(b, a.GetBlocks()[0].GetPool()))
	}
	if v := a.GetStatic(); v != nil && v.GetNamespace() == "" {
		addr, _ := netip.ParseAddr(cmp.Or(v.GetIpv4(), v.GetIpv6()))
		if have := s.Static(v.GetPool(), addr); have.GetIndex() == v.GetIndex() {
			out.Static = cmp.Or(have, v)
		}
	}
	if e := a.GetEgress(); e != nil && e.GetReplicas() == 0 {
		if have := s.Egress(e.GetNamespace(), e.GetName()); have.GetCreatedIndex() == e.GetCreatedIndex() {
			out.Egress = cmp.Or(have, e)
		}
	}
	if v := a.GetSlot(); v != nil && v.GetSince() == 0 {
		if have := s.Slot(v.GetNamespace(), v.GetName(), v.GetNumber()); have.GetEpoch() == v.GetEpoch() {
			out.Slot = cmp.Or(have, v)
		}
	}
	if p := a.GetPlainPeer(); p != nil && len(p.GetPublicKey()) == 0 {
		if have := s.PlainPeer(p.GetName()); have.GetCreatedIndex() == p.GetCreatedIndex() {
			out.PlainPeer = cmp.Or(have, p)
		}
	}
	return out
}

// completeBlock is the block that an answer names, as the event gave it. One that was given back since is shown without
// an owner.
func (s *State) completeBlock(b *skeinv1.Block, pool string) *skeinv1.Block {
	if b.GetSince() != 0 {
		return b
	}
	if have := s.Block(pool, b.GetNumber()); have != nil && have.GetIndex() == b.GetIndex() {
		return have
	}
	out := &skeinv1.Block{Pool: pool, Number: b.GetNumber(), Index: b.GetIndex()}
	if ipv4, ipv6, ok := s.BlockPrefixes(pool, b.GetNumber()); ok {
		out.Ipv4, out.Ipv6 = text(ipv4), text(ipv6)
	}
	return out
}
