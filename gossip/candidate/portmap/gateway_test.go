package portmap

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/pcp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/upnp"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/internal/sock"
)

// miniupnpd takes documentation's addresses for private ones, so the internet of these tests has others. Nothing of it
// leaves the test.
var internet = netip.MustParsePrefix("11.22.33.0/24")

// the protocols; opens sockets from several goroutines, so it is in the namespace as a whole
const childOrders = "SKEIN_PORTMAP_CHILD"

func TestMain(m *testing.M) {
	if protocols := os.Getenv(childOrders); protocols != "" {
		if err := child(strings.Split(protocols, ","), os.Stdin, json.NewEncoder(os.Stdout)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// word is what the child says.
type word struct {
	Found   candidate.Found
	Woken   bool
	Arrived string // a datagram at WireGuard's port
}

// child plays a host with WireGuard's port. Each line it reads is an order: full, check, release, squat, forget,
// proofs, moved, gone.
func child(protocols []string, in io.Reader, out *json.Encoder) error {
	conn, err := sock.ListenUDP("udp4", netip.AddrPortFrom(netip.Addr{}, nattest.WireGuardPort), 0)
	if err != nil {
		return err
	}
	words := make(chan word, 100)
	go func() {
		for b := make([]byte, 100); ; {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			words <- word{Arrived: string(b[:n])}
		}
	}()
	go func() {
		for w := range words {
			_ = out.Encode(w)
		}
	}()
	verdicts := []Proof{}
	s, err := New(Config{Port: nattest.WireGuardPort, Mark: 0x20, Protocols: protocols, Secret: []byte("secret"),
		Prove: func(context.Context, netip.AddrPort) Proof {
			if len(verdicts) == 0 {
				return Unproven
			}
			v := verdicts[0]
			verdicts = verdicts[1:]
			return v
		}})
	if err != nil {
		return err
	}
	ctx := context.Background()
	for lines := bufio.NewScanner(in); lines.Scan(); {
		host, err := hostaddr.Kernel{}.Read()
		if err != nil {
			return err
		}
		order, arguments, _ := strings.Cut(lines.Text(), " ")
		switch order {
		case "squat": // another host of this network has the port already
			g := host.Gateways[0]
			local := netip.MustParseAddr("192.168.1.77")
			_, err := pcp.Map(ctx, ask.Gateway{Addr: netip.AddrPortFrom(g.Addr, pcp.Port), Local: local}, pcp.Wish{
				Inner: netip.AddrPortFrom(local, nattest.WireGuardPort), Outer: netip.AddrPortFrom(netip.Addr{},
					nattest.WireGuardPort), Lifetime: time.Hour,
			})
			if err != nil {
				return err
			}
			words <- word{}
		case "forget":
			g := host.Gateways[0]
			device, err := upnp.Discover(ctx, ask.Gateway{Addr: netip.AddrPortFrom(g.Addr, pcp.Port), Local: g.Local})
			if err == nil {
				err = device.Unmap(ctx, nattest.WireGuardPort)
			}
			if err != nil {
				return err
			}
			words <- word{}
		case "proofs":
			verdicts = nil
			for _, v := range strings.Split(arguments, ",") {
				n, _ := strconv.Atoi(v)
				verdicts = append(verdicts, Proof(n))
			}
			words <- word{}
		case "moved": // this host reaches its router from another address now
			host.Gateways[0].Local = netip.MustParseAddr("192.168.1.77")
			words <- word{Found: s.Look(ctx, candidate.Request{Host: host, Full: true, Fresh: true})}
		case "gone":
			words <- word{Found: s.Look(ctx, candidate.Request{Full: true, Fresh: true})}
		case "protocols":
			s.SetProtocols(strings.FieldsFunc(arguments, func(r rune) bool { return r == ',' }))
			words <- word{}
		case "release":
			s.Release(ctx)
			words <- word{}
		default:
			f := s.Look(ctx, candidate.Request{Host: host, Full: lines.Text() == "full", Wake: func() {
				words <- word{Woken: true}
			}})
			words <- word{Found: f}
		}
	}
	return nil
}

// home is a host behind a router that runs miniupnpd.
type home struct {
	t       *testing.T
	net     *nattest.Net
	host    *nattest.Host
	orders  io.Writer
	words   *json.Decoder
	out     *os.File
	mini    *exec.Cmd
	options []string
	dir     string
}

func newHome(t *testing.T, network netip.Prefix, protocols string, options ...string) *home {
	t.Helper()
	n := nattest.At(t, network)
	h := &home{t: t, net: n, host: n.Host(nattest.PortRestricted), options: options, dir: t.TempDir()}
	h.host.AddAddress("eth0", "192.168.1.77/24")
	h.chains()
	h.start()
	var in io.WriteCloser
	err := h.host.Command(func(c *exec.Cmd) error {
		c.Env = append(os.Environ(), childOrders+"="+protocols)
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		if err != nil {
			return err
		}
		if in, err = c.StdinPipe(); err != nil {
			return err
		}
		h.orders, h.out = in, out.(*os.File)
		h.words = json.NewDecoder(out)
		t.Cleanup(func() {
			in.Close()
			if err := c.Wait(); err != nil {
				t.Errorf("the child ended badly: %v", err)
			}
		})
		return c.Start()
	}, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// chains makes the nftables chains that miniupnpd fills; a second call empties them, as a router does that starts anew.
func (h *home) chains() {
	h.t.Helper()
	h.host.Router.Do(func() {
		c, err := nftables.New()
		if err != nil {
			h.t.Fatal(err)
		}
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "filter"})
		c.FlushTable(table)
		hook := func(name string, kind nftables.ChainType, hook *nftables.ChainHook, priority *nftables.ChainPriority,
			target string) {
			c.AddChain(&nftables.Chain{Name: target, Table: table})
			base := c.AddChain(&nftables.Chain{Name: name, Table: table, Type: kind, Hooknum: hook, Priority: priority})
			c.AddRule(&nftables.Rule{Table: table, Chain: base,
				Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: target}}})
		}
		hook("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, "miniupnpd")
		hook("prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest,
			"prerouting_miniupnpd")
		hook("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
			"postrouting_miniupnpd")
		if err := c.Flush(); err != nil {
			h.t.Fatal(err)
		}
	})
}

// mappings counts what the router has granted.
func (h *home) mappings() (n int) {
	h.t.Helper()
	h.host.Router.Do(func() {
		c, err := nftables.New()
		if err != nil {
			h.t.Fatal(err)
		}
		rules, err := c.GetRules(&nftables.Table{Family: nftables.TableFamilyINet, Name: "filter"},
			&nftables.Chain{Name: "prerouting_miniupnpd"})
		if err != nil {
			h.t.Fatal(err)
		}
		n = len(rules)
	})
	return n
}

// start runs miniupnpd in the router until it listens.
func (h *home) start() {
	h.t.Helper()
	config := filepath.Join(h.dir, "conf")
	lines := append([]string{
		"ext_ifname=wan", "listening_ip=lan", "http_port=0", "enable_natpmp=yes", "enable_upnp=yes", "secure_mode=yes",
		"system_uptime=no", "ipv6_disable=yes",
		"uuid=9236ede9-b1ee-4910-9738-2238ccabab7b", "min_lifetime=120", "max_lifetime=86400",
	}, h.options...)
	if len(h.options) == 0 || !strings.HasPrefix(h.options[0], "deny") {
		lines = append(lines, "allow 1024-65535 192.168.1.0/24 1024-65535")
	}
	if err := os.WriteFile(config, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		h.t.Fatal(err)
	}
	err := h.host.Router.Command(func(c *exec.Cmd) error {
		h.mini = c
		out, err := c.StderrPipe()
		if err != nil {
			return err
		}
		c.Stdout = c.Stderr
		if err := c.Start(); err != nil {
			return fmt.Errorf("%w; .ci/setup installs it", err)
		}
		_ = out.(*os.File).SetReadDeadline(time.Now().Add(20 * time.Second))
		lines := bufio.NewScanner(out)
		var said []string
		for lines.Scan() {
			said = append(said, lines.Text())
			if strings.Contains(lines.Text(), "Listening for NAT-PMP/PCP") {
				_ = out.(*os.File).SetReadDeadline(time.Time{})
				go io.Copy(io.Discard, out)
				return nil
			}
		}
		return fmt.Errorf("miniupnpd ended: %s", strings.Join(said, "\n"))
	}, "miniupnpd", "-d", "-f", config, "-P", filepath.Join(h.dir, "pid"))
	if err != nil {
		h.t.Fatal(err)
	}
	mini := h.mini
	h.t.Cleanup(func() {
		_ = mini.Process.Kill()
		_ = mini.Wait()
	})
}

func (h *home) read() word {
	h.t.Helper()
	var w word
	_ = h.out.SetReadDeadline(time.Now().Add(20 * time.Second))
	if err := h.words.Decode(&w); err != nil {
		h.t.Fatalf("the child says nothing: %v", err)
	}
	return w
}

func (h *home) order(line string) candidate.Found {
	h.t.Helper()
	if _, err := io.WriteString(h.orders, line+"\n"); err != nil {
		h.t.Fatal(err)
	}
	for {
		if w := h.read(); !w.Woken && w.Arrived == "" {
			return w.Found
		}
	}
}

// granted checks that one address was found, and that a stranger's packet to it arrives.
func (h *home) granted(f candidate.Found, protocol string) netip.AddrPort {
	h.t.Helper()
	if len(f.Candidates) != 1 || f.Candidates[0].Source != protocol || f.Again <= 0 || f.Again > checkEvery {
		h.t.Fatalf("found %+v, want one candidate of %s", f, protocol)
	}
	outer := netip.MustParseAddrPort(f.Candidates[0].Address)
	if outer.Addr() != h.host.Outside {
		h.t.Fatalf("found %s, want an address of %s", outer, h.host.Outside)
	}
	stranger := h.net.Host(nattest.Public)
	var conn *net.UDPConn
	stranger.Do(func() {
		var err error
		if conn, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(outer)); err != nil {
			h.t.Fatal(err)
		}
	})
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "to %s by %s", outer, protocol); err != nil {
		h.t.Fatal(err)
	}
	for {
		if w := h.read(); w.Arrived == fmt.Sprintf("to %s by %s", outer, protocol) {
			return outer
		}
	}
}

