package plain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/labtest"
)

const labFile = `name: plain
sites:
  hq:     {nat: none}
  dc1:    {nat: none}
  dc2:    {nat: none}
  edge:   {nat: port-restricted-cone}
  home:   {nat: port-restricted-cone}
  office: {nat: symmetric}
nodes:
  ctl:    {site: hq, server: true, relay: true}
  gw1:    {site: dc1}
  gw2:    {site: dc2}
  inner:  {site: edge, config: {nodeAddresses: [192.168.77.0/24]}}
  phone:  {site: home, role: host}
  router: {site: office, role: host}
`

const (
	joins     = 30 * time.Second // a busy machine
	takenOver = 30 * time.Second
	port      = 7777
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "plain-client" {
		if err := runClient(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// scene is a lab with somebody who answers on every host.
type scene struct {
	t *testing.T
	*lab.Lab
	dir string
}

func newScene(t *testing.T) *scene {
	l, dir := labtest.Up(t, "plain", labFile)
	s := &scene{t: t, Lab: l, dir: dir}
	t.Cleanup(func() {
		if t.Failed() {
			for _, n := range []string{"ctl", "gw1", "gw2", "inner"} {
				info, _ := l.Node(n)
				b, _ := os.ReadFile(info.Log)
				t.Logf("%s: …%s", n, b[max(0, len(b)-4000):])
			}
		}
	})
	for _, n := range l.Spec.HostNames() {
		s.answer(n)
	}
	return s
}

func (s *scene) in(node string, f func() error) error {
	info, err := s.Node(node)
	if err != nil {
		return err
	}
	return fabric.In(info.Namespace, f)
}

// answer tells everybody who connects to a host where they come from.
func (s *scene) answer(node string) {
	s.t.Helper()
	var l net.Listener
	if err := s.in(node, func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
			c.Close()
		}
	}()
}

// reach connects from a host to an address; seen is as whom it has to be seen there.
func (s *scene) reach(from, to, seen string) error {
	var b []byte
	err := s.in(from, func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(netip.MustParseAddr(to), port).String(), time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		b, err = io.ReadAll(c)
		return err
	})
	if err == nil && string(b) != seen {
		err = fmt.Errorf("it is seen as %s, want %s", b, seen)
	}
	if err != nil {
		return fmt.Errorf("%s to %s: %w", from, to, err)
	}
	return nil
}

// eventually waits until f holds, and logs how long that took.
func (s *scene) eventually(what string, within time.Duration, f func() error) {
	s.t.Helper()
	began := time.Now()
	for {
		err := f()
		if err == nil {
			s.t.Logf("%s: after %s", what, time.Since(began).Round(time.Millisecond))
			return
		}
		if time.Since(began) > within {
			s.t.Fatalf("%s: not within %s: %v", what, within, err)
		}
		select {
		case <-s.t.Context().Done():
			s.t.Fatal("interrupted")
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (s *scene) skein(node string, args ...string) (string, error) {
	out, exit, err := s.Exec(s.t.Context(), node, append([]string{"skein"}, args...)...)
	if err == nil && exit != 0 {
		err = fmt.Errorf("exit status %d: %s", exit, out)
	}
	return out, err
}

func (s *scene) ok(node string, args ...string) string {
	s.t.Helper()
	out, err := s.skein(node, args...)
	if err != nil {
		s.t.Fatalf("%s: skein %s: %v", node, strings.Join(args, " "), err)
	}
	return out
}

// client starts a plain peer with a configuration, and returns what ends it.
func (s *scene) client(node, text string) (stop func()) {
	s.t.Helper()
	file := filepath.Join(s.dir, node+".conf")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var out buffer
	done := make(chan error, 1)
	go func() {
		_, err := s.ExecIO(ctx, node, []string{exe, "plain-client", file}, lab.Stdio{Out: &out, Err: &out})
		done <- err
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	s.t.Cleanup(stop)
	s.eventually("the client is up", joins, func() error {
		if !strings.Contains(out.String(), "ready") {
			return errors.New(out.String())
		}
		return nil
	})
	return stop
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// address is the address of a family that a configuration gives.
func address(t *testing.T, text string, family int) string {
	t.Helper()
	c, err := read(text)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(c.addresses, func(p netip.Prefix) bool { return p.Addr().Is4() == (family == 4) })
	return c.addresses[i].Addr().String()
}

func (s *scene) overlay(node string, family int) string {
	s.t.Helper()
	info, err := s.Node(node)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, a := range info.Overlay {
		if netip.MustParseAddr(a).Is4() == (family == 4) {
			return a
		}
	}
	s.t.Fatalf("%s has no address of family %d", node, family)
	return ""
}

// carriedBy waits until every node says who carries a peer.
func (s *scene) carriedBy(peer, carrier string, within time.Duration, nodes ...string) {
	s.t.Helper()
	s.eventually(peer+" is carried by "+carrier, within, func() error {
		for _, n := range nodes {
			out, err := s.skein(n, "peer", "list")
			if err != nil {
				return err
			}
			found := false
			for line := range strings.Lines(out) {
				f := strings.Fields(line)
				found = found || len(f) > 4 && f[0] == peer && f[4] == carrier
			}
			if !found {
				return fmt.Errorf("%s says\n%s", n, out)
			}
		}
		return nil
	})
}

// TestPlainPeer: hosts with a stock WireGuard behind two kinds of NAT join with the configuration as printed, reach
// nodes and each
// other, are reached with the network behind one, survive the loss of their carrier, stay where they are when it is
// back, and are
// gone everywhere when they are removed or have expired.
func TestPlainPeer(t *testing.T) {
	s := newScene(t)
	s.eventually("the carriers are known", joins, func() error {
		_, err := s.skein("ctl", "peer", "add", "office", "--allowed-ips", "192.168.50.0/24", "--via", "gw1,gw2",
			"--replace")
		return err
	})
	office := s.ok("ctl", "peer", "add", "office", "--allowed-ips", "192.168.50.0/24", "--via", "gw1,gw2", "--replace")
	phone := s.ok("ctl", "peer", "add", "phone", "--via", "gw1,gw2")
	s.badInput()
	if out, exit, err := s.Exec(t.Context(), "router", "ip", "address", "add", "192.168.50.1/24", "dev",
		"lo"); err != nil || exit != 0 {
		t.Fatalf("%v %s", err, out)
	}
	stopPhone := s.client("phone", phone)
	s.client("router", office)

	phone4, phone6 := address(t, phone, 4), address(t, phone, 6)
	office4 := address(t, office, 4)
	both := func() error {
		return errors.Join(
			s.reach("phone", s.overlay("inner", 4), phone4), s.reach("phone", s.overlay("inner", 6), phone6),
			s.reach("phone", s.overlay("gw1", 4), phone4),
			s.reach("inner", phone4, s.overlay("inner", 4)), s.reach("inner", phone6, s.overlay("inner", 6)),
			s.reach("gw2", phone4, s.overlay("gw2", 4)),
			s.reach("inner", "192.168.50.1", s.overlay("inner", 4)), s.reach("phone", "192.168.50.1", phone4),
			s.reach("router", s.overlay("inner", 4), office4),
			s.reach("router", phone4, office4))
	}
	s.eventually("plain peers join", joins, both)
	s.carriedBy("phone", "gw1", joins, "ctl", "inner", "gw2")
	s.carriedBy("office", "gw1", joins, "ctl", "inner", "gw2")
	s.strangers(phone4)
	for _, c := range []struct {
		want string
		args []string
	}{
		{"It is the address of plain peer phone", []string{"ip", "who", phone4}},
		{"It lies in 192.168.50.0/24, a network behind plain peer office", []string{"explain", "address",
			"192.168.50.9"}},
		{"PLAIN PEER", []string{"nodes"}},
	} {
		if out := s.ok("inner", c.args...); !strings.Contains(strings.Join(strings.Fields(out), " "), c.want) {
			t.Errorf("skein %s says\n%s\nwant %q", strings.Join(c.args, " "), out, c.want)
		}
	}

	if err := s.Kill(t.Context(), "gw1"); err != nil {
		t.Fatal(err)
	}
	moved := func() error {
		return errors.Join(s.reach("phone", s.overlay("inner", 4), phone4), s.reach("phone", s.overlay("inner", 6),
			phone6), s.reach("inner", phone4, s.overlay("inner", 4)),
			s.reach("inner", "192.168.50.1", s.overlay("inner", 4)), s.reach("router", s.overlay("gw2", 4), office4),
			s.reach("phone", "192.168.50.1", phone4))
	}
	s.eventually("another carrier takes them over", takenOver, moved)
	s.carriedBy("phone", "gw2", joins, "ctl", "inner", "gw2")

	if err := s.Start(t.Context(), "gw1"); err != nil {
		t.Fatal(err)
	}
	s.eventually("gw1 is back", joins, func() error { return s.reach("phone", s.overlay("gw1", 4), phone4) })
	s.carriedBy("phone", "gw2", joins, "ctl", "inner", "gw1", "gw2")
	s.carriedBy("office", "gw2", joins, "ctl", "inner", "gw1", "gw2")
	if err := moved(); err != nil {
		t.Errorf("with the first carrier back: %v", err)
	}

	s.ok("ctl", "peer", "remove", "phone")
	s.eventually("it is gone everywhere", joins, func() error {
		for _, r := range []error{s.reach("phone", s.overlay("inner", 4), phone4), s.reach("inner", phone4,
			s.overlay("inner", 4)), s.reach("phone", s.overlay("gw2", 4), phone4)} {
			if r == nil {
				return errors.New("it is still reached")
			}
		}
		for _, n := range []string{"ctl", "gw1", "gw2", "inner"} {
			if out, err := s.skein(n, "peer", "list"); err != nil || strings.Contains(out, "phone") {
				return fmt.Errorf("%s lists it: %v\n%s", n, err, out)
			}
		}
		return nil
	})
	if err := s.reach("inner", "192.168.50.1", s.overlay("inner", 4)); err != nil {
		t.Errorf("the removal of one concerns the other: %v", err)
	}
	stopPhone()

	// A peer that comes while its first carrier is away is carried by the next, and goes when its time is over.
	if err := s.Kill(t.Context(), "gw1"); err != nil {
		t.Fatal(err)
	}
	guest := s.ok("ctl", "peer", "add", "guest", "--via", "gw1,gw2", "--expires", "20s")
	s.client("phone", guest)
	guest4 := address(t, guest, 4)
	s.eventually("a guest joins by the second carrier", joins, func() error {
		return errors.Join(s.reach("phone", s.overlay("inner", 4), guest4), s.reach("inner", guest4,
			s.overlay("inner", 4)))
	})
	s.eventually("the guest's time is over", time.Minute, func() error {
		if s.reach("phone", s.overlay("inner", 4), guest4) == nil || s.reach("inner", guest4, s.overlay("inner",
			4)) == nil {
			return errors.New("it is still reached")
		}
		if out, err := s.skein("inner", "peer", "list"); err != nil || strings.Contains(out, "guest") {
			return fmt.Errorf("it is still there: %v\n%s", err, out)
		}
		return nil
	})
}

// strangers checks that nobody but the carrier's session brings in packets under a plain peer's address.
func (s *scene) strangers(plain string) {
	s.t.Helper()
	// The control net's port is for nodes: a plain peer does not reach it.
	err := s.in("phone", func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(netip.MustParseAddr(s.overlay("inner", 4)),
			7946).String(), time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
	if err == nil {
		s.t.Errorf("plain peer %s reaches the control net", plain)
	}
}

// badInput: what a user sees who gives a plain peer what is not its own.
func (s *scene) badInput() {
	s.t.Helper()
	s.ok("ctl", "pool", "create", "default", "--subnet", "10.64.0.0/16")
	for _, c := range []struct{ args, complaint string }{
		{"peer add x --allowed-ips 192.168.50.128/25", "overlaps 192.168.50.0/24 behind plain peer office"},
		{"peer add x --allowed-ips 10.64.3.0/24", "overlaps 10.64.0.0/16 of pool default"},
		{"peer add x --allowed-ips 10.4.0.0/24", "overlaps the overlay 10.4.0.0/16"},
		{"peer add x --allowed-ips 192.168.0.0/16", "overlaps"},
		{"peer add x --allowed-ips 192.168.77.0/25", "overlaps 192.168.77.0/24, a node address of inner"},
		{"peer add x --allowed-ips 0.0.0.0/0", "not private"},
		{"peer add x --allowed-ips nonsense", "is not a prefix"},
		{"peer add inner", "the name inner is taken by node"},
		{"peer add phone", "there is a plain peer phone already"},
		{"peer add x --via nobody", "no member is called"},
		{"peer add x --public-key short", "is not a WireGuard key"},
		{"peer add x --expires -1h", "want a time from now"},
		{"peer remove nobody", "there is no plain peer"},
		{"pool create other --subnet 192.168.50.0/28 --block-size-bits 2", "behind plain peer office"},
	} {
		out, exit, err := s.Exec(s.t.Context(), "ctl", append([]string{"skein"}, strings.Fields(c.args)...)...)
		if err != nil || exit == 0 || !strings.Contains(strings.Join(strings.Fields(out), " "), c.complaint) {
			s.t.Errorf("skein %s: exit status %d, %v, says\n%s\nwant %q", c.args, exit, err, out, c.complaint)
		}
	}
	if out, err := s.skein("inner", "peer", "add", "x"); err == nil || !strings.Contains(out+err.Error(),
		"for admins and servers") {
		s.t.Errorf("an agent admits a peer: %v\n%s", err, out)
	}
}
