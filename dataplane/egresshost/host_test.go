package egresshost

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

func TestDiff(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for _, c := range []struct {
		name         string
		want, actual []route
		add, gone    []route
	}{
		{"nothing", nil, nil, nil, nil},
		{"new", []route{{a, 1}}, nil, []route{{a, 1}}, nil},
		{"unchanged", []route{{a, 1}, {b, 2}}, []route{{a, 1}, {b, 2}}, nil, nil},
		{"another link is replaced", []route{{a, 2}}, []route{{a, 1}}, []route{{a, 2}}, nil},
		{"gone", []route{{b, 2}}, []route{{a, 1}, {b, 2}}, nil, []route{{a, 1}}},
	} {
		add, gone := diff(c.want, c.actual)
		if !slices.Equal(add, c.add) || !slices.Equal(gone, c.gone) {
			t.Errorf("%s: add %v, gone %v; want %v, %v", c.name, add, gone, c.add, c.gone)
		}
	}
}

const foreign = `table inet other {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 192.0.2.0/24 masquerade
	}
}
`

// What a gateway's namespace sends with its local address leaves its host with the host's own, answers come back, and a
// second look writes nothing.
func TestAGatewayHost(t *testing.T) {
	host, inner, outside := testns.New(t, "host"), testns.New(t, "inner"), testns.New(t, "outside")
	link := "sktest"
	local4, local6 := netip.MustParseAddr("169.254.101.1"), netip.MustParseAddr("fd73:6b65:696e:6567::1")
	near := []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24"), netip.MustParsePrefix("2001:db8:1::1/64")}
	far := []netip.Prefix{netip.MustParsePrefix("198.51.100.2/24"), netip.MustParsePrefix("2001:db8:1::2/64")}
	testns.Link(host, inner, link, []netip.Prefix{netip.MustParsePrefix("169.254.1.1/32"),
		netip.MustParsePrefix("fe80::1/64")},
		[]netip.Prefix{netip.PrefixFrom(local4, 32), netip.PrefixFrom(local6, 128), netip.MustParsePrefix("fe80::2/64")})
	testns.Link(host, outside, "up", near, far)
	ip := func(n *testns.NS, args ...string) string {
		t.Helper()
		out, err := exec.Command("ip", append([]string{"-n", n.Name}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	ip(inner, "route", "add", "169.254.1.1", "dev", link, "scope", "link")
	ip(inner, "route", "add", "default", "via", "169.254.1.1", "dev", link, "onlink")
	ip(inner, "-6", "route", "add", "default", "via", "fe80::1", "dev", link)
	host.Must("forward", func() error {
		_, err := forward(link)
		return err
	})
	host.Must("another program's table", func() error {
		c := exec.Command("nft", "-f", "-")
		c.Stdin = strings.NewReader(foreign)
		return c.Run()
	})
	ip(host, "rule", "add", "pref", "1999", "lookup", "77") // at our priority, and somebody else's

	spec := Spec{Routes: []dataplane.PodRoute{{Addr: local4, Link: link}, {Addr: local6, Link: link}}, Tunnel: "skein0",
		Uplinks: []string{"up", "gone"}}
	reconcile := func(s Spec, most int) {
		t.Helper()
		host.Must("reconcile", func() error {
			r, err := New(dataplane.Numbers{})
			if err != nil {
				return err
			}
			defer r.Close()
			n, err := r.Reconcile(s)
			if n > most {
				t.Errorf("%d writes, want at most %d", n, most)
			}
			return err
		})
	}
	reconcile(spec, 8)
	reconcile(spec, 0)

	for _, dst := range far {
		want := near[0].Addr()
		network := "udp4"
		if dst.Addr().Is6() {
			want, network = near[1].Addr(), "udp6"
		}
		var from netip.AddrPort
		outside.Must("listen", func() error {
			server, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst.Addr(), 7000)))
			if err != nil {
				return err
			}
			defer server.Close()
			var client *net.UDPConn
			inner.Must("dial", func() error {
				client, err = net.DialUDP(network, nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst.Addr(), 7000)))
				return err
			})
			if client == nil {
				return os.ErrInvalid
			}
			defer client.Close()
			_ = server.SetDeadline(time.Now().Add(5 * time.Second))
			_ = client.SetDeadline(time.Now().Add(5 * time.Second))
			buf := make([]byte, 16)
			if _, err := client.Write([]byte("out")); err != nil {
				return err
			}
			if _, from, err = server.ReadFromUDPAddrPort(buf); err != nil {
				return err
			}
			if _, err := server.WriteToUDPAddrPort([]byte("back"), from); err != nil {
				return err
			}
			_, err = client.Read(buf)
			return err
		})
		if from.Addr().Unmap() != want {
			t.Errorf("%s saw %s, want %s", dst, from.Addr(), want)
		}
	}

	ip(host, "route", "del", local4.String(), "table", "115")
	ip(host, "rule", "del", "pref", "1999", "lookup", "115")
	host.Must("somebody deletes our table", func() error {
		return exec.Command("nft", "delete", "table", "inet", "skein_egress").Run()
	})
	reconcile(spec, 3)
	if out := ip(host, "route", "show", "table", "115"); !strings.Contains(out, local4.String()) {
		t.Errorf("table 115 was not repaired: %s", out)
	}

	host.Must("purge", func() error { return Purge(dataplane.Numbers{}) })
	if out := ip(host, "route", "show", "table", "all"); strings.Contains(out, "table 115") {
		t.Errorf("left behind: %s", out)
	}
	if out := ip(host, "rule", "show", "pref", "1999"); strings.TrimSpace(out) != "1999:	from all lookup 77" {
		t.Errorf("rules at 1999: %q", out)
	}
	host.Must("nft", func() error {
		out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
		if strings.Contains(string(out), "skein") || !strings.Contains(string(out), "192.0.2.0/24 masquerade") {
			t.Errorf("nft after the purge: %s", out)
		}
		return err
	})
}
