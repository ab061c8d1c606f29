package wireguard

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
)

// Names of the drivers, as in the configuration and in reports.
const (
	Auto      = "auto"
	Kernel    = "kernel"
	Userspace = "userspace"
)

var (
	// ErrGone says that the link is no longer there; open the device anew.
	ErrGone = errors.New("the WireGuard link is gone")
	// ErrNoKernel says that this kernel has no WireGuard.
	ErrNoKernel = errors.New("this kernel has no WireGuard (module wireguard); use driver userspace or auto")
)

// Device is one WireGuard device of either driver. Its methods are called by one goroutine.
type Device interface {
	Driver() string
	// Read returns the configuration and what the device knows of its peers, or ErrGone.
	Read() (State, []dataplane.PeerStatus, error)
	// Status is Read where somebody else can change the device; else it reads the peers' status only.
	Status() (*State, []dataplane.PeerStatus, error)
	// Write applies one batch as one message.
	Write(batch []Op) error
	// SetMTU tells the link's MTU to a driver that pads packets itself.
	SetMTU(bytes int)
	// SetHops says which packets travel inside others, and whose come out. Notes say what cannot be.
	SetHops(h dataplane.Hops) (notes []string)
	// HasHops tells whether SetHops would change nothing.
	HasHops(h dataplane.Hops) bool
	// HopCounts are the packets of hops since the device was opened.
	HopCounts() hop.Counts
	// Done is closed when the device has died; nil if it cannot tell.
	Done() <-chan struct{}
	// Close lets go of the device. A kernel device stays and keeps forwarding.
	Close() error
}

// OpenConfig says which device to open.
type OpenConfig struct {
	Link   string
	MTU    int
	Driver string // auto, kernel or userspace
	Log    *slog.Logger
}

// Open creates the link or adopts the one a former run left, in the calling thread's network
// namespace. created counts the messages sent for it. With driver auto a kernel without WireGuard
// means userspace.
func Open(c OpenConfig) (d Device, created int, err error) {
	switch c.Driver {
	case Kernel:
		return openKernel(c)
	case Userspace:
		return openUserspace(c)
	case Auto, "":
		d, created, err = openKernel(c)
		if errors.Is(err, ErrNoKernel) {
			c.Log.Debug("kernel has no WireGuard, running it in this process", "link", c.Link)
			return openUserspace(c)
		}
		return d, created, err
	}
	return nil, 0, fmt.Errorf("WireGuard driver %q: allowed are auto, kernel and userspace", c.Driver)
}

// linkKind returns the kind of the named link, "" if there is none.
func linkKind(name string) (netlink.Link, string, error) {
	l, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("looking for link %s: %w", name, err)
	}
	return l, l.Type(), nil
}

// DeleteLink deletes the link if it is a WireGuard or TUN link, and says whether it did.
func DeleteLink(name string) (bool, error) {
	l, kind, err := linkKind(name)
	if err != nil || l == nil {
		return false, err
	}
	if kind != "wireguard" && kind != "tuntap" {
		return false, foreignLink(name, kind)
	}
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return false, fmt.Errorf("deleting link %s: %w", name, err)
	}
	return true, nil
}

func foreignLink(name, kind string) error {
	return fmt.Errorf(
		"link %s exists and is a %s link, not skein's: remove it, or choose another name with dataplane.link", name, kind)
}
