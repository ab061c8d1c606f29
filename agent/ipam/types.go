package ipam

import (
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Request asks for addresses for one attachment. Its NetNS serves to find out later whether the pod is still there.
type Request struct {
	podnet.Attachment
	Network string // name of the CNI network configuration
	// Pool that was asked for by name; empty: the namespace's own, else "default".
	Pool string
	// NamespacePool is the namespace's own, as whoever rules over namespaces says; empty: the one that serves it by the
	// log.
	NamespacePool string
	// Addresses that were asked for, one of a family at most; none: any.
	Addresses []netip.Addr
}

// Lease is what an attachment has.
type Lease struct {
	podnet.Attachment
	Network string
	Pool    string
	Static  bool   // reserved for this pod in the log
	Adopted bool   // found in the kernel; nobody of ours has asked for it
	Link    string // the host's end, of an adopted pod that Coil made; else empty
	Since   time.Time
	Until   time.Time // when it was given back; zero: it is in use
}

// Code says what kind of failure an Error is.
type Code uint8

// What can go wrong.
const (
	Invalid     Code = iota + 1 // the request itself is wrong, and will stay so
	Denied                      // the namespace may not use that pool, or the address belongs to somebody else
	Exhausted                   // the pool, the quota or the limit of blocks is used up
	Unavailable                 // nothing is free here, and no server decides now: try again later
	Exists                      // the attachment has addresses already
)

// Error is a refusal. Its message names the thing and the cause, Advice the next step.
type Error struct {
	Code    Code
	Message string
	Advice  string
}

// Error is message and advice.
func (e *Error) Error() string {
	if e.Advice == "" {
		return e.Message
	}
	return e.Message + "; " + e.Advice
}

// Event is what the journal keeps of one address.
type Event = skeinv1.PodAddress
