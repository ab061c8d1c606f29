package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/mdlayher/genetlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

// resolveWait is how long one name lookup may take.
const resolveWait = 3 * time.Second

// Request is what Read has to know.
type Request struct {
	Config  Configuration
	Agent   Agent
	Numbers dataplane.Numbers
	// Lookup resolves names; nil: the host's resolver.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)
}

var bothFamilies = []struct {
	number int
	name   string
}{{netlink.FAMILY_V4, "IPv4"}, {netlink.FAMILY_V6, "IPv6"}}

// reader fills Facts.
type reader struct {
	f Facts
	r Request
}

func (r *reader) skip(check, format string, a ...any) {
	r.f.Skipped = append(r.f.Skipped, Skip{check, fmt.Sprintf(format, a...)})
}

// Read collects the facts of the calling thread's network namespace. It does not fail: what cannot be seen is in
// Facts.Skipped.
func Read(ctx context.Context, q Request) Facts {
	r := &reader{r: q}
	r.f.Config, r.f.Agent, r.f.Privileged = q.Config, q.Agent, os.Geteuid() == 0
	r.f.Sysctl = map[string]string{}
	if !q.Agent.Running {
		r.skip("what the agent knows",
			"%s: the clock's difference to the leader's, and path MTUs to peers, were not examined",
			q.Agent.Why)
	}
	for _, read := range []func(){r.state, r.clock, r.links, r.rules, r.sysctls, r.drivers, r.firewall, r.pathMTUs,
		r.sockets,
		r.limits} {
		read()
	}
	r.names(ctx)
	return r.f
}

func (r *reader) state() {
	d := Directory{Path: r.r.Config.Value.StateDir}
	info, err := os.Stat(d.Path)
	switch {
	case err == nil:
		d.Exists, d.Mode = true, uint32(info.Mode().Perm())
		for _, name := range []string{"identity.pem", "wireguard.pem"} {
			file := filepath.Join(d.Path, name)
			if k, err := os.Stat(file); err == nil && k.Mode().Perm()&0o077 != 0 {
				d.OpenFiles = append(d.OpenFiles, file)
			}
		}
	case !errors.Is(err, fs.ErrNotExist):
		r.skip("state directory", "%v: run as root", err)
		return
	}
	at := d.Path
	for at != "/" { // a directory that is to be made lies on the file system of the nearest that is there
		if _, err := os.Stat(at); err == nil {
			break
		}
		at = filepath.Dir(at)
	}
	var s unix.Statfs_t
	if err := unix.Statfs(at, &s); err != nil {
		r.skip("state directory", "read the free space of %s: %v", at, err)
		return
	}
	d.FreeBytes, d.FreeInodes, d.Inodes = s.Bavail*uint64(s.Bsize), s.Ffree, s.Files
	r.f.State = d
}

func (r *reader) clock() {
	var t unix.Timex
	state, err := unix.Adjtimex(&t) // without modes it only reads
	if err != nil {
		r.skip("clock", "ask the kernel whether its clock is synchronised: %v", err)
		return
	}
	r.f.Clock = Clock{Known: true, Synchronised: state != unix.TIME_ERROR && t.Status&unix.STA_UNSYNC == 0,
		MaxError: time.Duration(t.Maxerror) * time.Microsecond}
}

