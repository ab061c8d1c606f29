package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// pathOf is the path of a test's namespace.
func pathOf(n *testns.NS) string { return "/var/run/netns/" + n.Name }

// newHost is a namespace with the rule for the pods' table and its own address.
func newHost(t testing.TB) *testns.NS {
	t.Helper()
	n := testns.New(t, "host")
	testns.Link(n, testns.New(t, "out"), "up0", []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"),
		netip.MustParsePrefix("2001:db8::1/64")}, nil)
	n.Must("host's rules", func() error {
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Table, r.Protocol = f, dataplane.DefaultNumbers().PodRule(),
				dataplane.DefaultNumbers().PodTable(), dataplane.RouteProtocol
			if err := netlink.RuleAdd(r); err != nil && !(f == unix.AF_INET6 && errors.Is(err, unix.EAFNOSUPPORT)) {
				return err
			}
		}
		return nil
	})
	return n
}

// attachment of the n-th pod, dual stack.
func attachment(n int, ns *testns.NS) Attachment {
	return Attachment{
		Key: Key{ContainerID: fmt.Sprintf("%064x", n), Interface: "eth0"}, NetNS: pathOf(ns), MTU: 1420, Namespace: "default",
		Pod:  fmt.Sprintf("pod-%d", n),
		IPv4: netip.AddrFrom4([4]byte{10, 64, byte(n >> 8), byte(n)}),
		IPv6: netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x64, 14: byte(n >> 8), 15: byte(n)}),
	}
}

// in runs f on a thread of the host.
func in(t testing.TB, host *testns.NS, f func() error) {
	t.Helper()
	host.Must("test", f)
}

func mustAdd(t testing.TB, host *testns.NS, a Attachment) (l Link) {
	t.Helper()
	in(t, host, func() (err error) { l, err = Add(a); return err })
	return l
}

// links lists a namespace's links, except lo and up0.
func links(t testing.TB, n *testns.NS) (names []string) {
	t.Helper()
	in(t, n, func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			if a := l.Attrs().Name; a != "lo" && a != "up0" {
				names = append(names, a)
			}
		}
		return err
	})
	return names
}

func TestAddMakesAllAndDelLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Attachment)
		addrs  int
	}{
		{"dual stack", func(*Attachment) {}, 2},
		{"IPv4 only", func(a *Attachment) { a.IPv6 = netip.Addr{} }, 1},
		{"IPv6 only", func(a *Attachment) { a.IPv4 = netip.Addr{} }, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, pod := newHost(t), testns.New(t, "pod")
			a := attachment(7, pod)
			c.change(&a)
			l := mustAdd(t, host, a)
			if l.Host != HostLink(a.Key) || l.Gateway6.IsValid() != a.IPv6.IsValid() {
				t.Errorf("link %+v", l)
			}
			in(t, host, func() error {
				h, err := netlink.LinkByName(l.Host)
				if err == nil && h.Attrs().HardwareAddr.String() != l.HostMAC.String() {
					t.Errorf("MAC of the host's end is %s, not %s", h.Attrs().HardwareAddr, l.HostMAC)
				}
				return err
			})
			in(t, host, func() error { return Check(a) })
			in(t, host, func() error {
				fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
				if len(fs) != c.addrs || fs[0].Pod != "pod-7" || fs[0].ContainerID != a.ContainerID || fs[0].Link != l.Host ||
					fs[0].Interface != "eth0" || fs[0].Namespace != "default" {
					t.Errorf("found %+v", fs)
				}
				return err
			})
			for range 2 {
				in(t, host, func() error { return Del(a.NetNS, a.Key) })
			}
			if left := append(links(t, host), links(t, pod)...); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			in(t, host, func() error {
				if err := Check(a); !errors.Is(err, ErrDiffers) {
					t.Errorf("check after the end: %v", err)
				}
				fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
				if len(fs) > 0 {
					t.Errorf("found %+v", fs)
				}
				return err
			})
		})
	}
}

