package egress

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// Timing of leases. What must hold: a ticket of Lease begins before its request is sent, and the leader counts Lease and Guard
// from a later moment, so a slot is given on only when the former owner's kernel has stopped.
const (
	RenewEvery = 200 * time.Millisecond
	Guard      = 100 * time.Millisecond
	// Handover is how long the former owner of a slot that moves by plan goes on for packets under way.
	Handover = 180 * time.Millisecond
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

var refPart = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`)

// ParseRef reads namespace/name.
func ParseRef(s string) (Ref, error) {
	namespace, name, ok := strings.Cut(s, "/")
	r := Ref{namespace, name}
	if !ok || !r.Valid() {
		return Ref{}, fmt.Errorf("%.100q is no egress: write namespace/name, as `skein egress list` does", s)
	}
	return r, nil
}

// Valid says that both parts may be names.
func (r Ref) Valid() bool {
	return len(r.Namespace) <= 63 && refPart.MatchString(r.Namespace) && refPart.MatchString(r.Name)
}

// Compare orders egresses by namespace, then by name.
func (r Ref) Compare(o Ref) int {
	return cmp.Or(strings.Compare(r.Namespace, o.Namespace), strings.Compare(r.Name, o.Name))
}
