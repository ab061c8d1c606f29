package resource

// Group and Version of the resources.
const (
	Group   = "skein.dev"
	Version = "v1alpha1"
)

// Finalizer keeps a resource that is being deleted until the log has let go of what it stands for.
const Finalizer = "skein.dev/log"

// Meta is what is decided by of a resource's metadata.
type Meta struct {
	Namespace  string
	Name       string
	UID        string
	Generation int64
	Deleting   bool
	Finalizers []string
}

// Finalized tells whether the resource waits for us when it is deleted.
func (m Meta) Finalized() bool {
	for _, f := range m.Finalizers {
		if f == Finalizer {
			return true
		}
	}
	return false
}

// Subnet is a part of a pool; both: with as many addresses each.
type Subnet struct {
	IPv4 string `json:"ipv4,omitempty"`
	IPv6 string `json:"ipv6,omitempty"`
}

// AddressPoolSpec is what a user wishes. Fields that are absent are left to the log.
type AddressPoolSpec struct {
	Subnets          []Subnet          `json:"subnets"`
	BlockSizeBits    *uint32           `json:"blockSizeBits,omitempty"`
	Draining         *bool             `json:"draining,omitempty"`
	CooldownSeconds  *uint32           `json:"cooldownSeconds,omitempty"`
	StickySeconds    *uint32           `json:"stickySeconds,omitempty"`
	MaxBlocksPerNode *uint32           `json:"maxBlocksPerNode,omitempty"`
	Namespaces       []string          `json:"namespaces,omitempty"`
	Allowed          []string          `json:"allowed,omitempty"`
	Quotas           map[string]uint32 `json:"quotas,omitempty"`
}

// EgressAddress is a slot's source address.
type EgressAddress struct {
	IPv4 string `json:"ipv4,omitempty"`
	IPv6 string `json:"ipv6,omitempty"`
}

// EgressSpec is what a user wishes.
type EgressSpec struct {
	Destinations      []string          `json:"destinations"`
	Gateways          map[string]string `json:"gateways"`
	Replicas          *uint32           `json:"replicas,omitempty"`
	Addresses         []EgressAddress   `json:"addresses,omitempty"`
	FouSourcePortAuto *bool             `json:"fouSourcePortAuto,omitempty"`
	LeaseMillis       *uint32           `json:"leaseMillis,omitempty"`
	Probes            []string          `json:"probes,omitempty"`
}

// AddressPool is one resource.
type AddressPool struct {
	Meta
	Spec     AddressPoolSpec
	Observed int64 // status.observedGeneration
}

// Egress is one resource.
type Egress struct {
	Meta
	Spec     EgressSpec
	Observed int64 // status.observedGeneration
}

// Condition types and reasons.
const (
	Synced = "Synced"

	ReasonApplied   = "Applied"          // the log has what the resource wishes
	ReasonRefused   = "Refused"          // the log refuses it; the message says why
	ReasonImmutable = "Immutable"        // it wishes for what cannot be changed
	ReasonCommand   = "ChangedByCommand" // a command has changed it since
	ReasonRemoved   = "RemovedByCommand" // a command has removed it since
	ReasonInUse     = "InUse"            // it is being deleted and still in use
	ReasonPending   = "Pending"          // the log has not answered yet
)

// Condition is one of a resource's, without its times.
type Condition struct {
	Type    string
	True    bool
	Reason  string
	Message string
}

// BlockStatus counts a pool's blocks.
type BlockStatus struct {
	Total, Owned, Reserved, Resting, Free uint64
}

// PoolStatus is what a pool's status says beside its condition.
type PoolStatus struct {
	Blocks BlockStatus
	Nodes  int
}

// EgressStatus is what an egress's status says beside its condition.
type EgressStatus struct {
	Replicas int    // slots with an owner
	Selector string // of the pods that are its gateways, as an HPA wants one: none are pods, so it selects nothing
	Owners   []string
}
