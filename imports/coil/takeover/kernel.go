package takeover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

const (
	plugin        = "coil"
	defaultSocket = "/run/coild.sock"
	dialTimeout   = 2 * time.Second
	maxConf       = 1 << 20 // bytes
)

var families = []int{unix.AF_INET, unix.AF_INET6}

// Read finds what Coil has left in this network namespace and in a directory of network configurations.
func Read(confDir string, n dataplane.Numbers) (Host, error) {
	var h Host
	var err error
	if h.Confs, err = readConfs(confDir); err != nil {
		return Host{}, err
	}
	sockets := []string{defaultSocket}
	for _, c := range h.Confs {
		if c.Socket != "" {
			sockets = append(sockets, c.Socket)
		}
	}
	h.Daemon = answering(sockets)
	pods, err := coilLinks()
	if err != nil {
		return Host{}, err
	}
	tables := map[int]bool{}
	for _, family := range families {
		routes, err := routesOf(family)
		if err != nil {
			return Host{}, err
		}
		for _, k := range routes {
			r, ok := toRoute(k)
			if pod := pods[k.LinkIndex]; ok && pod != nil && r.Dst.IsSingleIP() && r.Type == unix.RTN_UNICAST {
				r.Link = pod.Link
				pod.Routes = append(pod.Routes, r)
				tables[r.Table] = true
			} else if ok && isBlock(r, n) {
				if link, err := netlink.LinkByIndex(k.LinkIndex); err == nil {
					r.Link = link.Attrs().Name
					h.Blocks = append(h.Blocks, r)
				}
			}
		}
	}
	for _, p := range pods {
		if len(p.Routes) > 0 {
			h.Pods = append(h.Pods, *p)
		}
	}
	slices.SortFunc(h.Pods, func(a, b Pod) int { return a.Routes[0].Dst.Addr().Compare(b.Routes[0].Dst.Addr()) })
	h.Rules, err = rulesTo(tables, n)
	return h, err
}

// isBlock reports whether a route is one by which Coil exports a block: the agent's own are unreachable.
func isBlock(r Route, n dataplane.Numbers) bool {
	return r.Table == n.ExportTable() && r.Protocol == dataplane.RouteProtocol && r.Type != unix.RTN_UNREACHABLE
}

// coilLinks are the links of Coil's pods, by index.
func coilLinks() (map[int]*Pod, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("read the links: %w", err)
	}
	out := map[int]*Pod{}
	for _, l := range links {
		if a, ok := podnet.ParseCoilAlias(l.Attrs().Alias); ok {
			out[l.Attrs().Index] = &Pod{Link: l.Attrs().Name, Container: a.ContainerID}
		}
	}
	return out, nil
}

// routesOf reads the routes of all tables but the kernel's own of local addresses.
func routesOf(family int) ([]netlink.Route, error) {
	all, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("read the routes: %w", err)
	}
	return slices.DeleteFunc(all, func(r netlink.Route) bool { return r.Table == unix.RT_TABLE_LOCAL }), nil
}

func toRoute(k netlink.Route) (Route, bool) {
	if k.Dst == nil || k.LinkIndex == 0 {
		return Route{}, false
	}
	dst, ok := netip.AddrFromSlice(k.Dst.IP)
	ones, _ := k.Dst.Mask.Size()
	return Route{
		Table: k.Table, Dst: netip.PrefixFrom(dst.Unmap(), ones), Type: k.Type, Protocol: int(k.Protocol),
		Scope: int(k.Scope), Metric: k.Priority,
	}, ok
}

// rulesTo are the rules that lead everything into tables that only Coil has.
func rulesTo(tables map[int]bool, n dataplane.Numbers) (out []Rule, err error) {
	for _, t := range append(n.Tables(), unix.RT_TABLE_MAIN, unix.RT_TABLE_DEFAULT) {
		delete(tables, t)
	}
	for _, family := range families {
		all, err := netlink.RuleList(family)
		if err != nil {
			return nil, fmt.Errorf("read the policy rules: %w", err)
		}
		for _, k := range all {
			plain := k.Src == nil && k.Dst == nil && k.Mark == 0 && k.IifName == "" && k.OifName == "" && !k.Invert
			if r := (Rule{IPv6: family == unix.AF_INET6, Priority: k.Priority, Table: k.Table}); plain && tables[k.Table] {
				out = append(out, r)
			}
		}
	}
	return out, nil
}

