package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// A hundred at once, each from its own thread: Coil once took two minutes for eighty.
func TestAHundredAtOnce(t *testing.T) {
	n := 100
	if os.Getenv("SKEIN_WANT_KERNEL") == "1" { // an emulated guest is 10 to 30 times slower
		n = 10
	}
	host := newHost(t)
	pods := make([]*testns.NS, n)
	for i := range pods {
		pods[i] = testns.New(t, "pod")
	}
	took := make([]time.Duration, n)
	all := func(what string, f func(Attachment) error) time.Duration {
		start := time.Now()
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				host.Do(func() {
					began := time.Now()
					if err := f(attachment(i+1, pods[i])); err != nil {
						t.Errorf("%s: %v", what, err)
					}
					took[i] = time.Since(began)
				})
			})
		}
		wg.Wait()
		slices.Sort(took)
		t.Logf("%s: %s for all, p50 %s, p99 %s", what, time.Since(start), took[n/2], took[n*99/100])
		return time.Since(start)
	}
	// 0.3 s on two idle processors
	if d := all("add", func(a Attachment) error { _, err := Add(a); return err }); d > 10*time.Second {
		t.Errorf("a hundred at once took %s", d)
	}
	in(t, host, func() error {
		fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
		if len(fs) != 2*n {
			t.Errorf("%d addresses found, want %d", len(fs), 2*n)
		}
		return err
	})
	all("check", Check)
	all("del", func(a Attachment) error { return Del(a.NetNS, a.Key) })
	if left := links(t, host); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestMessagesOfAnAdd(t *testing.T) {
	for _, c := range []struct {
		name string
		v6   bool
		most int
	}{{"dual stack", true, 23}, {"IPv4 only", false, 15}} {
		host, pod := newHost(t), testns.New(t, "pod")
		a := attachment(1, pod)
		if !c.v6 {
			a.IPv6 = netip.Addr{}
		}
		least := 1000
		for range 5 { // a busy machine asks more often whether the kernel is ready
			in(t, host, func() error {
				_, n, err := add(a)
				least = min(least, n)
				return errors.Join(err, Del(a.NetNS, a.Key))
			})
		}
		t.Logf("%s: %d messages", c.name, least)
		if least > c.most {
			t.Errorf("%s: %d messages, want at most %d", c.name, least, c.most)
		}
	}
}

// BenchmarkAdd measures p50 and p99 of sequential Adds, among existing links.
func BenchmarkAdd(b *testing.B) {
	host := newHost(b)
	pods := make([]*testns.NS, min(b.N, 500))
	for i := range pods {
		pods[i] = testns.New(b, "pod")
	}
	var adds, dels []time.Duration
	b.ResetTimer()
	for i := range b.N {
		a := attachment(i%len(pods)+1, pods[i%len(pods)])
		host.Do(func() {
			if i >= len(pods) {
				began := time.Now()
				if err := Del(a.NetNS, a.Key); err != nil {
					b.Error(err)
				}
				dels = append(dels, time.Since(began))
			}
			began := time.Now()
			if _, err := Add(a); err != nil {
				b.Error(err)
			}
			adds = append(adds, time.Since(began))
		})
	}
	b.StopTimer()
	report := func(what string, ds []time.Duration) {
		if len(ds) == 0 {
			return
		}
		slices.Sort(ds)
		b.ReportMetric(float64(ds[len(ds)/2].Microseconds()), "µs-p50-"+what)
		b.ReportMetric(float64(ds[len(ds)*99/100].Microseconds()), "µs-p99-"+what)
	}
	report("add", adds)
	report("del", dels)
	host.Do(func() {
		began := time.Now()
		fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
		if err != nil {
			b.Error(err)
		}
		b.ReportMetric(float64(time.Since(began).Microseconds()), fmt.Sprintf("µs-scan-%d", len(fs)))
	})
}

