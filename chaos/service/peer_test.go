package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/testns"
)

// Addresses outside the tunnel, all in networks that belong to nobody.
const (
	routerAddr  = "198.18.1.1" // as the container sees it
	serviceAddr = "198.18.1.2" // of the container
	peerAddr    = "198.18.2.2"
	outsideAddr = "203.0.113.80" // beyond the router, for packets that leave by an egress
	outsidePort = "8080"
)

// world is the router between the container and the peer, and the peer's host.
type world struct {
	router, host *testns.NS
}

func newWorld(t *testing.T) world {
	w := world{router: testns.New(t, "svcr"), host: testns.New(t, "svcp")}
	for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		w.router.Sysctl(key, "1")
	}
	testns.Link(w.router, w.host, "peer0", []netip.Prefix{netip.MustParsePrefix("198.18.2.1/24")},
		[]netip.Prefix{netip.MustParsePrefix(peerAddr + "/24")})
	w.router.Address("lo", netip.MustParsePrefix(outsideAddr+"/32"))
	w.host.Must("default route", func() error {
		out, err := exec.Command("ip", "route", "add", "default", "via", "198.18.2.1").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return w
}

// peer is the other node: a server and a relay, not a service.
type peer struct {
	t      *testing.T
	host   *testns.NS
	binary string
	dir    string
	bare   string // what the host had before the first agent
	end    func()
}

func startPeer(t *testing.T, w world, binary string) *peer {
	t.Helper()
	dir, err := os.MkdirTemp("", "skp") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &peer{t: t, host: w.host, binary: binary, dir: dir}
	within(t, "the link-local address of the peer's link", func() error {
		if p.bare = p.rules(); !strings.Contains(p.bare, "local fe80::") { // the kernel looks first whether another has it
			return fmt.Errorf("there is\n%s", p.bare)
		}
		return nil
	})
	config := "name: peer\nrelay: true\nforceEndpoint: " + peerAddr + ":51820\negress: {clients: [{egresses: " +
		"[out/nat]}]}\n"
	if err := os.WriteFile(filepath.Join(dir, "skein.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	up := p.command("up", "--init")
	up.Stdout, up.Stderr = log, log
	w.host.Must("the peer's agent", up.Start)
	p.end = sync.OnceFunc(func() {
		_ = up.Process.Signal(syscall.SIGTERM)
		if err := up.Wait(); err != nil {
			t.Errorf("the peer's agent: %v", err)
		}
	})
	t.Cleanup(func() {
		p.end()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the peer's log:\n%s", text)
		}
	})
	within(t, "the peer's agent answers", func() error { _, err := p.try("status"); return err })
	return p
}

func (p *peer) command(args ...string) *exec.Cmd {
	return exec.Command(p.binary, append([]string{"--state-dir", p.dir + "/state", "--run-dir", p.dir + "/run",
		"--config", p.dir + "/skein.yaml"}, args...)...)
}

func (p *peer) try(args ...string) (string, error) {
	out, err := p.command(args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("on the peer: skein %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), err
}

// rules are the links, rules and routes of the peer's host.
func (p *peer) rules() string {
	p.t.Helper()
	var out []byte
	p.host.Must("looking at the kernel", func() (err error) {
		out, err = exec.Command("sh", "-c",
			`ip -br link | sed 's/[@ ].*//'; for f in -4 -6; do ip $f rule; ip $f route show table all | sort; done; nft list ruleset`).CombinedOutput()
		return err
	})
	return string(out)
}

func (p *peer) run(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// reaches waits until the peer gets a connection through the tunnel to the control net's port of the service's node.
func (p *peer) reaches(addr netip.Addr) {
	p.t.Helper()
	within(p.t, "the peer reaches "+addr.String(), func() (err error) {
		p.host.Do(func() {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", netip.AddrPortFrom(addr, 7946).String(), time.Second); err == nil {
				c.Close()
			}
		})
		return err
	})
}

// outside answers each connection with the address that it comes from, until the test ends.
func outside(t *testing.T, w world) {
	var l net.Listener
	w.router.Must("the server outside", func() (err error) {
		l, err = net.Listen("tcp4", net.JoinHostPort(outsideAddr, outsidePort))
		return err
	})
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			_, _ = io.WriteString(c, host)
			c.Close()
		}
	}()
}

// leaves waits until the peer's connections to the outside arrive there with an address.
func (p *peer) leaves(want string) {
	p.t.Helper()
	within(p.t, "the peer's packets leave by the service's node", func() (err error) {
		var got []byte
		p.host.Do(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			var c net.Conn
			if c, err = new(net.Dialer).DialContext(ctx, "tcp4",
				net.JoinHostPort(outsideAddr, outsidePort)); err != nil {
				return
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(2 * time.Second))
			got, err = io.ReadAll(c)
		})
		if err == nil && string(got) != want {
			err = errors.New("the server outside sees " + string(got))
		}
		return err
	})
}
