package redteam

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/identity"
)

func strangers() []Attempt {
	at := func(alpn string) Attempt {
		return Attempt{Name: "open " + alpn + " at a public node", From: Stranger, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				c, err := p.front(ctx, relayNode, alpn)
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				defer c.Close()
				_, _ = c.Write(frame(framePing, make([]byte, 8)))
				seen.hear(c, alpn)
				return seen, nil
			}, Judge: given}
	}
	return []Attempt{
		at(identity.ALPNRelay), at(identity.ALPNSplice), at(identity.ALPNRPC), at(identity.ALPNRaft),
		{Name: "connect without a certificate", From: Stranger, Guard: Roster,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				c, err := p.connect(ctx, netip.AddrPortFrom(f.address(relayNode), frontPort))
				if err != nil {
					return seen, err
				}
				t := tls.Client(c, &tls.Config{InsecureSkipVerify: true,
					NextProtos: []string{identity.ALPNJoin}}) // a stranger checks nothing
				defer t.Close()
				_ = t.SetDeadline(time.Now().Add(patience))
				if err := t.HandshakeContext(ctx); err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				_ = writeMessage(t, &skeinv1.JoinRequest{})
				r := &skeinv1.JoinResponse{}
				if err := readMessage(t, r); err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				seen.Given = append(seen.Given, "an answer at the port for joiners")
				return seen, nil
			}, Judge: given},
		joining("ask for the log without a token, as a cut-off member may", Stranger, Roster,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, _ *skeinv1.JoinToken) error {
				r.TokenId, r.TokenSecret, r.MemberIndex = "", nil, 1
				return nil
			}),
		joining("replay a member's request ID at the port for joiners", Stranger, RequestIDs,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, _ *skeinv1.JoinToken) error {
				r.TokenId, r.TokenSecret, r.TokenProof = "0000000000000000", make([]byte, 32), nil
				r.RequestId = f.prey.joined.GetRequestId()
				return nil
			}),
		joining("replay the request ID of a token's making at the port for joiners", Stranger, RequestIDs,
			func(ctx context.Context, f *Field, r *skeinv1.JoinRequest, _ *skeinv1.JoinToken) (err error) {
				r.TokenId, r.TokenSecret, r.TokenProof = "0000000000000000", make([]byte, 32), nil
				r.RequestId, err = f.tokenRequest(ctx)
				return err
			}),
		{Name: "announce a join request of 2 GiB", From: Stranger, Guard: Limits,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return seen, err
				}
				c, err := p.front(ctx, relayNode, identity.ALPNJoin)
				if err != nil {
					return seen, err
				}
				defer c.Close()
				_, _ = c.Write(binary.BigEndian.AppendUint32(nil, 1<<31))
				for range 64 {
					if _, err := c.Write(make([]byte, 4<<10)); err != nil {
						seen.Refusal = err.Error()
						break
					}
				}
				seen.answer(seen.waits(c, "a request of 2 GiB"))
				return seen, nil
			}, Judge: func(s Seen) string { return cmp.Or(lost(s), given(s)) }},
		{Name: "hold the port for joiners with more connections than one source may have", From: Stranger, Guard: Front,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.crowd(ctx, f.ns(stranger), netip.AddrPortFrom(f.address(relayNode), frontPort), 300, 64)
			}, Judge: bounded("connections held")},
		stunAmplifies("make STUN answers larger than their questions", stunPort),
		{Name: "draw STUN answers onto a bystander", From: Stranger, Guard: Stun, Long: true,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.stunReflect(ctx)
			}, Judge: bounded("answers at the bystander")},
		stunAnswer("get a STUN answer from a server's WireGuard port", wgPort),
		{Name: "forge a ping of a member", From: Stranger, Guard: Probes,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				c := probe.NewCodec([32]byte{1})
				b := c.EncodePing(nil, probe.Message{Sender: f.id(victim), Tx: probe.NewTxID(), Epoch: 1 << 50, Counter: 1,
					Length: probe.Size})
				return f.answerTo(f.ns(stranger), netip.AddrPortFrom(f.address(relayNode), wgPort), b)
			}, Judge: given},
		{Name: "send rubbish to a relay's reserved port", From: Stranger, Guard: RelayIDs,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p, err := f.readyPair(ctx, bystander)
				if err != nil {
					return seen, err
				}
				defer p.close()
				at := netip.AddrPortFrom(f.address(relayNode), p.prey.port)
				if _, err := f.answerTo(f.ns(stranger), at, []byte(spoofMark)); err != nil {
					return seen, err
				}
				if x, _ := heard(p.puppet.socket, arrival); len(x) > 0 {
					seen.Arrived = append(seen.Arrived, "a stranger, by the pair's port")
				}
				return seen, nil
			}, Judge: arrived},
	}
}

