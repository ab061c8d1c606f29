package doctor

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane"
)

// healthy is a public server without anything to complain of.
func healthy() Facts {
	c := config.Default()
	c.Name, c.ForceEndpoint = "dc1", "vpn.example.net:51820"
	server := true
	c.Server = &server
	return Facts{
		Config: Configuration{File: "/etc/skein/skein.yaml", Exists: true, Value: c},
		Agent:  Agent{Running: true, PID: 7, Driver: "kernel", Relay: true},
		State: Directory{Path: "/var/lib/skein", Exists: true, Mode: 0o700, FreeBytes: 10 << 30, FreeInodes: 1e6,
			Inodes: 1e7},
		Clock:     Clock{Known: true, Synchronised: true, MaxError: 20 * time.Millisecond},
		WireGuard: Module{Presence: Loaded}, FoU: Module{Presence: Loadable}, TUN: Module{Loaded, "/dev/net/tun is there"},
		NfTables: Module{Presence: Loaded},
		Sysctl: map[string]string{
			"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "0", "net.ipv4.conf.all.rp_filter": "0",
			"net.ipv4.conf.eth0.rp_filter": "1", "net.ipv6.conf.eth0.accept_ra": "1", "net.ipv4.conf.skein0.rp_filter": "0",
			"net.netfilter.nf_conntrack_count": "100", "net.netfilter.nf_conntrack_max": "262144",
			"fs.inotify.max_user_instances": "128", "fs.file-nr": "1000 0 100000",
		},
		Links: []Link{{Index: 2, Name: "eth0", Kind: "device", MTU: 1500, Up: true},
			{Index: 3, Name: "skein0", Kind: "wireguard", MTU: 1420, Up: true}},
		Uplinks: []Uplink{{"IPv4", "eth0"}, {"IPv6", "eth0"}},
		Names: []Name{{Key: "forceEndpoint", Host: "vpn.example.net",
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}},
		Rules:  []Rule{{Family: "IPv4", Priority: 32500, Mark: 0x40, Mask: 0x60, Table: 180, Protocol: 30}},
		Routes: []Route{{Table: 180, To: "default", Link: "skein0", Protocol: 30}},
		Limits: Limits{Whose: "agent", OpenFiles: 100, MaxFiles: 65536}, Privileged: true,
	}
}

func TestJudgeHealthyHost(t *testing.T) {
	r := Judge(healthy(), dataplane.DefaultNumbers())
	if r.Worst() != OK {
		t.Errorf("a host without a fault: %+v", r.Findings)
	}
	if len(r.Findings) < 14 {
		t.Errorf("only %d findings: are all checks still made?", len(r.Findings))
	}
	for _, f := range r.Findings {
		if f.Why != "" || f.Do != "" {
			t.Errorf("%s is ok and says what to do: %+v", f.Check, f)
		}
	}
}

