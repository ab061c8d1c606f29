package redteam

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Frames of the relay protocol, as relay/DESIGN.md draws them.
const (
	frameHello, framePing, framePong, frameData, frameGone = 0x01, 0x02, 0x03, 0x10, 0x11
	frameOffer, frameConnect, frameAccept, frameReply      = 0x20, 0x21, 0x22, 0x23
	frameReserve, frameFailed, frameGiveUp                 = 0x30, 0x31, 0x32
	framePair, frameState, frameDenied                     = 0x90, 0x91, 0x92
	frameForward, frameForwarded, frameFar                 = 0xa0, 0xa1, 0xa2

	channelWireGuard = 0
)

func frame(kind byte, body ...[]byte) []byte {
	b := slices.Concat(body...)
	return append([]byte{kind, byte(len(b) >> 8), byte(len(b))}, b...)
}

func idBytes(id identity.ID) []byte { return id[:] }

func readFrame(r io.Reader) (kind byte, body []byte, err error) {
	var head [3]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	body = make([]byte, binary.BigEndian.Uint16(head[1:]))
	_, err = io.ReadFull(r, body)
	return head[0], body, err
}

// session is a person's session with the relay.
type session struct {
	*tls.Conn
}

func (p *person) session(ctx context.Context) (*session, error) {
	c, err := p.front(ctx, relayNode, identity.ALPNRelay)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	kind, _, err := readFrame(c)
	if err == nil && kind != frameHello {
		err = fmt.Errorf("the relay begins with frame 0x%02x", kind)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return &session{c}, nil
}

// next reads frames until one of a kind comes, or time is over.
func (s *session) next(wait time.Duration, kinds ...byte) (kind byte, body []byte, err error) {
	_ = s.SetReadDeadline(time.Now().Add(wait))
	for {
		kind, body, err = readFrame(s)
		if err != nil || slices.Contains(kinds, kind) {
			return kind, body, err
		}
	}
}

// splice has the relay join a stream to a node.
func (p *person) splice(ctx context.Context, relay string, node identity.ID) (net.Conn, error) {
	c, err := p.front(ctx, relay, identity.ALPNSplice)
	if err != nil {
		return nil, err
	}
	// Nobody joins a stream to the relay's own node by itself: that one has a session too, with itself as any client.
	_ = c.SetDeadline(time.Now().Add(patience))
	kind, body := byte(0), []byte(nil)
	if _, err = c.Write(frame(frameConnect, idBytes(node))); err == nil {
		kind, body, err = readFrame(c)
	}
	if err == nil && (kind != frameReply || len(body) == 0 || body[0] != 0) {
		err = fmt.Errorf("the relay does not join the stream: %q", body)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	_ = c.SetDeadline(time.Time{})
	return c, nil
}

// twoSessions are the puppet's and the prey's; what arrives at the prey's is what a victim sees.
func (f *Field) twoSessions(ctx context.Context) (hostile, prey *session, err error) {
	if hostile, err = f.puppet.session(ctx); err != nil {
		return nil, nil, err
	}
	if prey, err = f.prey.session(ctx); err != nil {
		hostile.Close()
	}
	return hostile, prey, err
}

// toPrey sends a frame to the relay and tells what the prey gets as data or far data.
func (f *Field) toPrey(ctx context.Context, frames ...[]byte) (seen Seen, err error) {
	hostile, prey, err := f.twoSessions(ctx)
	if err != nil {
		return seen, err
	}
	defer hostile.Close()
	defer prey.Close()
	for _, b := range frames {
		if _, err := hostile.Write(b); err != nil {
			seen.Refusal = err.Error()
		}
	}
	for end := time.Now().Add(arrival); time.Now().Before(end); {
		kind, body, err := prey.next(time.Until(end), frameData, frameFar)
		if isTimeout(err) {
			break
		}
		if err != nil {
			return seen, fmt.Errorf("the prey's session ends: %w", err)
		}
		from := body
		if kind == frameFar {
			from = body[8:]
		}
		if id := identity.ID(from[:8]); id != f.puppet.key.ID() {
			seen.Arrived = append(seen.Arrived, "node "+id.String())
		}
	}
	if _, _, err := hostile.next(arrival, frameReply); err != nil && !isTimeout(err) {
		seen.Refusal = "the relay ends the session: " + err.Error()
	}
	return seen, nil
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

func relays() []Attempt {
	payload := []byte("red team")
	return []Attempt{
		{Name: "hand over a packet in another's name, as relays do", From: Member, Guard: RelayIDs,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.toPrey(ctx, frame(frameForwarded, idBytes(f.id(victim)), idBytes(f.prey.key.ID()), []byte{channelSignal},
					payload))
			}, Judge: arrived},
		{Name: "send frames that only relays send", From: Member, Guard: RelayIDs,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.toPrey(ctx, frame(frameFar, idBytes(f.id(relayNode)), idBytes(f.id(victim)), []byte{channelSignal},
					payload))
			}, Judge: arrived},
		{Name: "send a signal to a member in another's name", From: Member, Guard: Codes,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.signalAs(ctx, f.id(other))
			}, Judge: bounded("probes at an address that only a forged signal names")},
		{Name: "hand over a signal in another's name, as a relay by its own record", From: Member, Guard: Codes,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.signalAsRelay(ctx, f.id(other))
			}, Judge: bounded("probes at an address that only a forged signal names")},
		{Name: "name as its next WireGuard key one that it does not have", From: Member, Guard: NextKeys,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.nameKey(ctx)
			}, Judge: given},
		{Name: "have a stream joined to a node that is not a member", From: Member, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				c, err := f.puppet.splice(ctx, relayNode, p.key.ID())
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				c.Close()
				return Seen{Given: []string{"a stream to a stranger"}}, nil
			}, Judge: given},
		{Name: "take the other end of a stream that is offered to another", From: Member, Guard: RelayIDs,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.stealStream(ctx)
			}, Judge: given},
		{Name: "reserve all of the relay's UDP ports", From: Member, Guard: RelayLimits,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.reserveAll(ctx)
			}, Judge: bounded("pairs of ports")},
		{Name: "replace a victim's session by one with its ID", From: Stranger, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				s, err := p.session(ctx)
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				s.Close()
				return Seen{Given: []string{"a session with the relay"}}, nil
			}, Judge: given},
		{Name: "make the relay forward in userspace with an idle pair of its own", From: Member, Guard: RelayLimits,
			Long: true, Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.complain(ctx)
			}, Judge: lost},
		{Name: "move a pair's mapping with a bind that lacks the key", From: Stranger, Guard: RelayIDs,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.bindForged(ctx)
			}, Judge: arrived},
	}
}