// answer notes what a server said at the port for joiners. A refusal is nothing that the attacker could use.
func (s *Seen) answer(b []byte) {
	if len(b) == 0 {
		return
	}
	r := &skeinv1.JoinResponse{}
	err := readMessage(bytes.NewReader(b), r)
	switch {
	case err != nil:
		s.Given = append(s.Given, fmt.Sprintf("%d bytes that are no answer: %v", len(b), err))
	case r.GetState() != nil || r.GetNews() != nil || len(r.GetRecords()) > 0 || r.GetErrorCode() == "":
		s.Given = append(s.Given, "an answer that is not a refusal")
	default:
		s.Refusal = r.GetErrorMessage()
	}
}

// answerTo sends a datagram a few times and tells what comes back.
func (f *Field) answerTo(ns string, to netip.AddrPort, b []byte) (seen Seen, err error) {
	c, err := dialUDP(ns, to)
	if err != nil {
		return seen, err
	}
	defer c.Close()
	for range 3 {
		if _, err := c.Write(b); err != nil {
			seen.Refusal = err.Error()
		}
	}
	answer, err := heard(c, arrival)
	if err != nil && !isTimeout(err) {
		seen.Refusal = err.Error()
	}
	if len(answer) > 0 {
		seen.Given = append(seen.Given, fmt.Sprintf("an answer of %d bytes", len(answer)))
	}
	return seen, nil
}

// stunRequest is a binding request (RFC 8489) with attributes.
func stunRequest(attributes ...[]byte) []byte {
	body := slices.Concat(attributes...)
	b := []byte{0, 1, byte(len(body) >> 8), byte(len(body)), 0x21, 0x12, 0xa4, 0x42}
	return slices.Concat(b, []byte("red team tx."), body)
}

// changePort asks for the answer from another port (RFC 5780).
var changePort = []byte{0, 3, 0, 4, 0, 0, 0, 2}

func stunAnswer(name string, port uint16) Attempt {
	return Attempt{Name: name, From: Stranger, Guard: Stun, Judge: given,
		Try: func(ctx context.Context, f *Field) (Seen, error) {
			return f.answerTo(f.ns(stranger), netip.AddrPortFrom(f.address(relayNode), port), stunRequest())
		}}
}

// stunAmplifies asks the shortest and longer questions and compares sizes.
func stunAmplifies(name string, port uint16) Attempt {
	return Attempt{Name: name, From: Stranger, Guard: Stun, Judge: bounded("bytes of answers"),
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			const smallest = 64 // bytes of the smallest answer that says everything; the document excepts it
			padding := append([]byte{0x80, 0x26, 0, 200}, make([]byte, 200)...)
			for _, q := range [][]byte{stunRequest(), stunRequest(changePort), stunRequest(padding)} {
				var c net.PacketConn // the answer may come from another port
				if err := fabric.In(f.ns(stranger), func() (err error) {
					c, err = net.ListenPacket("udp", ":0")
					return err
				}); err != nil {
					return seen, err
				}
				_, err := c.WriteTo(q, net.UDPAddrFromAddrPort(netip.AddrPortFrom(f.address(relayNode), port)))
				if err == nil {
					_ = c.SetReadDeadline(time.Now().Add(arrival))
					b := make([]byte, 2048)
					var n int
					if n, _, err = c.ReadFrom(b); err == nil {
						seen.Count += max(0, n-max(len(q), smallest))
					}
				}
				c.Close()
				if err != nil && !isTimeout(err) {
					return seen, err
				}
			}
			return seen, nil
		}}
}