// Blocks of one address, and ends of egress tunnels, are on other hosts: the pods' table routes them through the
// overlay's link.
func TestWhatIsLedThroughTheOverlayIsNoPod(t *testing.T) {
	host := newHost(t)
	testns.Link(host, testns.New(t, "over"), dataplane.DefaultNumbers().Link, nil, nil)
	in(t, host, func() error {
		for i, name := range []string{dataplane.DefaultNumbers().Link, "up0"} {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			for _, to := range []string{"10.100.0.%d/32", "fd00:100::%d/128"} {
				dst := netlink.NewIPNet(netip.MustParsePrefix(fmt.Sprintf(to, i)).Addr().AsSlice())
				if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst,
					Table: dataplane.DefaultNumbers().PodTable(), Protocol: dataplane.RouteProtocol}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	var addrs []string
	in(t, host, func() error {
		found, err := Scan(dataplane.DefaultNumbers().Link, 0)
		for _, f := range found {
			addrs = append(addrs, f.Addr.String()+" "+f.Link)
		}
		return err
	})
	if want := []string{"10.100.0.1 up0", "fd00:100::1 up0"}; !slices.Equal(addrs, want) {
		t.Errorf("found %q, want %q", addrs, want)
	}
}

func TestDelOfWhatIsGone(t *testing.T) {
	host := newHost(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", "/no/such/file", file, "/proc/self/ns/uts", pathOf(host)} {
		in(t, host, func() error { return Del(path, Key{"gone", "eth0"}) })
	}
	in(t, host, func() error { return Del("", Key{"", "no/interface"}) })
}

// A failed Add leaves the pod and the host unchanged.
func TestFailedAddLeavesNothing(t *testing.T) {
	host, pod, other := newHost(t), testns.New(t, "pod"), testns.New(t, "pod")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mustAdd(t, host, attachment(1, other))
	before := links(t, host)
	testns.Link(pod, testns.New(t, "out"), "eth9", nil, nil)
	for _, c := range []struct {
		name   string
		change func(*Attachment)
		want   error
		words  string
	}{
		{"interface exists", func(a *Attachment) { a.Interface = "eth9" }, ErrExists, "interface eth9 exists already in " +
			"the pod"},
		{"attachment exists", func(a *Attachment) { a.ContainerID = attachment(1, pod).ContainerID }, ErrExists,
			"delete the attachment first"},
		{"IPv4 in use", func(a *Attachment) { a.IPv4 = attachment(1, pod).IPv4 }, ErrAddressInUse, "10.64.0.1"},
		{"IPv6 in use", func(a *Attachment) { a.IPv6 = attachment(1, pod).IPv6 }, ErrAddressInUse, "fd64::1"},
		{"no path", func(a *Attachment) { a.NetNS = "" }, ErrNoNetNS, "empty"},
		{"missing path", func(a *Attachment) { a.NetNS = "/no/such/file" }, ErrNoNetNS,
			"/no/such/file: there is no such file"},
		{"a file", func(a *Attachment) { a.NetNS = file }, ErrNoNetNS, "a file of another kind"},
		{"a directory", func(a *Attachment) { a.NetNS = "/" }, ErrNoNetNS, "a file of another kind"},
		{"another namespace", func(a *Attachment) { a.NetNS = "/proc/self/ns/uts" }, ErrNoNetNS,
			"a namespace of another kind"},
		{"the host's own", func(a *Attachment) { a.NetNS = pathOf(host) }, ErrNoNetNS, "the host's own"},
		{"no address", func(a *Attachment) { a.IPv4, a.IPv6 = netip.Addr{}, netip.Addr{} }, ErrInvalid, "no address"},
		{"loopback", func(a *Attachment) { a.IPv4 = netip.MustParseAddr("127.0.0.1") }, ErrInvalid, "127.0.0.1"},
		{"multicast", func(a *Attachment) { a.IPv6 = netip.MustParseAddr("ff02::1") }, ErrInvalid, "ff02::1"},
		{"wrong family", func(a *Attachment) { a.IPv4 = a.IPv6 }, ErrInvalid, "IPv4"},
		{"long name", func(a *Attachment) { a.Interface = "interface-number1" }, ErrInvalid, "1 to 15 characters"},
		{"slash", func(a *Attachment) { a.Interface = "../x" }, ErrInvalid, "../x"},
		{"lo", func(a *Attachment) { a.Interface = "lo" }, ErrInvalid, "lo"},
		{"container ID", func(a *Attachment) { a.ContainerID = strings.Repeat("x", 65) }, ErrInvalid, "container ID"},
		{"MTU", func(a *Attachment) { a.MTU = 1279 }, ErrInvalid, "at least 1280"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := attachment(2, pod)
			c.change(&a)
			in(t, host, func() error {
				if _, err := Add(a); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.words) {
					t.Errorf("error %v, want %q", err, c.words)
				} else {
					t.Log(err)
				}
				return nil
			})
			if now := links(t, host); !slices.Equal(before, now) {
				t.Errorf("links of the host: %q, were %q", now, before)
			}
			if now := links(t, pod); !slices.Equal(now, []string{"eth9"}) {
				t.Errorf("links of the pod: %q", now)
			}
		})
	}
	in(t, host, func() error { return Check(attachment(1, other)) })
}
