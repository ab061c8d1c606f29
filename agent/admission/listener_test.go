package admission

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// members are keys by ID.
type members struct{ sync.Map }

func membersOf(keys ...*identity.Key) *members {
	var m members
	for _, k := range keys {
		m.Store(k.ID(), k.Public())
	}
	return &m
}

func (m *members) key(id identity.ID) (ed25519.PublicKey, bool) {
	k, ok := m.Load(id)
	if !ok {
		return nil, false
	}
	return k.(ed25519.PublicKey), true
}

func newKey(t *testing.T) *identity.Key {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// echoes answer with the protocol and who is asking.
func echoes() Handlers {
	all := Handlers{}
	for _, alpn := range []string{identity.ALPNRelay, identity.ALPNSplice, identity.ALPNJoin} {
		all[alpn] = func(_ context.Context, c *tls.Conn, peer identity.ID) { io.WriteString(c, alpn+" "+peer.String()) }
	}
	return all
}

// serve runs a listener until the test ends.
func serve(t *testing.T, cfg Config) (*Listener, string) {
	t.Helper()
	cfg.Address, cfg.Log = "127.0.0.1:0", slog.New(slog.DiscardHandler)
	l, err := Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go l.Serve(ctx)
	t.Cleanup(func() { cancel(); <-l.Done() })
	return l, l.Addr().String()
}

// ask dials a listener and reads what it says.
func ask(t *testing.T, address string, key *identity.Key, alpn string, clock func() time.Time) (string, error) {
	t.Helper()
	conf, err := key.ClientTLS(alpn, func(ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	conf.Time = clock
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: conf}
	c, err := d.DialContext(t.Context(), "tcp", address)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	b, err := io.ReadAll(c)
	return string(b), err
}

// askOver is ask over a connection that is there.
func askOver(t *testing.T, c net.Conn, key *identity.Key, alpn string) (string, error) {
	t.Helper()
	conf, err := key.ClientTLS(alpn, func(ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	b, err := io.ReadAll(tls.Client(c, conf))
	return string(b), err
}

func TestListener(t *testing.T) {
	a, b, stranger := newKey(t), newKey(t), newKey(t)
	all := membersOf(a, b)
	_, address := serve(t, Config{Key: a, Member: all.key, Handlers: echoes()})
	for _, c := range []struct {
		name string
		who  *identity.Key
		alpn string
		in   bool
	}{
		{"a member relays", b, identity.ALPNRelay, true},
		{"a member splices", b, identity.ALPNSplice, true},
		{"a member joins again", b, identity.ALPNJoin, true},
		{"itself", a, identity.ALPNRelay, true},
		{"a stranger joins", stranger, identity.ALPNJoin, true},
		{"a stranger relays", stranger, identity.ALPNRelay, false},
		{"a stranger splices", stranger, identity.ALPNSplice, false},
		{"another protocol", b, identity.ALPNRaft, false},
		{"no protocol of ours", b, "h2", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			said, err := ask(t, address, c.who, c.alpn, nil)
			if want := c.alpn + " " + c.who.ID().String(); c.in && (err != nil || said != want) {
				t.Errorf("it said %q, %v; want %q", said, err, want)
			}
			if !c.in && (err == nil || said != "") {
				t.Errorf("it let in and said %q", said)
			}
		})
	}
	t.Run("another key with a member's ID", func(t *testing.T) {
		all.Store(stranger.ID(), b.Public())
		if said, err := ask(t, address, stranger, identity.ALPNRelay, nil); err == nil {
			t.Errorf("it let in and said %q", said)
		}
	})
	t.Run("a member that is one no longer", func(t *testing.T) {
		all.Delete(b.ID())
		if said, err := ask(t, address, b, identity.ALPNRelay, nil); err == nil {
			t.Errorf("it let in and said %q", said)
		}
	})
}

func TestListenPortTaken(t *testing.T) {
	key := newKey(t)
	_, address := serve(t, Config{Key: key, Member: membersOf(key).key, Handlers: echoes()})
	_, err := Listen(Config{Key: key, Address: address})
	if err == nil || !strings.Contains(err.Error(), "address already in use (if another program has it, set "+
		"ports.relay in the configuration)") {
		t.Errorf("have %v", err)
	}
}

// Certificates are judged by their key alone.
func TestConnectionsIgnoreTheClock(t *testing.T) {
	a, b := newKey(t), newKey(t)
	cfg := Config{Key: a, Member: membersOf(a, b).key, Handlers: echoes()}
	_, address := serve(t, cfg)
	for _, off := range []time.Duration{-26 * 365 * 24 * time.Hour, -3 * time.Hour, 3 * time.Hour,
		50 * 365 * 24 * time.Hour} {
		wrong := func() time.Time { return time.Now().Add(off) }
		if _, err := ask(t, address, b, identity.ALPNRelay, wrong); err != nil {
			t.Errorf("a client whose clock is %s off: %v", off, err)
		}
	}
	cfg.Now = func() time.Time { return time.Unix(0, 0) }
	_, address = serve(t, cfg)
	if _, err := ask(t, address, b, identity.ALPNRelay, nil); err != nil {
		t.Errorf("a server whose clock begins at 1970: %v", err)
	}
}
