package owners

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/internal/testns"
)

// Packets of a slot's address that two hosts send are told apart by their links' addresses; all others do not count.
func TestCapture(t *testing.T) {
	observer, one := testns.New(t, "see"), testns.New(t, "one")
	observer.Must("add a pair of links", func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(one.Handle)})
	})
	var mac [6]byte
	for _, c := range []struct {
		ns    *testns.NS
		addrs []string
	}{{observer, []string{"198.18.1.1/24", "2001:db8:1::1/64"}},
		{one, []string{"198.18.1.8/24", "198.18.1.9/24", "2001:db8:1::9/64"}}} {
		c.ns.Must("number links", func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			copy(mac[:], l.Attrs().HardwareAddr)
			for _, text := range c.addrs {
				a, err := netlink.ParseAddr(text)
				if err != nil {
					return err
				}
				a.Flags = 0x02 // IFA_F_NODAD
				if err := netlink.AddrAdd(l, a); err != nil {
					return err
				}
			}
			return netlink.LinkSetUp(l)
		})
	}
	w := Watch{NetNS: observer.Name, Link: "eth0", Port: 80, Nodes: map[[6]byte]string{mac: "one"},
		Slots: map[netip.Addr]string{netip.MustParseAddr("198.18.1.9"): "s", netip.MustParseAddr("2001:db8:1::9"): "s"}}
	c, err := Open(w)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	send := func(from, to string) {
		one.Must("send", func() error {
			local, err := net.ResolveUDPAddr("udp", from)
			if err != nil {
				return err
			}
			remote, err := net.ResolveUDPAddr("udp", to)
			if err != nil {
				return err
			}
			s, err := net.DialUDP("udp", local, remote)
			if err != nil {
				return err
			}
			defer s.Close()
			_, err = s.Write([]byte("x"))
			return err
		})
	}
	began := time.Now()
	send("198.18.1.8:0", "198.18.1.1:80")           // another source
	send("198.18.1.9:0", "198.18.1.1:81")           // another port
	send("198.18.1.9:0", "198.18.1.1:80")           //
	send("[2001:db8:1::9]:0", "[2001:db8:1::1]:80") //
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s, err := c.Seen()
		if err != nil {
			t.Fatal(err)
		}
		if s.Packets == 2 {
			r := s.Spells["s"]
			if len(r) != 1 || r[0].Node != "one" || r[0].Packets != 2 || r[0].First.Before(began.Add(-time.Second)) ||
				r[0].Last.After(time.Now()) || s.Lost != 0 {
				t.Errorf("%+v", s)
			}
			return
		}
		if time.Now().After(deadline) || s.Packets > 2 {
			t.Fatalf("%+v, want the two packets of the slot", s)
		}
	}
}

func TestPacketsTimesDoNotFollowATurnedClock(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for at, want := range map[time.Time]time.Time{
		now.Add(-time.Second): now.Add(-time.Second), now.Add(time.Millisecond): now.Add(time.Millisecond),
		now.Add(shortestJump): now, now.Add(-longestJump): now,
	} {
		if got := steady(at, now); !got.Equal(want) {
			t.Errorf("a packet of %s, read at %s, is taken to be of %s", at, now, got)
		}
	}
}
