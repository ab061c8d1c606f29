package ipam

import (
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Request asks for addresses for one attachment. An audit uses its NetNS to find out whether the pod still exists.
type Request struct {
	podnet.Attachment
	Network string // name of the CNI network configuration
	// Pool requested by name; empty: the namespace's pool, else "default".
	Pool string
	// NamespacePool is the pool from the namespace's own settings; empty: the pool that the log assigns to the
	// namespace.
	NamespacePool string
	// Addresses requested, at most one per family; none: any.
	Addresses []netip.Addr
}

// Lease is the addresses of one attachment.
type Lease struct {
	podnet.Attachment
	Network string
	Pool    string
	Static  bool   // reserved for this pod in the log
	Adopted bool   // found in the kernel; no request was made here
	Link    string // host's end of an adopted pod that Coil made; else empty
	Since   time.Time
	Until   time.Time // when it was released; zero: in use
}

// Code is the kind of an Error.
type Code uint8

// The kinds of failure.
const (
	Invalid     Code = iota + 1 // the request itself is wrong; a retry fails, too
	Denied                      // the namespace may not use that pool, or another pod owns the address
	Exhausted                   // the pool, the quota or the limit of blocks is used up
	Unavailable                 // nothing is free here, and no server decides at present: try again later
	Exists                      // the attachment already has addresses
)

// Error is a refusal. Message names the subject and the cause, Advice the next step.
type Error struct {
	Code    Code
	Message string
	Advice  string
}

// Error returns message and advice.
func (e *Error) Error() string {
	if e.Advice == "" {
		return e.Message
	}
	return e.Message + "; " + e.Advice
}

// Event is the journal's entry about one address.
type Event = skeinv1.PodAddress