func note(f candidate.Found, source string) candidate.Note {
	for _, n := range f.Notes {
		if n.Source == source {
			return n
		}
	}
	return candidate.Note{}
}

func TestEachProtocolMapsThePort(t *testing.T) {
	for _, tt := range []struct{ offered, taken string }{{"pcp", "pcp"}, {"natpmp", "natpmp"}, {"upnp", "upnp"},
		{"upnp,natpmp,pcp", "pcp"}} {
		t.Run(tt.offered, func(t *testing.T) {
			t.Parallel()
			h := newHome(t, internet, tt.offered)
			start := time.Now()
			f := h.order("full")
			t.Logf("granted after %s: %v", time.Since(start).Round(time.Millisecond), f.Notes)
			outer := h.granted(f, tt.taken)
			if outer.Port() != nattest.WireGuardPort {
				t.Errorf("mapped to port %d, though %d was free", outer.Port(), nattest.WireGuardPort)
			}
			if n := note(f, tt.taken); !n.OK || !strings.Contains(n.Text, outer.String()) {
				t.Errorf("note %+v", n)
			}
			if n := h.mappings(); n != 1 {
				t.Errorf("the router has %d mappings, want 1", n)
			}
			for _, order := range []string{"check", "full"} { // nothing changes: once checked, once renewed
				if got := h.granted(h.order(order), tt.taken); got != outer {
					t.Errorf("%s: %s, before %s", order, got, outer)
				}
			}
			h.order("release")
			if n := h.mappings(); n != 0 {
				t.Errorf("the router keeps %d mappings after the release", n)
			}
		})
	}
}

