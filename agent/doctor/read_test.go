package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// examine reads and judges inside a namespace.
func examine(t *testing.T, n *testns.NS, change func(*Request)) (f Facts, r Report) {
	t.Helper()
	c := config.Default()
	c.Name, c.StateDir = "dc1", t.TempDir()
	if err := os.Chmod(c.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	q := Request{Config: Configuration{File: "skein.yaml", Value: c}, Agent: Agent{Why: "none runs"},
		Numbers: dataplane.DefaultNumbers(),
		Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
			t.Errorf("%s is looked up, and the configuration does not name it", host)
			return nil, errors.New("no such host")
		}}
	if change != nil {
		change(&q)
	}
	n.Do(func() { f = Read(t.Context(), q) })
	return f, Judge(f, q.Numbers)
}

func find(r Report, check string, v Verdict) *Finding {
	i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Check == check && f.Verdict == v })
	if i < 0 {
		return nil
	}
	return &r.Findings[i]
}

// host is a namespace with a way out.
func host(t *testing.T) *testns.NS {
	t.Helper()
	n, router := testns.New(t, "doc"), testns.New(t, "docr")
	testns.Link(n, router, "up", []netip.Prefix{netip.MustParsePrefix("192.0.2.10/24"),
		netip.MustParsePrefix("2001:db8::10/64")},
		[]netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")})
	n.Must("default routes", func() error {
		l, err := netlink.LinkByName("up")
		if err != nil {
			return err
		}
		for _, gw := range []string{"192.0.2.1", "2001:db8::1"} {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(gw)}); err != nil {
				return err
			}
		}
		return nil
	})
	return n
}

func nft(t *testing.T, n *testns.NS, text string) {
	t.Helper()
	n.Must("nft", func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader(strings.ReplaceAll(text, "}}", "}\n}\n"))
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func TestReadsTheNetwork(t *testing.T) {
	n := host(t)
	n.Sysctl("net.ipv4.conf.up.rp_filter", "1")
	n.Must("a tunnel of another, and its numbers", func() error {
		up, err := netlink.LinkByName("up")
		if err != nil {
			return err
		}
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU = "flannel.1", 1450
		err = netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: a, VxlanId: 1, VtepDevIndex: up.Attrs().Index, Port: 8472})
		if err != nil {
			a.Name = "flannel0" // a kernel without VXLAN
			if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: a}); err != nil {
				return err
			}
		}
		r, mask := netlink.NewRule(), uint32(0xff)
		r.Priority, r.Mark, r.Mask, r.Table = 77, 0x40, &mask, 52
		if err := netlink.RuleAdd(r); err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR("10.9.0.0/16")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Dst: dst, Table: 180, Protocol: 3})
	})
	f, r := examine(t, n, nil)
	if !slices.Equal(f.Uplinks, []Uplink{{"IPv4", "up"}, {"IPv6", "up"}}) {
		t.Errorf("ways out: %+v", f.Uplinks)
	}
	if l, ok := f.link("up"); !ok || l.Kind != "veth" || l.MTU != 1500 || l.Parent != "" {
		t.Errorf("link up: %+v", l)
	}
	if f.filter("up") != "1" {
		t.Errorf("the filter of up is %q", f.filter("up"))
	}
	if w := find(r, "numbers", Warning); w == nil || !strings.Contains(w.Seen, "rule 77 (mark 0x40/0xff, table 52)") {
		t.Errorf("the rule with skein's mark is not found: %+v", r.Findings)
	}
	if !slices.ContainsFunc(r.Findings, func(f Finding) bool {
		return strings.Contains(f.Seen,
			"table 180 has a route to 10.9.0.0/16")
	}) {
		t.Errorf("the route in skein's table is not found: %+v", r.Findings)
	}
	if w := find(r, "other networks", Note); w == nil || !strings.Contains(w.Seen, "Flannel") {
		t.Errorf("Flannel is not found: %+v", r.Findings)
	}
}

