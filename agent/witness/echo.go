package witness

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Wire is what echoes need of this host.
type Wire struct {
	Self identity.ID
	Link string // the tunnel
	Port uint16 // of the control net, at which mirrors receive echoes
	// Overlay returns a node's addresses in the tunnel.
	Overlay func(identity.ID) (v4, v6 netip.Addr, ok bool)
	// Owner returns the node that has an overlay address.
	Owner func(netip.Addr) (identity.ID, bool)
	// Seal puts a code in front of a content that only this node and the other can compute. Open checks the other node's
	// code and removes it; false: the code is wrong.
	Seal func(to identity.ID, content []byte) ([]byte, bool)
	Open func(from identity.ID, sealed []byte) ([]byte, bool)
	// MTU is the largest tunnel packet, in bytes, that the path to a peer carries; 0: there is no live path.
	MTU func(identity.ID) int
	// Count, if set, is called for each echo or answer that the tunnel carries to or from a peer, with the bytes behind
	// its IP and UDP headers.
	Count func(peer identity.ID, sent bool, bytes int, address netip.Addr)
}

// overlay returns a node's IPv6 or IPv4 overlay address; invalid: it has none.
func (w *Wire) overlay(id identity.ID, six bool) netip.Addr {
	v4, v6, _ := w.Overlay(id)
	if six {
		return v6
	}
	return v4
}

// pace is how often an echo is tried, and how long to wait for an answer.
type pace struct {
	tries   int
	spacing time.Duration
	rest    time.Duration // wait after the last try
	first   time.Duration // wait after the first try, until examine asks more
}

const (
	leastTries, mostTries = 5, 16
	leastSpacing          = 80 * time.Millisecond
	leastRest             = 200 * time.Millisecond
	restUnknown           = 800 * time.Millisecond // while the round-trip time is unknown
	leastLoss             = 0.02
	wronglyLost           = 1e-6 // accepted probability that all tries are lost by chance
)

// paceFor chooses the pace for a share of lost echoes, a round-trip time, and how late this process wakes.
func paceFor(loss float64, rtt, late time.Duration) pace {
	p := pace{spacing: max(leastSpacing, rtt/2), rest: max(leastRest, 2*rtt) + 2*late}
	if rtt == 0 {
		p.rest = restUnknown + 2*late
	}
	loss = min(max(loss, leastLoss), 0.9)
	p.first = max(2*p.spacing, rtt+p.spacing/2)
	p.tries = min(max(int(math.Ceil(math.Log(wronglyLost)/math.Log(loss))), leastTries), mostTries)
	return p
}

// result is the outcome of an echo with its tries.
type result struct {
	sent     int // tries
	answered bool
	lost     int           // tries before the one that was answered
	rtt      time.Duration // of the answered try
	mirror   identity.ID   // that answered
	err      error         // of the last try that could not be sent
}

var errNoMirror = errors.New("no mirror has an address of the family")

// ask sends echoes of one kind through a leader to the mirrors in turn, each from a new port, until one is answered.
// via is the leader; if it is zero or this host itself, the echoes go to the mirrors directly.
func (w *Wire) ask(ctx context.Context, via identity.ID, mirrors []identity.ID, kind Kind, p pace) (r result) {
	var to []identity.ID
	for _, m := range mirrors {
		if w.overlay(m, kind.six()).IsValid() {
			to = append(to, m)
		}
	}
	if len(to) == 0 || !w.overlay(w.Self, kind.six()).IsValid() {
		r.err = errNoMirror
		return r
	}
	type got struct {
		try int
		rtt time.Duration
	}
	end := time.Duration(p.tries-1)*p.spacing + p.rest
	until := time.Now().Add(end)
	answers := make(chan got, p.tries)
	var flows []flow
	defer func() {
		for _, f := range flows {
			f.Close()
		}
	}()
	next, last := time.NewTimer(0), time.NewTimer(end)
	defer next.Stop()
	defer last.Stop()
	for try := 0; ; {
		select {
		case <-next.C:
			mirror := to[try%len(to)]
			f, most, took, err := w.try(via, mirror, kind)
			switch {
			case err != nil && r.sent == 0:
				r.err = err
				return r // this host cannot send such an echo
			case err != nil:
				r.err = err
			default:
				begun := time.Now()
				r.sent++
				flows = append(flows, f)
				go func(try int) {
					if f.receive(until, most, took) {
						answers <- got{try, time.Since(begun)}
					}
				}(try)
			}
			if try++; try < p.tries {
				next.Reset(p.spacing)
			}
		case a := <-answers:
			r.answered, r.lost, r.rtt, r.mirror = true, a.try, a.rtt, to[a.try%len(to)]
			return r
		case <-last.C:
			return r
		case <-ctx.Done():
			r.err = ctx.Err()
			return r
		}
	}
}

// try sends one echo. took reports whether a packet is the answer, which has at most `most` bytes.
func (w *Wire) try(via, mirror identity.ID, kind Kind) (f flow, most int, took func([]byte) bool, err error) {
	hop := via // the peer whose path the packet takes
	m := message{kind: request}
	if via.IsZero() || via == w.Self {
		hop = mirror
	} else if m.via = w.overlay(via, false); !m.via.IsValid() {
		return f, 0, nil, fmt.Errorf("node %s has no overlay IPv4 address", via)
	}
	if _, err := rand.Read(m.nonce[:]); err != nil {
		return f, 0, nil, err
	}
	self, to := w.overlay(w.Self, kind.six()), w.overlay(mirror, kind.six())
	if f, err = openFlow(self, netip.AddrPortFrom(to, w.Port)); err != nil {
		return f, 0, nil, err
	}
	fail := func(err error) (flow, int, func([]byte) bool, error) {
		f.Close()
		return flow{}, 0, nil, err
	}
	size := 0
	if kind.large() {
		mtu, err := f.mtu()
		if err != nil {
			return fail(err)
		}
		size = w.messageSize(hop, m.via.IsValid(), mtu, kind.six())
	}
	sealed, ok := w.Seal(mirror, m.encode(size))
	if !ok {
		return fail(fmt.Errorf("node %s is not a member", mirror))
	}
	if err := w.emit(m.via, datagram(f.local(), netip.AddrPortFrom(to, w.Port), sealed)); err != nil {
		return fail(err)
	}
	w.count(hop, true, len(sealed), to)
	return f, len(sealed), func(b []byte) bool {
		content, ok := w.Open(mirror, b)
		got, err := decode(content)
		if !ok || err != nil || got.kind != answer || got.nonce != m.nonce {
			return false
		}
		w.count(hop, false, len(b), to)
		return true
	}, nil
}

// sealBytes is by how much Seal lengthens a content.
const sealBytes = 17

// messageSize returns the size in bytes of a message whose packet fills the smaller of mtu and the MTU of the path to
// hop.
func (w *Wire) messageSize(hop identity.ID, wrapped bool, mtu int, six bool) int {
	if path := w.MTU(hop); path > 0 {
		if wrapped {
			path -= dataplane.HopOverhead
		}
		mtu = min(mtu, path)
	}
	return mtu - headers(six) - sealBytes
}

// emit sends a packet encapsulated to a leader, or directly if via is invalid.
func (w *Wire) emit(via netip.Addr, packet []byte) error {
	if via.IsValid() {
		packet = wrapped(w.overlay(w.Self, false), via, packet)
	}
	return send(w.Link, packet)
}

func (w *Wire) count(peer identity.ID, sent bool, bytes int, address netip.Addr) {
	if w.Count != nil {
		w.Count(peer, sent, bytes, address)
	}
}
