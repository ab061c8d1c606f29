package doctor

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane"
)

func (j *judge) conntrack() {
	const check = "conntrack"
	count, err1 := strconv.Atoi(j.f.Sysctl["net.netfilter.nf_conntrack_count"])
	most, err2 := strconv.Atoi(j.f.Sysctl["net.netfilter.nf_conntrack_max"])
	if err1 != nil || err2 != nil || most <= 0 {
		return // not loaded, or not this namespace's: then Skipped says so
	}
	seen := fmt.Sprintf("%d of %d connections", count, most)
	grow := fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d", max(4*most, 4*conntrackFew))
	switch {
	case count >= most:
		j.say(Failure, check, seen, "new connections are dropped, those through the mesh among them", grow)
	case count*100 >= most*conntrackFull:
		j.say(Warning, check, seen, "when it is full, new connections are dropped, those through the mesh among them", grow)
	case most < conntrackFew && j.relays():
		j.say(Note, check, seen, "a relay's UDP and an egress gateway take an entry for each flow", grow)
	default:
		j.ok(check, "%s", seen)
	}
}

func (j *judge) names() {
	for _, n := range j.f.Names {
		check := "name " + n.Host
		if n.Problem == "" {
			j.ok(check, "%s (%s)", join(n.Addresses), n.Key)
			continue
		}
		v, why := Warning, "this STUN server cannot be asked"
		if n.Key == "forceEndpoint" {
			v, why = Failure, "peers do not learn where this host is reached; the last address stays published for a time"
		}
		j.say(v, check, n.Problem, why, "getent ahosts "+n.Host+"; correct "+n.Key+" or the name service")
	}
}

func join(addrs []netip.Addr) string {
	out := make([]string, len(addrs))
	for i, a := range addrs {
		out[i] = a.String()
	}
	return strings.Join(out, " ")
}

// port is one that the agent listens on.
type port struct {
	key, proto string
	number     uint16
	at         netip.Addr // not valid: all addresses
	offered    bool       // this host needs others to reach it
}

// wanted are the agent's ports by the configuration.
func (j *judge) wanted() []port {
	c := j.f.Config.Value
	out := []port{
		{key: "ports.wireguard", proto: "udp", number: c.Ports.WireGuard, offered: true},
		{key: "ports.relay", proto: "tcp", number: c.Ports.Relay, offered: j.relays() || c.Server != nil && *c.Server},
		{key: "ports.stun", proto: "udp", number: c.Ports.Stun, offered: j.relays()},
		{key: "ports.stun", proto: "udp", number: c.Ports.Stun + 1, offered: j.relays()},
	}
	if ap, err := netip.ParseAddrPort(c.Ports.Metrics); err == nil {
		out = append(out, port{key: "ports.metrics", proto: "tcp", number: ap.Port(), at: ap.Addr()})
	}
	return out
}

func overlap(a, b netip.Addr) bool {
	return !a.IsValid() || !b.IsValid() || a.IsUnspecified() || b.IsUnspecified() || a.Unmap() == b.Unmap()
}

// ports looks for others on the agent's ports, when the agent is not there to have them itself.
func (j *judge) ports() {
	if j.f.Agent.Running {
		return
	}
	free := true
	for _, p := range j.wanted() {
		i := slices.IndexFunc(j.f.Sockets, func(s Socket) bool {
			return s.Proto == p.proto && s.Address.Port() == p.number && overlap(p.at, s.Address.Addr())
		})
		if i < 0 {
			continue
		}
		s := j.f.Sockets[i]
		check := fmt.Sprintf("port %d/%s", p.number, p.proto)
		if l, ok := j.f.link(j.n.Link); s.Kernel && ok && l.Kind == "wireguard" && p.key == "ports.wireguard" {
			j.ok(check, "skein's tunnel %s has it and goes on without the agent", l.Name)
			continue
		}
		who := "a process that this user may not see"
		switch {
		case s.Program != "":
			who = fmt.Sprintf("%s (process %d)", s.Program, s.PID)
		case s.Kernel:
			who = "the kernel: a tunnel, or a process of another namespace"
		}
		free = false
		j.say(Failure, check, who+" has it at "+s.Address.String(), "the agent cannot start with "+p.key,
			fmt.Sprintf("ss -lnp '( sport = :%d )'; stop that, or set %s to another port", p.number, p.key))
	}
	if j.f.SawSockets && free {
		j.ok("ports", "nobody else has the agent's ports")
	}
}

