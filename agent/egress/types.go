package egress

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/dnsname"
)

// Timing of leases. Invariant: a ticket of TicketFor(lease) begins before its request is sent, and the leader counts
// the lease plus GuardFor(lease) from a later moment. So the leader reassigns a slot only after the former owner's
// kernel has stopped forwarding.
const (
	RenewEvery = 200 * time.Millisecond
	// Guard is the shortest time between the end of a ticket and that of its lease at the leader.
	Guard = 100 * time.Millisecond
	// guardShare makes the guard of a long lease 1000 ppm of it. NTP slews a clock by up to 500 ppm, and crystals
	// differ by up to 200.
	guardShare = 1000
	// MaxTicket is how long a kernel forwards at most without proof from other machines that no more time has passed
	// there. A machine that is frozen and resumed forwards no longer than that by its own clock, however long its lease
	// is.
	MaxTicket = 3 * time.Second
	// Handover is how long the former owner of a slot in a planned move continues, for packets under way.
	Handover = 180 * time.Millisecond
	// SyncEvery is how often the clients' hosts repeat their lists to gateways, which may have forgotten them.
	SyncEvery = 10 * time.Second
)

// GuardFor is what the leader adds to a lease, so that clocks may differ by 1000 ppm.
func GuardFor(lease time.Duration) time.Duration { return max(Guard, lease/guardShare) }

// TicketFor is how long a gateway's kernel forwards for a lease. It subtracts what a leader of a version before
// GuardFor, which adds only Guard, does not wait. So one new side, leader or gateway, suffices.
func TicketFor(lease time.Duration) time.Duration { return lease - (GuardFor(lease) - Guard) }

// firstTicket is the duration of the ticket that belongs to a request to the leader.
func firstTicket(lease time.Duration) time.Duration { return min(TicketFor(lease), MaxTicket) }

// long reports whether a lease lasts longer than a ticket may.
func long(lease time.Duration) bool { return TicketFor(lease) > MaxTicket }

// Ref names an egress.
type Ref struct{ Namespace, Name string }

// String is namespace/name, as users write it.
func (r Ref) String() string { return r.Namespace + "/" + r.Name }

// RefOf is the egress that a message names.
func RefOf(m interface {
	GetNamespace() string
	GetName() string
}) Ref {
	return Ref{m.GetNamespace(), m.GetName()}
}

// ParseRef parses namespace/name.
func ParseRef(s string) (Ref, error) {
	namespace, name, ok := strings.Cut(s, "/")
	r := Ref{namespace, name}
	if !ok || !r.Valid() {
		return Ref{}, fmt.Errorf("%.100q is not an egress: write namespace/name, as `skein egress list` does", s)
	}
	return r, nil
}

// Valid reports whether both parts are valid names.
func (r Ref) Valid() bool {
	return len(r.Namespace) <= dnsname.MostLabel && dnsname.IsName(r.Namespace) && dnsname.IsName(r.Name)
}

// Compare orders egresses by namespace, then by name.
func (r Ref) Compare(o Ref) int {
	return cmp.Or(strings.Compare(r.Namespace, o.Namespace), strings.Compare(r.Name, o.Name))
}

// ErrNone is the answer of a node that runs no egresses.
var ErrNone = errors.New("this node runs no egresses: it only relays; ask another")
