package fou

import (
	"net/netip"

	"github.com/skeinmesh/skein/dataplane"
)

// Spec is all that is wanted of FoU in one network namespace.
type Spec struct {
	// IPv4 and IPv6 ask for the listener of each family.
	IPv4, IPv6 bool
	Ports      dataplane.FoUPorts
	Tunnels    []Tunnel // by remote; a remote has one, but on a gateway one for each of the near ends that it uses
	// Any asks for the catch-all devices, which take what comes from another address than a tunnel leads to.
	Any bool
	// Gateway says that the tunnels lead to many clients, each to the address that its packets inside have. The TUN driver
	// then has one device for all tunnels with one near end, and lets nobody in whose packets have another source inside
	// than outside; with the kernel's that is left to the gateway's packet filter.
	Gateway bool
}

// Tunnel is one tunnel.
type Tunnel struct {
	Local, Remote  netip.Addr // of one family
	SourcePortAuto bool       // the outer source port follows from the flow inside; else it is that of Spec.Ports
	MTU            int        // of the device, in bytes
}

// Stats are a driver's counters of inner packets and their bytes: of the TUN driver since it was opened, of the kernel
// since it made the devices that are there.
type Stats struct {
	RxPackets, RxBytes, TxPackets, TxBytes uint64
	// DroppedStranger came from no tunnel's remote, or with another's source inside; DroppedMalformed was not a packet, or
	// was marked on its way as congested though its sender does not understand that (RFC 6040). The kernel does not count
	// strangers.
	DroppedStranger, DroppedMalformed uint64
	// DroppedTx could not be sent: no tunnel leads there, it is too big for the way (the sender is told), or there is no
	// route.
	DroppedTx uint64
}

// Driver runs FoU in one network namespace. Reconcile and Close are for one goroutine.
type Driver interface {
	// Name is kernel or userspace.
	Name() string
	// Reconcile makes the devices as the Spec has them: what is missing or different is made anew, what is ours and not
	// in it is removed. It tells how many changes it made.
	Reconcile(Spec) (writes int, err error)
	// Link is the device that a route into the tunnel from local to remote names, by the Spec that was reconciled last.
	Link(local, remote netip.Addr) string
	// Stats reads the counters.
	Stats() (Stats, error)
	// Close ends what this process does. Devices stay.
	Close() error
}
