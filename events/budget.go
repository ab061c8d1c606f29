package events

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// What the state may come to, in bytes of its snapshot form. Whoever joins, and every agent that follows, reads it as
// one message of at most 64 MiB, so Decide refuses what would make a section larger than its limit. Nodes have a limit
// of their own, and so have pods' addresses and egresses together: neither can use up what the other needs.
//
// Some commands are never refused for their size: those that make the state smaller, and those that may add a little to
// what is there, of which there is a bounded number: roles, keys, schemas, draining, tokens, claims of static
// addresses, owners of slots, revocations. MaxStateBytes is what all limits and all of these come to.
const (
	MaxStateBytes  = 62 << 20
	MaxNodeBytes   = 17 << 20 // live and revoked nodes
	MaxPodBytes    = 30 << 20 // pools, blocks, static addresses, grants and egresses
	MaxPoolBytes   = 8 << 20
	MaxBlockBytes  = 24 << 20 // owned, reserved and waiting ones
	MaxStaticBytes = 8 << 20
	MaxGrantBytes  = 4 << 20
	MaxEgressBytes = 12 << 20 // with their slots
	MaxPlainBytes  = 1 << 20  // plain peers

	MaxTranslationBytes = 128 << 10 // translations: MaxTranslations of them are less

	maxImportBytes = 24 << 20 // of the events of one import: an entry of the log holds 32 MiB
	crowdedPercent = 80       // of a limit, from which on users are warned
)

// budget holds limits; 0 is none.
type budget struct {
	sections [sections]int
	pods     int
}

func standardBudget() budget {
	return budget{pods: MaxPodBytes, sections: [sections]int{
		sectionNodes: MaxNodeBytes, sectionPools: MaxPoolBytes, sectionBlocks: MaxBlockBytes,
		sectionStatics: MaxStaticBytes, sectionGrants: MaxGrantBytes, sectionEgresses: MaxEgressBytes,
		sectionPlain: MaxPlainBytes, sectionTranslations: MaxTranslationBytes,
	}}
}

// pods is what pools, everything in them, and egresses take.
func (s *sizes) pods() int {
	return s[sectionPools] + s[sectionBlocks] + s[sectionStatics] + s[sectionGrants] + s[sectionEgresses]
}

// check refuses the events of a command that would make a section larger than its limit. A section that is above it
// already, as one of an earlier version may be, still takes what does not make it larger.
func (b budget) check(s *State, c *skeinv1.Command, events []*skeinv1.Event) error {
	grown, total, counted := growth(c, events)
	if !counted {
		return nil
	}
	if c.GetImportPools() != nil && total > maxImportBytes {
		return refuse(InvalidArgument,
			"the import makes %d changes of %s, and an entry of the log holds at most %s: split it by pool", len(events),
			mebibytes(total), mebibytes(maxImportBytes))
	}
	fits := b.pods == 0 || s.sizes.pods()+grown.pods() <= b.pods
	for i, limit := range b.sections {
		fits = fits && (limit == 0 || grown[i] == 0 || s.sizes[i]+grown[i] <= limit)
	}
	if fits {
		return nil
	}
	next := s.Clone() // what the events replace counts, too: fold them
	for _, e := range events {
		if err := next.Fold(e); err != nil {
			return err // unreachable: the events follow one another
		}
	}
	for i, limit := range b.sections {
		if limit > 0 && next.sizes[i] > limit && next.sizes[i] > s.sizes[i] {
			return s.refuseSize(section(i), limit)
		}
	}
	if have := next.sizes.pods(); b.pods > 0 && have > b.pods && have > s.sizes.pods() {
		return s.refusePods(b.pods)
	}
	return nil
}

// growth bounds from above what events add to each section. It does not count what they take away. counted is false
// when none of them is held to a limit.
func growth(c *skeinv1.Command, events []*skeinv1.Event) (grown sizes, total int, counted bool) {
	for _, e := range events {
		in, bytes, limited := grows(c, e)
		grown[in] += bytes
		total += bytes + eventOverhead
		counted = counted || limited
	}
	return grown, total, counted
}

