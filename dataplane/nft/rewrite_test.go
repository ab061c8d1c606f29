package nft_test

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

const wgPort = 51820

func rewriting(rs ...dataplane.PortRewrite) dataplane.Spec {
	return dataplane.Spec{Complete: true, WireGuard: dataplane.WireGuard{Port: wgPort}, PortRewrites: rs}
}

func via(local uint16, remote string) dataplane.PortRewrite {
	return dataplane.PortRewrite{Local: local, Remote: netip.MustParseAddrPort(remote)}
}

// Rewrites come, change, are read back by the next run, and leave nothing behind when the last one goes.
func TestRewritesAreKeptInTheTable(t *testing.T) {
	n := testns.New(t, "nft")
	r := open(t, n)
	a, b := via(40001, "203.0.113.7:51820"), via(40002, "203.0.113.7:4500")
	for _, step := range []struct {
		name   string
		spec   dataplane.Spec
		writes int
	}{
		{"none", rewriting(), 30},
		{"one", rewriting(a), 8},
		{"unchanged", rewriting(a), 0},
		{"another", rewriting(b, a), 2},
		{"another local port", rewriting(via(40003, "203.0.113.7:51820"), b), 4},
		{"one goes", rewriting(b), 2},
		{"the last goes", rewriting(), 6},
	} {
		writes, notes, err := r.Reconcile(step.spec)
		if err != nil || len(notes) > 0 {
			t.Fatalf("%s: %v, notes %v", step.name, err, notes)
		}
		if writes != step.writes {
			t.Errorf("%s: %d messages, want %d", step.name, writes, step.writes)
		}
		if d, err := r.Diff(step.spec); err != nil || len(d) > 0 {
			t.Fatalf("%s: differs: %q %v", step.name, d, err)
		}
	}
	if _, _, err := r.Reconcile(rewriting(a, b)); err != nil {
		t.Fatal(err)
	}
	next := open(t, n)
	before := rewriting(via(40009, "203.0.113.7:51820"))
	before.Complete = false
	if _, _, err := next.Reconcile(before); err != nil {
		t.Fatal(err)
	}
	if have, err := next.Rewrites(); err != nil || len(have) != 2 || have[0] != b || have[1].Local != 40009 {
		t.Errorf("before everything has spoken, the next run has %v, %v", have, err)
	}
	if _, _, err := next.Reconcile(rewriting(a)); err != nil {
		t.Fatal(err)
	}
	if have, err := next.Rewrites(); err != nil || len(have) != 1 || have[0] != a {
		t.Errorf("then it has %v, %v", have, err)
	}
}

func TestRewritesThatCannotBeAreNoted(t *testing.T) {
	r := open(t, testns.New(t, "nft"))
	good := via(40001, "203.0.113.7:51820")
	s := rewriting(good, via(40002, "203.0.113.7:51820"), via(40003, "[2001:db8::1]:51820"), via(0, "203.0.113.8:51820"))
	_, notes, err := r.Reconcile(s)
	if err != nil || len(notes) != 3 {
		t.Fatalf("notes %q, %v", notes, err)
	}
	if have, err := r.Rewrites(); err != nil || len(have) != 1 || have[0] != good {
		t.Errorf("the table has %v, %v", have, err)
	}
}

// end is a UDP socket in a namespace.
type end struct {
	*testing.T
	*net.UDPConn
}

func listen(t *testing.T, n *testns.NS, at string) end {
	t.Helper()
	var c *net.UDPConn
	n.Must("listen at "+at, func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	})
	t.Cleanup(func() { c.Close() })
	return end{t, c}
}

func (e end) send(to, text string) {
	e.Helper()
	if _, err := e.WriteToUDPAddrPort([]byte(text), netip.MustParseAddrPort(to)); err != nil {
		e.Fatalf("send %q to %s: %v", text, to, err)
	}
}

// got reads one datagram and checks where it came from.
func (e end) got(from, text string) {
	e.Helper()
	_ = e.SetReadDeadline(time.Now().Add(3 * time.Second))
	b := make([]byte, 65536)
	k, at, err := e.ReadFromUDPAddrPort(b)
	if err != nil {
		e.Fatalf("waiting for %.20q from %s: %v", text, from, err)
	}
	if at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port()); at.String() != from || string(b[:k]) != text {
		e.Fatalf("got %.20q from %s, want %.20q from %s", b[:k], at, text, from)
	}
}

// The rewrite works in both directions, whoever speaks first, on flows that were there before it, beside a firewall
// that follows connections, for single datagrams and for many in one (UDP GSO), and touches nobody else's packets.
func TestRewriteCarriesPackets(t *testing.T) {
	for _, firewall := range []bool{false, true} {
		name := "alone"
		if firewall {
			name = "beside a stateful firewall"
		}
		t.Run(name, func(t *testing.T) { carry(t, firewall) })
	}
}

func carry(t *testing.T, firewall bool) {
	here, there := testns.New(t, "here"), testns.New(t, "there")
	testns.Link(here, there, "eth0", []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24")},
		[]netip.Prefix{netip.MustParsePrefix("203.0.113.2/24")})
	if firewall {
		here.Must("firewall", statefulInput)
	}
	wg, peer, other := listen(t, here, "0.0.0.0:51820"), listen(t, there, "203.0.113.2:7000"),
		listen(t, there, "203.0.113.2:7001")
	probe := listen(t, here, "0.0.0.0:40001")
	probe.send("203.0.113.2:7000", "opens the mapping")
	peer.got("203.0.113.1:40001", "opens the mapping")
	wg.send("203.0.113.2:7000", "before")
	peer.got("203.0.113.1:51820", "before")

	r := open(t, here)
	if _, _, err := r.Reconcile(rewriting(via(40001, "203.0.113.2:7000"))); err != nil {
		t.Fatal(err)
	}
	probe.Close()
	peer.send("203.0.113.1:40001", "the peer first")
	wg.got("203.0.113.2:7000", "the peer first")
	wg.send("203.0.113.2:7000", "hello")
	peer.got("203.0.113.1:40001", "hello")
	big := strings.Repeat("x", 1400)
	wg.segments("203.0.113.2:7000", strings.Repeat(big, 10), 1400)
	for range 10 {
		peer.got("203.0.113.1:40001", big)
	}
	wg.send("203.0.113.2:7001", "to another")
	other.got("203.0.113.1:51820", "to another")
	other.send("203.0.113.1:51820", "from another")
	wg.got("203.0.113.2:7001", "from another")

	if _, _, err := r.Reconcile(rewriting()); err != nil {
		t.Fatal(err)
	}
	wg.send("203.0.113.2:7000", "after")
	peer.got("203.0.113.1:51820", "after")
	peer.send("203.0.113.1:51820", "and back")
	wg.got("203.0.113.2:7000", "and back")
}

// segments sends many datagrams by one call, as wireguard-go does.
func (e end) segments(to, text string, size uint16) {
	e.Helper()
	raw := make([]byte, unix.CmsgSpace(2))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&raw[0]))
	h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	copy(raw[unix.CmsgLen(0):], binaryutil.NativeEndian.PutUint16(size))
	if _, _, err := e.WriteMsgUDPAddrPort([]byte(text), raw, netip.MustParseAddrPort(to)); err != nil {
		e.Fatal(err)
	}
}

// statefulInput lets in answers, and what comes to WireGuard's port.
func statefulInput() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "firewall"})
	drop := nftables.ChainPolicyDrop
	chain := c.AddChain(&nftables.Chain{Name: "input", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}})
	return c.Flush()
}
