package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/race"
	"github.com/skeinmesh/skein/relay/wire"
)

// dialTimeout bounds the time to connect to a relay, with the handshake.
const dialTimeout = 5 * time.Second

// dialTries is how many relays are tried for one stream, the likeliest first. Each costs a handshake at both ends. A
// relay that has said that the peer is not there is not tried until it says that the peer has come.
const dialTries = 3

// pace sets the delay between a relay's addresses (RFC 8305), and the time that each has to prove the relay's key.
var pace = race.Pace{Stagger: 250 * time.Millisecond, Proof: time.Second}

// dialRelay connects to a relay at the first address that proves the relay's key. A dead address delays the others by
// 250 ms at most, and an address at which another program accepts and says nothing by a second.
func (p *Pool) dialRelay(ctx context.Context, r Relay, addresses []string, alpn string) (*tls.Conn, error) {
	if len(addresses) == 0 {
		return nil, fmt.Errorf("dial relay %s: it offers no address", r.ID)
	}
	config, err := p.cfg.Key.ClientTLS(alpn, identity.Expect(r.Key))
	if err != nil {
		return nil, fmt.Errorf("dial relay %s: %w", r.ID, err)
	}
	config.DynamicRecordSizingDisabled = true
	late := p.cfg.Lag.Late(time.Now())
	ctx, cancel := context.WithTimeout(ctx, dialTimeout+2*late)
	defer cancel()
	pace := race.Pace{Stagger: pace.Stagger + late, Proof: pace.Proof + 2*late}

	ways := make([]race.Way[*tls.Conn], len(addresses))
	for i, address := range addresses {
		ways[i] = func(ctx context.Context, connected func()) (*tls.Conn, error) {
			return p.dialAddress(ctx, address, config, connected)
		}
	}
	conn, errs := race.First(ctx, pace, ways, func(c *tls.Conn) { c.NetConn().Close() })
	if conn == nil {
		return nil, errors.Join(errs...)
	}
	return conn, nil
}

func (p *Pool) dialAddress(ctx context.Context, address string, config *tls.Config,
	connected func()) (*tls.Conn, error) {
	d := net.Dialer{Control: p.cfg.Control, KeepAlive: -1} // the session or stream sets keepalives
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("dial relay: %w", err)
	}
	connected()
	t := tls.Client(wire.Gather(conn), config)
	if err := t.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial relay at %s: handshake: %w", address, err)
	}
	return t, nil
}

// Dial opens a byte stream to a peer through a relay with which both have a session. The stream supports half-close
// (CloseWrite), and is secret from the relay only if its ends encrypt it.
func (p *Pool) Dial(ctx context.Context, peer identity.ID) (net.Conn, error) {
	s := p.peer(peer)
	options, clients := p.options(s, p.now(), false)
	slices.SortFunc(options, func(a, b option) int {
		switch {
		case better(a, b):
			return -1
		case better(b, a):
			return 1
		}
		return 0
	})
	options = slices.DeleteFunc(options, func(o option) bool {
		return o.know == knownGone && clients[o.relay].queue() != nil // the relay will say when the peer is back
	})
	if len(options) == 0 && p.Absent(peer) {
		return nil, fmt.Errorf("dial node %s: %w: %w", peer, ErrNoRelay, wire.ErrNotHere)
	}
	var errs []error
	for _, o := range options[:min(len(options), dialTries)] {
		conn, err := p.dialVia(ctx, clients[o.relay], peer)
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, wire.ErrNotHere) {
			p.absent(clients[o.relay], peer, nil)
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	if len(errs) == 0 {
		return nil, fmt.Errorf("dial node %s: %w: no relay is known", peer, ErrNoRelay)
	}
	return nil, fmt.Errorf("dial node %s: %w: %w", peer, ErrNoRelay, errors.Join(errs...))
}

func (p *Pool) dialVia(ctx context.Context, c *client, peer identity.ID) (net.Conn, error) {
	conn, err := p.splice(ctx, c, wire.AppendNode(nil, wire.FrameConnect, peer))
	if err != nil {
		return nil, fmt.Errorf("through relay %s: %w", c.relay.ID, err)
	}
	return conn, nil
}

// splice opens a connection for this node's end of a stream, and asks the relay to join it with the other end.
func (p *Pool) splice(ctx context.Context, c *client, request []byte) (*viaStream, error) {
	conn, err := p.dialRelay(ctx, c.relay, c.dialAddresses(), identity.ALPNSplice)
	if err != nil {
		return nil, err
	}
	wire.TuneStream(conn.NetConn())
	stop := context.AfterFunc(ctx, func() { conn.NetConn().Close() })
	err = ask(conn, request)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.NetConn().Close()
		return nil, err
	}
	return c.track(conn), nil
}

func ask(conn *tls.Conn, request []byte) error {
	// The relay waits AcceptTimeout for the peer and then says so; if it is silent for longer, it is dead.
	if err := conn.SetDeadline(time.Now().Add(wire.AcceptTimeout + 2*time.Second)); err != nil {
		return fmt.Errorf("ask for the stream: %w", err)
	}
	if _, err := conn.Write(request); err != nil {
		return fmt.Errorf("ask for the stream: %w", err)
	}
	body, err := wire.ReadFrame(conn, wire.FrameReply)
	if err != nil {
		return fmt.Errorf("read the relay's answer: %w", err)
	}
	switch code, reason := wire.DecodeReply(body); code {
	case wire.ReplyOK:
		return conn.SetDeadline(time.Time{})
	case wire.ReplyNotHere:
		return wire.ErrNotHere
	default:
		return fmt.Errorf("the relay refused the stream: %q", reason)
	}
}
