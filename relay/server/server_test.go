package server_test

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

func TestStrangersAreRefused(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	stranger := relaytest.NewNode(t, nil, relaytest.NewKey(t))
	stranger.Use(r)
	relaytest.WaitFor(t, "the refusal", func() bool { return stranger.Stats()[0].LastError != "" })
	if r.Server.Connected(stranger.ID) {
		t.Error("a stranger has a session")
	}
}

func TestSourceCannotBeForged(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	c := relaytest.RawSession(t, r, relaytest.NewKey(t), identity.ALPNRelay)
	// The only ID a client can write is the destination; a frame of the relay's own kind is refused.
	if _, err := c.Write(wire.AppendNode(nil, wire.FrameHere, a.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, io.ErrNoProgress) {
		t.Fatal(err)
	}
	key := relaytest.NewKey(t)
	c = relaytest.RawSession(t, r, key, identity.ALPNRelay)
	if _, err := c.Write(wire.AppendData(nil, b.ID, 0, append(a.ID[:], "as if from a"...))); err != nil {
		t.Fatal(err)
	}
	b.Want(t, key.ID(), 0, string(a.ID[:])+"as if from a")
}

func TestBrokenFramesEndTheSession(t *testing.T) {
	for name, frame := range map[string][]byte{
		"data without destination": wire.AppendHeader(nil, wire.FrameData, 3),
		"unknown type":             wire.AppendHeader(nil, 0x55, 0),
		"long ping":                wire.AppendHeader(nil, wire.FramePing, 9),
		"longer than any frame":    {byte(wire.FrameData), 0xff, 0xff},
		"relay's frame":            wire.AppendReply(nil, wire.ReplyOK, ""),
		"hello":                    wire.AppendHello(nil, wire.Hello{}),
	} {
		t.Run(name, func(t *testing.T) {
			m := relaytest.NewMembers()
			r := relaytest.StartRelay(t, m)
			key := relaytest.NewKey(t)
			c := relaytest.RawSession(t, r, key, identity.ALPNRelay)
			if _, err := c.Write(frame); err != nil {
				t.Fatal(err)
			}
			relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(key.ID()) })
		})
	}
	t.Run("cut short", func(t *testing.T) {
		m := relaytest.NewMembers()
		r := relaytest.StartRelay(t, m)
		b := relaytest.StartNode(t, m, r)
		key := relaytest.NewKey(t)
		c := relaytest.RawSession(t, r, key, identity.ALPNRelay)
		whole := wire.AppendData(nil, b.ID, 0, []byte("never whole"))
		if _, err := c.Write(whole[:len(whole)-1]); err != nil {
			t.Fatal(err)
		}
		c.Close()
		relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(key.ID()) })
		if len(b.Packets) != 0 {
			t.Error("half a packet was delivered")
		}
	})
	t.Run("types to ignore", func(t *testing.T) {
		m := relaytest.NewMembers()
		r := relaytest.StartRelay(t, m)
		b := relaytest.StartNode(t, m, r)
		key := relaytest.NewKey(t)
		c := relaytest.RawSession(t, r, key, identity.ALPNRelay)
		frames := append(wire.AppendHeader(nil, 0xf0, 4), 1, 2, 3, 4)
		if _, err := c.Write(wire.AppendData(frames, b.ID, 0, []byte("after"))); err != nil {
			t.Fatal(err)
		}
		b.Want(t, key.ID(), 0, "after")
	})
}

func TestSilentClientIsDropped(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.IdleTimeout = 300 * time.Millisecond })
	key := relaytest.NewKey(t)
	relaytest.RawSession(t, r, key, identity.ALPNRelay)
	relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(key.ID()) })
}

func TestNewerSessionReplacesOlder(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r)
	key := relaytest.NewKey(t)
	older := relaytest.RawSession(t, r, key, identity.ALPNRelay) // half-open: it neither reads nor closes
	newer := relaytest.RawSession(t, r, key, identity.ALPNRelay)
	if _, err := io.Copy(io.Discard, older); err == nil {
		t.Log("the older session saw a clean end")
	}
	if err := a.Send(key.ID(), 0, []byte("to the newer")); err != nil {
		t.Fatal(err)
	}
	body, err := wire.ReadFrame(newer, wire.FrameData)
	if err != nil {
		t.Fatal(err)
	}
	if from, _, payload := wire.DecodeData(body); from != a.ID || string(payload) != "to the newer" {
		t.Errorf("got %q from %s", payload, from)
	}
	if s := r.Server.Stats(); s.Replaced < 1 || s.Sessions != 2 {
		t.Errorf("stats: %+v, want one session replaced and two present", s)
	}
}

