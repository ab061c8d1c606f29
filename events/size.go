package events

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// section is a part of the state whose bytes are counted by themselves.
type section uint8

const (
	sectionSettings section = iota // the cluster, its settings, gossip's keys: bounded by their fields
	sectionNodes                   // live and revoked ones
	sectionServers
	sectionTokens
	sectionAnswers
	sectionPools
	sectionBlocks // owned, reserved and waiting ones
	sectionStatics
	sectionGrants
	sectionEgresses     // with their slots
	sectionPlain        // plain peers
	sectionTranslations // of sites' networks
	sectionRanges       // of sites
	sections
)

// sizes are the bytes of each part in the snapshot form.
type sizes [sections]int

func (s *sizes) add(p section, m proto.Message)  { s[p] += entrySize(p, sizeOf(m)) }
func (s *sizes) drop(p section, m proto.Message) { s[p] -= entrySize(p, sizeOf(m)) }

// entrySize is what a message of so many bytes takes as a field of State: a tag, its length, itself. The fields from 16
// on, which are egresses, plain peers, translations and ranges of sites, have tags of two bytes.
func entrySize(p section, n int) int {
	tag := 1
	if p == sectionEgresses || p == sectionPlain || p == sectionTranslations || p == sectionRanges {
		tag = 2
	}
	return tag + protowire.SizeVarint(uint64(n)) + n
}

// setCell replaces an entity that is there once.
func setCell[M proto.Message](s *State, at **cell[M], v M) {
	if *at != nil {
		s.sizes.drop(sectionSettings, (*at).value)
	}
	*at = &cell[M]{value: v}
	s.sizes.add(sectionSettings, v)
}

// Size is how many bytes the state's snapshot form, Proto, has when it is written. It is kept with each change and
// costs nothing.
func (s *State) Size() int {
	n := sizeNumber(s.index) + sizeNumber(uint64(s.time))
	for _, v := range s.sizes {
		n += v
	}
	return n
}

// sizeOf is proto.Size with a short way for the messages that change often. A test holds the two against each other,
// field by field.
func sizeOf(m proto.Message) int {
	if len(m.ProtoReflect().GetUnknown()) == 0 {
		switch m := m.(type) {
		case *skeinv1.Node:
			if m.PodCidrs == nil && m.Settings == nil {
				return sizeNode(m)
			}
		case *skeinv1.Token:
			return sizeText(m.GetId()) + sizeText(m.GetSecretHash()) + sizeNumber(uint64(m.GetCreatedAt())) +
				sizeNumber(uint64(m.GetExpiresAt())) +
				sizeNumber(uint64(m.GetUsesLeft())) + sizeNumber(uint64(m.GetUses())) + sizeText(m.GetLabel()) +
				sizeFlag(m.GetAgentsOnly()) +
				sizeText(m.GetRole()) + sizeFlag(m.GetSigned())
		case *skeinv1.Block:
			return sizeBlock(m)
		case *skeinv1.FreedBlock:
			return sizeText(m.GetPool()) + sizeNumber(m.GetNumber()) + sizeNumber(uint64(m.GetAt())) + sizeNumber(m.GetIndex())
		case *skeinv1.EgressSlot:
			return sizeText(m.GetNamespace()) + sizeText(m.GetName()) + sizeNumber(uint64(m.GetNumber())) +
				sizeText(m.GetNodeId()) + sizeNumber(m.GetEpoch()) +
				sizeNumber(uint64(m.GetSince())) + sizeText(m.GetReason()) + sizeText(m.GetFromNodeId()) +
				sizeFlag(m.GetPlanned()) +
				sizeNumber(uint64(m.GetLeaseMillis())) + sizeNumber(uint64(m.GetFormerLeaseMillis()))
		case *skeinv1.Answer:
			if n, ok := sizeAnswer(m); ok {
				return n
			}
		}
	}
	return proto.Size(m)
}

func sizeNode(n *skeinv1.Node) int {
	size := sizeText(n.GetId()) + sizeText(n.GetName()) + sizeText(n.GetIdentityKey()) + sizeText(n.GetWireguardKey()) +
		sizeText(n.GetIpv4()) + sizeText(n.GetIpv6()) +
		sizeNumber(uint64(n.GetAdmittedAt())) + sizeNumber(n.GetAdmittedIndex()) + sizeNumber(uint64(n.GetMinSchema())) +
		sizeNumber(uint64(n.GetMaxSchema())) +
		sizeFlag(n.GetAgentsOnly()) + sizeFlag(n.GetDraining()) + sizeFlag(n.GetAdmin())
	for k, v := range n.GetLabels() { // key and value of an entry are written even when they are empty
		size += sizeMessage(2 + protowire.SizeBytes(len(k)) + protowire.SizeBytes(len(v)))
	}
	return size
}

func sizeBlock(b *skeinv1.Block) int {
	return sizeText(b.GetPool()) + sizeNumber(b.GetNumber()) + sizeText(b.GetIpv4()) + sizeText(b.GetIpv6()) +
		sizeText(b.GetNodeId()) + sizeText(b.GetReason()) +
		sizeNumber(uint64(b.GetSince())) + sizeNumber(b.GetIndex())
}

// sizeAnswer measures an answer about what the state is asked for most.
func sizeAnswer(a *skeinv1.Answer) (n int, ok bool) {
	if a.Pool != nil || a.Static != nil || a.Grant != nil || a.Egress != nil || a.PlainPeer != nil || len(a.Plan) > 0 {
		return 0, false
	}
	n = sizeText(a.GetRequestId()) + sizeNumber(a.GetIndex()) + sizeText(a.GetErrorCode()) + sizeText(a.GetErrorMessage())
	if a.Node != nil {
		n += sizeMessage(sizeOf(a.Node))
	}
	if a.Token != nil {
		n += sizeMessage(sizeOf(a.Token))
	}
	if a.Slot != nil {
		n += sizeMessage(sizeOf(a.Slot))
	}
	for _, b := range a.Blocks {
		n += sizeMessage(sizeOf(b))
	}
	return n, true
}

// The sizes of fields with numbers below 16; see appendText and appendNumber.
func sizeText[T string | []byte](v T) int {
	if len(v) == 0 {
		return 0
	}
	return sizeMessage(len(v))
}

func sizeMessage(n int) int { return 1 + protowire.SizeBytes(n) }

func sizeNumber(v uint64) int {
	if v == 0 {
		return 0
	}
	return 1 + protowire.SizeVarint(v)
}

func sizeFlag(v bool) int { return sizeNumber(protowire.EncodeBool(v)) }
