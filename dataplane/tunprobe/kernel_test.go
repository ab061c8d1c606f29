package tunprobe_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/testgw"
	"github.com/skeinmesh/skein/dataplane/tunprobe"
)

const limit = 10 * time.Second

var (
	own  = tunprobe.Source{IPv4: netip.MustParseAddr("169.254.102.1"), IPv6: netip.MustParseAddr("fd73:6b65:696e:6568::1")}
	slot = tunprobe.Source{IPv4: netip.MustParseAddr("169.254.102.2"), IPv6: netip.MustParseAddr("fd73:6b65:696e:6568::2")}
)

func scene(t *testing.T) (*testgw.Scene, *tunprobe.Prober) {
	t.Helper()
	s := testgw.New(t)
	s.Return(s.A)
	p, err := tunprobe.Open(tunprobe.Options{NetNS: testgw.Path(s.A.NS), Source: own,
		Slots: map[int]tunprobe.Source{3: slot},
		Log:   slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	s.Target.Must("listening", func() error {
		l, err := net.Listen("tcp", ":80")
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	return s, p
}

func ping(p *tunprobe.Prober, slot int, target string, wait time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	return p.Ping(ctx, slot, target)
}

func TestTargetsAreReachedThroughTheGateway(t *testing.T) {
	s, p := scene(t)
	var all []string
	for _, a := range []netip.Addr{testgw.Target4, testgw.Target6} {
		all = append(all, "icmp:"+a.String(), "tcp:"+netip.AddrPortFrom(a, 80).String(),
			"tcp:"+netip.AddrPortFrom(a, 81).String())
	}
	for _, target := range all {
		for _, slot := range []int{tunprobe.NoSlot, 3} {
			rtt, err := ping(p, slot, target, limit)
			if err != nil || rtt <= 0 {
				t.Errorf("%s for slot %d: %v", target, slot, err)
			}
			t.Logf("%s for slot %d: %v", target, slot, rtt)
		}
	}
	if _, err := ping(p, 4, all[0], limit); err == nil {
		t.Error("a slot without a source asks")
	}
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			if _, err := ping(p, tunprobe.NoSlot, all[i%len(all)], limit); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	s.A.Stop() // what clients' packets meet, probes meet as well
	for _, target := range all {
		if rtt, err := ping(p, tunprobe.NoSlot, target, 50*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s through a stopped gateway: %v, %v", target, rtt, err)
		}
	}
}

func TestNoRoute(t *testing.T) {
	_, p := scene(t)
	for _, target := range []string{"icmp:198.51.100.1", "tcp:198.51.100.1:80", "icmp:2001:db8:ff::1",
		"tcp:[2001:db8:ff::1]:80"} {
		if _, err := ping(p, tunprobe.NoSlot, target, limit); !errors.Is(err, tunprobe.ErrUnreachable) {
			t.Errorf("%s: %v", target, err)
		}
	}
}

func TestManyThatNobodyAnswers(t *testing.T) {
	s, p := scene(t)
	s.A.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	results := make(chan error, tunprobe.MaxProbes+1)
	for range tunprobe.MaxProbes + 1 {
		go func() {
			_, err := p.Ping(ctx, tunprobe.NoSlot, "icmp:"+testgw.Target4.String())
			results <- err
		}()
	}
	if err := <-results; !errors.Is(err, tunprobe.ErrBusy) {
		t.Errorf("one more than the most: %v", err)
	}
	cancel()
	for range tunprobe.MaxProbes {
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
	}
}

func TestRoutesAndLifeOfTheDevice(t *testing.T) {
	s, p := scene(t)
	if other, err := tunprobe.Open(tunprobe.Options{NetNS: testgw.Path(s.A.NS), Source: own,
		Log: slog.Default()}); err == nil {
		other.Close()
		t.Error("two have the device")
	}
	s.A.Must("routes", func() error {
		l, err := netlink.LinkByName(tunprobe.Link)
		if err != nil {
			return err
		}
		for _, table := range []int{unix.RT_TABLE_MAIN, dataplane.GatewayTable} {
			found := map[string]bool{}
			for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
				routes, err := netlink.RouteListFiltered(family,
					&netlink.Route{Table: table, LinkIndex: l.Attrs().Index, Protocol: 30},
					netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
				if err != nil {
					return err
				}
				for _, r := range routes {
					found[r.Dst.IP.String()] = true
				}
			}
			for _, a := range []netip.Addr{own.IPv4, own.IPv6, slot.IPv4, slot.IPv6} {
				if !found[a.String()] {
					t.Errorf("table %d has no route to %s", table, a)
				}
			}
		}
		return nil
	})
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	s.A.Do(func() {
		if _, err := netlink.LinkByName(tunprobe.Link); err == nil {
			t.Error("the device is still there")
		}
	})
	if _, err := ping(p, tunprobe.NoSlot, "icmp:192.0.2.10", limit); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a closed prober: %v", err)
	}
}