// ask is a question to the firewall.
type ask struct {
	check string
	hook  string
	p     Packet
	bad   Verdict // when all such packets are dropped
	why   string
	allow string // arguments of a rule that lets them pass
}

// outside is the link by which packets of a family come from outside.
func (j *judge) outside(family string) string {
	for _, u := range j.f.Uplinks {
		if u.Family == family {
			return u.Link
		}
	}
	return "any other link" // a name that no link has
}

func (j *judge) asks() (out []ask) {
	for _, six := range []bool{false, true} {
		family := "IPv4"
		if six {
			family = "IPv6"
		}
		if len(j.f.Uplinks) > 0 && !j.f.hasUplink(family) {
			continue
		}
		outside := j.outside(family)
		out = append(out, ask{"answers over " + family, "input",
			Packet{IPv6: six, In: outside, Proto: protoUDP, Port: 61000, State: stateEstablished}, Failure,
			"answers to what this host sends do not come back", "ct state established,related accept"})
		for _, p := range j.wanted() {
			if !p.offered {
				continue
			}
			proto, bad := uint64(protoUDP), Warning
			why := "peers cannot begin a direct path to this host; it has to begin, or a relay carries the traffic"
			if p.proto == "tcp" {
				proto = protoTCP
			}
			if p.key != "ports.wireguard" {
				bad, why = Failure, "others cannot join here, use this relay, or ask it for their address"
			}
			out = append(out, ask{fmt.Sprintf("port %d/%s over %s", p.number, p.proto, family), "input",
				Packet{IPv6: six, Proto: proto, Port: uint64(p.number), State: stateNew, In: outside}, bad, why,
				fmt.Sprintf("%s dport %d accept", p.proto, p.number)})
		}
		control := j.f.Config.Value.Ports.Control
		for _, proto := range []uint64{protoTCP, protoUDP} {
			name := map[uint64]string{protoTCP: "tcp", protoUDP: "udp"}[proto]
			out = append(out, ask{fmt.Sprintf("control port %d/%s over %s", control, name, family), "input",
				Packet{IPv6: six, Proto: proto, Port: uint64(control), State: stateNew, In: j.n.Link}, Failure,
				"gossip, the log and signals between nodes go there, inside the tunnel",
				fmt.Sprintf("iifname %s %s dport %d accept", j.n.Link, name, control)})
		}
		if why := j.forwards(); why != "" {
			out = append(out, ask{"forwarding from the tunnel over " + family, "forward",
				Packet{IPv6: six, Proto: protoTCP, Port: 61000, State: stateNew, In: j.n.Link}, Failure,
				"this host passes packets on for others: " + why, "iifname " + j.n.Link + " accept"})
		}
	}
	return out
}

// forwards says for whom this host passes packets on; empty: for nobody.
func (j *judge) forwards() string {
	var out []string
	for _, r := range j.f.Routes {
		if r.Table == j.n.PodTable() && r.Protocol == dataplane.RouteProtocol && strings.HasPrefix(r.Link, podLink) {
			out = append(out, "it has pods")
			break
		}
	}
	if slices.Contains(j.f.Tables, "inet "+j.n.EgressNftTable) {
		out = append(out, "it is an egress gateway")
	}
	return strings.Join(out, ", ")
}

