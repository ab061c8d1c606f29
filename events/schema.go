package events

import skeinv1 "github.com/skeinmesh/skein/api/skein/v1"

// SchemaMin and SchemaMax are the range of event schemas that this version folds.
const (
	SchemaMin uint32 = 1
	SchemaMax uint32 = 4
)

// schemaOf is the registry of event bodies: the schema version that introduced each. A body that
// changes what Fold does with it is a new body with a new version. 0 means unknown.
func schemaOf(e *skeinv1.Event) uint32 {
	switch e.GetBody().(type) {
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
	case *skeinv1.Event_EgressDefined,
		*skeinv1.Event_EgressChanged,
		*skeinv1.Event_EgressRemoved,
		*skeinv1.Event_SlotAssigned,
		*skeinv1.Event_SlotMoved,
		*skeinv1.Event_SlotReleased:
		return 3
	case *skeinv1.Event_ClockRepaired:
		return 4
	}
	return 0
}