// TestJudge breaks one thing at a time, and wants exactly that found, with a reason and something to do.
func TestJudge(t *testing.T) {
	accept := func(cs ...Condition) FilterRule { return FilterRule{Conditions: cs, Verdict: "accept"} }
	established := accept(Condition{Field: FieldState, Mask: 6, Ranges: [][2]uint64{{0, 0}}, Not: true})
	udp := Condition{Field: FieldProto, Ranges: [][2]uint64{{protoUDP, protoUDP}}}
	input := func(rules ...FilterRule) []Chain {
		return []Chain{{Family: "inet", Table: "filter", Name: "input", Hook: "input", Type: "filter", Drop: true,
			Rules: rules}}
	}
	tunnel := accept(Condition{Field: FieldIn, Names: []string{"skein0"}})
	ports := func(ns ...uint64) (c Condition) {
		c.Field = FieldPort
		for _, n := range ns {
			c.Ranges = append(c.Ranges, [2]uint64{n, n})
		}
		return c
	}
	for _, c := range []struct {
		name    string
		fault   func(*Facts)
		verdict Verdict
		check   string
		seen    string // a part
		do      string // a part
	}{
		{"bad configuration", func(f *Facts) { f.Config.Problem = "skein.yaml:3: ports.relay: 0 is not allowed" },
			Failure, "configuration", "ports.relay", "skein.yaml"},
		{"no agent", func(f *Facts) { f.Agent = Agent{Why: "no agent answers"} }, Note, "agent", "no agent answers",
			"skein up"},
		{"what the agent says", func(f *Facts) {
			f.Agent.Problems = []Problem{{"disk", "it is full", "make room", "error"}}
		}, Failure, "agent", "disk: it is full", "make room"},
		{"open directory", func(f *Facts) { f.State.Mode = 0o755 }, Warning, "state directory", "0755", "chmod 0700"},
		{"open key", func(f *Facts) { f.State.OpenFiles = []string{"/var/lib/skein/identity.pem"} },
			Failure, "state directory", "identity.pem", "chmod 0600"},
		{"disk full", func(f *Facts) { f.State.FreeBytes = 1 << 20 }, Failure, "free space of /var/lib/skein", "1 MiB",
			"df -h"},
		{"disk nearly full", func(f *Facts) { f.State.FreeBytes = 300 << 20 },
			Warning, "free space of /var/lib/skein", "300 MiB", "df -h"},
		{"no inodes", func(f *Facts) { f.State.FreeInodes = 3 }, Warning, "free space of /var/lib/skein", "3 inodes",
			"df -i"},
		{"no NTP", func(f *Facts) { f.Clock.Synchronised = false }, Warning, "clock", "not synchronised", "set-ntp"},
		{"clock off", func(f *Facts) { f.Agent.ClockOffset = -time.Minute }, Warning, "clock", "-1m0s", "set-ntp"},
		{"poor NTP", func(f *Facts) { f.Clock.MaxError = 5 * time.Second }, Note, "clock", "5s", "timedatectl"},
		{"no WireGuard", func(f *Facts) { f.WireGuard.Presence = Absent }, Note, "WireGuard driver", "no module wireguard",
			"install"},
		{"no WireGuard, and asked for", func(f *Facts) {
			f.WireGuard.Presence, f.Config.Value.Dataplane.WireGuard = Absent, "kernel"
		}, Failure, "WireGuard driver", "no module wireguard", "dataplane.wireguard: auto"},
		{"the agent found no WireGuard", func(f *Facts) { f.WireGuard.Presence, f.Agent.Driver = Unknown, "userspace" },
			Note, "WireGuard driver", "no module wireguard", "install"},
		{"no FoU", func(f *Facts) { f.FoU.Presence = Absent }, Note, "FoU driver", "no module fou", "install"},
		{"no TUN", func(f *Facts) { f.TUN = Module{Absent, "/dev/net/tun is not there"} }, Note, "TUN device", "not there",
			"modprobe"},
		{"no TUN, and needed", func(f *Facts) {
			f.TUN, f.Config.Value.Dataplane.WireGuard = Module{Absent, "/dev/net/tun is not there"}, "userspace"
		}, Failure, "TUN device", "not there", "modprobe tun"},
		{"no nftables", func(f *Facts) { f.NfTables = Module{Absent, "the kernel answers: no"} },
			Failure, "nftables", "the kernel answers", "modprobe nf_tables"},
		{"relay without forwarding", func(f *Facts) { f.Sysctl["net.ipv4.ip_forward"] = "0" },
			Note, "IP forwarding", "ip_forward is 0", "sysctl -w net.ipv4.ip_forward=1"},
		{"relay in the kernel without forwarding", func(f *Facts) {
			f.Sysctl["net.ipv4.ip_forward"], f.Config.Value.Dataplane.Relay = "0", "kernel"
		}, Failure, "IP forwarding", "ip_forward is 0", "sysctl -w net.ipv4.ip_forward=1"},
		{"router advertisements", func(f *Facts) { f.Sysctl["net.ipv6.conf.all.forwarding"] = "1" },
			Warning, "router advertisements", "eth0", "accept_ra=2"},
		{"strict tunnel", func(f *Facts) { f.Sysctl["net.ipv4.conf.all.rp_filter"] = "1" },
			Failure, "reverse path filter", "skein0", "skein0.rp_filter=2"},
		{"strict with two ways out", func(f *Facts) { f.Uplinks = append(f.Uplinks, Uplink{"IPv4", "eth1"}) },
			Warning, "reverse path filter", "eth0", "eth0.rp_filter=2"},
		{"tunnel in a tunnel", func(f *Facts) { f.Links[0].Kind, f.Links[0].MTU = "wireguard", 1420 },
			Warning, "way out", "eth0 is a tunnel (wireguard, MTU 1420)", "ip route get"},
		{"VLAN on VXLAN", func(f *Facts) {
			f.Links[0].Kind, f.Links[0].Parent = "vlan", "vx"
			f.Links = append(f.Links, Link{Index: 9, Name: "vx", Kind: "vxlan", MTU: 1450})
		}, Warning, "way out", "vx is a tunnel (vxlan, MTU 1450)", "ip route get"},
		{"into itself", func(f *Facts) { f.Uplinks[1].Link = "skein0" }, Failure, "way out",
			"IPv6 default route leads into skein0",
			"ip route del"},
		{"small MTU", func(f *Facts) { f.Links[0].MTU = 1280 }, Failure, "way out", "MTU 1280", "mtu 1360"},
		{"smaller MTU", func(f *Facts) { f.Links[0].MTU = 1492 }, Note, "way out", "MTU 1492", "mtu 1500"},
		{"no way out", func(f *Facts) { f.Uplinks = nil }, Warning, "way out", "no default route", "ip route"},
		{"small path", func(f *Facts) {
			f.PathMTUs = []PathMTU{{"home1", netip.MustParseAddrPort("203.0.113.9:51820"), "eth0", 1300}}
		}, Warning, "path MTU", "1300 bytes to home1", "skein explain peer home1"},
		{"conntrack full", func(f *Facts) { f.Sysctl["net.netfilter.nf_conntrack_count"] = "262144" },
			Failure, "conntrack", "262144 of 262144", "nf_conntrack_max=1048576"},
		{"conntrack nearly full", func(f *Facts) { f.Sysctl["net.netfilter.nf_conntrack_count"] = "200000" },
			Warning, "conntrack", "200000 of 262144", "nf_conntrack_max=1048576"},
		{"small conntrack of a relay", func(f *Facts) { f.Sysctl["net.netfilter.nf_conntrack_max"] = "4096" },
			Note, "conntrack", "100 of 4096", "nf_conntrack_max=65536"},
		{"name", func(f *Facts) { f.Names[0].Problem = "vpn.example.net does not resolve: no such host" },
			Failure, "name vpn.example.net", "does not resolve", "forceEndpoint"},
		{"name of a STUN server", func(f *Facts) { f.Names[0].Key, f.Names[0].Problem = "stunServers", "no" },
			Warning, "name vpn.example.net", "no", "stunServers"},
		{"strange link", func(f *Facts) { f.Links[1].Kind = "dummy" }, Failure, "numbers", "skein0 is a dummy",
			"dataplane.link"},
		{"our marks", func(f *Facts) { f.Rules = append(f.Rules, Rule{"IPv4", 500, 0x20, 0xff, 51, 0}) },
			Warning, "numbers", "rule 500 (mark 0x20/0xff, table 51)", "another mark"},
		{"our table by a rule", func(f *Facts) { f.Rules = append(f.Rules, Rule{"IPv6", 500, 0, 0, 180, 0}) },
			Warning, "numbers", "table 180", "another table"},
		{"our priority", func(f *Facts) { f.Rules = append(f.Rules, Rule{"IPv4", 2000, 0, 0, 254, 0}) },
			Note, "numbers", "rule 2000", "another priority"},
		{"our table by a route", func(f *Facts) { f.Routes = append(f.Routes, Route{180, "10.0.0.0/8", "wg0", 3}) },
			Warning, "numbers", "10.0.0.0/8", "ip route show table 180"},
		{"another mesh", func(f *Facts) {
			f.Links = append(f.Links, Link{Index: 9, Name: "tailscale0", Kind: "tuntap", MTU: 1280})
		},
			Note, "other networks", "Tailscale", "docs/kubernetes.md"},
		{"inotify", func(f *Facts) { f.Limits.InotifyProblem = "too many" }, Warning, "inotify", "too many",
			"max_user_instances"},
		{"files", func(f *Facts) { f.Limits.OpenFiles = 60000 }, Failure, "open files", "60000 of 65536", "LimitNOFILE"},
		{"few files for a relay", func(f *Facts) { f.Limits.MaxFiles = 1024 }, Warning, "open files", "100 of 1024",
			"LimitNOFILE"},
		{"files of all", func(f *Facts) { f.Sysctl["fs.file-nr"] = "90000 0 100000" }, Warning, "open files",
			"90000 of 100000",
			"fs.file-max"},
		{"answers are dropped", func(f *Facts) {
			f.Chains = input(tunnel, accept(udp, ports(51820, 3478, 3479)), accept(ports(7443)))
		}, Failure, "firewall", "answers over IPv4: dropped by table inet filter, chain input, its policy",
			"ct state established"},
		{"WireGuard's port", func(f *Facts) {
			f.Chains = input(tunnel, established, accept(udp, ports(3478, 3479)), accept(ports(7443)))
		}, Warning, "firewall", "port 51820/udp over IPv4: dropped by", "udp dport 51820 accept"},
		{"relay's port", func(f *Facts) {
			f.Chains = input(tunnel, established, accept(udp, ports(51820, 3478, 3479)))
		}, Failure, "firewall", "port 7443/tcp over IPv4: dropped by", "tcp dport 7443 accept"},
		{"control port", func(f *Facts) {
			f.Chains = input(established, accept(udp, ports(51820, 3478, 3479)), accept(ports(7443)))
		}, Failure, "firewall", "control port 7946/tcp over IPv4: dropped by", "iifname skein0 tcp dport 7946 accept"},
		{"only from some", func(f *Facts) {
			f.Chains = input(tunnel, established, accept(udp, ports(3478, 3479)), accept(ports(7443)),
				accept(udp, ports(51820), Condition{Field: FieldOther}))
		}, Note, "firewall", "port 51820/udp over IPv4: whether it is dropped depends on more", "udp dport 51820 accept"},
		{"forwarding for pods", func(f *Facts) {
			f.Routes = append(f.Routes, Route{116, "10.64.0.1/32", "sk0a1b2c3d4e5f", 30})
			f.Chains = []Chain{{Family: "ip", Table: "filter", Name: "FORWARD", Hook: "forward", Type: "filter", Drop: true}}
		}, Failure, "firewall", "forwarding from the tunnel over IPv4: dropped by",
			"ip filter FORWARD iifname skein0 accept"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := healthy()
			c.fault(&f)
			r := Judge(f, dataplane.DefaultNumbers())
			i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Check == c.check && f.Verdict == c.verdict })
			if i < 0 {
				t.Fatalf("no %s of %s in %+v", c.verdict, c.check, r.Findings)
			}
			found := r.Findings[i]
			if !strings.Contains(found.Seen, c.seen) || !strings.Contains(found.Do, c.do) || found.Why == "" {
				t.Errorf("found %+v", found)
			}
			for _, other := range r.Findings {
				if other.Verdict != OK && other.Check != c.check {
					t.Errorf("this fault brings another finding, too: %+v", other)
				}
			}
			if r.Worst() != c.verdict {
				t.Errorf("the worst of it is %s", r.Worst())
			}
		})
	}
}

