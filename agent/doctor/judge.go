package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane"
)

const (
	tunnelOverhead = 80                    // bytes that WireGuard adds over IPv6
	leastUplink    = 1280 + tunnelOverhead // bytes: below it IPv6 does not fit into the tunnel
	ethernet       = 1500

	diskFailure = 64 << 20 // bytes: the log of one server at its default size does not fit
	diskWarning = 512 << 20
	fewInodes   = 1000

	clockWarning = 45 * time.Second // by so much the leader's clock may be off before the others contradict it
	clockError   = time.Second      // that the kernel itself reckons with

	conntrackFull = 75 // percent
	conntrackFew  = 16384
	filesUsed     = 80   // percent
	filesRelay    = 8192 // a relay's sessions, streams and reserved ports together

	podLink = dataplane.PodLinkPrefix
)

// judge gathers what the checks say.
type judge struct {
	f   Facts
	n   dataplane.Numbers
	out []Finding
}

func (j *judge) ok(check, seen string, a ...any) {
	j.out = append(j.out, Finding{Check: check, Seen: fmt.Sprintf(seen, a...), Verdict: OK})
}

func (j *judge) say(v Verdict, check, seen, why, do string) {
	j.out = append(j.out, Finding{Check: check, Seen: seen, Verdict: v, Why: why, Do: do})
}

// Judge says what the facts mean for an agent with these numbers. It is pure.
func Judge(f Facts, n dataplane.Numbers) Report {
	j := &judge{f: f, n: n}
	for _, check := range []func(){
		j.config, j.agent, j.state, j.clock, j.modules, j.forwarding, j.rpFilter, j.uplinks, j.pathMTU, j.conntrack,
		j.names, j.ports, j.firewall, j.others, j.inotify, j.files,
	} {
		check()
	}
	return Report{Findings: j.out, Skipped: append([]Skip{}, f.Skipped...)}
}

func (j *judge) config() {
	const check = "configuration"
	switch c := j.f.Config; {
	case c.Problem != "":
		j.say(Failure, check, c.Problem, "the agent does not start with it; the other checks go by the defaults",
			"edit "+c.File+"; docs/config.md has all keys")
	case !c.Exists:
		j.ok(check, "%s is not there: all defaults hold", c.File)
	default:
		j.ok(check, "%s is valid", c.File)
	}
}

func (j *judge) agent() {
	const check = "agent"
	a := j.f.Agent
	if !a.Running {
		j.say(Note, check, cmp.Or(a.Why, "none runs"), "what only a running agent knows was not examined",
			"systemctl start skein, or skein up")
		return
	}
	if len(a.Problems) == 0 {
		j.ok(check, "it runs and reports no problem")
		return
	}
	for _, p := range a.Problems {
		v := Warning
		if p.Severity == "error" {
			v = Failure
		}
		j.say(v, check, p.Subject+": "+p.Message, "the agent reports it itself", cmp.Or(p.Advice, "skein status"))
	}
}

func (j *judge) state() {
	const check = "state directory"
	d := j.f.State
	if d.Path == "" {
		return
	}
	there := "is there"
	if !d.Exists {
		there = "is made by the first start"
	} else if d.Mode&0o077 != 0 {
		j.say(Warning, check, fmt.Sprintf("%s has mode %04o", d.Path, d.Mode),
			"others than its owner get at this node's private keys", "chmod 0700 "+d.Path)
	}
	for _, file := range d.OpenFiles {
		j.say(Failure, check, file+" can be read by others", "whoever has read it can act as this node",
			"chmod 0600 "+file+"; if somebody may have read it, revoke this node and join anew")
	}
	free := "free space of " + d.Path
	switch {
	case d.FreeBytes < diskFailure:
		j.say(Failure, free, bytesText(d.FreeBytes), "the log and the journal cannot be written; a server stops deciding",
			"df -h "+d.Path+"; free space there, or move stateDir")
	case d.FreeBytes < diskWarning:
		j.say(Warning, free, bytesText(d.FreeBytes), "the archive of events alone may grow to 256 MiB",
			"df -h "+d.Path+"; free space there, or move stateDir")
	case d.Inodes > 0 && d.FreeInodes < fewInodes:
		j.say(Warning, free, fmt.Sprintf("%d inodes", d.FreeInodes), "files are replaced by new ones, which need inodes",
			"df -i "+d.Path)
	default:
		j.ok(check, "%s %s, with %s free", d.Path, there, bytesText(d.FreeBytes))
	}
}