// answering is the first socket at which somebody answers.
func answering(sockets []string) string {
	for _, s := range sockets {
		if c, err := net.DialTimeout("unix", s, dialTimeout); err == nil {
			c.Close()
			return s
		}
	}
	return ""
}

// readConfs finds the network configurations that name Coil's plugin, in order of name.
func readConfs(dir string) (out []Conf, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for Coil's network configuration: %w", err)
	}
	for _, e := range entries {
		if !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		file := filepath.Join(dir, e.Name())
		info, err := os.Stat(file)
		if err != nil || !info.Mode().IsRegular() || info.Size() > maxConf {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read a network configuration: %w", err)
		}
		if c, ok := parseConf(content); ok {
			c.File, c.Content, c.Mode = file, content, uint32(info.Mode().Perm())
			out = append(out, c)
		}
	}
	return out, nil
}

// parseConf reads a configuration, as a list or of one plugin, and reports whether Coil's plugin is in it.
func parseConf(content []byte) (Conf, bool) {
	type one struct {
		Type   string `json:"type"`
		Socket string `json:"socket"`
	}
	var all struct {
		one
		Plugins []one `json:"plugins"`
	}
	if json.Unmarshal(content, &all) != nil {
		return Conf{}, false
	}
	if all.Type != "" {
		all.Plugins = []one{all.one}
	}
	at := slices.IndexFunc(all.Plugins, func(p one) bool { return p.Type == plugin })
	if at < 0 {
		return Conf{}, false
	}
	c := Conf{Socket: all.Plugins[at].Socket, Chain: []string{}}
	for _, p := range all.Plugins[at+1:] {
		c.Chain = append(c.Chain, p.Type)
	}
	return c, true
}

// kernelRoute is a route as it is added and removed.
func kernelRoute(r Route) (*netlink.Route, error) {
	l, err := netlink.LinkByName(r.Link)
	if err != nil {
		return nil, err
	}
	family, bits := unix.AF_INET6, r.Dst.Addr().BitLen()
	if r.Dst.Addr().Is4() {
		family = unix.AF_INET
	}
	return &netlink.Route{
		Family: family, LinkIndex: l.Attrs().Index, Table: r.Table, Type: r.Type,
		Protocol: netlink.RouteProtocol(r.Protocol), Scope: netlink.Scope(r.Scope), Priority: r.Metric,
		Dst: &net.IPNet{IP: r.Dst.Addr().AsSlice(), Mask: net.CIDRMask(r.Dst.Bits(), bits)},
	}, nil
}

// setRoute adds or removes a route. One that is there, or gone, with its link too, is as it shall be.
func setRoute(r Route, there bool) error {
	k, err := kernelRoute(r)
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		return nil // the pod has ended
	}
	verb, do, fine := "add", netlink.RouteAdd, error(syscall.EEXIST)
	if !there {
		verb, do, fine = "remove", netlink.RouteDel, syscall.ESRCH
	}
	if err == nil {
		err = do(k)
	}
	if err != nil && !errors.Is(err, fine) {
		return fmt.Errorf("%s the route %s: %w", verb, r, err)
	}
	return nil
}

func setRule(r Rule, there bool) error {
	k := netlink.NewRule()
	k.Priority, k.Table, k.Family = r.Priority, r.Table, unix.AF_INET
	if r.IPv6 {
		k.Family = unix.AF_INET6
	}
	verb, do, fine := "add", netlink.RuleAdd, error(syscall.EEXIST)
	if !there {
		verb, do, fine = "remove", netlink.RuleDel, syscall.ENOENT
	}
	if err := do(k); err != nil && !errors.Is(err, fine) {
		return fmt.Errorf("%s the %s: %w", verb, r, err)
	}
	return nil
}