func (r *reader) links() {
	list, err := netlink.LinkList()
	if err != nil {
		r.skip("links", "read this host's links: %v", err)
		return
	}
	byIndex := map[int]string{}
	for _, l := range list {
		byIndex[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range list {
		a := l.Attrs()
		one := Link{Index: a.Index, Name: a.Name, Kind: l.Type(), MTU: a.MTU, Up: a.Flags&net.FlagUp != 0}
		below := a.ParentIndex
		if v, ok := l.(*netlink.Vxlan); ok {
			below = v.VtepDevIndex
		}
		if one.Kind != "veth" && a.NetNsID < 0 { // of these the number is one of another namespace
			one.Parent = byIndex[below]
		}
		r.f.Links = append(r.f.Links, one)
	}
	for _, family := range bothFamilies {
		name := family.name
		routes, err := netlink.RouteListFiltered(family.number, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
		if err != nil {
			r.skip("way out", "read the %s routes: %v", name, err)
			continue
		}
		for _, one := range routes {
			if ones, _ := mask(one.Dst); one.Dst != nil && ones != 0 || one.Type != unix.RTN_UNICAST {
				continue
			}
			hops := []int{one.LinkIndex}
			for _, h := range one.MultiPath {
				hops = append(hops, h.LinkIndex)
			}
			for _, i := range hops {
				if byIndex[i] != "" {
					r.f.Uplinks = append(r.f.Uplinks, Uplink{name, byIndex[i]})
				}
			}
		}
	}
	slices.SortStableFunc(r.f.Uplinks, func(a, b Uplink) int { return strings.Compare(a.Family, b.Family) })
}

func mask(n *net.IPNet) (ones, bits int) {
	if n == nil {
		return 0, 0
	}
	return n.Mask.Size()
}

// rules reads policy rules, and the routes of the tables that skein uses.
func (r *reader) rules() {
	for _, family := range bothFamilies {
		name := family.name
		rules, err := netlink.RuleList(family.number)
		if err != nil {
			r.skip("numbers", "read the %s rules: %v", name, err)
			continue
		}
		for _, one := range rules {
			k := Rule{Family: name, Priority: one.Priority, Mark: one.Mark, Table: one.Table, Protocol: int(one.Protocol)}
			if k.Mask = ^uint32(0); one.Mask != nil {
				k.Mask = *one.Mask
			}
			r.f.Rules = append(r.f.Rules, k)
		}
		for _, table := range r.r.Numbers.Tables() {
			routes, err := netlink.RouteListFiltered(family.number, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
			if err != nil {
				r.skip("numbers", "read the %s routes of table %d: %v", name, table, err)
				continue
			}
			for _, one := range routes {
				k := Route{Table: table, To: "default", Protocol: int(one.Protocol)}
				if one.Dst != nil {
					k.To = one.Dst.String()
				}
				if l := slices.IndexFunc(r.f.Links, func(l Link) bool { return l.Index == one.LinkIndex }); l >= 0 {
					k.Link = r.f.Links[l].Name
				}
				r.f.Routes = append(r.f.Routes, k)
			}
		}
	}
	slices.SortStableFunc(r.f.Rules, func(a, b Rule) int { return strings.Compare(a.Family, b.Family) })
	slices.SortStableFunc(r.f.Routes, func(a, b Route) int { return a.Table - b.Table })
}

// sysctls reads settings. Those of links are of uplinks and the tunnel alone.
func (r *reader) sysctls() {
	names := []string{
		"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv6.conf.all.disable_ipv6",
		"net.ipv4.conf.all.rp_filter", "net.ipv4.conf.default.rp_filter", "net.ipv4.conf.all.src_valid_mark",
		"net.netfilter.nf_conntrack_count", "net.netfilter.nf_conntrack_max", "net.core.rmem_max", "net.core.wmem_max",
		"fs.inotify.max_user_instances", "fs.inotify.max_user_watches", "fs.file-nr",
	}
	links := []string{r.r.Numbers.Link}
	for _, u := range r.f.Uplinks {
		links = append(links, u.Link)
	}
	slices.Sort(links)
	for _, l := range slices.Compact(links) {
		names = append(names, "net.ipv4.conf."+l+".rp_filter", "net.ipv4.conf."+l+".forwarding",
			"net.ipv6.conf."+l+".accept_ra", "net.ipv6.conf."+l+".forwarding")
	}
	for _, n := range names {
		b, err := os.ReadFile(sysctlFile(n, links))
		if err == nil {
			r.f.Sysctl[n] = strings.Join(strings.Fields(string(b)), " ")
		} else if !errors.Is(err, fs.ErrNotExist) {
			r.skip("sysctl "+n, "%v", err)
		}
	}
}

// sysctlFile is a setting's file. A link's name may hold dots itself.
func sysctlFile(name string, links []string) string {
	for _, l := range links {
		if before, after, ok := strings.Cut(name, ".conf."+l+"."); ok {
			return filepath.Join("/proc/sys", strings.ReplaceAll(before, ".", "/"), "conf", l, after)
		}
	}
	return "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
}

// drivers asks what the kernel has without loading anything.
func (r *reader) drivers() {
	var families []genetlink.Family
	c, err := genetlink.Dial(nil)
	if err == nil {
		families, err = c.ListFamilies()
		c.Close()
	}
	if err != nil {
		r.skip("drivers", "ask the kernel for its netlink families: %v", err)
	}
	var u unix.Utsname
	_ = unix.Uname(&u)
	dir := filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:]))
	module := func(name string) Module {
		if slices.ContainsFunc(families, func(f genetlink.Family) bool { return f.Name == name }) {
			return Module{Loaded, "its netlink family is there"}
		}
		return moduleIn("/sys/module", dir, name)
	}
	r.f.WireGuard, r.f.FoU = module("wireguard"), module("fou")
	for _, one := range []struct {
		name string
		m    Module
	}{{"wireguard", r.f.WireGuard}, {"fou", r.f.FoU}} {
		if one.m.Presence == Unknown {
			r.skip("module "+one.name, "it is not loaded, and %s does not tell whether it could be: %s", dir, one.m.Detail)
		}
	}
	const tun = "/dev/net/tun"
	info, err := os.Stat(tun)
	switch {
	case err != nil:
		r.f.TUN = Module{Absent, tun + " is not there"}
	case info.Mode()&os.ModeCharDevice == 0:
		r.f.TUN = Module{Absent, tun + " is not a device"}
	case unix.Access(tun, unix.R_OK|unix.W_OK) != nil:
		r.f.TUN = Module{Absent, tun + " may not be opened by this user"}
	default:
		r.f.TUN = Module{Loaded, tun + " is there"}
	}
}

// moduleIn looks for a module among those that are loaded, built in, and installed for this kernel.
func moduleIn(sys, dir, name string) Module {
	if _, err := os.Stat(filepath.Join(sys, name)); err == nil {
		return Module{Loaded, filepath.Join(sys, name)}
	}
	lists := 0
	for _, l := range []struct {
		file string
		p    Presence
	}{{"modules.builtin", Loaded}, {"modules.dep", Loadable}} {
		b, err := os.ReadFile(filepath.Join(dir, l.file))
		if err != nil {
			continue
		}
		lists++
		for line := range strings.Lines(string(b)) {
			file, _, _ := strings.Cut(strings.TrimSpace(line), ":")
			base, _, _ := strings.Cut(filepath.Base(file), ".")
			if base == name {
				return Module{l.p, filepath.Join(dir, l.file)}
			}
		}
	}
	if lists < 2 {
		return Module{Unknown, "its lists of modules are not there"}
	}
	return Module{Absent, dir}
}

func (r *reader) firewall() {
	tables, chains, err := readFirewall()
	r.f.Tables, r.f.Chains = tables, chains
	switch {
	case err == nil:
		r.f.NfTables = Module{Presence: Loaded}
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		r.skip("firewall", "read the nft tables: %v: run as root", err)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
		r.f.NfTables = Module{Absent, fmt.Sprintf("the kernel answers nftables with: %v", err)}
	default:
		r.skip("firewall", "read the nft tables: %v", err)
	}
	for _, file := range []string{"/proc/net/ip_tables_names", "/proc/net/ip6_tables_names"} {
		if b, err := os.ReadFile(file); err == nil && len(b) > 0 {
			r.skip("firewall",
				"the legacy iptables have tables here (%s in %s), which are not read: look with iptables-legacy -S",
				strings.Join(strings.Fields(string(b)), " "), file)
		}
	}
}

// pathMTUs asks the kernel by which way it would send to peers' endpoints. That sends nothing.
func (r *reader) pathMTUs() {
	for name, at := range r.r.Agent.Endpoints {
		routes, err := netlink.RouteGetWithOptions(at.Addr().AsSlice(), &netlink.RouteGetOptions{Mark: r.r.Numbers.MarkWG})
		if err != nil || len(routes) == 0 {
			continue // there is no way to it now
		}
		p := PathMTU{Peer: name, Endpoint: at, MTU: routes[0].MTU}
		if i := slices.IndexFunc(r.f.Links, func(l Link) bool { return l.Index == routes[0].LinkIndex }); i >= 0 {
			p.Link = r.f.Links[i].Name
		}
		r.f.PathMTUs = append(r.f.PathMTUs, p)
	}
	slices.SortFunc(r.f.PathMTUs, func(a, b PathMTU) int { return strings.Compare(a.Peer, b.Peer) })
}

func (r *reader) limits() {
	l := Limits{Whose: "this command"}
	if pid := r.r.Agent.PID; pid > 0 {
		var limit unix.Rlimit
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err == nil {
			err = unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit)
		}
		if err != nil {
			r.skip("open files", "read those of the agent (process %d): %v: run as root", pid, err)
		} else {
			l.Whose, l.OpenFiles, l.MaxFiles = "agent", uint64(len(files)), limit.Max
		}
	} else {
		var limit unix.Rlimit
		files, _ := os.ReadDir("/proc/self/fd")
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil {
			l.OpenFiles, l.MaxFiles = uint64(len(files)), limit.Max
		}
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		l.InotifyProblem = fmt.Sprintf("no further instance can be made: %v", err)
	} else {
		unix.Close(fd)
	}
	r.f.Limits = l
}

