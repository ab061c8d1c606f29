package podnet

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testns"
)

// echo answers UDP packets on port 7 of a namespace with the address that it saw as their source.
func echo(t testing.TB, n *testns.NS) {
	t.Helper()
	var c *net.UDPConn
	n.Must("echo", func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{Port: 7})
		return err
	})
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort([]byte(from.Addr().Unmap().String()), from)
		}
	}()
}

// ask sends one packet to the echo at an address and returns the source that it reports.
func ask(n *testns.NS, to netip.Addr) (source string, err error) {
	n.Do(func() {
		var c net.Conn
		if c, err = net.Dial("udp", netip.AddrPortFrom(to, 7).String()); err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err = c.Write([]byte("?")); err != nil {
			return
		}
		b := make([]byte, 100)
		var got int
		got, err = c.Read(b)
		source = string(b[:got])
	})
	return source, err
}

// The first packet arrives: Add has waited for the carrier and for duplicate address detection.
func TestPodsAndHostReachEachOtherAtOnce(t *testing.T) {
	host, one, two := newHost(t), testns.New(t, "pod"), testns.New(t, "pod")
	echo(t, host)
	a, b := attachment(1, one), attachment(2, two)
	echo(t, two)
	mustAdd(t, host, a)
	mustAdd(t, host, b)
	for _, c := range []struct {
		what   string
		from   *testns.NS
		to     netip.Addr
		source string
	}{
		{"pod to pod, IPv4", one, b.IPv4, a.IPv4.String()},
		{"pod to pod, IPv6", one, b.IPv6, a.IPv6.String()},
		{"pod to host, IPv4", one, netip.MustParseAddr("192.0.2.1"), a.IPv4.String()},
		{"pod to host, IPv6", one, netip.MustParseAddr("2001:db8::1"), a.IPv6.String()},
		{"host to pod, IPv4", host, b.IPv4, "192.0.2.1"}, // not 169.254.1.1
		{"host to pod, IPv6", host, b.IPv6, "2001:db8::1"},
	} {
		began := time.Now()
		source, err := ask(c.from, c.to)
		if took := time.Since(began); took > 500*time.Millisecond {
			t.Errorf("%s: the first packet took %s", c.what, took) // lost, and a neighbour asked for again after a second
		}
		if err != nil || source != c.source {
			t.Errorf("%s: source %q, want %q, error %v", c.what, source, c.source, err)
		}
	}
	for _, n := range []string{"net/ipv4/ip_forward", "net/ipv4/conf/all/forwarding", "net/ipv4/conf/up0/forwarding"} {
		in(t, host, func() error {
			v, err := os.ReadFile("/proc/sys/" + n)
			if strings.TrimSpace(string(v)) != "0" {
				t.Errorf("%s is now %s", n, v)
			}
			return err
		})
	}
}

// A pod cannot send with another pod's address.
func TestPodSendsWithItsOwnAddressOnly(t *testing.T) {
	host, one, two := newHost(t), testns.New(t, "pod"), testns.New(t, "pod")
	mustAdd(t, host, attachment(1, one))
	mustAdd(t, host, attachment(2, two))
	one.Address("eth0", netip.PrefixFrom(attachment(2, two).IPv4, 32))
	echo(t, host)
	// now it knows its gateway's MAC; resolving that would be blocked, too
	if _, err := ask(one, netip.MustParseAddr("192.0.2.1")); err != nil {
		t.Fatal(err)
	}
	before := rpDrops(t, host)
	one.Do(func() {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: attachment(2, two).IPv4.AsSlice()},
			&net.UDPAddr{IP: net.IP{192, 0, 2, 1}, Port: 7})
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		for deadline := time.Now().Add(5 * time.Second); rpDrops(t, host) == before && time.Now().Before(deadline); {
			_, _ = c.Write([]byte("?"))
			time.Sleep(5 * time.Millisecond)
		}
	})
	if rpDrops(t, host) == before {
		t.Error("no packet was dropped for its source")
	}
}

// rpDrops is the number of packets that the host's reverse path filter dropped.
func rpDrops(t *testing.T, n *testns.NS) int {
	t.Helper()
	var text []byte
	in(t, n, func() (err error) { text, err = os.ReadFile("/proc/thread-self/net/netstat"); return err })
	var names []string
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if i := slices.Index(names, "IPReversePathFilter"); i >= 0 && len(words) > i {
			v, err := strconv.Atoi(words[i])
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		names = words
	}
	t.Fatal("the kernel does not count packets dropped for their source")
	return 0
}

