package podnet

import (
	"net"
	"net/netip"
)

// Attachment is one interface of one pod: what Add makes and Check expects.
type Attachment struct {
	ContainerID string // the container runtime's, 1 to 64 characters
	Interface   string // its name in the pod, usually eth0
	NetNS       string // path of the pod's network namespace
	// IPv4 and IPv6 are the pod's addresses; one of the two may be invalid.
	IPv4, IPv6 netip.Addr
	MTU        int    // bytes
	Namespace  string // of the pod; may be empty
	Pod        string // its name; may be empty
}

// Link is what Add made.
type Link struct {
	Host    string // name of the end on the host
	HostMAC net.HardwareAddr
	MAC     net.HardwareAddr // of the pod's end
	// Gateway6 is the link-local address of the end on the host, the pod's IPv6 next hop; invalid without IPv6.
	Gateway6 netip.Addr
}

// Found is a pod's address as the kernel has it: a host route in dataplane.PodTable.
type Found struct {
	Addr netip.Addr
	Link string // the interface that the route names
	// What the link's alias says of an attachment of ours; all empty for a link that somebody else made.
	ContainerID, Interface, Namespace, Pod string
}