// signalAs sends a signal to the victim by the relay that says it is from another node, with a code of the attacker's
// own key, and counts probes to the address that it names.
func (f *Field) signalAs(ctx context.Context, from identity.ID) (seen Seen, err error) {
	hostile, err := f.puppet.session(ctx)
	if err != nil {
		return seen, err
	}
	defer hostile.Close()
	return f.forgeSignal(ctx, from, 23456, func(signal []byte) error {
		_, err := hostile.Write(frame(frameData, idBytes(f.id(victim)), []byte{channelSignal}, signal))
		return err
	})
}

// nameKey tells the victim of a next WireGuard key whose private half the attacker does not have, as that of a member
// that is about to change to it, and sees whether WireGuard takes it there. The proof is one by the attacker's own key.
func (f *Field) nameKey(ctx context.Context) (seen Seen, err error) {
	hostile, err := f.puppet.session(ctx)
	if err != nil {
		return seen, err
	}
	defer hostile.Close()
	theirs, err := identity.NewWireGuardKey()
	if err != nil {
		return seen, err
	}
	key, err := theirs.Public()
	if err != nil {
		return seen, err
	}
	cluster, err := identity.ParseClusterID(f.members.GetCluster().GetId())
	if err != nil {
		return seen, err
	}
	proof, err := identity.PairKey(f.puppet.wg, identity.WireGuardKey(f.member(victim).GetWireguardKey()), cluster,
		"next key of "+f.puppet.id())
	if err != nil {
		return seen, err
	}
	signal, err := marshal(&skeinv1.Signal{From: f.puppet.id(), Body: &skeinv1.Signal_Rekey_{Rekey: &skeinv1.Signal_Rekey{
		Phase: skeinv1.Signal_Rekey_PREPARE, Key: key[:], Proof: proof[:]}}})
	if err != nil {
		return seen, err
	}
	code, err := f.puppet.code(f.puppet.key.ID(), f.member(victim), channelSignal, signal)
	if err != nil {
		return seen, err
	}
	for range 3 {
		_, err := hostile.Write(frame(frameData, idBytes(f.id(victim)), []byte{channelSignal}, slices.Concat(code, signal)))
		if err != nil {
			return seen, err
		}
	}
	pause.For(ctx, 2*arrival)
	plan, err := f.api(victim).Plan(ctx, &skeinv1.PlanRequest{})
	if err != nil {
		return seen, err
	}
	if strings.Contains(plan.GetText(), "(next key)") {
		seen.Given = []string{"WireGuard at the victim has a key that is another's"}
	}
	return seen, nil
}

