package podnet

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/skeinmesh/skein/dataplane"
)

// What callers decide by.
var (
	// ErrExists says that the pod has an interface of this name already, or the host a link for it.
	ErrExists = errors.New("exists already")
	// ErrAddressInUse says that the host has a route of another link to one of the addresses.
	ErrAddressInUse = errors.New("address is in use on this host")
	// ErrNoNetNS says that there is no network namespace at the path: it is missing, or something else.
	ErrNoNetNS = errors.New("no network namespace")
	// ErrNoIPv6 says that the pod has only an IPv6 address, and this host or the pod's namespace no IPv6.
	ErrNoIPv6 = errors.New("IPv6 is disabled")
	// ErrInvalid says that the Attachment itself is wrong.
	ErrInvalid = errors.New("invalid")
)

// gateway6 is the address of every host end; it is link-local, so that each link can have the same.
var (
	gateway4 = netip.MustParseAddr(dataplane.PodGateway)
	gateway6 = netip.MustParseAddr("fe80::1")
)

// Key names an attachment: one interface of one container.
type Key struct {
	ContainerID string `json:"containerID"` // the container runtime's, 1 to 64 characters
	Interface   string `json:"interface"`   // its name in the pod, usually eth0
}

// Attachment is one interface of one pod: what Add makes and Check expects, and what the alias of the host's end says,
// but for namespace and MTU.
type Attachment struct {
	Key
	NetNS string // path of the pod's network namespace
	// IPv4 and IPv6 are the pod's addresses; one of the two may be invalid.
	IPv4, IPv6 netip.Addr
	MTU        int    // bytes
	Namespace  string // of the pod; may be empty
	Pod        string // its name; may be empty
	Table      int    // of the host's routes to the pod, 1 to 252; 0: the default one (dataplane.Numbers.PodTable)
}

// Link is what Add made.
type Link struct {
	Host    string // name of the end on the host
	HostMAC net.HardwareAddr
	MAC     net.HardwareAddr // of the pod's end
	// Gateway6 is the link-local address of the end on the host, the pod's IPv6 next hop; invalid without IPv6.
	Gateway6 netip.Addr
}

// Found is a pod's address as the kernel has it: a host route in the table of pods, or, where that is missing, what
// the alias of a link of ours says.
type Found struct {
	Addr netip.Addr
	Link string // the interface that the route names
	// What the link's alias says of an attachment of ours; all empty for a link that somebody else made.
	// Pod ends in ~ where it was too long for the alias.
	Key
	Namespace, Pod string
	// OfCoil is set where the alias is Coil's, which says container and interface.
	OfCoil bool
}

var defaultTable = dataplane.DefaultNumbers().PodTable()

// tableOr is a table, the default one for 0.
func tableOr(table int) int {
	if table == 0 {
		return defaultTable
	}
	return table
}

// HostLink is the name of the link's end on the host: the same for the same attachment, so that it is found again
// without a record.
func HostLink(k Key) string {
	sum := sha256.Sum256([]byte(k.ContainerID + "/" + k.Interface))
	return dataplane.PodLinkPrefix + hex.EncodeToString(sum[:6])
}

// who is the attachment in an error's words.
func (k Key) who() string { return fmt.Sprintf("container %s, %s", k.ContainerID, k.Interface) }

func (a Attachment) who() string {
	if a.Pod == "" {
		return a.Key.who()
	}
	return fmt.Sprintf("pod %s/%s, %s", a.Namespace, a.Pod, a.Interface)
}

// Limits of what an Attachment may hold.
const (
	maxID        = 64
	maxNamespace = 63
	maxPod       = 253
	minMTU       = 68   // IPv4's
	minMTU6      = 1280 // IPv6's; the kernel takes IPv6 off a link with less
	maxMTU       = 65535
	maxTable     = 252 // the kernel's own are behind
)

// validate says what is wrong with the attachment before the kernel is asked.
func (a Attachment) validate() error {
	if err := validateKey(a.Key); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
	}
	switch {
	case !a.IPv4.IsValid() && !a.IPv6.IsValid():
		return bad("no address")
	case a.IPv4.IsValid() && (!a.IPv4.Is4() || !usable(a.IPv4)):
		return bad("%s is no address of a pod: want unicast IPv4", a.IPv4)
	case a.IPv6.IsValid() && (!a.IPv6.Is6() || a.IPv6.Is4In6() || a.IPv6.Zone() != "" || !usable(a.IPv6)):
		return bad("%s is no address of a pod: want unicast IPv6", a.IPv6)
	case a.MTU < minMTU || a.MTU > maxMTU:
		return bad("MTU %d: want %d to %d", a.MTU, minMTU, maxMTU)
	case a.IPv6.IsValid() && a.MTU < minMTU6:
		return bad("MTU %d: IPv6 needs at least %d", a.MTU, minMTU6)
	case a.Table < 0 || a.Table > maxTable:
		return bad("table %d of the host's routes: want 1 to %d", a.Table, maxTable)
	case len(a.Namespace) > maxNamespace || !plain(a.Namespace):
		return bad("name of the pod's namespace %.80q: want at most %d characters without spaces", a.Namespace,
			maxNamespace)
	case len(a.Pod) > maxPod || !plain(a.Pod):
		return bad("name of the pod %.80q: want at most %d characters without spaces", a.Pod, maxPod)
	}
	return nil
}

func usable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.IsLinkLocalUnicast()
}

func validateKey(k Key) error {
	containerID, ifname := k.ContainerID, k.Interface
	const ifnamsiz = 16 // bytes, with the closing zero
	if len(containerID) < 1 || len(containerID) > maxID || !plain(containerID) || strings.Contains(containerID, "/") {
		return fmt.Errorf("%w: container ID %.80q: want 1 to %d characters without spaces and slashes", ErrInvalid,
			containerID, maxID)
	}
	if ifname == "" || len(ifname) >= ifnamsiz || ifname == "." || ifname == ".." || ifname == "lo" ||
		strings.ContainsAny(ifname, "/:%") || !plain(ifname) {
		return fmt.Errorf("%w: interface name %.80q: want 1 to %d characters without spaces, slashes, colons and percent "+
			"signs, and not lo", ErrInvalid, ifname, ifnamsiz-1)
	}
	return nil
}

// plain says that s has no spaces and nothing unprintable: it is a word of an alias.
func plain(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f })
}