func (j *judge) firewall() {
	const check = "firewall"
	if j.f.NfTables.Presence != Loaded {
		return
	}
	good := true
	for _, a := range j.asks() {
		f := firewall(j.f.Chains, j.n.NftTables(), a.hook, a.p)
		switch {
		case f.verdict == "drop" && f.sure:
			good = false
			j.say(a.bad, check, a.check+": dropped by "+f.where, a.why, allow(f.where, a))
		case !f.sure || f.where != "":
			good = false
			j.say(Note, check, a.check+": whether it is dropped depends on more than the port; see "+f.where, a.why,
				allow(f.where, a))
		}
	}
	if good {
		j.ok(check, "no nftables rule drops what skein needs")
	}
}

// allow is the command that lets packets pass where they are dropped. Chains that a firewall's own program writes
// shall be changed by that program.
func allow(where string, a ask) string {
	at, _, _ := strings.Cut(where, ", rule")
	at, _, _ = strings.Cut(at, ", its policy")
	words := strings.Fields(strings.NewReplacer("table ", "", ", chain", "").Replace(at))
	if len(words) != 3 {
		return "nft list ruleset"
	}
	family, table, chain := words[0], words[1], words[2]
	port, proto := a.p.Port, "udp"
	if a.p.Proto == protoTCP {
		proto = "tcp"
	}
	switch {
	case table == "firewalld" && a.hook == "input" && a.p.State == stateNew:
		return fmt.Sprintf("firewall-cmd --permanent --add-port=%d/%s && firewall-cmd --reload", port, proto)
	case strings.HasPrefix(chain, "ufw") && a.hook == "input" && a.p.State == stateNew:
		return fmt.Sprintf("ufw allow %d/%s", port, proto)
	}
	return fmt.Sprintf("nft insert rule %s %s %s %s; and in the file that makes that chain", family, table, chain, a.allow)
}

// meshes says whose links have a name that begins so.
var meshes = []struct{ begin, who string }{
	{"tailscale", "Tailscale"}, {"kubespan", "Talos KubeSpan"}, {"nebula", "Nebula"}, {"zt", "ZeroTier"},
	{"netmaker", "Netmaker"}, {"nm-", "Netmaker"}, {"wt0", "NetBird"}, {"kilo", "Kilo"}, {"flannel", "Flannel"},
	{"cilium", "Cilium"}, {"cali", "Calico"}, {"vxlan.calico", "Calico"}, {"weave", "Weave Net"}, {"ovn", "OVN"},
}

func (j *judge) others() {
	const check = "numbers"
	good := true
	bad := func(v Verdict, seen, why, do string) {
		good = false
		j.say(v, check, seen, why, do)
	}
	if l, ok := j.f.link(j.n.Link); ok && l.Kind != "wireguard" && l.Kind != "tun" && l.Kind != "tuntap" {
		bad(Failure, "the link "+l.Name+" is a "+l.Kind, "skein's tunnel has that name", "set dataplane.link to another name")
	}
	seen := map[string]bool{}
	for _, r := range j.f.Rules {
		if r.Protocol == dataplane.RouteProtocol {
			continue
		}
		text := fmt.Sprintf("rule %d (mark %#x/%#x, table %d)", r.Priority, r.Mark, r.Mask, r.Table)
		if seen[text] {
			continue // the other family's
		}
		seen[text] = true
		switch {
		case r.Mark&j.n.MarkMask != 0 && r.Mask&j.n.MarkMask != 0:
			bad(Warning, text+" goes by marks of skein's", "packets of one are taken for the other's: skein marks with bits "+
				fmt.Sprintf("%#x", j.n.MarkMask), "ip rule; give the other software another mark")
		case slices.Contains(j.n.Tables(), r.Table):
			bad(Warning, text+" leads to a table of skein's", "it finds skein's routes there, or skein another's",
				"ip rule; give the other software another table")
		case r.Priority == j.n.RulePriority || r.Priority >= j.n.FirstRule && r.Priority <= j.n.LastRule():
			bad(Note, text+" stands among skein's rules",
				"which of them the kernel asks first is a matter of chance where priorities are the same",
				"ip rule; give the other software another priority")
		}
	}
	tables := map[int]bool{}
	for _, r := range j.f.Routes {
		if r.Protocol == dataplane.RouteProtocol || tables[r.Table] || !slices.Contains(j.n.Tables(), r.Table) {
			continue
		}
		tables[r.Table] = true
		bad(Warning, fmt.Sprintf("table %d has a route to %s that is not skein's (protocol %d)", r.Table, r.To, r.Protocol),
			"what skein leads there may go that way instead",
			fmt.Sprintf("ip route show table %d; give the other software another table", r.Table))
	}
	if good {
		j.ok(check, "nobody else uses skein's link, marks, rules and tables")
	}
	told := map[string]bool{}
	for _, l := range j.f.Links {
		i := slices.IndexFunc(meshes, func(m struct{ begin, who string }) bool { return strings.HasPrefix(l.Name, m.begin) })
		if i < 0 || told[meshes[i].who] || l.Name == j.n.Link {
			continue
		}
		told[meshes[i].who] = true
		j.say(Note, "other networks", fmt.Sprintf("%s is a link of %s (%s, MTU %d)", l.Name, meshes[i].who, l.Kind, l.MTU),
			"networks that lie in each other need MTUs that fit, and one of them has to lead where both could",
			"docs/kubernetes.md has what works beside another CNI")
	}
}

