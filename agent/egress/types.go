package egress

import (
	"fmt"
	"time"
)

// Timing of leases. What must hold: a ticket of Lease begins before its request is sent, and the leader counts Lease and Guard
// from a later moment, so a slot is given on only when the former owner's kernel has stopped.
const (
	RenewEvery = 200 * time.Millisecond
	Guard      = 100 * time.Millisecond
	// Handover is how long the former owner of a slot that moves by plan goes on for packets under way.
	Handover = 60 * time.Millisecond
	// SyncEvery is how often clients are told again to gateways that may have forgotten them.
	SyncEvery = 10 * time.Second
)

// Ref names an egress.
type Ref struct{ Namespace, Name string }

// String is namespace/name, as users write it.
func (r Ref) String() string { return r.Namespace + "/" + r.Name }

// Slot names one slot of an egress.
type Slot struct {
	Ref
	Number int
}

// String is namespace/name#number.
func (s Slot) String() string { return fmt.Sprintf("%s#%d", s.Ref, s.Number) }