// forgeSignal has a signal sent to the victim that asks in another node's name for probes to a port of the bystander,
// and counts them there.
func (f *Field) forgeSignal(
	ctx context.Context, from identity.ID, port uint16, send func(signal []byte) error,
) (seen Seen, err error) {
	at := netip.AddrPortFrom(f.address(bystander), port)
	signal, err := marshal(&skeinv1.Signal{From: from.String(),
		Body: &skeinv1.Signal_Punch_{Punch: &skeinv1.Signal_Punch{Addresses: []string{at.String()}}}})
	if err != nil {
		return seen, err
	}
	code, err := f.puppet.code(from, f.member(victim), channelSignal, signal)
	if err != nil {
		return seen, err
	}
	err = sniff(f.ns(bystander), func(b []byte, out bool) {
		if _, to, _, ok := udpOf(b); ok && !out && to == at {
			seen.Count++
		}
	}, func() error {
		for range 5 {
			if err := send(slices.Concat(code, signal)); err != nil {
				return err
			}
		}
		pause.For(ctx, 2*arrival)
		return nil
	})
	return seen, err
}

// signalAsRelay does the same as a relay, which may name the sender of what it hands over: any member is one that says
// so in its record. That the relay under attack takes it for one shows a packet in its own name, which arrives at the
// prey.
func (f *Field) signalAsRelay(ctx context.Context, from identity.ID) (seen Seen, err error) {
	const epoch = 1 << 44
	wg, err := f.puppet.wg.Public()
	if err != nil {
		return seen, err
	}
	publish := func(seq uint64, offer *skeinv1.RelayOffer) error {
		s, err := signed(f.puppet, &skeinv1.Record{NodeId: f.puppet.id(), Epoch: epoch, Seq: seq, WireguardKey: wg[:],
			Relay: offer})
		if err == nil {
			_, err = f.puppet.push(ctx, relayNode, s)
		}
		return err
	}
	nobody := netip.AddrPortFrom(f.address(bystander), frontPort)
	if err := publish(1, &skeinv1.RelayOffer{Addresses: []string{nobody.String()}}); err != nil {
		return seen, err
	}
	defer func() { err = errors.Join(err, publish(2, nil)) }()
	hostile, prey, err := f.twoSessions(ctx)
	if err != nil {
		return seen, err
	}
	defer hostile.Close()
	defer prey.Close()
	handOver := func(origin, to identity.ID, payload []byte) error {
		_, err := hostile.Write(frame(frameForwarded, idBytes(origin), idBytes(to), []byte{channelSignal}, payload))
		return err
	}
	if err := until(ctx, patience, func() error {
		_ = hostile.SetDeadline(time.Now().Add(2 * patience))
		if err := handOver(f.puppet.key.ID(), f.prey.key.ID(), []byte("in its own name")); err != nil {
			return err
		}
		if _, _, err := prey.next(arrival, frameFar); err != nil {
			return fmt.Errorf("the relay does not take it for a relay: %w", err)
		}
		return nil
	}); err != nil {
		return seen, err
	}
	return f.forgeSignal(ctx, from, 23457, func(signal []byte) error { return handOver(from, f.id(victim), signal) })
}