// eventOverhead is what an event has besides its entity.
const eventOverhead = 64 + MaxText

// grows is what an event adds to a section, and whether it is held to the limit.
func grows(c *skeinv1.Command, e *skeinv1.Event) (in section, bytes int, limited bool) {
	const reference = 64 // more than a claim or a release adds besides the pool's name
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_NodeAdmitted:
		return sectionNodes, entrySize(sectionNodes, sizeOf(b.NodeAdmitted.GetNode())), true
	case *skeinv1.Event_NodeChanged:
		change := c.GetChangeNode()
		return sectionNodes, entrySize(sectionNodes, sizeOf(b.NodeChanged.GetNode())), change.GetSetLabels() ||
			change.GetName() != ""
	case *skeinv1.Event_NodeSettingsSet:
		const longer = 4 // bytes: the field's tag, and the lengths around it
		v := b.NodeSettingsSet.GetSettings()
		return sectionNodes, entrySize(sectionNodes, sizeOf(v)) + longer, v != nil
	case *skeinv1.Event_PoolCreated:
		return sectionPools, entrySize(sectionPools, sizeOf(b.PoolCreated.GetPool())), true
	case *skeinv1.Event_PoolChanged:
		return sectionPools, entrySize(sectionPools, sizeOf(b.PoolChanged.GetPool())), true
	case *skeinv1.Event_BlockAllocated:
		return sectionBlocks, entrySize(sectionBlocks, sizeOf(b.BlockAllocated.GetBlock())), true
	case *skeinv1.Event_BlockReserved:
		return sectionBlocks, entrySize(sectionBlocks, sizeOf(b.BlockReserved.GetBlock())), true
	case *skeinv1.Event_BlockReleased:
		return sectionBlocks, reference + len(b.BlockReleased.GetPool()), false
	case *skeinv1.Event_AddressReserved:
		return sectionStatics, entrySize(sectionStatics, sizeOf(b.AddressReserved.GetAddress())), true
	case *skeinv1.Event_AddressClaimed:
		return sectionStatics, reference, false
	case *skeinv1.Event_GrantSet:
		return sectionGrants, entrySize(sectionGrants, sizeOf(b.GrantSet.GetGrant())),
			b.GrantSet.GetGrant().GetAddresses() > 0
	case *skeinv1.Event_EgressDefined:
		return sectionEgresses, egressSize(b.EgressDefined.GetEgress()), true
	case *skeinv1.Event_EgressChanged:
		return sectionEgresses, egressSize(b.EgressChanged.GetEgress()), true
	case *skeinv1.Event_PlainPeerSet:
		return sectionPlain, entrySize(sectionPlain, sizeOf(b.PlainPeerSet.GetPlainPeer())), true
	case *skeinv1.Event_SiteTranslationSet:
		return sectionTranslations, entrySize(sectionTranslations, sizeOf(b.SiteTranslationSet.GetTranslation())), true
	case *skeinv1.Event_SlotReleased:
		return sectionEgresses, entrySize(sectionEgresses, sizeOf(b.SlotReleased.GetSlot())), false
	}
	return sectionSettings, 0, false
}

// egressSize is what an egress takes with slots that never had an owner.
func egressSize(e *skeinv1.Egress) int {
	slot := 16 + len(e.GetNamespace()) + len(e.GetName())
	return entrySize(sectionEgresses, sizeOf(e)) + int(e.GetReplicas())*entrySize(sectionEgresses, slot)
}

func mebibytes(n int) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// refuseSize says what is large and what to remove.
func (s *State) refuseSize(in section, limit int) error {
	what, next := s.content.describe(in)
	return refuse(ResourceExhausted, "%s take %s of the agreed state, and may take no more than %s: %s", what,
		mebibytes(s.sizes[in]), mebibytes(limit), next)
}