// stunReflect sends requests with a bystander's address as source as fast as that goes, and counts answers there.
func (f *Field) stunReflect(ctx context.Context) (seen Seen, err error) {
	const count = 6000
	from := netip.AddrPortFrom(f.address(bystander), 25252)
	r, err := f.rawOut(stranger)
	if err != nil {
		return seen, err
	}
	defer r.close()
	q := datagram(from, netip.AddrPortFrom(f.address(relayNode), stunPort), stunRequest())
	began := time.Now()
	err = sniff(f.ns(bystander), func(b []byte, out bool) {
		if _, to, _, ok := udpOf(b); ok && !out && to == from {
			seen.Count++
		}
	}, func() error {
		for i := range count {
			if err := r.send(q); err != nil {
				return err
			}
			if i%20 == 0 { // sockets' queues are short
				pause.For(ctx, time.Millisecond)
			}
		}
		pause.For(ctx, arrival)
		return ctx.Err()
	})
	if err == nil && seen.Count == 0 {
		err = errors.New("no answer came to the bystander: the network drops forged sources")
	}
	const burst, rate = 400, 200 // a second, to one address
	seen.Bound = burst + int(rate*time.Since(began).Seconds()) + rate
	return seen, err
}

// rawOut sends raw packets from a host to its router.
func (f *Field) rawOut(host string) (*raw, error) {
	info, err := f.lab.Node(host)
	if err != nil {
		return nil, err
	}
	b := info.Host.Addr.As4()
	b[3] = 1 // the router of every site in a lab
	return openRaw(info.Namespace, fabric.HostLink, netip.AddrFrom4(b))
}

// overheard attempts are of somebody who has heard packets between members.
func overheard() []Attempt {
	return []Attempt{
		{Name: "replay probes of members from elsewhere", From: Overheard, Guard: Probes,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.replay(ctx, func(b []byte) bool { _, err := probe.Parse(b); return err == nil }, "probes")
			}, Judge: given},
		{Name: "replay WireGuard packets of members from elsewhere", From: Overheard, Guard: Probes, Long: true,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				return f.replay(ctx, func(b []byte) bool { return len(b) > 4 && b[0] == 4 && b[1] == 0 }, "packets")
			}, Judge: given},
	}
}

// replay hears what comes to the server's WireGuard port for a while and sends it again from a stranger's address.
func (f *Field) replay(ctx context.Context, want func([]byte) bool, what string) (seen Seen, err error) {
	var heardAll [][]byte
	err = sniff(f.ns(relayNode), func(b []byte, out bool) {
		if _, to, payload, ok := udpOf(b); ok && !out && to.Port() == wgPort && want(payload) && len(heardAll) < 200 {
			heardAll = append(heardAll, slices.Clone(payload))
		}
	}, func() error { pause.For(ctx, 4*time.Second); return ctx.Err() })
	if err != nil {
		return seen, err
	}
	if len(heardAll) == 0 {
		return seen, fmt.Errorf("no %s of members were heard", what)
	}
	c, err := dialUDP(f.ns(stranger), netip.AddrPortFrom(f.address(relayNode), wgPort))
	if err != nil {
		return seen, err
	}
	defer c.Close()
	for _, b := range heardAll {
		_, _ = c.Write(b)
	}
	if b, _ := heard(c, 2*arrival); len(b) > 0 {
		seen.Given = append(seen.Given, fmt.Sprintf("an answer of %d bytes to replayed %s", len(b), what))
	}
	return seen, nil
}
