package path

import (
	"fmt"
	"net/netip"
	"time"
)

// Pings prove that UDP packets pass, but some firewalls recognise WireGuard's messages and drop only those. So a
// direct path is also given up when WireGuard sends over it and receives nothing for handshakeTimeoutSeconds. A punch
// informs the peer, whose own WireGuard may have nothing to send. No direct path is used until a retry is due.
// Source: WireKube's handshakeTimeoutSeconds, after which the relay replaces a direct path without a handshake.

const (
	unheardDefault = 30 * time.Second // setting handshakeTimeoutSeconds
	// unheardLeast is how long a healthy WireGuard may receive nothing: it acknowledges one-way traffic after
	// KEEPALIVE_TIMEOUT, 10 s, and repeats a lost handshake after REKEY_TIMEOUT, 5 s.
	unheardLeast = 15 * time.Second
	// after such a pause in sending, the wait begins anew: an open handshake is repeated every 5 s
	unheardGap  = 20 * time.Second
	unheardMost = time.Hour // longest time without a direct path
)

// questions records since when WireGuard has sent to one peer without receiving anything, and when it sent last. The
// zero value means that it waits for nothing.
type questions struct{ since, last time.Time }

// next adds a reading. Argument byRelay: WireGuard now sends to a relay, which says nothing about a direct path.
// Neither does what arrived over a relay.
func (q questions) next(last, c Counters, byRelay bool) questions {
	if byRelay || c.rawRx < last.rawRx || c.rawTx < last.rawTx || c.rawRx > last.rawRx && c.Relayed == last.Relayed {
		return questions{} // sent elsewhere, another device, or received
	}
	if sent := c.rawTx - last.rawTx; sent == 0 || sent == keepaliveBytes {
		return q // a keepalive gets no answer
	}
	if q.since.IsZero() || c.At.Sub(q.last) > unheardGap {
		q.since = c.At
	}
	q.last = c.At
	return q
}

// keepaliveBytes is the size of WireGuard's message without content.
const keepaliveBytes = 32

// byRelay reports whether WireGuard's endpoint is a relay's.
func (m *Machine) byRelay(e netip.AddrPort) bool {
	if e.Addr().IsLoopback() {
		return true
	}
	i := (&step{Machine: *m}).find(e)
	return i >= 0 && m.Probes[i].Type == relayC
}

// deaf reports whether WireGuard has waited too long for an answer over the direct path, and a relay is available.
func (m *Machine) deaf(q questions) bool {
	if m.Path.Kind != Direct || !m.Path.Alive || m.Path.Silent || m.Relay.ID.IsZero() || q.since.IsZero() {
		return false
	}
	return !q.last.Before(later(q.since, m.Path.Since).Add(m.Settings.handshakeTimeout()))
}

func (s Settings) handshakeTimeout() time.Duration {
	if s.HandshakeTimeout == 0 {
		return unheardDefault
	}
	return max(s.HandshakeTimeout, unheardLeast)
}

// handleUnheard gives up the direct path for the relay: this host's WireGuard receives nothing from the peer over it,
// or the peer reports the same of its own.
func (s *step) handleUnheard(peers bool) {
	if s.Path.Kind != Direct || s.Relay.ID.IsZero() {
		return
	}
	if s.now.Sub(s.UnheardUntil) > unheardMost {
		s.UnheardTimes = 0
	}
	s.UnheardUntil = s.now.Add(min(s.directRetry()<<s.UnheardTimes, max(unheardMost, s.directRetry())))
	s.UnheardTimes = min(s.UnheardTimes+1, 10)
	who := "this host's WireGuard hears nothing of the peer"
	if peers {
		who = "the peer's WireGuard hears nothing of this host"
	}
	s.Lost = fmt.Sprintf("Over the direct path to %s pings are answered, but %s: something on the way drops WireGuard's "+
		"packets. Direct paths are tried again in %s.", s.Path.Endpoint, who, round(s.UnheardUntil.Sub(s.now)))
	s.Path.Alive, s.Path.Suspect = false, false
	s.Pending = nil
	s.DirectEnd, s.SilentSince = s.now, s.now
	s.Retries, s.NextRetry = 0, s.UnheardUntil
	if !peers {
		s.actions = append(s.actions, Action{Kind: ActionPunch, Reply: true, Unheard: true})
	}
}

// muted reports whether an endpoint must not be used although it answers pings, because WireGuard's packets failed.
func (s *step) muted(p *Probe) bool {
	return p.Type != relayC && s.now.Before(s.UnheardUntil) && !s.Relay.ID.IsZero()
}
