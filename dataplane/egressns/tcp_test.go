package egressns

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// tcpEcho answers each connection at the target with a line containing the source address, and then echoes all data.
func (s *scene) tcpEcho(a netip.Addr) {
	var l net.Listener
	s.target.Must("listening", func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(a, echoPort).String())
		return err
	})
	s.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintln(c, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr())
				io.Copy(c, c)
			}()
		}
	}()
}

// connect is a TCP connection from the client's namespace, nil when there is none in time.
func (s *scene) connect(from, to netip.Addr, within time.Duration) net.Conn {
	s.t.Helper()
	var c net.Conn
	s.client.Do(func() {
		ctx, cancel := context.WithTimeout(s.t.Context(), within)
		defer cancel()
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
		c, _ = d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, echoPort).String())
	})
	if c != nil {
		s.t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(60 * time.Second))
	}
	return c
}

// TestTCP: much data in both directions, in segments that fit into the tunnel.
func TestTCP(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	s.grant(0, time.Minute)
	for _, x := range []struct{ client, target, source netip.Addr }{{client4, target4, source4},
		{client6, target6, source6}} {
		s.tcpEcho(x.target)
		c := s.connect(x.client, x.target, 10*time.Second)
		if c == nil {
			t.Fatalf("no connection from %s to %s\n%s", x.client, x.target, s.state())
		}
		data := bytes.Repeat([]byte("0123456789abcdef"), 1<<15)
		go func() {
			c.Write(data)
			c.(*net.TCPConn).CloseWrite()
		}()
		got, err := io.ReadAll(c)
		seen, rest, _ := bytes.Cut(got, []byte("\n"))
		if string(seen) != x.source.String() || !bytes.Equal(rest, data) || err != nil {
			t.Errorf("the target sees %q, want %s; %d bytes of %d came back; %v", seen, x.source, len(rest), len(data), err)
		}
	}
}

// TestProbes: a health probe of a slot needs its lease and has its source. One of a gateway without a slot uses the
// namespace's own address, needs no lease, and is TCP or ICMP.
func TestProbes(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	slot0, nobodys := ProbeSource(0, false), ProbeSource(-1, false)
	s.client.Must("the probe's device", func() error {
		h, err := netns.GetFromPath(s.file)
		if err != nil {
			return err
		}
		defer h.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name = Probe
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: Probe, PeerNamespace: netlink.NsFd(h)})
	})
	f, err := os.Open(s.file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := inside(f, func() error {
		l, err := netlink.LinkByName(Probe)
		if err != nil {
			return err
		}
		a, _ := netlink.ParseAddr("169.254.102.254/24")
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	}); err != nil {
		t.Fatal(err)
	}
	s.client.Address(Probe, netip.PrefixFrom(slot0, 24), netip.PrefixFrom(nobodys, 24))
	route(s.client, target4.String()+"/32", "169.254.102.254", Probe)
	s.tcpEcho(target4)
	sees := func(c net.Conn) string {
		b := make([]byte, 64)
		n, _ := c.Read(b)
		return string(bytes.TrimSpace(b[:n]))
	}
	c := s.connect(nobodys, target4, 10*time.Second)
	if c == nil {
		t.Fatalf("a probe without a slot does not pass\n%s", s.state())
	}
	if got := sees(c); got != local4.String() {
		t.Errorf("the target sees %s, want %s", got, local4)
	}
	s.silent("UDP of a probe without a slot", s.socket(nobodys), target4)
	if s.connect(slot0, target4, 300*time.Millisecond) != nil {
		t.Error("a slot's probe passes without its lease")
	}
	s.grant(0, time.Minute)
	if c = s.connect(slot0, target4, 10*time.Second); c == nil {
		t.Fatalf("a slot's probe does not pass\n%s", s.state())
	}
	if got := sees(c); got != source4.String() {
		t.Errorf("the target sees %s, want %s", got, source4)
	}
}
