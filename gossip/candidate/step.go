package candidate

import (
	"context"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Step is one way of finding out how this host can be reached. Looks at one step never overlap.
type Step interface {
	// Source names the step in what it finds: stun, imds, upnp.
	Source() string
	// Look finds out what there is to find, in time bounds of its own. What it returns replaces what it returned before.
	// When ctx ends, what it returns does not matter.
	Look(ctx context.Context, r Request) Found
}

// Releaser is a Step that holds something of others, such as a port of the router, and gives it back at the end.
type Releaser interface {
	Release(ctx context.Context)
}

// Request is the wish that a step looks.
type Request struct {
	Host Host
	// Full asks to look at everything anew: the first time, after the network changed, or because somebody waits for it.
	// Else the step's own time has come.
	Full  bool
	Fresh bool        // the host's network is another one than at the last look
	Early func(Found) // tells what is certain already, while Look goes on
	Wake  func()      // asks for another full look at this step soon; may be called at any time, by any goroutine
	Soon  func()      // the same for a look as the step's own time brings
}

// Found is what one step knows.
type Found struct {
	Candidates []*skeinv1.Candidate
	NAT        *NATReport    // from the step that looks at the NAT
	Notes      []Note        // for people
	Problem    string        // what an operator should repair, and in Help how; empty: nothing
	Help       string        //
	Again      time.Duration // when to look again; 0: not before the network changes or somebody asks
	Elastic    []netip.Addr  // addresses outside that lead to this host alone, with all ports
}

// Note is one line on what a step did, without anything that changes by itself, such as ages.
type Note struct {
	Source string // as in candidates
	OK     bool
	Text   string
}

// Host is how this host is connected.
type Host struct {
	Addrs    []netip.Addr   // that others may reach: public ones first, IPv4 before IPv6
	Gateways []Gateway      // of the default routes, best first
	Overlay  []netip.Prefix // addresses inside the tunnel, which are never candidates
}

// Gateway is the next hop of a default route.
type Gateway struct {
	Addr  netip.Addr
	Local netip.Addr // this host's address towards it
	Link  string
}

// Equal compares two hosts.
func (h Host) Equal(o Host) bool {
	return slices.Equal(h.Addrs, o.Addrs) && slices.Equal(h.Gateways, o.Gateways) && slices.Equal(h.Overlay, o.Overlay)
}

// Network reads and watches how this host is connected; hostaddr.Kernel is one.
type Network interface {
	Read() (Host, error)
	// Watch calls changed whenever something may be different, until ctx ends or it cannot go on.
	Watch(ctx context.Context, changed func()) error
}
