package portmap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/natpmp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/pcp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/upnp"
)

func TestEpoch(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	tests := []struct {
		name          string
		before, now   uint32
		elapsed       time.Duration
		lost, unknown bool
	}{
		{name: "in step", before: 100, now: 160, elapsed: time.Minute},
		{name: "a second off", before: 100, now: 99},
		{name: "the first word", now: 5, unknown: true},
		{name: "started anew", before: 100, now: 3, elapsed: time.Minute, lost: true},
		{name: "started anew, and longer up than before", before: 100, now: 3700, elapsed: 2 * time.Hour, lost: true},
		{name: "too fast", before: 100, now: 300, elapsed: time.Minute, lost: true},
		{name: "a clock that is a little wrong", before: 100, now: 100 + 3600, elapsed: 3700 * time.Second},
		{name: "at the end of time", before: 1<<32 - 1, now: 1<<32 - 1},
	}
	for _, tt := range tests {
		e := epoch{tt.before, start}
		if tt.unknown {
			e = epoch{}
		}
		if got := e.lost(epoch{tt.now, start.Add(tt.elapsed)}); got != tt.lost {
			t.Errorf("%s: lost %v", tt.name, got)
		}
	}
}

func TestUseless(t *testing.T) {
	for outer, want := range map[string]string{
		"11.22.33.4:51820":  "",
		"203.0.113.4:51820": "", // laboratories are made of documentation's addresses
		"11.22.33.4:0":      "port 0",
		"0.0.0.0:51820":     "it has none",
		"127.0.0.1:51820":   "it has none",
		"224.0.0.1:51820":   "it has none",
		"169.254.3.4:51820": "it has none",
		"10.0.0.7:51820":    "double NAT",
		"192.168.0.7:51820": "double NAT",
		"100.64.9.9:51820":  "double NAT",
	} {
		err := useless(netip.MustParseAddrPort(outer))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", outer, err, want)
		}
	}
}

func TestChoose(t *testing.T) {
	ip := netip.MustParseAddr
	four := candidate.Gateway{Addr: ip("192.168.1.1"), Local: ip("192.168.1.2")}
	six := candidate.Gateway{Addr: ip("fe80::1%eth0"), Local: ip("2001:db8::2")}
	open := candidate.Gateway{Addr: ip("203.0.113.1"), Local: ip("203.0.113.2")}
	tests := []struct {
		gateways []candidate.Gateway
		want     string
	}{
		{[]candidate.Gateway{six, four}, ""},
		{[]candidate.Gateway{six}, "no IPv4 gateway"},
		{nil, "no IPv4 gateway"},
		{[]candidate.Gateway{open, four}, "not needed"},
	}
	for _, tt := range tests {
		g, why := choose(candidate.Host{Gateways: tt.gateways})
		if (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) || why == "" && g != four {
			t.Errorf("%v: %v, %q", tt.gateways, g, why)
		}
	}
}

func TestSilenceIsNoRefusal(t *testing.T) {
	for err, want := range map[error]bool{
		fmt.Errorf("gateway: %w", ask.ErrNoAnswer):            false,
		errors.New("connection reset by peer"):                false,
		pcp.ErrGarbled:                                        false,
		fmt.Errorf("x: %w", &pcp.RefusedError{Code: 2}):       true,
		fmt.Errorf("x: %w", natpmp.RefusedError(2)):           true,
		fmt.Errorf("x: %w", &upnp.RefusedError{Code: 606}):    true,
		useless(netip.MustParseAddrPort("10.0.0.1:1")):        true,
		fmt.Errorf("x: %w", upnp.ErrLost):                     true,
		fmt.Errorf("gateway 192.168.1.1: %w", pcp.ErrVersion): true,
	} {
		if final(err) != want {
			t.Errorf("%v: final %v", err, !want)
		}
	}
}

func TestRenewalIsDueAtHalfTime(t *testing.T) {
	s, err := New(Config{Port: 51820, Protocols: Protocols})
	if err != nil {
		t.Fatal(err)
	}
	outer := netip.MustParseAddrPort("11.22.33.4:51820")
	for _, tt := range []struct {
		age, lifetime, want time.Duration
	}{
		{0, 2 * time.Hour, checkEvery},
		{59*time.Minute + 30*time.Second, 2 * time.Hour, 30 * time.Second},
		{90 * time.Minute, 2 * time.Hour, 15 * time.Minute}, // the router is silent: half of what is left
		{2*time.Hour - 5*time.Second, 2 * time.Hour, retryLeast},
		{0, 30 * time.Second, 15 * time.Second},
	} {
		s.lease = &lease{protocol: PCP, outer: outer, granted: time.Now().Add(-tt.age), lifetime: tt.lifetime}
		if f := s.found(); (f.Again-tt.want).Abs() > time.Second || len(f.Candidates) != 1 {
			t.Errorf("%s into a lease of %s: again after %s, want %s", tt.age, tt.lifetime, f.Again, tt.want)
		}
	}
	if _, err := New(Config{Protocols: []string{"ssdp"}}); err == nil {
		t.Error("an unknown protocol was taken")
	}
}

func TestAnnouncementsOfOthersAreNotHeard(t *testing.T) {
	woken := 0
	a := &announcements{}
	router := netip.MustParseAddr("192.168.1.1")
	a.handle(announced, router)
	a.follow(router, func() { woken++ })
	a.handle(announced, netip.MustParseAddr("192.168.1.9"))
	a.handle([]byte("nonsense"), router)
	if woken != 0 {
		t.Errorf("woken %d times by what is not an announcement of this router", woken)
	}
}

// announced is a router's word by NAT-PMP that its address outside is 11.22.33.4 and that it has just started.
var announced = []byte{0, 128, 0, 0, 0, 0, 0, 1, 11, 22, 33, 4}

// A router that starts twice within moments is asked again after the second time too, and a flood wakes once in five
// seconds.
func TestAnnouncementsThatComeSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var woken []time.Duration
		began := time.Now()
		a := &announcements{}
		router := netip.MustParseAddr("192.168.1.1")
		a.follow(router, func() { woken = append(woken, time.Since(began)) })
		for range 120 {
			a.handle(announced, router)
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		a.handle(announced, router)
		a.handle(announced, router)
		a.close()
		time.Sleep(time.Minute)
		if want := []time.Duration{0, announceGap, 2 * announceGap, 3 * announceGap,
			72 * time.Second}; !slices.Equal(woken, want) {
			t.Errorf("woken at %v, want %v", woken, want)
		}
	})
}
