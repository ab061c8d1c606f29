package fabric

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// trackedFile is how many connections the kernel tracks in the namespace of the thread that reads it.
const trackedFile = "/proc/sys/net/netfilter/nf_conntrack_count"

// Connections counts the connections that the kernel tracks in a namespace; without connection tracking there are none.
func Connections(ns string) (int, error) {
	b, err := []byte(nil), error(nil)
	if err := In(ns, func() error {
		b, err = os.ReadFile(trackedFile)
		return nil
	}); err != nil {
		return 0, err
	}
	if errors.Is(err, os.ErrNotExist) {
		return listed(ns)
	}
	if err != nil {
		return 0, fmt.Errorf("count the connections of %s: %w", ns, err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("count the connections of %s: %s: %w", ns, trackedFile, err)
	}
	return n, nil
}

// listed counts them where the kernel has no such file: it can be without the whole directory, or show it to the first
// namespace alone.
func listed(ns string) (n int, err error) {
	fd, err := open(ns)
	if err != nil {
		return 0, err
	}
	defer fd.Close()
	h, err := netlink.NewHandleAt(fd, unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, fmt.Errorf("count the connections of %s: %w", ns, err)
	}
	defer h.Close()
	for _, family := range []netlink.InetFamily{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		flows, err := h.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return 0, fmt.Errorf("count the connections of %s: %w", ns, err)
		}
		n += len(flows)
	}
	return n, nil
}