// names looks up the host names of the configuration, all at once.
func (r *reader) names(ctx context.Context) {
	lookup := r.r.Lookup
	if lookup == nil {
		lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	names := HostNames(r.r.Config.Value)
	var all sync.WaitGroup
	for i := range names {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, resolveWait)
			defer cancel()
			addrs, err := lookup(ctx, names[i].Host)
			for _, a := range addrs {
				names[i].Addresses = append(names[i].Addresses, a.Unmap())
			}
			if err == nil && len(addrs) == 0 {
				err = errors.New("it has no address")
			}
			if err != nil {
				names[i].Problem = fmt.Sprintf("%s does not resolve: %v", names[i].Host, err)
			}
		})
	}
	all.Wait()
	r.f.Names = names
}

// sockets reads who waits on which port.
func (r *reader) sockets() {
	owners, hidden := socketOwners()
	for _, file := range []string{"udp", "udp6", "tcp", "tcp6"} {
		b, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				r.skip("ports", "%v", err)
			}
			continue
		}
		r.f.SawSockets = true
		for line := range strings.Lines(string(b)) {
			s, inode, ok := parseSocket(strings.TrimSuffix(file, "6"), line)
			if !ok {
				continue
			}
			if o, ok := owners[inode]; ok {
				s.PID, s.Program = o.pid, o.program
			} else {
				s.Kernel = !hidden
			}
			r.f.Sockets = append(r.f.Sockets, s)
		}
	}
	if hidden {
		r.skip("owners of ports", "other users' processes do not show: run as root")
	}
}

