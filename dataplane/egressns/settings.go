package egressns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// setting is a sysctl, with / in place of the dots in its name.
type setting struct{ name, value string }

// own are the settings inside the namespace. Those of default apply to the tunnels' devices.
var own = []setting{
	{"ipv4/ip_forward", "1"},
	{"ipv6/conf/all/forwarding", "1"},
	// A client's packets arrive by its tunnel, but except for packets from eth0 the route to its address leads to eth0.
	{"ipv4/conf/all/rp_filter", "0"},
	{"ipv4/conf/default/rp_filter", "0"},
	{"ipv4/conf/" + Uplink + "/rp_filter", "0"},
	{"ipv4/conf/all/send_redirects", "0"},
	{"ipv4/conf/default/send_redirects", "0"},
	{"ipv4/conf/" + Uplink + "/send_redirects", "0"},
	{"ipv4/conf/all/accept_redirects", "0"},
	{"ipv4/conf/" + Uplink + "/accept_redirects", "0"},
	{"ipv6/conf/default/accept_dad", "0"},
	{"ipv6/conf/" + Uplink + "/accept_dad", "0"},
	{"ipv6/conf/default/accept_ra", "0"},
	{"ipv6/conf/" + Uplink + "/accept_ra", "0"},
	{"ipv6/conf/" + Uplink + "/accept_redirects", "0"},
	// Lets a connection continue if conntrack has not seen its beginning, as after a move without its entries.
	{"netfilter/nf_conntrack_tcp_loose", "1"},
}

// ofEnd are the settings of the host's end (docs/decisions/0022).
func ofEnd(link string, strict bool) []setting {
	filter := "0"
	// the kernel uses the higher of two values, and just after a slot's move the route to its senders leads elsewhere
	if strict {
		filter = "2"
	}
	return []setting{
		{"ipv4/conf/" + link + "/forwarding", "1"},
		{"ipv4/conf/" + link + "/rp_filter", filter},
		{"ipv4/conf/" + link + "/send_redirects", "0"},
		{"ipv6/conf/" + link + "/accept_ra", "0"},
	}
}

// set writes a setting unless it has the value already, in the calling thread's namespace, and counts the write.
func (s setting) set(writes *int) error {
	file := "/proc/sys/net/" + s.name
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6, or conntrack not loaded yet
		return nil
	}
	if err == nil && strings.TrimSpace(string(b)) != s.value {
		*writes++
		err = os.WriteFile(file, []byte(s.value), 0o644)
	}
	if err != nil {
		return fmt.Errorf("setting net.%s to %s: %w: the agent needs a writable /proc/sys for egresses",
			strings.ReplaceAll(s.name, "/", "."), s.value, err)
	}
	return nil
}

// settings sets those of both namespaces.
func (l *links) settings() error {
	err := inside(l.ns, func() error {
		var errs []error
		for _, s := range own {
			errs = append(errs, s.set(&l.writes))
		}
		return errors.Join(errs...)
	})
	return errors.Join(err, inside(l.host, func() error {
		all, err := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter")
		if err != nil {
			return fmt.Errorf("reading net.ipv4.conf.all.rp_filter: %w", err)
		}
		var errs []error
		for _, s := range ofEnd(l.name, strings.TrimSpace(string(all)) != "0") {
			errs = append(errs, s.set(&l.writes))
		}
		if _, err := os.Stat("/proc/sys/net/ipv6/conf/" + l.name); err == nil {
			errs = append(errs, podnet.ForwardIPv6(l.name))
		}
		return errors.Join(errs...)
	}))
}