// Other programs' links: found if they have a pod's route, and never removed except by the DEL of that pod.
func TestPodsOfOthers(t *testing.T) {
	host, pod, bystander := newHost(t), testns.New(t, "pod"), testns.New(t, "pod")
	coil, other := netip.MustParseAddr("10.64.9.9"), netip.MustParseAddr("10.64.9.8")
	testns.Link(host, pod, "eth0", nil, []netip.Prefix{netip.PrefixFrom(coil, 32)})
	in(t, host, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		// old kernels rename only what is down
		if err := errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "veth12345678"),
			netlink.LinkSetUp(l)); err != nil {
			return err
		}
		return exchange(newHostRoute(coil, l.Attrs().Index, defaultTable))
	})
	// no route, so not recognised as a pod's
	testns.Link(host, bystander, "eth0", nil, []netip.Prefix{netip.PrefixFrom(other, 32)})
	ours := mustAdd(t, host, attachment(1, testns.New(t, "pod")))
	in(t, host, func() error {
		fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
		if len(fs) != 3 || fs[1].Addr != coil || fs[1].Link != "veth12345678" || fs[1].ContainerID+fs[1].Pod+
			fs[1].Interface != "" {
			t.Errorf("found %+v", fs)
		}
		return err
	})
	in(t, host, func() error { return Purge(0) })
	if now := links(t, host); len(now) != 2 || slices.Contains(now, ours.Host) {
		t.Errorf("after purge: %q", now)
	}
	in(t, host, func() error { return Del(pathOf(bystander), Key{"unknown", "eth0"}) })
	if now := links(t, bystander); len(now) != 1 {
		t.Errorf("the interface of a stranger was deleted: %q", now)
	}
	in(t, host, func() error { return Del(pathOf(pod), Key{"of-coil", "eth0"}) })
	if now := links(t, pod); len(now) != 0 {
		t.Errorf("the pod that Coil made is still there: %q", now)
	}
}

// Coil's links are recognised by their alias, and removed only by the DEL of their own container.
func TestPodsOfCoil(t *testing.T) {
	host, pod := newHost(t), testns.New(t, "pod")
	v4 := netip.MustParseAddr("10.64.9.9")
	testns.Link(host, pod, "eth0", nil, []netip.Prefix{netip.PrefixFrom(v4, 32)})
	in(t, host, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "veth12345678"), netlink.LinkSetUp(l),
			netlink.LinkSetAlias(l, "COIL:default:0123abcd:eth0")); err != nil {
			return err
		}
		return exchange(newHostRoute(v4, l.Attrs().Index, defaultTable))
	})
	in(t, host, func() error {
		fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
		want := Found{Addr: v4, Link: "veth12345678", Key: Key{"0123abcd", "eth0"}, OfCoil: true}
		if len(fs) != 1 || fs[0] != want {
			t.Errorf("found %+v, want %+v", fs, want)
		}
		return err
	})
	in(t, host, func() error { return Purge(0) })
	in(t, host, func() error { return Del(pathOf(pod), Key{"another", "eth0"}) })
	if now := links(t, pod); len(now) != 1 {
		t.Fatalf("the pod's interface is gone, and nobody ended its container: %q", now)
	}
	in(t, host, func() error { return Del(pathOf(pod), Key{"0123abcd", "eth0"}) })
	if now := links(t, pod); len(now) != 0 {
		t.Errorf("the pod that Coil made is still there: %q", now)
	}
}

// A link that was read while it was being made, before it had its alias, is still attributed to its pod only.
func TestLinkReadBeforeItsAlias(t *testing.T) {
	host := newHost(t)
	ours, pair := attachment(1, testns.New(t, "pod")), attachment(2, testns.New(t, "pod"))
	mustAdd(t, host, pair)
	in(t, host, func() error {
		c, err := dial(nil)
		if err != nil {
			return err
		}
		defer c.close()
		before, err := c.links()
		if err != nil {
			return err
		}
		made, err := Add(ours)
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName(made.Host)
		if err != nil {
			return err
		}
		// as between its creation and its alias
		before[l.Attrs().Index] = link{index: l.Attrs().Index, name: made.Host, kind: "veth"}
		fs, err := c.pods(before, dataplane.DefaultNumbers().Link, 0)
		if err != nil {
			return err
		}
		if len(fs) != 4 {
			t.Errorf("found %+v", fs)
		}
		for _, f := range fs {
			if f.ContainerID != ours.ContainerID && f.ContainerID != pair.ContainerID || f.Interface != "eth0" {
				t.Errorf("found %+v, whose alias says more", f)
			}
		}
		return nil
	})
}

// A renamed link is found by its other end, and an address with a lost route is not free.
func TestRenamedAndRobbed(t *testing.T) {
	host, pod := newHost(t), testns.New(t, "pod")
	a := attachment(1, pod)
	l := mustAdd(t, host, a)
	in(t, host, func() error {
		h, err := netlink.LinkByName(l.Host)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetDown(h); err != nil { // takes the routes away
			return err
		}
		return netlink.LinkSetName(h, "renamed")
	})
	in(t, host, func() error {
		fs, err := Scan(dataplane.DefaultNumbers().Link, 0)
		if len(fs) != 2 || fs[0].Addr != a.IPv4 || fs[1].Addr != a.IPv6 || fs[0].ContainerID != a.ContainerID {
			t.Errorf("found %+v", fs)
		}
		return err
	})
	in(t, host, func() error { return Del(pathOf(pod), a.Key) })
	if left := append(links(t, host), links(t, pod)...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// exchange sends one message.
func exchange(r request) error {
	c, err := dial(nil)
	if err != nil {
		return err
	}
	defer c.close()
	_, err = c.do(r)
	return err
}