func (s *State) refusePods(limit int) error {
	v := &s.sizes
	return refuse(ResourceExhausted, "pools, blocks, static addresses, grants and egresses take %s of the agreed state "+
		"(%s, %s, %s, %s and %s), and may take no more than %s together: remove what is not used, the largest first",
		mebibytes(v.pods()), mebibytes(v[sectionPools]), mebibytes(v[sectionBlocks]), mebibytes(v[sectionStatics]),
		mebibytes(v[sectionGrants]), mebibytes(v[sectionEgresses]), mebibytes(limit))
}

// describe says what a section holds, and how it becomes smaller.
func (c *content) describe(in section) (what, next string) {
	switch in {
	case sectionNodes:
		return fmt.Sprintf("%d nodes and %d revoked ones", c.nodes.n, c.revoked.n),
			"revoke those that are not used with skein node revoke, which also ends their long labels; revoked nodes are " +
				"kept, so that their keys and addresses never come back"
	case sectionPools:
		return fmt.Sprintf("%d pools", c.pools.n), "remove pools that are not used with skein pool remove, or shorten " +
			"their lists of namespaces and quotas with skein pool set"
	case sectionBlocks:
		return "the blocks of all pools", "release reserved ones (skein block list --reserved), and remove pools that are " +
			"not used; long reasons and names of pools count for each block"
	case sectionStatics:
		return fmt.Sprintf("%d static addresses", c.staticCount), "release those that are not used with skein ip release"
	case sectionGrants:
		return fmt.Sprintf("%d grants", c.grantCount), "give fewer namespaces a quota with skein pool set"
	case sectionEgresses:
		return fmt.Sprintf("%d egresses with %d slots", c.outlets.n, c.slotCount),
			"remove some that are not used with skein egress remove, or give them fewer destinations"
	case sectionPlain:
		return fmt.Sprintf("%d plain peers", c.plain.n), "remove those that are not used with skein peer remove"
	case sectionTranslations:
		return fmt.Sprintf("%d translations of sites' networks", c.translations.n),
			"remove those that are not used with skein site translate --remove"
	}
	return "the settings", ""
}

// Crowded is a section of the state that is near its limit, or above it.
type Crowded struct {
	What         string
	Bytes, Limit int
	Next         string // how it becomes smaller
}

// Crowded lists the sections that are near their limits. A cluster that is not huge has none.
func (s *State) Crowded() (out []Crowded) { return s.crowded(standardBudget()) }

func (s *State) crowded(b budget) (out []Crowded) {
	near := func(have, limit int) bool { return limit > 0 && have > limit/100*crowdedPercent }
	for i, limit := range b.sections {
		if near(s.sizes[i], limit) {
			what, next := s.content.describe(section(i))
			out = append(out, Crowded{What: what, Bytes: s.sizes[i], Limit: limit, Next: next})
		}
	}
	if have := s.sizes.pods(); near(have, b.pods) {
		out = append(out, Crowded{What: "pools, blocks, static addresses, grants and egresses together", Bytes: have,
			Limit: b.pods, Next: "remove what is not used, the largest first"})
	}
	return out
}

// keptLabels is how many bytes of labels stay with a node that is revoked. Nobody reads them any more, and revoked
// nodes are kept for ever.
const keptLabels = 512

// withoutLabels takes long labels from a node that is about to be revoked, and is the node then.
func (d *decision) withoutLabels(n *skeinv1.Node) *skeinv1.Node {
	if labelBytes(n.GetLabels()) <= keptLabels {
		return n
	}
	d.answer.Node = n
	bare := proto.CloneOf(n)
	bare.Labels = nil
	d.emitChange(bare)
	return bare
}

// revokedReason is the reason that is kept with a revoked node: none when nodes have used up what they may. Revoking is
// never refused for its size.
func (d *decision) revokedReason(reason string) string {
	if d.s.sizes[sectionNodes] >= MaxNodeBytes {
		return ""
	}
	return reason
}