func (j *judge) clock() {
	const check = "clock"
	c := j.f.Clock
	off := j.f.Agent.ClockOffset.Abs()
	switch {
	case off > clockWarning:
		j.say(Warning, check, fmt.Sprintf("it differs from the leader's by %s",
			j.f.Agent.ClockOffset.Round(time.Millisecond)),
			"lifetimes of tokens and the times in explain and events are wrong; a server with such a clock does not lead",
			"timedatectl set-ntp true")
	case !c.Known:
	case !c.Synchronised:
		j.say(Warning, check, "the kernel's clock is not synchronised",
			"the log's time follows the leader's clock; drifting clocks end leaderships and shift lifetimes",
			"timedatectl set-ntp true; in a virtual machine the hypervisor may do it without the kernel's knowledge")
	case c.MaxError > clockError:
		j.say(Note, check, fmt.Sprintf("synchronised, with an error of up to %s", c.MaxError.Round(time.Millisecond)),
			"times in explain and events of several nodes may not be in order", "timedatectl timesync-status")
	case off > 0:
		j.ok(check, "synchronised, %s from the leader's", j.f.Agent.ClockOffset.Round(time.Millisecond))
	default:
		j.ok(check, "synchronised")
	}
}

// driver judges a module that has a substitute in userspace. setting is its key's value.
func (j *judge) driver(check, key, setting, module string, m Module, cost string) {
	switch {
	case setting == config.Userspace:
		j.ok(check, "%s: userspace asks for no module", key)
	case m.Presence == Unknown:
	case m.Presence == Absent && setting == config.Kernel:
		j.say(Failure, check, "this kernel has no module "+module, key+": kernel asks for it",
			"install this kernel's extra modules, or set "+key+": auto")
	case m.Presence == Absent:
		j.say(Note, check, "this kernel has no module "+module, cost,
			"install this kernel's extra modules, then restart skein")
	case m.Presence == Loadable:
		j.ok(check, "module %s is there and not loaded yet", module)
	default:
		j.ok(check, "module %s is loaded", module)
	}
}

func (j *judge) modules() {
	d := j.f.Config.Value.Dataplane
	if j.f.WireGuard.Presence == Unknown && j.f.Agent.Driver == config.Userspace {
		j.f.WireGuard.Presence = Absent // the agent has tried
	}
	j.driver("WireGuard driver", "dataplane.wireguard", d.WireGuard, "wireguard", j.f.WireGuard,
		"WireGuard runs inside the agent: each packet costs several times the CPU, and none passes while the agent is down")
	j.driver("FoU driver", "dataplane.fou", d.FoU, "fou", j.f.FoU,
		"tunnels of egresses run inside the agent: more CPU for each packet, and none passes while it is down; "+
			"hosts without egresses need neither")
	needTUN := d.WireGuard == config.Userspace || d.WireGuard == config.Auto && j.f.WireGuard.Presence == Absent
	switch p := j.f.TUN.Presence; {
	case p == Absent && needTUN:
		j.say(Failure, "TUN device", j.f.TUN.Detail, "userspace WireGuard has no other way to the kernel",
			"modprobe tun; in a container, pass /dev/net/tun to it")
	case p == Absent:
		j.say(Note, "TUN device", j.f.TUN.Detail, "there is no falling back to userspace drivers", "modprobe tun")
	case p != Unknown:
		j.ok("TUN device", "%s", j.f.TUN.Detail)
	}
	switch j.f.NfTables.Presence {
	case Absent:
		j.say(Failure, "nftables", j.f.NfTables.Detail, "routes into the tunnel are chosen by marks that nftables sets",
			"modprobe nf_tables")
	case Loaded, Loadable:
		j.ok("nftables", "%d tables", len(j.f.Tables))
	}
}

