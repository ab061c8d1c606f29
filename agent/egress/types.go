package egress

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/dnsname"
)

// Timing of leases. What must hold: a ticket of TicketFor(lease) begins before its request is sent, and the leader
// counts the lease and GuardFor(lease) from a later moment, so a slot is given on only when the former owner's kernel
// has stopped.
const (
	RenewEvery = 200 * time.Millisecond
	// Guard is the shortest time between the end of a ticket and that of its lease at the leader.
	Guard = 100 * time.Millisecond
	// guardShare of a lease is the guard of a long one: 1000 ppm. NTP turns a clock by up to 500 ppm, and crystals
	// differ by up to 200.
	guardShare = 1000
	// MaxTicket is how long a kernel forwards at most without a proof from outside that time has not passed it by: a
	// machine that is stopped and continued as a whole goes on for no longer than that, by its own clock, however long
	// its lease is.
	MaxTicket = 3 * time.Second
	// Handover is how long the former owner of a slot that moves by plan goes on for packets under way.
	Handover = 180 * time.Millisecond
	// SyncEvery is how often clients are told again to gateways that may have forgotten them.
	SyncEvery = 10 * time.Second
)

// GuardFor is how much longer than a lease the leader counts: clocks that differ by 1000 ppm agree on who is first.
func GuardFor(lease time.Duration) time.Duration { return max(Guard, lease/guardShare) }

// TicketFor is how long a gateway's kernel counts for a lease. It leaves out what a leader before GuardFor, who counts
// the lease and Guard, does not wait: so it suffices that one of the two knows GuardFor.
func TicketFor(lease time.Duration) time.Duration { return lease - (GuardFor(lease) - Guard) }

// firstTicket is how long the ticket of a request to the leader is.
func firstTicket(lease time.Duration) time.Duration { return min(TicketFor(lease), MaxTicket) }

// long reports whether a lease lives longer than a ticket.
func long(lease time.Duration) bool { return TicketFor(lease) > MaxTicket }

// Ref names an egress.
type Ref struct{ Namespace, Name string }

// String is namespace/name, as users write it.
func (r Ref) String() string { return r.Namespace + "/" + r.Name }

// RefOf reads which egress a message is about.
func RefOf(m interface {
	GetNamespace() string
	GetName() string
}) Ref {
	return Ref{m.GetNamespace(), m.GetName()}
}

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
	return len(r.Namespace) <= dnsname.MostLabel && dnsname.IsName(r.Namespace) && dnsname.IsName(r.Name)
}

// Compare orders egresses by namespace, then by name.
func (r Ref) Compare(o Ref) int {
	return cmp.Or(strings.Compare(r.Namespace, o.Namespace), strings.Compare(r.Name, o.Name))
}

// ErrNone is for those who ask a node that runs none.
var ErrNone = errors.New("this node runs no egresses: it only relays; ask another")
