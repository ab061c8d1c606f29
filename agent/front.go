package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay"
)

const frontHandshakeTimeout = 5 * time.Second

// front is the TLS port of a public node: relay sessions, spliced streams and joins, told apart by ALPN.
// Members alone get past the handshake, but for joiners, who have a token instead.
type front struct {
	roster   *roster
	handlers map[string]func(ctx context.Context, c *tls.Conn, peer identity.ID)
	log      *slog.Logger
	tls      *tls.Config
	listener net.Listener
	door     door
	done     chan struct{} // closed when serve and all handlers have ended
}

func openFront(key *identity.Key, r *roster, addr string, handlers map[string]func(context.Context, *tls.Conn,
	identity.ID), log *slog.Logger) (*front, error) {
	f := &front{roster: r, handlers: handlers, log: log, done: make(chan struct{})}
	var protocols []string
	for alpn := range handlers {
		protocols = append(protocols, alpn)
	}
	var err error
	if f.tls, err = key.ServerTLS(protocols, f.verify); err != nil {
		return nil, err
	}
	if f.listener, err = net.Listen("tcp", addr); err != nil {
		return nil, fmt.Errorf("relay and join port: %w (another program has it? set ports.relay in the configuration)", err)
	}
	return f, nil
}

func (f *front) verify(alpn string, key ed25519.PublicKey) error {
	if alpn == identity.ALPNJoin {
		return nil
	}
	id := identity.IDOf(key)
	if known, ok := f.roster.Key(id); !ok || !known.Equal(key) {
		return fmt.Errorf("node %s: %w", id, control.ErrNotMember)
	}
	return nil
}

// serve accepts until ctx ends, and waits for the handlers.
func (f *front) serve(ctx context.Context) {
	defer close(f.done)
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { f.listener.Close() })
	defer stop()
	for {
		c, err := f.listener.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				break
			}
			f.log.Warn("relay and join port: accept", "error", err)
			wait(ctx, 100*time.Millisecond)
			continue
		}
		leave, err := f.door.enter(time.Now(), remote(c))
		if err != nil {
			turnAway(c)
			continue
		}
		wg.Go(func() {
			t, alpn, peer, err := f.handshake(ctx, c)
			leave()
			if err != nil {
				f.log.Debug("relay and join port: handshake refused", "from", c.RemoteAddr().String(), "error", err)
				c.Close()
				return
			}
			defer t.Close()
			if alpn == identity.ALPNJoin {
				leave, ok := f.door.join(remote(c))
				if !ok {
					return // it tries again, after a growing pause
				}
				defer leave()
			}
			f.handlers[alpn](ctx, t, peer)
		})
	}
}

func (f *front) handshake(ctx context.Context, c net.Conn) (*tls.Conn, string, identity.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, frontHandshakeTimeout)
	defer cancel()
	t := tls.Server(relay.Gather(c), f.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", identity.ID{}, err
	}
	state := t.ConnectionState()
	key, err := identity.PeerKey(state)
	if err != nil {
		return nil, "", identity.ID{}, err
	}
	if f.handlers[state.NegotiatedProtocol] == nil {
		return nil, "", identity.ID{}, fmt.Errorf("no handler for protocol %q", state.NegotiatedProtocol)
	}
	return t, state.NegotiatedProtocol, identity.IDOf(key), nil
}

// wait pauses for d or until ctx ends, and tells whether to go on.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
