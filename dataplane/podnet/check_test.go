package podnet

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

func withLink(name string, f func(netlink.Link) error) func() error {
	return func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(l)
	}
}

// withoutRoutes deletes a link's routes of a table and family.
func withoutRoutes(name string, family, table int) func() error {
	return withLink(name, func(l netlink.Link) error {
		rs, err := netlink.RouteListFiltered(family, &netlink.Route{Table: table, LinkIndex: l.Attrs().Index},
			netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
		for _, r := range rs {
			if e := netlink.RouteDel(&r); e != nil {
				return e
			}
		}
		return err
	})
}

func TestCheckSeesEverything(t *testing.T) {
	for _, c := range []struct {
		name   string
		inside bool // the pod
		do     func(Link, Attachment) func() error
		words  []string
	}{
		{"link gone", false, func(l Link, a Attachment) func() error { return withLink(l.Host, netlink.LinkDel) },
			[]string{"is not on the host", "no interface eth0 in the pod", "no route to 10.64.0.1", "no route to fd64::1"}},
		{"host's end down", false, func(l Link, a Attachment) func() error { return withLink(l.Host, netlink.LinkSetDown) },
			[]string{"link " + HostLink(attachment(1, &testns.NS{}).Key) + " is down", "no route to 10.64.0.1",
				"no route to fd64::1"}},
		{"host's MTU", false, func(l Link, a Attachment) func() error {
			return withLink(l.Host, func(n netlink.Link) error { return netlink.LinkSetMTU(n, 1400) })
		}, []string{"is 1400, not 1420"}},
		{"host's IPv4 route", false, func(l Link, a Attachment) func() error {
			return withoutRoutes(l.Host, unix.AF_INET, dataplane.DefaultNumbers().PodTable())
		}, []string{"no route to 10.64.0.1"}},
		{"host's IPv6 route", false, func(l Link, a Attachment) func() error {
			return withoutRoutes(l.Host, unix.AF_INET6, dataplane.DefaultNumbers().PodTable())
		}, []string{"no route to fd64::1"}},
		{"gateways", false, func(l Link, a Attachment) func() error {
			return withLink(l.Host, func(n netlink.Link) error {
				as, err := netlink.AddrList(n, netlink.FAMILY_ALL)
				for _, x := range as {
					if e := netlink.AddrDel(n, &x); e != nil {
						return e
					}
				}
				return err
			})
		}, []string{"no address 169.254.1.1", "no address fe80::1"}},
		{"forwarding", false, func(l Link, a Attachment) func() error {
			return func() error {
				return os.WriteFile("/proc/sys/net/ipv4/conf/"+l.Host+"/forwarding", []byte("0"), 0o644)
			}
		}, []string{"does not forward IPv4"}},
		{"pod's end down", true, func(Link, Attachment) func() error { return withLink("eth0", netlink.LinkSetDown) },
			[]string{"eth0 in the pod is down", "no default route via 169.254.1.1", "no route to 169.254.1.1"}},
		{"lo down", true, func(Link, Attachment) func() error { return withLink("lo", netlink.LinkSetDown) },
			[]string{"lo in the pod is down"}},
		{"pod's MTU", true, func(Link, Attachment) func() error {
			return withLink("eth0", func(n netlink.Link) error { return netlink.LinkSetMTU(n, 1300) })
		}, []string{"eth0 in the pod is 1300, not 1420"}},
		{"pod's addresses", true, func(Link, Attachment) func() error {
			return withLink("eth0", func(n netlink.Link) error {
				as, err := netlink.AddrList(n, netlink.FAMILY_ALL)
				for _, x := range as {
					if e := netlink.AddrDel(n, &x); e != nil {
						return e
					}
				}
				return err
			})
		}, []string{"lacks the address 10.64.0.1", "lacks the address fd64::1"}},
		{"pod's IPv4 routes", true, func(Link, Attachment) func() error {
			return withoutRoutes("eth0", unix.AF_INET, unix.RT_TABLE_MAIN)
		},
			[]string{"no default route via 169.254.1.1", "no route to 169.254.1.1"}},
		{"pod's IPv6 routes", true, func(Link, Attachment) func() error {
			return withoutRoutes("eth0", unix.AF_INET6, unix.RT_TABLE_MAIN)
		},
			[]string{"no default route via fe80::1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, pod := newHost(t), testns.New(t, "pod")
			a := attachment(1, pod)
			l := mustAdd(t, host, a)
			in(t, host, func() error { return Check(a) })
			n := host
			if c.inside {
				n = pod
			}
			in(t, n, c.do(l, a))
			in(t, host, func() error {
				err := Check(a)
				if !errors.Is(err, ErrDiffers) {
					t.Errorf("error %v", err)
					return nil
				}
				for _, w := range c.words {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("%q is missing in %v", w, err)
					}
				}
				return nil
			})
		})
	}
}

func TestCheckOfAPodWithoutNamespace(t *testing.T) {
	host, pod := newHost(t), testns.New(t, "pod")
	a := attachment(1, pod)
	mustAdd(t, host, a)
	a.NetNS = "/no/such/file"
	in(t, host, func() error {
		if err := Check(a); !errors.Is(err, ErrDiffers) || !strings.Contains(err.Error(), "/no/such/file") {
			t.Errorf("error %v", err)
		}
		return nil
	})
}

func TestAliasIsReadBack(t *testing.T) {
	word := func(most int) *rapid.Generator[string] {
		return rapid.StringMatching(`[a-z0-9]([a-z0-9.-]*[a-z0-9])?`).Filter(func(s string) bool { return len(s) <= most })
	}
	rapid.Check(t, func(t *rapid.T) {
		a := Attachment{Table: rapid.SampledFrom([]int{0, 1, 126, 252}).Draw(t, "table"),
			Key: Key{word(64).Draw(t, "id"),
				word(15).Filter(func(s string) bool { return s != "lo" }).Draw(t, "interface")},
			Namespace: word(63).Draw(t, "namespace"), Pod: word(253).Draw(t, "pod")}
		if rapid.Bool().Draw(t, "v4") {
			a.IPv4 = netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "IPv4")))
		}
		if rapid.Bool().Draw(t, "v6") {
			a.IPv6 = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "IPv6")))
		}
		if rapid.Bool().Draw(t, "long") {
			a.Pod = strings.Repeat("p", 253)
		}
		s := a.Alias()
		got, ok := ParseAlias(s)
		if cut, was := strings.CutSuffix(got.Pod, "~"); was && len(s) == 255 && strings.HasPrefix(a.Pod, cut) {
			got.Pod = a.Pod
		}
		if !ok || got != a || len(s) > 255 {
			t.Errorf("%d bytes %q: %+v %v", len(s), s, got, ok)
		}
	})
}

func FuzzParseAlias(f *testing.F) {
	f.Add("skein/1 c eth0 10.0.0.1 fd00::1 default pod")
	f.Add("skein/1 c eth0 - - - -")
	f.Add("uplink to the switch")
	f.Fuzz(func(t *testing.T, s string) {
		a, ok := ParseAlias(s)
		if !ok {
			return
		}
		if again, ok := ParseAlias(a.Alias()); len(s) <= 255 && (!ok || again != a) {
			t.Errorf("%q: %+v, then %+v %v", s, a, again, ok)
		}
	})
}