// TestTakenPorts: a port that another has is a failure while the agent is down, with the name of who has it.
func TestTakenPorts(t *testing.T) {
	f := healthy()
	f.Agent = Agent{Why: "none"}
	f.Sockets = []Socket{
		{Proto: "tcp", Address: netip.MustParseAddrPort("192.0.2.1:7443"), PID: 9, Program: "nginx"},
		{Proto: "udp", Address: netip.MustParseAddrPort("0.0.0.0:51820"), Kernel: true},
		{Proto: "tcp", Address: netip.MustParseAddrPort("192.0.2.1:9469"), PID: 9, Program: "nginx"}, // ours is on 127.0.0.1
		{Proto: "udp", Address: netip.MustParseAddrPort("[::]:7443"), PID: 9, Program: "nginx"},      // ours is TCP
	}
	r := Judge(f, dataplane.DefaultNumbers())
	var got []string
	for _, one := range r.Findings {
		if one.Verdict == Failure {
			got = append(got, one.Check+" "+one.Seen)
		}
	}
	if want := []string{"port 7443/tcp nginx (process 9) has it at 192.0.2.1:7443"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q: the tunnel that goes on without the agent is not another's", got, want)
	}
	f.Links = f.Links[:1] // no tunnel of ours
	if r := Judge(f, dataplane.DefaultNumbers()); r.Count(Failure) != 2 {
		t.Errorf("the kernel holds WireGuard's port for another: %+v", r.Findings)
	}
	f.Agent.Running = true
	if r := Judge(f, dataplane.DefaultNumbers()); r.Count(Failure) != 0 {
		t.Errorf("a running agent has its ports itself: %+v", r.Findings)
	}
}

func TestHostNames(t *testing.T) {
	c := config.Config{ForceEndpoint: "vpn.example.net:1", StunServers: []string{"192.0.2.1:3478", "stun.example.net:3478",
		"[2001:db8::1]:3478", "stun.example.net:3479"}}
	got := HostNames(c)
	if len(got) != 2 || got[0].Host != "vpn.example.net" || got[1].Host != "stun.example.net" ||
		got[1].Key != "stunServers" {
		t.Errorf("%+v", got)
	}
}