// relays reports whether this host relays for others, or shall.
func (j *judge) relays() bool {
	c := j.f.Config.Value
	return j.f.Agent.Relay || c.Relay == config.On || c.Relay == config.Auto && c.ForceEndpoint != ""
}

func (j *judge) forwarding() {
	const check = "IP forwarding"
	v4, ok := j.f.Sysctl["net.ipv4.ip_forward"]
	relay := j.f.Config.Value.Dataplane.Relay
	switch {
	case !ok:
	case v4 != "0":
		j.ok(check, "net.ipv4.ip_forward is %s", v4)
	case j.relays() && relay == config.Kernel:
		j.say(Failure, check, "net.ipv4.ip_forward is 0", "dataplane.relay: kernel forwards no UDP without it",
			"sysctl -w net.ipv4.ip_forward=1, or dataplane.relay: auto")
	case j.relays() && relay == config.Auto:
		j.say(Note, check, "net.ipv4.ip_forward is 0",
			"this relay's UDP goes through the agent instead of the kernel, at more CPU for each packet",
			"sysctl -w net.ipv4.ip_forward=1, where this host may forward between all its links")
	default:
		j.ok(check, "net.ipv4.ip_forward is 0; skein switches it on by link where it needs it")
	}
	if j.f.Sysctl["net.ipv6.conf.all.forwarding"] == "0" || !j.f.hasUplink("IPv6") {
		return
	}
	for _, u := range j.f.Uplinks {
		if u.Family == "IPv6" && j.f.Sysctl["net.ipv6.conf."+u.Link+".accept_ra"] == "1" {
			j.say(Warning, "router advertisements", u.Link+" has accept_ra 1, and this host forwards IPv6",
				"the kernel ignores advertisements then: the default route and the address of this link run out",
				"sysctl -w net.ipv6.conf."+u.Link+".accept_ra=2, unless the route is configured by hand")
		}
	}
}

func (f Facts) hasUplink(family string) bool {
	return slices.ContainsFunc(f.Uplinks, func(u Uplink) bool { return u.Family == family })
}

func (f Facts) link(name string) (Link, bool) {
	i := slices.IndexFunc(f.Links, func(l Link) bool { return l.Name == name })
	if i < 0 {
		return Link{}, false
	}
	return f.Links[i], true
}

// filter is the reverse path filter in force on a link: the greater of its own and that of all.
func (f Facts) filter(link string) string {
	return max(f.Sysctl["net.ipv4.conf.all.rp_filter"], f.Sysctl["net.ipv4.conf."+link+".rp_filter"])
}

func (j *judge) rpFilter() {
	const check = "reverse path filter"
	if _, ok := j.f.Sysctl["net.ipv4.conf.all.rp_filter"]; !ok {
		return
	}
	if _, ok := j.f.link(j.n.Link); ok && j.f.filter(j.n.Link) == "1" {
		j.say(Failure, check, "strict on "+j.n.Link,
			"peers' addresses are routed by mark, which this filter does not see: it drops what comes by the tunnel",
			"sysctl -w net.ipv4.conf."+j.n.Link+".rp_filter=2; see who sets it: grep -r rp_filter /etc/sysctl.d")
		return
	}
	var strict []string
	n := 0
	for _, u := range j.f.Uplinks {
		if u.Family != "IPv4" {
			continue
		}
		if n++; j.f.filter(u.Link) == "1" && !slices.Contains(strict, u.Link) {
			strict = append(strict, u.Link)
		}
	}
	if n > 1 && len(strict) > 0 {
		j.say(Warning, check, "strict on "+strings.Join(strict, " and ")+", and there are "+fmt.Sprint(n)+" default routes",
			"packets of a peer that come by the other way out than answers leave by are dropped",
			"sysctl -w net.ipv4.conf."+strict[0]+".rp_filter=2")
		return
	}
	names := map[string]string{"": "off", "0": "off", "1": "strict", "2": "loose"}
	j.ok(check, "%s on all links; the tunnel's own is skein's", names[j.f.Sysctl["net.ipv4.conf.all.rp_filter"]])
}

