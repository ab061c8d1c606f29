// Package fou makes tunnels that carry IPv4 in IPv4 and IPv6 in IPv6 inside UDP ("Foo over UDP"), in one network namespace.
//
// There are two drivers that put the same packets on the wire: the kernel's (ipip and ip6tnl devices with FoU encapsulation, and
// a listener for each family), and one over TUN devices in this process for kernels without. Devices have the same names with both.
//
// Source: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt.
package fou

import "net/netip"

// Spec is all that is wanted of FoU in one network namespace.
type Spec struct {
	// IPv4 and IPv6 ask for the listener of each family.
	IPv4, IPv6 bool
	Tunnels    []Tunnel // by remote; a remote has one
	// Any asks for the catch-all devices, which take what comes from another address than a tunnel leads to.
	Any bool
	// Gateway says that the tunnels lead to many clients, each to the address that its packets inside have. The TUN driver
	// then has one device for all of a family, and lets nobody in whose packets have another source inside than outside.
	Gateway bool
}

// Tunnel is one tunnel.
type Tunnel struct {
	Local, Remote  netip.Addr // of one family
	SourcePortAuto bool       // the outer source port follows from the flow inside; else it is dataplane.FoUPort
	MTU            int        // of the device, in bytes
}

// Stats are a driver's counters since it was opened.
type Stats struct {
	RxPackets, RxBytes, TxPackets, TxBytes uint64
	// DroppedStranger came from no tunnel's remote, or with another's source inside; DroppedMalformed was no packet.
	DroppedStranger, DroppedMalformed uint64
}

// Driver runs FoU in one network namespace. Its methods are for one goroutine.
type Driver interface {
	// Name is kernel or userspace.
	Name() string
	// Reconcile makes the devices as the Spec has them: what is missing or different is made anew, what is ours and not
	// in it is removed. It tells how many changes it made.
	Reconcile(Spec) (writes int, err error)
	// Link is the device that a route into the tunnel to remote names.
	Link(remote netip.Addr) string
	// Stats reads the counters.
	Stats() (Stats, error)
	// Close ends what this process does. Devices stay.
	Close() error
}
