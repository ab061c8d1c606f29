package events

import (
	"cmp"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// SchemaMin and SchemaMax are the range of event schemas that this version folds.
const (
	SchemaMin uint32 = 1
	SchemaMax uint32 = 10
)

// schemaOf is the registry of event bodies: the schema version that introduced each. A body that
// changes what Fold does with it is a new body with a new version. 0 means unknown.
func schemaOf(e *skeinv1.Event) uint32 {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_ClusterCreated,
		*skeinv1.Event_SettingsChanged,
		*skeinv1.Event_TokenCreated,
		*skeinv1.Event_TokenUsed,
		*skeinv1.Event_TokenRevoked,
		*skeinv1.Event_NodeAdmitted,
		*skeinv1.Event_NodeChanged,
		*skeinv1.Event_NodeRevoked,
		*skeinv1.Event_NodeKeyRotated,
		*skeinv1.Event_ServerAdded,
		*skeinv1.Event_ServerPromoted,
		*skeinv1.Event_ServerRemoved,
		*skeinv1.Event_GossipKeyRotated,
		*skeinv1.Event_CommandAnswered:
		return 1
	case *skeinv1.Event_PoolCreated,
		*skeinv1.Event_PoolChanged,
		*skeinv1.Event_PoolRemoved,
		*skeinv1.Event_BlockAllocated,
		*skeinv1.Event_BlockReserved,
		*skeinv1.Event_BlockReleased,
		*skeinv1.Event_AddressReserved,
		*skeinv1.Event_AddressClaimed,
		*skeinv1.Event_AddressReleased,
		*skeinv1.Event_GrantSet:
		return 2
	case *skeinv1.Event_EgressChanged:
		return schemaOfEgress(b.EgressChanged.GetEgress())
	case *skeinv1.Event_EgressDefined:
		return schemaOfEgress(b.EgressDefined.GetEgress())
	case *skeinv1.Event_EgressRemoved,
		*skeinv1.Event_SlotAssigned,
		*skeinv1.Event_SlotMoved,
		*skeinv1.Event_SlotReleased:
		return 3
	case *skeinv1.Event_ClockRepaired:
		return 4
	case *skeinv1.Event_PodCidrsSet:
		return 5
	case *skeinv1.Event_NodeSettingsSet:
		return 6
	case *skeinv1.Event_PlainPeerSet,
		*skeinv1.Event_PlainPeerRemoved:
		return plainPeerSchema
	case *skeinv1.Event_SiteTranslationSet,
		*skeinv1.Event_SiteTranslationRemoved:
		return translationSchema
	case *skeinv1.Event_SiteRangeAllotted:
		return rangeSchema
	case *skeinv1.Event_SlicedRangeAllotted:
		return sliceSchema
	}
	return 0
}

// neededSchema is what a server has to fold for what is in the state, and what that is.
func (s *State) neededSchema() (what string, schema uint32) {
	switch {
	case s.settings.get().GetFouPortChange() != nil:
		return "another port of egresses' tunnels", fouSchema
	case slices.ContainsFunc(s.egressNames, func(r egressRef) bool {
		return schemaOfEgress(s.outlet(r).egress.get()) == drainSchema
	}):
		return "egresses with slots that drain, or that spread flows", drainSchema
	case slices.ContainsFunc(s.ranges, func(r SiteRange) bool { return r.Sliced }):
		return "ranges of sites in slices", sliceSchema
	case s.translations.n > 0:
		return "translated networks of sites", translationSchema
	case s.rangeTable.n > 0:
		return "ranges of sites", rangeSchema
	case s.nodesSet > 0:
		return "settings of nodes", siteSchema
	case bySites(s.settings.get()):
		return "sites that speak through leaders", siteSchema
	case s.plain.n > 0:
		return "plain peers", plainPeerSchema
	case len(s.podNets) > 0:
		return "networks of Kubernetes Nodes' pods", 5
	case s.outlets.n > 0:
		return "egresses", 3
	case s.pools.n > 0:
		return "pools", 2
	}
	return "", SchemaMin
}

// checkLowered refuses a server that says it folds less than what the state holds: nothing of that kind could be
// decided any more. One that was rolled back to an older version, before the cluster used what is new, says so truly
// and holds the others back until it is upgraded again; see Holdbacks. What agents fold matters to themselves alone.
func (d *decision) checkLowered(old, next *skeinv1.Node) error {
	what, need := d.s.neededSchema()
	high := next.GetMaxSchema()
	if high >= min(need, old.GetMaxSchema()) || find(&d.s.servers, old.GetId()) == nil {
		return nil
	}
	return refuse(FailedPrecondition, "server %s would fold event schemas up to %d only, and the cluster has %s, which "+
		"need %d; install a version that folds them on %s, or take its role with skein node withdraw %s server",
		old.GetName(), high, what, need, old.GetName(), old.GetName())
}

// Holdbacks are the servers that do not fold events up to a schema, by name: what needs it is refused until they are
// upgraded.
func (s *State) Holdbacks(schema uint32) (out []*skeinv1.Node) {
	for v := range s.servers.all() {
		if n := find(&s.nodes, v.GetNodeId()); n.GetMaxSchema() < schema {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b *skeinv1.Node) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return out
}