// parseSocket reads a line of /proc/net/udp or tcp: sockets that wait for connections, or for packets of anybody.
func parseSocket(proto, line string) (s Socket, inode string, ok bool) {
	f := strings.Fields(line)
	if len(f) < 10 || !strings.HasSuffix(f[0], ":") {
		return s, "", false
	}
	const listen, unconnected = "0A", "07"
	if state := f[3]; proto == "tcp" && state != listen || proto == "udp" && state != unconnected {
		return s, "", false
	}
	at, ok := parseHexAddr(f[1])
	return Socket{Proto: proto, Address: at}, f[9], ok
}

// parseHexAddr reads an address as /proc/net has it: words of 32 bits in the host's byte order, then the port.
func parseHexAddr(s string) (netip.AddrPort, bool) {
	host, portText, ok := strings.Cut(s, ":")
	p, err := strconv.ParseUint(portText, 16, 16)
	if !ok || err != nil || len(host) != 8 && len(host) != 32 {
		return netip.AddrPort{}, false
	}
	var b []byte
	for i := 0; i < len(host); i += 8 {
		w, err := strconv.ParseUint(host[i:i+8], 16, 32)
		if err != nil {
			return netip.AddrPort{}, false
		}
		b = nativeAppend(b, uint32(w))
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), true
}

// printable keeps what a process calls itself from doing things to a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

type owner struct {
	pid     int
	program string
}

// socketOwners are the processes by the inodes of their sockets; hidden: some processes did not show theirs.
func socketOwners() (out map[string]owner, hidden bool) {
	out = map[string]owner{}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range processes {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		files, err := os.ReadDir(filepath.Join(dir, "fd"))
		if err != nil {
			hidden = hidden || errors.Is(err, fs.ErrPermission)
			continue
		}
		program := ""
		for _, f := range files {
			to, err := os.Readlink(filepath.Join(dir, "fd", f.Name()))
			inode, is := strings.CutPrefix(to, "socket:[")
			if err != nil || !is {
				continue
			}
			if program == "" {
				b, _ := os.ReadFile(filepath.Join(dir, "comm"))
				program = printable(strings.TrimSpace(string(b)))
			}
			out[strings.TrimSuffix(inode, "]")] = owner{pid, program}
		}
	}
	return out, hidden
}
