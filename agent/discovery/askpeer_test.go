package discovery

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
)

// A public host answers STUN at STUN's ports. Its WireGuard port is silent for a stranger, and tells a member who pings
// it.
func TestWireGuardsPortAnswersMembersAlone(t *testing.T) {
	internet := nattest.New(t)
	public, other := internet.Host(nattest.Public), internet.Host(nattest.Symmetric)
	wg, stun := netip.AddrPortFrom(public.Addr, 51820), netip.AddrPortFrom(public.Addr, 3478)
	server, member := identity.ID{1}, identity.ID{2}
	a := listenAsAgent(t, public, server, member)
	public.Do(func() {
		if err := a.Serve(true); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		if err := a.Serve(false); err != nil || a.Server() != nil {
			t.Errorf("the STUN server is closed: %v", err)
		}
	})

	var stranger *net.UDPConn
	other.Do(func() {
		var err error
		if stranger, err = net.ListenUDP("udp4", nil); err != nil {
			t.Fatal(err)
		}
	})
	defer stranger.Close()
	ask := func(to netip.AddrPort) {
		b, err := stunmsg.EncodeRequest(stunmsg.TxID{1}, stunmsg.Here)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stranger.WriteToUDPAddrPort(b, to); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		ask(wg)
	}

	asker := listenAsAgent(t, other, member, server)
	asker.SetPeers(map[netip.AddrPort]identity.ID{wg: server})
	mapped, rtt, err := asker.askPeer(t.Context(), wg)
	if err != nil || mapped.Addr() != other.Outside || rtt <= 0 {
		t.Errorf("a member hears %s after %s, %v; want its outside address %s", mapped, rtt, err, other.Outside)
	}
	// WireGuard's port has answered the member, so it has dealt with what came before; and STUN's port answers after that.
	ask(stun)
	_ = stranger.SetReadDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, 2048)
	if n, from, err := stranger.ReadFromUDPAddrPort(b); err != nil || from != stun {
		t.Errorf("a stranger's first answer is %x from %s, %v; want one from STUN's port", b[:n], from, err)
	}
	if _, _, err := asker.askPeer(t.Context(), stun); err == nil {
		t.Error("somebody was asked who is not a peer")
	}
	if len(asker.peers.waiting) != 0 {
		t.Error("the ping is waited for though it was answered")
	}
}

// listenAsAgent opens discovery and the prober at WireGuard's port, as the daemon does.
func listenAsAgent(t *testing.T, host *nattest.Host, self, peer identity.ID) *Discovery {
	t.Helper()
	var socket *probe.Socket
	host.Do(func() {
		owner, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 51820}) // instead of WireGuard
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { owner.Close() })
		if socket, err = probe.Open(probe.Config{Port: 51820}); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() { socket.Close() })
	var prober *probe.Prober
	d, err := New(Config{Socket: socket, Port: 51820, StunPort: 3478, Log: slog.New(slog.DiscardHandler),
		Ping: func(id identity.ID, to netip.AddrPort) (probe.TxID, error) { return prober.SendPing(id, to) }})
	if err != nil {
		t.Fatal(err)
	}
	prober = probe.NewProber(probe.ProberConfig{Self: self, Epoch: 1, Socket: socket, OnSTUN: d.STUN.HandleSTUN,
		OnPong: d.PongReceived})
	prober.SetPeer(peer, [32]byte{7})
	socket.Serve(prober.Handle)
	return d
}

func TestAPeerIsAskedAgainWhenAPingIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q askedPeers
		var mu sync.Mutex
		at, observed := netip.MustParseAddrPort("203.0.113.1:51820"), netip.MustParseAddrPort("198.51.100.1:7")
		q.peersAt(map[netip.AddrPort]identity.ID{at: {1}})
		pings := 0
		ping := func(id identity.ID) (probe.TxID, error) {
			mu.Lock()
			defer mu.Unlock()
			pings++
			tx := probe.TxID{byte(pings)}
			switch pings {
			case 2: // by a way that says nothing of this one
				time.AfterFunc(time.Millisecond, func() {
					q.heard(probe.Pong{Peer: id, From: netip.MustParseAddrPort("203.0.113.9:1"), To: at, Tx: tx,
						Observed: netip.MustParseAddrPort("192.0.2.1:1")})
				})
			case 3:
				time.AfterFunc(time.Millisecond, func() {
					q.heard(probe.Pong{Peer: id, From: at, To: at, Tx: tx, Observed: observed, RTT: time.Millisecond})
				})
			}
			return tx, nil
		}
		got, rtt, err := q.ask(t.Context(), at, ping)
		if got != observed || rtt != time.Millisecond || err != nil || pings != 3 || len(q.waiting) != 0 {
			t.Errorf("%s, %s, %v after %d pings, %d are waited for", got, rtt, err, pings, len(q.waiting))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := q.ask(ctx, at, ping); !errors.Is(err, context.DeadlineExceeded) || pings != 6 || len(q.waiting) != 0 {
			t.Errorf("%v after %d pings", err, pings)
		}
	})
}
