package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// dialAs connects to a relay as a member would, and leaves what is said to the test.
func dialAs(t *testing.T, m *members, r *testRelay, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	m.allow(key.ID())
	config, err := key.ClientTLS(alpn, identity.Expect(r.key.Public()))
	if err != nil {
		t.Fatal(err)
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: config}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", r.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*tls.Conn)
}

// Whoever sends to nodes that are not here has some of it handed back, and costs the others no lock for the rest.
func TestWhatIsHandedBackIsBounded(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	c := dialAs(t, m, r, newKey(t), identity.ALPNRelay)
	const packets = 4 * refusalsBurst
	began := time.Now()
	go func() {
		var b []byte
		for i := range packets {
			b = appendData(b[:0], identity.ID{9, byte(i >> 8), byte(i)}, ChannelSignal, []byte("x"))
			if _, err := c.Write(b); err != nil {
				return
			}
		}
		_, _ = c.Write(appendToken(nil, framePing, 7))
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, back := newFrameReader(), 0
	for done := false; !done; {
		if _, err := f.fill(c); err != nil {
			t.Fatal(err)
		}
		for {
			typ, _, ok, err := f.next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			switch typ {
			case frameGone:
				back++
			case framePong:
				done = true
			}
		}
	}
	most := refusalsBurst + int(time.Since(began).Seconds()*refusalsPerSecond) + 1
	if back == 0 || back > most {
		t.Errorf("%d of %d packets were handed back, want at most %d", back, packets, most)
	}
	if st := r.server.Stats(); st.Unroutable != packets {
		t.Errorf("%d packets count as unroutable, want all %d", st.Unroutable, packets)
	}
}

// Connections that do not say what they are for are few for each node, and concern no other.
func TestSplicesThatSayNothingAreBounded(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	silent := newKey(t)
	var open []*tls.Conn
	for range maxOpening {
		open = append(open, dialAs(t, m, r, silent, identity.ALPNSplice))
	}
	opening := func() int {
		r.server.streams.mu.Lock()
		defer r.server.streams.mu.Unlock()
		return r.server.streams.fresh[silent.ID()]
	}
	waitFor(t, "all that may", func() bool { return opening() == maxOpening })
	over := dialAs(t, m, r, silent, identity.ALPNSplice)
	_ = over.SetReadDeadline(time.Now().Add(acceptTimeout / 2))
	if _, err := over.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one too many: %v, want its end", err)
	}
	other := dialAs(t, m, r, newKey(t), identity.ALPNSplice)
	if err := ask(other, appendNode(nil, frameConnect, silent.ID())); !errors.Is(err, errNotHere) {
		t.Errorf("another node beside it: %v", err)
	}
	for _, c := range open {
		c.Close()
	}
	waitFor(t, "their end", func() bool { return opening() == 0 })
	if err := ask(dialAs(t, m, r, silent, identity.ALPNSplice),
		appendNode(nil, frameConnect, identity.ID{1})); !errors.Is(err, errNotHere) {
		t.Errorf("after their end: %v", err)
	}
}