func TestRouterThatStartsAnewIsAskedAgain(t *testing.T) {
	for _, protocol := range Protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			h := newHome(t, internet, protocol)
			outer := h.granted(h.order("full"), protocol)
			_ = h.mini.Process.Kill()
			_ = h.mini.Wait()
			h.chains()
			if n := h.mappings(); n != 0 {
				t.Fatalf("%d mappings survive", n)
			}
			// While it is away the lease is still believed.
			if f := h.order("check"); len(f.Candidates) != 1 {
				t.Errorf("a router that is away: %+v", f)
			}
			h.start()
			if protocol == UPnP { // it does not announce itself, and listens at another port now
				if got := h.granted(h.order("check"), protocol); got != outer {
					t.Errorf("found %s, before %s", got, outer)
				}
				return
			}
			for !h.read().Woken { // by its announcement
			}
			if got := h.granted(h.order("full"), protocol); got != outer {
				t.Errorf("found %s, before %s", got, outer)
			}
		})
	}
}

// A mapping belongs to one gateway and one address of this host. With another it is worth nothing, and is asked for
// anew.
func TestAnotherGatewayIsAskedAnew(t *testing.T) {
	for _, protocol := range Protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			h := newHome(t, internet, protocol)
			before := h.granted(h.order("full"), protocol)
			after := h.granted(h.order("moved"), protocol)
			if after == before {
				t.Errorf("%s leads to the old address", after)
			}
			if f := h.order("gone"); len(f.Candidates) != 0 || len(f.Notes) != 1 {
				t.Errorf("without a gateway: %+v", f)
			}
			if got := h.granted(h.order("full"), protocol); got != before {
				t.Errorf("back again: %s, before %s", got, before)
			}
		})
	}
}