func TestWithoutIPv6(t *testing.T) {
	for _, where := range []string{"host", "pod"} {
		t.Run(where, func(t *testing.T) {
			host, pod := newHost(t), testns.New(t, "pod")
			n := map[string]*testns.NS{"host": host, "pod": pod}[where]
			n.Sysctl("net.ipv6.conf.all.disable_ipv6", "1")
			n.Sysctl("net.ipv6.conf.default.disable_ipv6", "1")
			a := attachment(1, pod)
			l := mustAdd(t, host, a)
			if l.Gateway6.IsValid() {
				t.Errorf("an IPv6 gateway %s", l.Gateway6)
			}
			echo(t, pod)
			if s, err := ask(host, a.IPv4); err != nil || s != "192.0.2.1" {
				t.Errorf("source %q, error %v", s, err)
			}
			in(t, host, func() error { return Check(a) })
			in(t, host, func() error { return Del(a.NetNS, a.Key) })
			a.IPv4 = netip.Addr{}
			in(t, host, func() error {
				if _, err := Add(a); !errors.Is(err, ErrNoIPv6) || !strings.Contains(err.Error(), "disable_ipv6") {
					t.Errorf("error %v", err)
				}
				return nil
			})
			if left := append(links(t, host), links(t, pod)...); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func setting(t *testing.T, n *testns.NS, link, name string) (v string) {
	t.Helper()
	in(t, n, func() (err error) { v, err = readSetting(link, name); return err })
	return v
}

// With the switch for the whole host, links that learned from router advertisements by default still do.
func TestForwardingKeepsLearning(t *testing.T) {
	host := newHost(t)
	testns.Link(host, testns.New(t, "out"), "up1", nil, nil)
	host.Sysctl("net.ipv6.conf.up1.accept_ra", "0")
	for range 2 {
		in(t, host, forwardAll)
		for _, c := range []struct{ link, name, want string }{
			{"all", "forwarding", "1"}, {"up0", "forwarding", "1"}, {"up0", "accept_ra", "2"}, {"up1", "accept_ra", "0"},
			{"default", "accept_ra", "2"},
		} {
			if v := setting(t, host, c.link, c.name); v != c.want {
				t.Errorf("%s.%s is %s, want %s", c.link, c.name, v, c.want)
			}
		}
	}
	// A pod's link still does not learn.
	pod := testns.New(t, "pod")
	l := mustAdd(t, host, attachment(1, pod))
	if v := setting(t, host, l.Host, "accept_ra"); v != "0" {
		t.Errorf("accept_ra of the pod's link is %s", v)
	}
	mustAdd(t, host, attachment(2, testns.New(t, "pod")))
	echo(t, pod)
	if _, err := ask(host, attachment(1, pod).IPv6); err != nil {
		t.Error(err)
	}
}

// If the kernel can forward IPv6 per link, nothing else on the host changes; a pod with only IPv4 changes nothing.
func TestForwardingOfTheHostStays(t *testing.T) {
	host, pod := newHost(t), testns.New(t, "pod")
	a := attachment(1, pod)
	a.IPv6 = netip.Addr{}
	mustAdd(t, host, a)
	if v := setting(t, host, "all", "forwarding"); v != "0" {
		t.Errorf("a pod without IPv6 switched IPv6 forwarding to %s", v)
	}
	l := mustAdd(t, host, attachment(2, testns.New(t, "pod")))
	single := false
	in(t, host, func() error {
		_, err := os.Stat(settings6 + l.Host + "/force_forwarding")
		single = err == nil
		return nil
	})
	want := map[bool]string{true: "0", false: "1"}[single]
	if v := setting(t, host, "all", "forwarding"); v != want {
		t.Errorf("all.forwarding is %s, want %s", v, want)
	}
	if v := setting(t, host, "up0", "accept_ra"); single && v != "1" || !single && v != "2" {
		t.Errorf("up0.accept_ra is %s", v)
	}
}

// The test binary reruns itself without the capability, in the host's namespace: all threads of a process lose it
// together.
func TestMissingRights(t *testing.T) {
	const path = "SKEIN_TEST_NETNS"
	if netns := os.Getenv(path); netns != "" {
		_, err := Add(Attachment{Key: Key{ContainerID: "c", Interface: "eth0"}, NetNS: netns, MTU: 1420,
			IPv4: netip.MustParseAddr("10.64.0.1")})
		if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), os.Getenv("SKEIN_TEST_WORDS")) {
			t.Errorf("error %v", err)
		}
		return
	}
	host, pod := newHost(t), testns.New(t, "pod")
	for words, right := range map[string]uintptr{"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN,
		"CAP_NET_ADMIN": unix.CAP_NET_ADMIN} {
		host.Do(func() {
			// of this thread, which ends with its goroutine
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, right, 0, 0, 0); err != nil {
				t.Error(err)
				return
			}
			c := exec.Command(os.Args[0], "-test.run=^TestMissingRights$", "-test.v")
			c.Env = append(os.Environ(), path+"="+pathOf(pod), "SKEIN_TEST_WORDS="+words)
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestMissingRights") {
				t.Errorf("without %s: %v\n%s", words, err, out)
			}
		})
		if left := append(links(t, host), links(t, pod)...); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
}