func (j *judge) inotify() {
	if p := j.f.Limits.InotifyProblem; p != "" {
		j.say(Warning, "inotify", p, "kubelet, container runtimes and programs that watch their files fail to start",
			"sysctl -w fs.inotify.max_user_instances=1024")
	} else if v, ok := j.f.Sysctl["fs.inotify.max_user_instances"]; ok {
		j.ok("inotify", "instances are to be had, of %s for each user", v)
	}
}

func (j *judge) files() {
	const check = "open files"
	l := j.f.Limits
	if l.MaxFiles == 0 {
		return
	}
	seen := fmt.Sprintf("%d of %d (%s)", l.OpenFiles, l.MaxFiles, l.Whose)
	const raise = "systemctl edit skein: LimitNOFILE=65536, then systemctl restart skein"
	switch {
	case l.OpenFiles*100 >= l.MaxFiles*filesUsed:
		j.say(Failure, check, seen, "soon the agent can take no further connection", raise)
	case j.relays() && l.MaxFiles < filesRelay:
		j.say(Warning, check, seen, fmt.Sprintf("a relay needs up to %d for its sessions and streams", filesRelay), raise)
	default:
		j.ok(check, "%s", seen)
	}
	fields := strings.Fields(j.f.Sysctl["fs.file-nr"])
	if len(fields) == 3 {
		used, _ := strconv.ParseUint(fields[0], 10, 64)
		most, _ := strconv.ParseUint(fields[2], 10, 64)
		if most > 0 && used >= most/100*filesUsed {
			j.say(Warning, check, fmt.Sprintf("%d of %d on the whole host", used, most), "soon no program can open a file",
				fmt.Sprintf("sysctl -w fs.file-max=%d", 4*most))
		}
	}
}

// HostNames are the names in a configuration that a lookup is needed for, by their keys.
func HostNames(c config.Config) (out []Name) {
	add := func(key, hostPort string) {
		host, _, err := net.SplitHostPort(hostPort)
		if _, perr := netip.ParseAddr(host); err != nil || perr == nil {
			return
		}
		if !slices.ContainsFunc(out, func(n Name) bool { return n.Host == host && n.Key == key }) {
			out = append(out, Name{Key: key, Host: cmp.Or(host, hostPort)})
		}
	}
	if c.ForceEndpoint != "" {
		add("forceEndpoint", c.ForceEndpoint)
	}
	for _, s := range c.StunServers {
		add("stunServers", s)
	}
	return out
}
