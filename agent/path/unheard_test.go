package path

import (
	"strings"
	"testing"
	"time"
)

// Something on the path drops WireGuard's packets and passes pings: after the timeout both ends use the relay, and a
// direct path is tried again after 120 s, 240 s, and so on. Once the packets pass, it stays.
func TestWireGuardIsDropped(t *testing.T) {
	for seed := range uint64(6) {
		k := newKernel(t, seed, natPortRestricted)
		k.every = []time.Duration{20 * time.Millisecond, time.Second, 5 * time.Second}[seed%3]
		// Without this, a packet still in the relay at the switch moves WireGuard back to it, and nothing is lost.
		k.still = true
		k.echo(20 * time.Minute)
		k.run(3 * time.Second)
		k.deaf = true
		k.run(29 * time.Second)
		wantPaths(t, k.sim, "within the timeout", Direct, true)
		k.run(8 * time.Second)
		wantPaths(t, k.sim, "after the timeout", Relay, true)
		if reason := k.nodes[0].m.Path.Reason; !strings.Contains(reason, "drops WireGuard's packets") {
			t.Errorf("seed %d: the reason is %q", seed, reason)
		}
		k.run(k.every + time.Second)
		lost := k.lost()
		k.run(80 * time.Second)
		if more := k.lost() - lost; more > 1 { // one may be under way
			k.dump()
			t.Fatalf("seed %d: %d packets lost on the relay", seed, more)
		}
		k.run(70 * time.Second) // a trial of 30 s
		wantPaths(t, k.sim, "after a trial", Relay, true)
		k.deaf = false
		k.run(4*time.Minute + 10*time.Second)
		wantPaths(t, k.sim, "when the packets pass", Direct, true)
		lost = k.lost()
		k.run(5 * time.Minute)
		wantPaths(t, k.sim, "and stay there", Direct, true)
		if more := k.lost() - lost; more > 1 {
			t.Errorf("seed %d: %d packets lost afterwards", seed, more)
		}
	}
}

// The timeout is the setting's, a new network tries at once, and without a relay there is nothing to leave for.
func TestUnheardFollowsSettingAndNetwork(t *testing.T) {
	k := newKernel(t, 1, natPortRestricted)
	k.still = true
	for _, n := range k.nodes {
		k.input(n, Input{Kind: InputSettings, Settings: &Settings{HandshakeTimeout: time.Minute}})
	}
	k.echo(20 * time.Minute)
	k.deaf = true
	k.run(58 * time.Second)
	wantPaths(t, k.sim, "within a timeout of a minute", Direct, true)
	k.run(4 * time.Second)
	wantPaths(t, k.sim, "after it", Relay, true)
	for _, n := range k.nodes {
		k.input(n, Input{Kind: InputNetwork})
	}
	k.run(5 * time.Second)
	wantPaths(t, k.sim, "in a new network", Direct, true)
	k.run(65 * time.Second)
	wantPaths(t, k.sim, "dropped there, too", Relay, true)
	for i, n := range k.nodes {
		peer := k.record(k.nodes[1-i])
		peer.Candidates = append(peer.Candidates, Candidate{Type: host, Addr: ap("10.9.9.9:51820")})
		k.input(n, Input{Kind: InputPeer, Node: &peer})
	}
	k.run(5 * time.Second)
	wantPaths(t, k.sim, "with another record of the peer", Direct, true)
	for _, n := range k.nodes {
		k.input(n, Input{Kind: InputRelay})
	}
	k.run(3 * time.Minute)
	wantPaths(t, k.sim, "without a relay", Direct, true)
}

func TestQuestions(t *testing.T) {
	at := func(s float64) time.Time { return simStart.Add(time.Duration(s * float64(time.Second))) }
	type reading struct {
		at     float64 // seconds
		tx, rx uint64  // since the one before
		relay  bool    // a relay brought what was heard
	}
	for name, c := range map[string]struct {
		readings []reading
		since    float64 // -1: no open question
	}{
		"nothing sent":                    {[]reading{{at: 1}, {at: 2}}, -1},
		"keepalives want no answer":       {[]reading{{at: 1, tx: 32}, {at: 26, tx: 32}}, -1},
		"data without an answer":          {[]reading{{at: 1, tx: 96}, {at: 2}, {at: 5, tx: 148}}, 1},
		"answered":                        {[]reading{{at: 1, tx: 96}, {at: 2, rx: 32}}, -1},
		"answered by a relay":             {[]reading{{at: 1, tx: 96}, {at: 2, tx: 96, rx: 96, relay: true}}, 1},
		"handshakes are repeated":         {[]reading{{at: 1, tx: 148}, {at: 6, tx: 148}, {at: 11.2, tx: 148}}, 1},
		"a response is a question, too":   {[]reading{{at: 1, tx: 92}}, 1},
		"after a pause it begins anew":    {[]reading{{at: 1, tx: 96}, {at: 22, tx: 96}}, 22},
		"another device: a smaller count": {[]reading{{at: 1, tx: 96}, {at: 2, tx: ^uint64(0)}}, -1},
	} {
		var q questions
		last := Counters{At: simStart}
		for _, r := range c.readings {
			next := last
			next.At, next.rawTx, next.rawRx = at(r.at), last.rawTx+r.tx, last.rawRx+r.rx
			if r.relay {
				next.Relayed++
			}
			q, last = q.next(last, next, false), next
		}
		if want := at(c.since); c.since < 0 && !q.since.IsZero() || c.since >= 0 && !q.since.Equal(want) {
			t.Errorf("%s: asked since %s, want %v s", name, q.since, c.since)
		}
	}
	if got := (Settings{HandshakeTimeout: time.Second}).handshakeTimeout(); got != unheardLeast {
		t.Errorf("a timeout of a second is %s, want %s", got, unheardLeast)
	}
}
