package control_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/identity"
)

func (n *node) knows(codes bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.codes = codes
}

// overlay is the address of the i-th node of a trio.
func overlay(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 77, 0, byte(i + 1)}) }

// forge sends what a neighbour would, under a node's overlay address, to another's control net.
func forge(t *testing.T, from, to int, port uint16, b string) {
	t.Helper()
	c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(overlay(from), 0)),
		net.UDPAddrFromAddrPort(netip.AddrPortFrom(overlay(to), port)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(b)); err != nil {
		t.Fatal(err)
	}
}

// Between nodes that both know codes the source address alone makes nobody believed, and with a node of the version
// before packets go as they did.
func TestPacketsByTheTunnelCarryACode(t *testing.T) {
	_, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	n[0].tunnel = control.Up
	for _, c := range []struct {
		name               string
		sender, receiver   bool // knows that both do
		delivered, forging bool // forged without a code
	}{
		{"both of the version before", false, false, true, true},
		{"both know", true, true, true, false},
		{"the sender knows it first", true, false, true, true},
		{"the sender does not know yet", false, true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			n[0].knows(c.sender)
			n[1].knows(c.receiver)
			forge(t, 0, 1, n[1].port, "\x02forged")
			forge(t, 0, 1, n[1].port, "\x820123456789abcdefforged with a code")
			forge(t, 0, 1, n[1].port, "\x82short")
			forge(t, 0, 1, n[1].port, "")
			if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("honest")); err != nil {
				t.Fatal(err)
			}
			if c.forging {
				n[1].want(t, n[0].id, "2 forged")
			}
			if c.delivered {
				n[1].want(t, n[0].id, "2 honest")
			}
			n[0].knows(true)
			if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("last")); err != nil {
				t.Fatal(err)
			}
			n[1].want(t, n[0].id, "2 last") // and nothing before it
		})
	}
}

// hangsUp tells whether the other end closes a connection at once.
func hangsUp(t *testing.T, from netip.Addr, to int, port uint16) bool {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: 5 * time.Second}
	c, err := d.Dial("tcp4", netip.AddrPortFrom(overlay(to), port).String())
	if err != nil {
		return true
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetReadDeadline(time.Now().Add(2 * time.Second)) // less than a handshake may take
	_, err = c.Read(make([]byte, 1))
	var late net.Error
	return errors.Is(err, io.EOF) || err != nil && !(errors.As(err, &late) && late.Timeout())
}

// Whoever has no member's overlay address, such as a pod, gets no handshake; a member's address gets those that its
// bound allows, and they are given back.
func TestStreamsByTheTunnelAreMembersAlone(t *testing.T) {
	_, n := trio(t)
	left, entered := make(chan netip.Addr, 8), make(chan netip.Addr, 8)
	var full atomic.Bool
	n[1].enter = func(from netip.Addr) (func(), error) {
		if full.Load() {
			return nil, errors.New("full")
		}
		entered <- from
		return func() { left <- from }, nil
	}
	n[0].tunnel = control.Up
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	if !hangsUp(t, netip.MustParseAddr("127.77.9.9"), 1, n[1].port) {
		t.Error("an address that is not a member's may begin a handshake")
	}
	c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if from := <-entered; from != overlay(0) {
		t.Errorf("a stream came from %s, want %s", from, overlay(0))
	}
	select {
	case <-left:
	case <-time.After(5 * time.Second):
		t.Error("the place of a handshake that is over is not given back")
	}
	full.Store(true)
	if !hangsUp(t, overlay(0), 1, n[1].port) {
		t.Error("beyond its bound a member may begin a handshake")
	}
}

// An echo is taken with its sender's code only, whatever way it came and however large it is; and nothing else is
// taken for one.
func TestEchoesCarryACode(t *testing.T) {
	_, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	n[0].tunnel = control.Up
	for _, codes := range []bool{false, true} {
		n[0].knows(codes)
		n[1].knows(codes)
		for _, content := range []string{"hello", "hello" + strings.Repeat(".", 8000)} {
			sealed, ok := n[0].net.SealEcho(n[1].id, []byte(content))
			if !ok {
				t.Fatal("not sealed")
			}
			forge(t, 0, 1, n[1].port, "\x03hello")                                     // without a code
			forge(t, 0, 1, n[1].port, "\x83"+strings.Repeat("0", 16)+"hello")          // with a wrong one
			forge(t, 1, 1, n[1].port, string(sealed))                                  // another's
			forge(t, 0, 1, n[1].port, string(sealed[:len(sealed)-1]))                  // not whole
			forge(t, 0, 1, n[1].port, "\x82"+string(sealed[1:]))                       // for another channel
			forge(t, 0, 1, n[1].port, "\x83"+string(sealed[1:17])+"HELLO"+content[5:]) // changed
			forge(t, 0, 1, n[1].port, string(sealed))
			if codes {
				n[1].want(t, n[0].id, fmt.Sprintf("echo from %s at %s:%d, %d: %.10s", overlay(0), overlay(1), n[1].port,
					len(content), content))
			} else { // without codes for the rest, a packet that has none is another's word
				n[1].want(t, n[0].id, "3 hello")
				n[1].want(t, n[0].id, fmt.Sprintf("echo from %s at %s:%d, %d: %.10s", overlay(0), overlay(1), n[1].port,
					len(content), content))
			}
			if got, ok := n[1].net.OpenEcho(n[0].id, sealed); !ok || string(got) != content {
				t.Errorf("opened: %v, %d bytes", ok, len(got))
			}
			if _, ok := n[1].net.OpenEcho(n[1].id, sealed); ok {
				t.Error("the code is taken for another's")
			}
		}
	}
}
