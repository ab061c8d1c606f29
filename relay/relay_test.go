package relay

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
)

func TestPacketsPassBetweenMembers(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	large := strings.Repeat("x", MaxPayload)
	for _, want := range []got{
		{a.id, ChannelWireGuard, "data"}, {a.id, ChannelGossip, "gossip"}, {a.id, ChannelSignal, "signal"},
		{a.id, ChannelGossip, ""}, {a.id, ChannelWireGuard, large},
	} {
		if err := a.Send(b.id, want.channel, []byte(want.b)); err != nil {
			t.Fatal(err)
		}
		b.want(t, want)
	}
	if err := a.Send(b.id, 0, make([]byte, MaxPayload+1)); err == nil {
		t.Error("a packet over the limit was taken")
	}
	// A relay's own host and a node itself are peers like all others.
	if err := a.Send(a.id, 0, []byte("self")); err != nil {
		t.Fatal(err)
	}
	a.want(t, got{a.id, 0, "self"})
}

func TestImpersonatedRelayIsRefused(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	n := newNode(t, m, newKey(t))
	other := newKey(t)
	n.SetRelays([]Relay{{ID: other.ID(), Addresses: []string{r.address}, Key: other.Public()}})
	waitFor(t, "the refusal", func() bool {
		return strings.Contains(n.Stats()[0].LastError, identity.ErrUnknownPeer.Error())
	})
	if len(n.Links()) != 0 {
		t.Errorf("links with an impersonated relay: %v", n.Links())
	}
}

func TestPacketForLateComerIsNotLost(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	b := newNode(t, m, newKey(t))
	if err := a.Send(b.id, ChannelWireGuard, []byte("handshake")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the relay's refusal", func() bool { return a.Stats()[0].Gone == 1 })
	if err := a.Send(b.id, ChannelGossip, []byte("gossip")); !errors.Is(err, ErrNoRelay) {
		t.Errorf("gossip to an absent peer: %v, want %v", err, ErrNoRelay)
	}
	b.use(r)
	b.want(t, got{a.id, ChannelWireGuard, "handshake"})
}

func TestReconnectKeepsTrying(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	r.kill()
	waitFor(t, "the loss to be noticed", func() bool { return len(a.Links()) == 0 && len(b.Links()) == 0 })
	r.listen(t, r.address)
	if err := a.Send(b.id, ChannelSignal, []byte("kept over the break")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelSignal, "kept over the break"})
}

// Who knows that a relay's host is back need not wait for the backoff, which has grown meanwhile.
func TestRetryEndsTheBackoff(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	n := startNode(t, m, r)
	waitFor(t, "the session", func() bool { return n.connected(r.key.ID()) })
	r.kill()
	dials := func() uint64 { return n.Stats()[0].Reconnects }
	waitFor(t, "a backoff of some seconds", func() bool {
		n.Retry(r.key.ID())
		return dials() >= 6
	})
	r.listen(t, r.address)
	n.Retry(r.key.ID())
	began := time.Now()
	waitFor(t, "the session again", func() bool { return n.connected(r.key.ID()) })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s, as long as the backoff", d)
	}
}

func TestStreams(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	ca, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	cb := <-b.streams
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
	waitFor(t, "the stream to be forgotten", func() bool { return r.server.Stats().Streams == 0 })
}

func TestStreamToAbsentPeerFailsAtOnce(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := a.Dial(ctx, newKey(t).ID()); !errors.Is(err, ErrNotHere) || !errors.Is(err, ErrNoRelay) {
		t.Errorf("dial: %v, want %v", err, ErrNotHere)
	}
}

func ExamplePool_Choose() {
	p := NewPool(PoolConfig{})
	defer p.Close()
	_, _, ok := p.Choose(identity.ID{1})
	fmt.Println(ok)
	// Output: false
}
