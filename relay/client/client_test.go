package client_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

func TestPacketsPassBetweenMembers(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	large := strings.Repeat("x", wire.MaxPayload)
	for _, want := range []struct {
		from    identity.ID
		channel byte
		payload string
	}{
		{a.ID, wire.ChannelWireGuard, "data"}, {a.ID, wire.ChannelGossip, "gossip"}, {a.ID, wire.ChannelSignal, "signal"},
		{a.ID, wire.ChannelGossip, ""}, {a.ID, wire.ChannelWireGuard, large},
	} {
		if err := a.Send(b.ID, want.channel, []byte(want.payload)); err != nil {
			t.Fatal(err)
		}
		b.Want(t, want.from, want.channel, want.payload)
	}
	if err := a.Send(b.ID, 0, make([]byte, wire.MaxPayload+1)); err == nil {
		t.Error("a packet over the limit was taken")
	}
	// A relay's own host and a node itself are peers like all others.
	if err := a.Send(a.ID, 0, []byte("self")); err != nil {
		t.Fatal(err)
	}
	a.Want(t, a.ID, 0, "self")
}

func TestImpersonatedRelayIsRefused(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	n := relaytest.NewNode(t, m, relaytest.NewKey(t))
	other := relaytest.NewKey(t)
	n.SetRelays([]client.Relay{{ID: other.ID(), Addresses: []string{r.Address}, Key: other.Public()}})
	relaytest.WaitFor(t, "the refusal", func() bool {
		return strings.Contains(n.Stats()[0].LastError, identity.ErrUnknownPeer.Error())
	})
	if len(n.Links()) != 0 {
		t.Errorf("links with an impersonated relay: %v", n.Links())
	}
}

func TestPacketForLateComerIsNotLost(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r)
	b := relaytest.NewNode(t, m, relaytest.NewKey(t))
	if err := a.Send(b.ID, wire.ChannelWireGuard, []byte("handshake")); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "the relay's refusal", func() bool { return a.Stats()[0].Gone == 1 })
	if err := a.Send(b.ID, wire.ChannelGossip, []byte("gossip")); !errors.Is(err, client.ErrNoRelay) {
		t.Errorf("gossip to an absent peer: %v, want %v", err, client.ErrNoRelay)
	}
	b.Use(r)
	b.Want(t, a.ID, wire.ChannelWireGuard, "handshake")
}

func TestReconnectKeepsTrying(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	r.Kill()
	relaytest.WaitFor(t, "the loss to be noticed", func() bool { return len(a.Links()) == 0 && len(b.Links()) == 0 })
	r.Listen(t, r.Address)
	if err := a.Send(b.ID, wire.ChannelSignal, []byte("kept over the break")); err != nil {
		t.Fatal(err)
	}
	b.Want(t, a.ID, wire.ChannelSignal, "kept over the break")
}

// A node that knows that a relay's host is back need not wait for the backoff, which has grown meanwhile.
func TestRetryEndsTheBackoff(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	n := relaytest.StartNode(t, m, r)
	relaytest.WaitFor(t, "the session", func() bool { return n.Connected(r.Key.ID()) })
	r.Kill()
	dials := func() uint64 { return n.Stats()[0].Reconnects }
	relaytest.WaitFor(t, "a backoff of some seconds", func() bool {
		n.Retry(r.Key.ID())
		return dials() >= 6
	})
	r.Listen(t, r.Address)
	n.Retry(r.Key.ID())
	began := time.Now()
	relaytest.WaitFor(t, "the session again", func() bool { return n.Connected(r.Key.ID()) })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s, as long as the backoff", d)
	}
}

func TestStreams(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	ca, err := a.Dial(t.Context(), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	cb := <-b.Streams
	type half interface{ CloseWrite() error }
	const size = 8 << 20
	send := func(c net.Conn, seed byte) {
		block := bytes.Repeat([]byte{seed, 1, 2, 3}, 4096)
		for range size / len(block) {
			if _, err := c.Write(block); err != nil {
				t.Errorf("write: %v", err)
				return
			}
		}
		if err := c.(half).CloseWrite(); err != nil {
			t.Errorf("close one half: %v", err)
		}
	}
	receive := func(c net.Conn, seed byte) {
		h, want := sha256.New(), sha256.Sum256(bytes.Repeat([]byte{seed, 1, 2, 3}, size/4))
		if n, err := io.Copy(h, c); err != nil || n != size || !bytes.Equal(h.Sum(nil), want[:]) {
			t.Errorf("received %d bytes (want %d), error %v, or other bytes than were sent", n, size, err)
		}
	}
	// One direction ends long before the other begins.
	var wg sync.WaitGroup
	wg.Go(func() { send(ca, 'a') })
	receive(cb, 'a')
	wg.Go(func() { send(cb, 'b') })
	receive(ca, 'b')
	wg.Wait()
	relaytest.WaitFor(t, "the stream to be forgotten", func() bool { return r.Server.Stats().Streams == 0 })
}

func TestStreamToAbsentPeerFailsAtOnce(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := a.Dial(ctx, relaytest.NewKey(t).ID())
	if !errors.Is(err, wire.ErrNotHere) || !errors.Is(err, client.ErrNoRelay) {
		t.Errorf("dial: %v, want %v", err, wire.ErrNotHere)
	}
}

func ExamplePool_Choose() {
	p := client.NewPool(client.PoolConfig{})
	defer p.Close()
	_, _, ok := p.Choose(identity.ID{1})
	fmt.Println(ok)
	// Output: false
}
