package relay

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestStrangersAreRefused(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	stranger := newNode(t, nil, newKey(t))
	stranger.use(r)
	waitFor(t, "the refusal", func() bool { return stranger.Stats()[0].LastError != "" })
	if r.server.Connected(stranger.id) {
		t.Error("a stranger has a session")
	}
}

func TestSourceCannotBeForged(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	c := rawSession(t, r, newKey(t), identity.ALPNRelay)
	// The only ID a client can write is the destination; a frame of the relay's own kind is refused.
	if _, err := c.Write(AppendNode(nil, FrameHere, a.id)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, io.ErrNoProgress) {
		t.Fatal(err)
	}
	key := newKey(t)
	c = rawSession(t, r, key, identity.ALPNRelay)
	if _, err := c.Write(AppendData(nil, b.id, 0, append(a.id[:], "as if from a"...))); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{key.ID(), 0, string(a.id[:]) + "as if from a"})
}

func TestBrokenFramesEndTheSession(t *testing.T) {
	for name, frame := range map[string][]byte{
		"data without destination": AppendHeader(nil, FrameData, 3),
		"unknown type":             AppendHeader(nil, 0x55, 0),
		"long ping":                AppendHeader(nil, FramePing, 9),
		"longer than any frame":    {byte(FrameData), 0xff, 0xff},
		"relay's frame":            AppendReply(nil, ReplyOK, ""),
		"hello":                    AppendHello(nil, Hello{}),
	} {
		t.Run(name, func(t *testing.T) {
			m := newMembers()
			r := startRelay(t, m)
			key := newKey(t)
			c := rawSession(t, r, key, identity.ALPNRelay)
			if _, err := c.Write(frame); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
		})
	}
	t.Run("cut short", func(t *testing.T) {
		m := newMembers()
		r := startRelay(t, m)
		b := startNode(t, m, r)
		key := newKey(t)
		c := rawSession(t, r, key, identity.ALPNRelay)
		whole := AppendData(nil, b.id, 0, []byte("never whole"))
		if _, err := c.Write(whole[:len(whole)-1]); err != nil {
			t.Fatal(err)
		}
		c.Close()
		waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
		if len(b.packets) != 0 {
			t.Error("half a packet was delivered")
		}
	})
	t.Run("types to ignore", func(t *testing.T) {
		m := newMembers()
		r := startRelay(t, m)
		b := startNode(t, m, r)
		key := newKey(t)
		c := rawSession(t, r, key, identity.ALPNRelay)
		frames := append(AppendHeader(nil, 0xf0, 4), 1, 2, 3, 4)
		if _, err := c.Write(AppendData(frames, b.id, 0, []byte("after"))); err != nil {
			t.Fatal(err)
		}
		b.want(t, got{key.ID(), 0, "after"})
	})
}

func TestSilentClientIsDropped(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.IdleTimeout = 300 * time.Millisecond })
	key := newKey(t)
	rawSession(t, r, key, identity.ALPNRelay)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
}

func TestNewerSessionReplacesOlder(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	key := newKey(t)
	older := rawSession(t, r, key, identity.ALPNRelay) // half-open: it neither reads nor closes
	newer := rawSession(t, r, key, identity.ALPNRelay)
	if _, err := io.Copy(io.Discard, older); err == nil {
		t.Log("the older session saw a clean end")
	}
	if err := a.Send(key.ID(), 0, []byte("to the newer")); err != nil {
		t.Fatal(err)
	}
	body, err := ReadFrame(newer, FrameData)
	if err != nil {
		t.Fatal(err)
	}
	if from, _, payload := DecodeData(body); from != a.id || string(payload) != "to the newer" {
		t.Errorf("got %q from %s", payload, from)
	}
	if s := r.server.Stats(); s.Replaced < 1 || s.Sessions != 2 {
		t.Errorf("stats: %+v, want one session replaced and two present", s)
	}
}

func TestKick(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	stream, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	m.revoke(a.id)
	r.server.Kick(a.id)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(a.id) })
	if _, err := stream.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a kicked node's stream ended with %v, want a reset", err)
	}
	waitFor(t, "the refusal to come back", func() bool { return a.Stats()[0].Reconnects > 0 && !a.Stats()[0].Connected })
}

func TestStreamOfferNeedsItsOwnerAndSecret(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	key, thief := newKey(t), newKey(t)
	target := rawSession(t, r, key, identity.ALPNRelay)
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Dial(t.Context(), key.ID())
		dialed <- err
	}()
	body, err := ReadFrame(target, FrameOffer)
	if err != nil {
		t.Fatal(err)
	}
	o := DecodeOffer(body)
	if o.From != a.id {
		t.Errorf("offer from %s, want %s", o.From, a.id)
	}
	wrong := o.Secret
	wrong[0] ^= 1
	for _, c := range []struct {
		key    *identity.Key
		secret [SecretSize]byte
		want   ReplyCode
	}{{thief, o.Secret, ReplyRefused}, {key, wrong, ReplyRefused}, {key, o.Secret, ReplyOK},
		{key, o.Secret, ReplyRefused}} {
		conn := rawSession(t, r, c.key, identity.ALPNSplice)
		if _, err := conn.Write(AppendAccept(nil, o.Stream, c.secret)); err != nil {
			t.Fatal(err)
		}
		body, err := ReadFrame(conn, FrameReply)
		if err != nil {
			t.Fatal(err)
		}
		if code, reason := DecodeReply(body); code != c.want {
			t.Errorf("answer %d %q, want %d", code, reason, c.want)
		}
	}
	if err := <-dialed; err != nil {
		t.Error(err)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxStreamsPerClient = 2 })
	a, b := startNode(t, m, r), startNode(t, m, r)
	for i := range 3 {
		_, err := a.Dial(t.Context(), b.id)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if _, err := b.Dial(t.Context(), a.id); err != nil {
		t.Errorf("another client's stream: %v", err)
	}
}

func TestSessionsAreLimited(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxSessions = 1 })
	startNode(t, m, r)
	late := newNode(t, m, newKey(t))
	late.use(r)
	waitFor(t, "the refusal", func() bool { return r.server.Stats().Refused > 0 })
}

// Limits that change while the relay works count for what comes next: sessions, streams, and what clients send.
func TestLimitsChange(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxSessions, c.MaxStreamsPerClient = 1, 1 })
	a := startNode(t, m, r)
	late := newNode(t, m, newKey(t))
	late.use(r)
	waitFor(t, "the refusal", func() bool { return r.server.Stats().Refused > 0 })
	r.server.SetLimits(Limits{MaxSessions: 2, MaxStreamsPerClient: 2, MaxMemory: 32 << 20, ClientPackets: 100})
	waitFor(t, "the second session", func() bool { return r.server.Stats().Sessions == 2 })
	if have := r.server.Stats().MaxMemory; have != 32<<20 {
		t.Errorf("%d bytes of memory", have)
	}
	for i := range 3 {
		_, err := a.Dial(t.Context(), late.id)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	limited := func() uint64 {
		for range 50 {
			_ = a.Send(late.id, 1, make([]byte, 100))
		}
		return r.server.Stats().Limited
	}
	waitFor(t, "a client that sends too much is slowed", func() bool { return limited() > 0 })
	r.server.SetLimits(Limits{MaxSessions: 1})
	if n := r.server.Stats().Sessions; n != 2 {
		t.Errorf("%d sessions are left: those that are open stay", n)
	}
}