func TestKick(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	stream, err := a.Dial(t.Context(), b.ID)
	if err != nil {
		t.Fatal(err)
	}
	m.Revoke(a.ID)
	r.Server.Kick(a.ID)
	relaytest.WaitFor(t, "the end of the session", func() bool { return !r.Server.Connected(a.ID) })
	if _, err := stream.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a kicked node's stream ended with %v, want a reset", err)
	}
	relaytest.WaitFor(t, "the refusal to come back", func() bool {
		return a.Stats()[0].Reconnects > 0 && !a.Stats()[0].Connected
	})
}

func TestStreamOfferNeedsItsOwnerAndSecret(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	a := relaytest.StartNode(t, m, r)
	key, thief := relaytest.NewKey(t), relaytest.NewKey(t)
	target := relaytest.RawSession(t, r, key, identity.ALPNRelay)
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Dial(t.Context(), key.ID())
		dialed <- err
	}()
	body, err := wire.ReadFrame(target, wire.FrameOffer)
	if err != nil {
		t.Fatal(err)
	}
	o := wire.DecodeOffer(body)
	if o.From != a.ID {
		t.Errorf("offer from %s, want %s", o.From, a.ID)
	}
	wrong := o.Secret
	wrong[0] ^= 1
	for _, c := range []struct {
		key    *identity.Key
		secret [wire.SecretSize]byte
		want   wire.ReplyCode
	}{{thief, o.Secret, wire.ReplyRefused}, {key, wrong, wire.ReplyRefused}, {key, o.Secret, wire.ReplyOK},
		{key, o.Secret, wire.ReplyRefused}} {
		conn := relaytest.RawSession(t, r, c.key, identity.ALPNSplice)
		if _, err := conn.Write(wire.AppendAccept(nil, o.Stream, c.secret)); err != nil {
			t.Fatal(err)
		}
		body, err := wire.ReadFrame(conn, wire.FrameReply)
		if err != nil {
			t.Fatal(err)
		}
		if code, reason := wire.DecodeReply(body); code != c.want {
			t.Errorf("answer %d %q, want %d", code, reason, c.want)
		}
	}
	if err := <-dialed; err != nil {
		t.Error(err)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.MaxStreamsPerClient = 2 })
	a, b := relaytest.StartNode(t, m, r), relaytest.StartNode(t, m, r)
	for i := range 3 {
		_, err := a.Dial(t.Context(), b.ID)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if _, err := b.Dial(t.Context(), a.ID); err != nil {
		t.Errorf("another client's stream: %v", err)
	}
}

func TestSessionsAreLimited(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.MaxSessions = 1 })
	relaytest.StartNode(t, m, r)
	late := relaytest.NewNode(t, m, relaytest.NewKey(t))
	late.Use(r)
	relaytest.WaitFor(t, "the refusal", func() bool { return r.Server.Stats().Refused > 0 })
}

// Limits that change while the relay works count for what comes next: sessions, streams, and what clients send.
func TestLimitsChange(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m, func(c *server.Config) { c.MaxSessions, c.MaxStreamsPerClient = 1, 1 })
	a := relaytest.StartNode(t, m, r)
	late := relaytest.NewNode(t, m, relaytest.NewKey(t))
	late.Use(r)
	relaytest.WaitFor(t, "the refusal", func() bool { return r.Server.Stats().Refused > 0 })
	r.Server.SetLimits(server.Limits{MaxSessions: 2, MaxStreamsPerClient: 2, MaxMemory: 32 << 20, ClientPackets: 100})
	relaytest.WaitFor(t, "the second session", func() bool { return r.Server.Stats().Sessions == 2 })
	if have := r.Server.Stats().MaxMemory; have != 32<<20 {
		t.Errorf("%d bytes of memory", have)
	}
	for i := range 3 {
		_, err := a.Dial(t.Context(), late.ID)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	limited := func() uint64 {
		for range 50 {
			_ = a.Send(late.ID, 1, make([]byte, 100))
		}
		return r.Server.Stats().Limited
	}
	relaytest.WaitFor(t, "a client that sends too much is slowed", func() bool { return limited() > 0 })
	r.Server.SetLimits(server.Limits{MaxSessions: 1})
	if n := r.Server.Stats().Sessions; n != 2 {
		t.Errorf("%d sessions are left: those that are open stay", n)
	}
}