// encapsulates says what a kind of link adds to packets, in bytes over IPv4; IPv6 takes 20 more.
var encapsulates = map[string]int{
	"wireguard": 60, "tun": 60, "tuntap": 60, "vxlan": 50, "geneve": 50, "gre": 24, "gretap": 38, "ip6gre": 44,
	"ip6gretap": 58,
	"ipip":      20, "sit": 20, "ip6tnl": 40, "vti": 60, "vti6": 80, "xfrm": 60,
}

// below walks from a link down to the one that leaves this host.
func (f Facts) below(name string) (out []Link) {
	for l, ok := f.link(name); ok && len(out) < 8; l, ok = f.link(l.Parent) {
		if out = append(out, l); l.Parent == "" || l.Parent == l.Name {
			break
		}
	}
	return out
}

func (j *judge) uplinks() {
	const check = "way out"
	seen := map[string]bool{}
	for _, u := range j.f.Uplinks {
		if seen[u.Link] {
			continue
		}
		seen[u.Link] = true
		if u.Link == j.n.Link {
			j.say(Failure, check, "the "+u.Family+" default route leads into "+u.Link,
				"the tunnel's own packets would go into the tunnel", "ip route del default dev "+u.Link)
			continue
		}
		l, ok := j.f.link(u.Link)
		if !ok {
			continue
		}
		tunnel := false
		for _, below := range j.f.below(u.Link) {
			extra, is := encapsulates[below.Kind]
			if !is {
				continue
			}
			tunnel = true
			j.say(Warning, check, fmt.Sprintf("%s is a tunnel (%s, MTU %d)", below.Name, below.Kind, below.MTU),
				fmt.Sprintf("every packet of the mesh is put into another one twice, which costs about %d more bytes and "+
					"CPU for each, "+"and a NAT of the tunnel's far end counts", extra),
				"ip route get 192.0.2.1; route the peers' endpoints by the link below, if that may carry UDP")
		}
		switch {
		case l.MTU < leastUplink:
			j.say(Failure, check, fmt.Sprintf("%s has MTU %d", l.Name, l.MTU),
				fmt.Sprintf("the tunnel needs %d: IPv6 in it takes 1280 bytes, and WireGuard %d", leastUplink, tunnelOverhead),
				fmt.Sprintf("ip link set %s mtu %d, if the network behind it carries that", l.Name, leastUplink))
		case tunnel:
		case l.MTU < ethernet:
			j.say(Note, check, fmt.Sprintf("%s has MTU %d", l.Name, l.MTU),
				fmt.Sprintf("the tunnel has %d instead of %d bytes; TCP is told, and paths are tested", l.MTU-tunnelOverhead,
					ethernet-tunnelOverhead),
				fmt.Sprintf("ip link set %s mtu %d, if the network behind it carries that", l.Name, ethernet))
		default:
			j.ok(check, "%s (%s, MTU %d)", l.Name, l.Kind, l.MTU)
		}
	}
	if len(j.f.Links) > 0 && len(seen) == 0 {
		j.say(Warning, check, "there is no default route", "only peers on this host's own networks can be reached",
			"ip route; ip -6 route")
	}
}

func (j *judge) pathMTU() {
	const check = "path MTU"
	small := 0
	for _, p := range j.f.PathMTUs {
		l, ok := j.f.link(p.Link)
		if p.MTU == 0 || !ok || p.MTU >= l.MTU {
			continue
		}
		small++
		v, why := Note, "packets to that peer are made smaller; this is what a router said, or a test found"
		if p.MTU < leastUplink {
			v, why = Warning, "IPv6 in the tunnel does not fit; the relay carries what does not"
		}
		j.say(v, check, fmt.Sprintf("%d bytes to %s (%s), and %s has %d", p.MTU, p.Peer, p.Endpoint, l.Name, l.MTU), why,
			"skein explain peer "+p.Peer)
	}
	if small == 0 && len(j.f.PathMTUs) > 0 {
		j.ok(check, "that of the link to all %d direct peers", len(j.f.PathMTUs))
	}
}

func bytesText(n uint64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d KiB", n>>10)
}