// TestReadsFirewalls: what nft has made is read as nft means it.
func TestReadsFirewalls(t *testing.T) {
	const begin = "table inet filter {\n chain input { type filter hook input priority 0; policy drop;\n"
	const good = "iifname \"lo\" accept\n ct state established,related accept\n iifname \"skein0\" accept\n meta " +
		"l4proto 58 accept\n"
	for _, c := range []struct {
		name, text string
		want       []string // findings that are not ok
	}{
		{"nothing", "", nil},
		{"all that skein needs", begin + good + "udp dport 51820 accept\n}}", nil},
		{"a set of ports", begin + good + "udp dport { 53, 51000-52000 } accept\n}}", nil},
		{"a set with a name", "table inet filter { set open { type inet_service; elements = { 22, 51820 } }\n" +
			"chain input { type filter hook input priority 0; policy drop;\n" + good + "udp dport @open accept\n}}", nil},
		{"by a verdict map", begin + "ct state vmap { established : accept, related : accept, invalid : drop }\n" +
			"iifname { \"lo\", \"skein0\" } accept\n jump more\n }\n chain more { meta l4proto . th dport vmap { tcp . 22 : " +
			"accept }\n" +
			"udp dport 51820 accept\n}}", nil},
		{"WireGuard's port is shut", begin + good + "tcp dport 22 accept\n}}", []string{
			"warning port 51820/udp over IPv4: dropped by table inet filter, chain input, its policy",
			"warning port 51820/udp over IPv6: dropped by table inet filter, chain input, its policy"}},
		{"by a rule", "table ip filter { chain INPUT { type filter hook input priority 0; policy accept;\n" +
			"ct state established accept\n iifname \"skein0\" accept\n udp dport 50000-60000 reject\n}}", []string{
			"warning port 51820/udp over IPv4: dropped by table ip filter, chain INPUT, rule 3"}},
		{"only some", begin + good +
			"ip saddr 198.51.100.0/24 udp dport 51820 accept\n ip6 saddr 2001:db8:9::/48 accept\n}}", []string{
			"note port 51820/udp over IPv4: whether it is dropped depends on more than the port; see table inet filter, chain " +
				"input, its policy",
			"note port 51820/udp over IPv6: whether it is dropped depends on more than the port; see table inet filter, chain " +
				"input, its policy"}},
		{"the second chain drops", begin + good +
			"udp dport 51820 accept\n}}\ntable ip late { chain in { type filter hook input priority 10;\n" +
			"udp dport 51820 drop\n}}",
			[]string{"warning port 51820/udp over IPv4: dropped by table ip late, chain in, rule 1"}},
		{"the tunnel is shut", begin + "ct state established,related accept\n udp dport 51820 accept\n}}", []string{
			"failure control port 7946/tcp over IPv4: dropped by table inet filter, chain input, its policy",
			"failure control port 7946/udp over IPv4: dropped by table inet filter, chain input, its policy",
			"failure control port 7946/tcp over IPv6: dropped by table inet filter, chain input, its policy",
			"failure control port 7946/udp over IPv6: dropped by table inet filter, chain input, its policy"}},
		{"skein's own", "table inet skein { chain skein_prerouting { type filter hook input priority 0; policy drop; }}",
			nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := host(t)
			if c.text != "" {
				nft(t, n, c.text)
			}
			f, r := examine(t, n, nil)
			if f.NfTables.Presence != Loaded {
				t.Fatalf("nftables: %+v, not seen: %+v", f.NfTables, f.Skipped)
			}
			var got []string
			for _, one := range r.Findings {
				if one.Check == "firewall" && one.Verdict != OK {
					got = append(got, string(one.Verdict)+" "+one.Seen)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

// TestSeesWhoHasAPort: this test itself holds WireGuard's port.
func TestSeesWhoHasAPort(t *testing.T) {
	n := host(t)
	var c *net.UDPConn
	n.Must("listen", func() (err error) {
		c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 51820})
		return err
	})
	defer c.Close()
	_, r := examine(t, n, nil)
	if f := find(r, "port 51820/udp", Failure); f == nil || !strings.Contains(f.Seen, "doctor.test (process ") {
		t.Errorf("%+v", r.Findings)
	}
}

func TestReadsTheStateDirectory(t *testing.T) {
	n := testns.New(t, "doc")
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o750), os.WriteFile(filepath.Join(dir, "identity.pem"), nil, 0o644),
		os.Chmod(filepath.Join(dir, "identity.pem"), 0o644)); err != nil {
		t.Fatal(err)
	}
	_, r := examine(t, n, func(q *Request) { q.Config.Value.StateDir = dir })
	if f := find(r, "state directory", Warning); f == nil || !strings.Contains(f.Seen, "0750") {
		t.Errorf("the open directory: %+v", r.Findings)
	}
	if f := find(r, "state directory", Failure); f == nil || !strings.Contains(f.Seen, "identity.pem") {
		t.Errorf("the open key: %+v", r.Findings)
	}
	if f := find(r, "way out", Warning); f == nil {
		t.Errorf("no default route: %+v", r.Findings)
	}
}

// TestLooksUpNamesOfTheConfiguration: these alone, and what fails is a finding.
func TestLooksUpNamesOfTheConfiguration(t *testing.T) {
	n := testns.New(t, "doc")
	_, r := examine(t, n, func(q *Request) {
		q.Config.Value.ForceEndpoint, q.Config.Value.StunServers = "here.example:1", []string{"gone.example:2", "192.0.2.1:3"}
		q.Lookup = func(_ context.Context, host string) ([]netip.Addr, error) {
			if host == "here.example" {
				return []netip.Addr{netip.MustParseAddr("::ffff:192.0.2.9")}, nil
			}
			return nil, errors.New("no such host")
		}
	})
	if f := find(r, "name here.example", OK); f == nil || f.Seen != "192.0.2.9 (forceEndpoint)" {
		t.Errorf("%+v", r.Findings)
	}
	if f := find(r, "name gone.example", Warning); f == nil || !strings.Contains(f.Seen, "no such host") {
		t.Errorf("%+v", r.Findings)
	}
}

func TestModuleIn(t *testing.T) {
	dir := t.TempDir()
	sys, lib := filepath.Join(dir, "sys"), filepath.Join(dir, "lib")
	for path, text := range map[string]string{
		"sys/fou/x": "", "lib/modules.builtin": "kernel/drivers/net/tun.ko\n",
		"lib/modules.dep": "kernel/drivers/net/wireguard/wireguard.ko.zst: kernel/lib/libcurve.ko.zst\n",
	} {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]Presence{"fou": Loaded, "tun": Loaded, "wireguard": Loadable, "libcurve": Absent} {
		if got := moduleIn(sys, lib, name).Presence; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := moduleIn(sys, filepath.Join(dir, "none"), "wireguard").Presence; got != Unknown {
		t.Errorf("without lists of modules: %q", got)
	}
}

func TestParseSocket(t *testing.T) {
	for line, want := range map[string]string{
		"  1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 " +
			"x": "127.0.0.1:8080",
		"  1: 00000000000000000000000000000000:CA6C 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 4711 " +
			"1": "[::]:51820",
		"  1: 0100007F:1F90 0200007F:1000 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 x": "",
		"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode":   "",
		"  1: 0100007F 0200007F:1000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 x":      "",
	} {
		s, inode, ok := parseSocket("tcp", line)
		switch {
		case !ok && want == "":
		case !ok || s.Address.String() != want || inode != "4711":
			t.Errorf("%q: %v %s %v, want %q", line, s.Address, inode, ok, want)
		}
	}
}

// TestPrintable: any user may call a process what he likes, and root reads it on a terminal.
func TestPrintable(t *testing.T) {
	if got := printable("ngi\x1b[2Jnx\n"); got != "ngi?[2Jnx?" {
		t.Errorf("%q", got)
	}
}
