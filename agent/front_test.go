package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// serveFront runs a front that answers with the protocol and who is asking.
func serveFront(t *testing.T, key *identity.Key, r *roster, clock func() time.Time) (*front, string) {
	t.Helper()
	handlers := map[string]func(context.Context, *tls.Conn, identity.ID){}
	for _, alpn := range []string{identity.ALPNRelay, identity.ALPNSplice, identity.ALPNJoin} {
		handlers[alpn] = func(_ context.Context, c *tls.Conn, peer identity.ID) { io.WriteString(c, alpn+" "+peer.String()) }
	}
	return serveFrontWith(t, key, r, clock, handlers)
}

func serveFrontWith(t *testing.T, key *identity.Key, r *roster, clock func() time.Time,
	handlers map[string]func(context.Context, *tls.Conn, identity.ID)) (*front, string) {
	t.Helper()
	f, err := openFront(key, r, "127.0.0.1:0", handlers, quiet())
	if err != nil {
		t.Fatal(err)
	}
	f.tls.Time = clock
	ctx, cancel := context.WithCancel(context.Background())
	go f.serve(ctx)
	t.Cleanup(func() { cancel(); <-f.done })
	return f, f.listener.Addr().String()
}

// ask dials a front and reads what it says.
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

func TestFront(t *testing.T) {
	a, b, stranger := newHost(t, "a"), newHost(t, "b"), newHost(t, "x")
	w := newWorld(t, a, b)
	r := newRoster(w.state)
	_, address := serveFront(t, a.key, r, nil)
	for _, c := range []struct {
		name string
		who  host
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
			said, err := ask(t, address, c.who.key, c.alpn, nil)
			if want := c.alpn + " " + c.who.key.ID().String(); c.in && (err != nil || said != want) {
				t.Errorf("it said %q, %v; want %q", said, err, want)
			}
			if !c.in && (err == nil || said != "") {
				t.Errorf("it let in and said %q", said)
			}
		})
	}
	t.Run("another key with a member's ID", func(t *testing.T) {
		m := *r.current.Load()
		id := stranger.key.ID()
		as, _ := find(m.ids, b.key.ID())
		at, _ := find(m.ids, id)
		m.ids, m.nodes = slices.Insert(slices.Clone(m.ids), at, id), slices.Insert(slices.Clone(m.nodes), at, m.nodes[as])
		r.current.Store(&m)
		if said, err := ask(t, address, stranger.key, identity.ALPNRelay, nil); err == nil {
			t.Errorf("it let in and said %q", said)
		}
	})
	t.Run("a member that is one no longer", func(t *testing.T) {
		r.update(newWorld(t, a).state)
		if said, err := ask(t, address, b.key, identity.ALPNRelay, nil); err == nil {
			t.Errorf("it let in and said %q", said)
		}
	})
}

func TestFrontPortTaken(t *testing.T) {
	a := newHost(t, "a")
	r := newRoster(newWorld(t, a).state)
	_, address := serveFront(t, a.key, r, nil)
	_, err := openFront(a.key, r, address, nil, quiet())
	if err == nil || !strings.Contains(err.Error(), "address already in use (another program has it? set ports.relay in "+
		"the configuration)") {
		t.Errorf("have %v", err)
	}
}
