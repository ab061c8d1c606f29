package e2e

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/identity"
)

// front is where the seed takes relay sessions and joiners.
func front(t *testing.T) string {
	t.Helper()
	info, err := shared(t).Node("seed")
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(info.Host.Addr, 7443).String()
}

// dial opens a TCP connection from a host of the lab.
func dial(t *testing.T, host, address string) net.Conn {
	t.Helper()
	var c net.Conn
	err := fabric.In(fabric.HostNS(labName, host), func() (err error) {
		c, err = net.DialTimeout("tcp", address, patience)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// secure is a TLS connection by which key is proved.
func secure(t *testing.T, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	conf, err := key.ClientTLS(alpn, func(ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(dial(t, "spare", front(t)), conf)
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Logf("handshake: %v", err) // with TLS 1.3 the refusal often comes with the first read
	}
	return c
}

// ended reads until the other end closes and gives what it sent.
func ended(t *testing.T, c net.Conn) []byte {
	t.Helper()
	b, err := io.ReadAll(io.LimitReader(c, 1<<20))
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("after %s the connection is still open", patience)
	}
	return b
}

// unharmed asserts that the seed's agent is the same one as before and has no new problem.
func unharmed(t *testing.T) func() {
	t.Helper()
	client, err := shared(t).Client("seed")
	if err != nil {
		t.Fatal(err)
	}
	status := func() *skeinv1.StatusResponse {
		st, err := client.Status(context.Background(), &skeinv1.StatusRequest{})
		if err != nil {
			t.Fatalf("the seed's agent: %v", err)
		}
		return st
	}
	before := status()
	return func() {
		t.Helper()
		after := status()
		if after.GetStartedAt() != before.GetStartedAt() || len(after.GetProblems()) > len(before.GetProblems()) {
			t.Errorf("the seed suffered: before %v, after %v", before, after)
		}
	}
}

func newKey(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestStrangerAtTheTLSPort(t *testing.T) {
	t.Cleanup(unharmed(t))
	t.Run("no TLS", func(t *testing.T) {
		c := dial(t, "spare", front(t))
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		const alert = 0x15 // TLS's own word for "this is not TLS"
		if b := ended(t, c); len(b) > 0 && (b[0] != alert || len(b) != 7) {
			t.Errorf("it answered %q", b)
		}
	})
	t.Run("silence", func(t *testing.T) {
		t.Parallel() // takes the five seconds that a handshake may
		ended(t, dial(t, "spare", front(t)))
	})
	for _, alpn := range []string{identity.ALPNRelay, identity.ALPNSplice, identity.ALPNRPC, identity.ALPNRaft, "h2"} {
		t.Run("not a member: "+alpn, func(t *testing.T) {
			c := secure(t, newKey(t), alpn)
			if b := ended(t, c); len(b) > 0 {
				t.Errorf("a stranger got %d bytes: %x", len(b), b)
			}
		})
	}
	length := func(n uint32, rest string) []byte { return append(binary.BigEndian.AppendUint32(nil, n), rest...) }
	for name, j := range map[string]struct {
		bytes []byte
		cut   bool // the joiner hangs up; else the seed has to
	}{
		"length beyond the limit": {length(1<<31, "x"), false},
		"more than it sends":      {length(1000, "x"), true},
		"no protobuf":             {length(4, "\xff\xff\xff\xff"), false},
		"nothing":                 {nil, true},
	} {
		t.Run("joins with "+name, func(t *testing.T) {
			c := secure(t, newKey(t), identity.ALPNJoin)
			_, _ = c.Write(j.bytes)
			if j.cut {
				_ = c.CloseWrite()
			}
			if b := ended(t, c); len(b) > 0 {
				t.Errorf("it answered %d bytes", len(b))
			}
		})
	}
}

func TestRelayFrames(t *testing.T) {
	s := newSite(t, "spare", "clumsy", nil)
	s.stop(s.running("--join", token(t)))
	key, _, err := identity.LoadOrCreate(s.path("state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unharmed(t))
	const (
		hello, ping, data, gone = 0x01, 0x02, 0x10, 0x11
	)
	frame := func(kind byte, body []byte) []byte {
		return append([]byte{kind, byte(len(body) >> 8), byte(len(body))}, body...)
	}
	read := func(t *testing.T, c net.Conn) (byte, []byte) {
		t.Helper()
		var head [3]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatal(err)
		}
		body := make([]byte, binary.BigEndian.Uint16(head[1:]))
		if _, err := io.ReadFull(c, body); err != nil {
			t.Fatal(err)
		}
		return head[0], body
	}
	session := func(t *testing.T) *tls.Conn {
		t.Helper()
		c := secure(t, key, identity.ALPNRelay)
		if kind, _ := read(t, c); kind != hello {
			t.Fatalf("the relay begins with frame 0x%02x", kind)
		}
		return c
	}
	for name, f := range map[string]struct {
		bytes []byte
		cut   bool // the client hangs up; else the relay has to
	}{
		"cut short in its head":  {[]byte{data}, true},
		"cut short in its body":  {frame(data, make([]byte, 900))[:40], true},
		"too short for its type": {frame(data, []byte{1, 2, 3}), false},
		"too long for its type":  {frame(ping, make([]byte, 9)), false},
		"longer than any frame":  {[]byte{data, 0xff, 0xff}, false},
		"one that relays send":   {frame(hello, make([]byte, 13)), false},
		"of a type nobody knows": {frame(0x3f, nil), false},
		"noise":                  {bytes.Repeat([]byte{0x17, 0xff}, 4000), false},
	} {
		t.Run(name, func(t *testing.T) {
			c := session(t)
			_, _ = c.Write(f.bytes)
			if f.cut {
				_ = c.CloseWrite()
			}
			ended(t, c)
		})
	}
	t.Run("for an unknown key", func(t *testing.T) {
		c := session(t)
		body := append([]byte{0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 1, 0}, "payload"...)
		if _, err := c.Write(frame(data, body)); err != nil {
			t.Fatal(err)
		}
		kind, back := read(t, c)
		for kind == data { // the node's peers find that it has a session, and have something to say to it
			kind, back = read(t, c)
		}
		if kind != gone || !bytes.Equal(back, body) {
			t.Errorf("the answer is frame 0x%02x %q, want the packet back", kind, back)
		}
	})
}
