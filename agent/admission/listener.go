package admission

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
	"github.com/skeinmesh/skein/relay/wire"
)

const (
	handshakeTimeout = 5 * time.Second
	acceptAgain      = 100 * time.Millisecond // after the kernel had no connection to give, such as for want of files
)

// Handlers serve the connections that are past the handshake, by ALPN protocol. The connection is closed when they
// return.
type Handlers map[string]func(ctx context.Context, c *tls.Conn, peer identity.ID)

// Config is what a Listener needs.
type Config struct {
	Key      *identity.Key                                      // of this node
	Member   func(identity.ID) (key ed25519.PublicKey, ok bool) // who is a member now, and by which key
	Address  string                                             // to listen at, such as ":7443"
	Handlers Handlers
	Log      *slog.Logger
	Now      func() time.Time // for certificates; nil: time.Now
}

// Listener is the TLS port of a public node.
type Listener struct {
	cfg      Config
	tls      *tls.Config
	listener net.Listener
	limiter  Limiter
	done     chan struct{} // closed when Serve and all handlers have ended
}

// Listen opens the port. An error names what another program can be told to leave alone.
func Listen(cfg Config) (*Listener, error) {
	l := &Listener{cfg: cfg, done: make(chan struct{})}
	var protocols []string
	for alpn := range cfg.Handlers {
		protocols = append(protocols, alpn)
	}
	var err error
	if l.tls, err = cfg.Key.ServerTLS(protocols, l.verify); err != nil {
		return nil, err
	}
	l.tls.Time = cfg.Now
	if l.listener, err = net.Listen("tcp", cfg.Address); err != nil {
		return nil, fmt.Errorf("relay and join port: %w (if another program has it, set ports.relay in the "+
			"configuration)", err)
	}
	return l, nil
}

// Close closes the port of a listener that does not serve yet; one that does ends with its context.
func (l *Listener) Close() error { return l.listener.Close() }

// Addr is where it listens.
func (l *Listener) Addr() net.Addr { return l.listener.Addr() }

// Done is closed when Serve and all handlers have ended.
func (l *Listener) Done() <-chan struct{} { return l.done }

// Stats are how many handshakes are under way and how many connections were turned away.
func (l *Listener) Stats() (open int, refused uint64) { return l.limiter.Stats() }

func (l *Listener) verify(alpn string, key ed25519.PublicKey) error {
	if alpn == identity.ALPNJoin {
		return nil
	}
	id := identity.IDOf(key)
	if known, ok := l.cfg.Member(id); !ok || !known.Equal(key) {
		return fmt.Errorf("node %s: %w", id, control.ErrNotMember)
	}
	return nil
}

// Serve accepts until ctx ends, and waits for the handlers.
func (l *Listener) Serve(ctx context.Context) {
	defer close(l.done)
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := context.AfterFunc(ctx, func() { l.listener.Close() })
	defer stop()
	for {
		c, err := l.listener.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				break
			}
			l.cfg.Log.Warn("relay and join port: cannot accept a connection, will try again", "error", err)
			select {
			case <-time.After(acceptAgain):
			case <-ctx.Done():
			}
			continue
		}
		leave, err := l.limiter.Enter(time.Now(), remote(c))
		if err != nil {
			reset(c)
			continue
		}
		wg.Go(func() { l.serve(ctx, c, leave) })
	}
}

// serve serves one connection; handshaken is called when its handshake has ended.
func (l *Listener) serve(ctx context.Context, c net.Conn, handshaken func()) {
	t, alpn, peer, err := l.handshake(ctx, c)
	handshaken()
	if err != nil {
		l.cfg.Log.Debug("relay and join port: handshake refused", "from", c.RemoteAddr().String(), "error", err)
		c.Close()
		return
	}
	defer t.Close()
	if alpn == identity.ALPNJoin {
		leave, ok := l.limiter.Join(remote(c))
		if !ok {
			return // it tries again, after a growing pause
		}
		defer leave()
	}
	l.cfg.Handlers[alpn](ctx, t, peer)
}

func (l *Listener) handshake(ctx context.Context, c net.Conn) (*tls.Conn, string, identity.ID, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	t := tls.Server(wire.Gather(c), l.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, "", identity.ID{}, err
	}
	state := t.ConnectionState()
	key, err := identity.PeerKey(state)
	if err != nil {
		return nil, "", identity.ID{}, err
	}
	if l.cfg.Handlers[state.NegotiatedProtocol] == nil {
		return nil, "", identity.ID{}, fmt.Errorf("no handler for protocol %q", state.NegotiatedProtocol)
	}
	return t, state.NegotiatedProtocol, identity.IDOf(key), nil
}