// stealStream lets the prey ask for a stream to the victim, and takes it with guessed secrets.
func (f *Field) stealStream(ctx context.Context) (seen Seen, err error) {
	third, err := f.newcomer(bystander)
	if err != nil {
		return seen, err
	}
	if err := third.enrol(ctx, "third-"+third.id()[:6]); err != nil {
		return seen, err
	}
	waiting, err := third.session(ctx) // it is offered the stream, and leaves it
	if err != nil {
		return seen, err
	}
	defer waiting.Close()
	ask, err := f.prey.front(ctx, relayNode, identity.ALPNSplice)
	if err != nil {
		return seen, err
	}
	defer ask.Close()
	if _, err := ask.Write(frame(frameConnect, idBytes(third.key.ID()))); err != nil {
		return seen, err
	}
	_, offer, err := waiting.next(patience, frameOffer)
	if err != nil {
		return seen, fmt.Errorf("the stream was not offered: %w", err)
	}
	number := offer[:8]
	// A guess; and the true one, from an identity that it was not offered to.
	for _, secret := range [][]byte{make([]byte, 16), offer[16:32]} {
		c, err := f.puppet.front(ctx, relayNode, identity.ALPNSplice)
		if err != nil {
			return seen, err
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = c.Write(frame(frameAccept, number, secret))
		kind, body, rerr := byte(0), []byte(nil), err
		if err == nil {
			kind, body, rerr = readFrame(c)
		}
		c.Close()
		if rerr == nil && kind == frameReply && len(body) > 0 && body[0] == 0 {
			seen.Given = append(seen.Given, "a stream that was offered to another")
			return seen, nil
		}
		seen.Refusal = string(body)
	}
	return seen, nil
}

// reserveAll asks for pairs with everybody, from two identities, again and again.
func (f *Field) reserveAll(ctx context.Context) (seen Seen, err error) {
	before, err := f.api(relayNode).Relay(ctx, &skeinv1.RelayRequest{})
	if err != nil {
		return seen, err
	}
	s, err := f.puppet.session(ctx)
	if err != nil {
		return seen, err
	}
	defer s.Close()
	for range 50 {
		for _, n := range f.members.GetNodes() {
			id, err := identity.ParseID(n.GetId())
			if err != nil || id == f.puppet.key.ID() {
				continue
			}
			if _, err := s.Write(frame(frameReserve, idBytes(id))); err != nil {
				seen.Refusal = err.Error()
			}
		}
	}
	pause.For(ctx, arrival)
	after, err := f.api(relayNode).Relay(ctx, &skeinv1.RelayRequest{})
	seen.Count = int(after.GetServer().GetUdpPairs()) - int(before.GetServer().GetUdpPairs())
	seen.Bound = len(f.members.GetNodes()) // one for each peer
	return seen, err
}

// reservation is one end's half of a pair.
type reservation struct {
	pair []byte
	port uint16
	key  []byte
}

// reserve makes a pair of the puppet and the prey, and returns both halves.
func (f *Field) reserve(ctx context.Context) (a, b *session, ra, rb reservation, err error) {
	if a, b, err = f.twoSessions(ctx); err != nil {
		return a, b, ra, rb, err
	}
	_, err = a.Write(frame(frameReserve, idBytes(f.prey.key.ID())))
	for s, r := range map[*session]*reservation{a: &ra, b: &rb} {
		if err != nil {
			break
		}
		var kind byte
		var body []byte
		if kind, body, err = s.next(patience, framePair, frameDenied); err == nil && kind == frameDenied {
			err = fmt.Errorf("the relay reserves no ports: reason %d", body[8])
		}
		if err == nil {
			*r = reservation{body[:8], binary.BigEndian.Uint16(body[16:]), body[18:50]}
		}
	}
	if err != nil {
		a.Close()
		b.Close()
	}
	return a, b, ra, rb, err
}

// bind is the datagram that proves where a client's packets come from.
func bind(r reservation, counter uint64, nonce []byte) []byte {
	b := []byte{0xf5, 0x73, 0x6b, 0x6e, 0x80, 1, 0, 56}
	b = append(b, r.pair...)
	b = binary.BigEndian.AppendUint64(b, counter)
	b = append(b, nonce...)
	m := hmac.New(sha256.New, r.key)
	m.Write(b)
	return append(b, m.Sum(nil)[:16]...)
}

// prove answers the relay's challenge from a socket.
func (f *Field) prove(ns string, r reservation) (net.Conn, error) {
	c, err := dialUDP(ns, netip.AddrPortFrom(f.address(relayNode), r.port))
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	b := make([]byte, 100)
	_, err = c.Write(bind(r, 1, make([]byte, 16)))
	if err == nil {
		_, err = c.Read(b)
	}
	if err == nil {
		_, err = c.Write(bind(r, 2, b[24:40]))
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("prove a mapping at the relay: %w", err)
	}
	_ = c.SetDeadline(time.Time{})
	return c, nil
}

// pairEnd is one node's end of a pair of ports that the relay forwards.
type pairEnd struct {
	session *session
	reservation
	socket net.Conn // proven
}

// pair is one of the puppet and the prey, without agents at either end.
type pair struct{ puppet, prey pairEnd }

// readyPair has the relay reserve a pair, and proves both ends: the puppet's from a host, the prey's from its own.
func (f *Field) readyPair(ctx context.Context, host string) (p *pair, err error) {
	p = &pair{}
	if p.puppet.session, p.prey.session, p.puppet.reservation, p.prey.reservation, err = f.reserve(ctx); err != nil {
		return nil, err
	}
	if p.puppet.socket, err = f.prove(f.ns(host), p.puppet.reservation); err == nil {
		p.prey.socket, err = f.prove(f.ns(bystander), p.prey.reservation)
	}
	if err == nil {
		if _, _, err = p.puppet.session.next(patience, frameState); err != nil {
			err = fmt.Errorf("the pair is not ready: %w", err)
		}
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// close has the relay end the pair. One that it keeps for the next attempt would be ready at once, with a mapping to
// sockets that are closed.
func (p *pair) close() {
	_, err := p.puppet.session.Write(frame(frameGiveUp, p.puppet.pair))
	for ended := false; err == nil && !ended; {
		var state []byte
		_, state, err = p.puppet.session.next(patience, frameState)
		ended = err == nil && state[len(state)-1] == 0
	}
	for _, e := range []pairEnd{p.puppet, p.prey} {
		if e.socket != nil {
			e.socket.Close()
		}
		e.session.Close()
	}
}

// complain makes a pair ready, sends nothing through it, and says that nothing comes through.
func (f *Field) complain(ctx context.Context) (seen Seen, err error) {
	status := func() (string, error) {
		s, err := f.api(relayNode).Status(ctx, &skeinv1.StatusRequest{})
		return s.GetRelayUdp(), err
	}
	before, err := status()
	if err != nil {
		return seen, err
	}
	if before != "kernel" {
		return seen, fmt.Errorf("the relay forwards by %q already: nothing could be lost", before)
	}
	p, err := f.readyPair(ctx, stranger)
	if err != nil {
		return seen, err
	}
	defer p.close()
	for range 6 { // the relay leaves a new pair a second
		if _, err := p.puppet.session.Write(frame(frameFailed, p.puppet.pair)); err != nil {
			return seen, err
		}
		pause.For(ctx, 400*time.Millisecond)
	}
	after, err := status()
	if before != after {
		seen.Lost = append(seen.Lost, fmt.Sprintf("the relay forwards by %q instead of %q", after, before))
	}
	return seen, err
}

// bindForged has a ready pair of puppet and prey; a stranger sends binds with another key, and hopes for the prey's
// packets.
func (f *Field) bindForged(ctx context.Context) (seen Seen, err error) {
	p, err := f.readyPair(ctx, stranger)
	if err != nil {
		return seen, err
	}
	defer p.close()
	thief, err := dialUDP(f.mallory.ns, netip.AddrPortFrom(f.address(relayNode), p.puppet.port))
	if err != nil {
		return seen, err
	}
	defer thief.Close()
	forged := p.puppet.reservation
	forged.key = make([]byte, 32)
	for i := range 5 {
		if _, err := thief.Write(bind(forged, uint64(10+i), make([]byte, 16))); err != nil {
			seen.Refusal = err.Error()
		}
		if _, err := p.prey.socket.Write([]byte("for the puppet alone")); err != nil {
			return seen, err
		}
	}
	if b, _ := heard(thief, arrival); len(b) > 0 {
		seen.Arrived = append(seen.Arrived, "the pair's other end")
	}
	return seen, nil
}