// Somebody deletes the mapping. UPnP announces nothing, but the next check notices.
func TestForgottenMappingIsNoticed(t *testing.T) {
	h := newHome(t, internet, UPnP)
	outer := h.granted(h.order("full"), UPnP)
	if h.order("forget"); h.mappings() != 0 {
		t.Fatal("the mapping is still there")
	}
	if got := h.granted(h.order("check"), UPnP); got != outer {
		t.Errorf("found %s, before %s", got, outer)
	}
}

func TestTakenPort(t *testing.T) {
	for _, protocol := range Protocols {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			h := newHome(t, internet, protocol)
			h.order("squat")
			if got := h.granted(h.order("full"), protocol); got.Port() == nattest.WireGuardPort {
				t.Errorf("took %s from its owner", got)
			}
			if n := h.mappings(); n != 2 {
				t.Errorf("the router has %d mappings, want both", n)
			}
		})
	}
}

// A router behind another NAT has a private address outside; what it grants is of no use and not published.
func TestDoubleNAT(t *testing.T) {
	h := newHome(t, netip.MustParsePrefix("10.99.0.0/24"), "pcp,natpmp,upnp")
	f := h.order("full")
	if len(f.Candidates) != 0 || len(f.Notes) != 3 {
		t.Errorf("found %+v", f)
	}
	for _, n := range f.Notes {
		if n.OK || n.Text == "" {
			t.Errorf("note %+v", n)
		}
	}
	t.Log(f.Notes)
}

// By the other two protocols miniupnpd walks through all 65,535 ports and says so for each before it refuses; pcp and
// natpmp have tests for that.
func TestRouterThatRefuses(t *testing.T) {
	h := newHome(t, internet, UPnP, "deny 0-65535 0.0.0.0/0 0-65535")
	f := h.order("full")
	if n := note(f, UPnP); len(f.Candidates) != 0 || n.OK || !strings.Contains(n.Text, "refused by the gateway") {
		t.Errorf("found %+v", f)
	}
	t.Log(f.Notes)
}

// A router may grant what it does not do, or what another NAT in front of it does not: proof from outside decides.
func TestWhatDoesNotArriveIsNotPublished(t *testing.T) {
	h := newHome(t, internet, PCP)
	steps := []struct {
		proofs string // 0: nobody to ask, 1: it arrives, 2: it does not
		want   bool
	}{
		{"0", true},   // believed until somebody can say
		{"2,1", true}, // one lost packet says nothing
		{"2,2", true}, // proven once: it is not asked again
	}
	for _, tt := range steps {
		h.order("proofs " + tt.proofs)
		if f := h.order("check"); (len(f.Candidates) == 1) != tt.want {
			t.Errorf("%s: %+v", tt.proofs, f)
		}
	}
	h = newHome(t, internet, UPnP)
	for _, tt := range []struct {
		proofs string
		want   bool
	}{{"2,2", false}, {"0", false}, {"2", false}, {"1", true}} {
		h.order("proofs " + tt.proofs)
		f := h.order("full")
		if n := note(f, UPnP); (len(f.Candidates) == 1) != tt.want || n.OK != tt.want ||
			strings.Contains(n.Text, "do not arrive") == tt.want {
			t.Errorf("%s: %+v", tt.proofs, f)
		}
	}
	if h.order("release"); h.mappings() != 0 {
		t.Error("what was not published was not given back")
	}
}

func TestRouterThatSpeaksNone(t *testing.T) {
	h := newHome(t, internet, "pcp,natpmp,upnp")
	_ = h.mini.Process.Kill()
	_ = h.mini.Wait()
	start := time.Now()
	f := h.order("full")
	if took := time.Since(start); len(f.Candidates) != 0 || len(f.Notes) != 3 || f.Again != lookEvery ||
		took > 5*time.Second {
		t.Errorf("found %+v after %s", f, took)
	}
	// It is found when it appears, by its announcement.
	h.start()
	for !h.read().Woken {
	}
	h.granted(h.order("full"), PCP)
}

// Protocols that may not be used any more give back what they got, and others take their place; none asks nobody.
func TestProtocolsChange(t *testing.T) {
	h := newHome(t, internet, "pcp,natpmp,upnp")
	h.granted(h.order("full"), PCP)
	h.order("protocols pcp,upnp")
	h.granted(h.order("check"), PCP)
	h.order("protocols upnp")
	h.granted(h.order("check"), UPnP)
	h.order("protocols")
	if f := h.order("full"); len(f.Candidates)+len(f.Notes) > 0 || f.Again != 0 || h.mappings() != 0 {
		t.Errorf("without protocols: %+v, and %d mappings at the router", f, h.mappings())
	}
	h.order("protocols natpmp")
	h.granted(h.order("check"), NATPMP)
}
