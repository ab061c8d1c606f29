package path

import (
	"fmt"
	"net/netip"
	"time"
)

// Pings prove that packets pass, not that WireGuard's do: some firewalls know its messages and drop them alone. So a
// direct path is left as well when WireGuard asks for answers over it and hears none for handshakeTimeoutSeconds. The
// peer is told, since its own WireGuard may have nothing to ask. No direct path is used then until a retry is due.
// Source: WireKube's handshakeTimeoutSeconds, which has the relay take over from a direct path without a handshake.

const (
	unheardDefault = 30 * time.Second // setting handshakeTimeoutSeconds
	// unheardLeast is how long WireGuard may be silent though all is well: what came one way alone is acknowledged after
	// KEEPALIVE_TIMEOUT, 10 s, and a lost handshake is tried again after REKEY_TIMEOUT, 5 s.
	unheardLeast = 15 * time.Second
	// without a question for so long, a question begins anew: an open handshake is repeated each 5 s
	unheardGap  = 20 * time.Second
	unheardMost = time.Hour // longest time without a direct path
)

// questions follow one peer's counters: since when WireGuard has asked for an answer in vain, and when it did last.
// The zero value has no open question.
type questions struct{ since, last time.Time }

// next takes a reading. By a relay is whether WireGuard now sends to one, which says nothing about a direct path, nor
// does what a relay has brought.
func (q questions) next(last, c Counters, byRelay bool) questions {
	if byRelay || c.rawRx < last.rawRx || c.rawTx < last.rawTx || c.rawRx > last.rawRx && c.Relayed == last.Relayed {
		return questions{} // elsewhere, another device, or heard
	}
	if sent := c.rawTx - last.rawTx; sent == 0 || sent == keepaliveBytes {
		return q // nobody answers a keepalive
	}
	if q.since.IsZero() || c.At.Sub(q.last) > unheardGap {
		q.since = c.At
	}
	q.last = c.At
	return q
}

// keepaliveBytes is WireGuard's message without content.
const keepaliveBytes = 32

// byRelay reports whether an endpoint of WireGuard's is a relay's.
func (m *Machine) byRelay(e netip.AddrPort) bool {
	if e.Addr().IsLoopback() {
		return true
	}
	i := (&step{Machine: *m}).find(e)
	return i >= 0 && m.Probes[i].Type == relayC
}

// deaf reports whether WireGuard has asked in vain over the direct path in use for too long, and there is another way.
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

// takeUnheard leaves the direct path for the relay: this host's WireGuard does not hear the peer over it, or the peer,
// which says so, does not hear this host.
func (s *step) takeUnheard(peers bool) {
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

// muted reports whether an endpoint must not be used, whatever answers there, since WireGuard was not heard.
func (s *step) muted(p *Probe) bool {
	return p.Type != relayC && s.now.Before(s.UnheardUntil) && !s.Relay.ID.IsZero()
}
