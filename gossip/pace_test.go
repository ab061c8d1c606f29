package gossip

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/simtime"
)

// While there is no news, memberlist checks for news every five seconds instead of ten times a second; news is sent as
// soon as before.
func TestGossipRestsWithoutNews(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 3, 1)
		defer s.end()
		s.within(10*time.Second, "all agree", s.agreed(s.nodes))
		s.within(10*time.Second, "all alive", s.meshed(s.nodes))
		for _, n := range s.nodes {
			p := n.g.wide.Load().pace.Load()
			if p == nil {
				t.Fatal("memberlist's ticker was not found; it ticks ten times a second")
			}
			s.within(time.Minute, "no news", func() bool { return resting(p) })
		}
		s.publish(0, "elsewhere")
		if resting(s.nodes[0].g.wide.Load().pace.Load()) {
			t.Error("there is news, and the ticker rests")
		}
		took := s.within(time.Second, "all see the change", sees(s.nodes, s.nodes[0].key.ID(), "elsewhere"))
		t.Logf("a change after a silence is known after %s", took)
		if took > 150*time.Millisecond {
			t.Errorf("a change after a silence is known after %s, want at most 150 ms", took)
		}
	})
}

// A node that says goodbye after a silence is not taken for one that died.
func TestGoodbyeAfterASilence(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 5, 1)
		defer s.end()
		s.within(10*time.Second, "all alive", s.meshed(s.nodes))
		s.within(time.Minute, "no news", func() bool { return resting(s.nodes[4].g.wide.Load().pace.Load()) })
		gone := s.nodes[4].key.ID()
		s.nodes[4].g.Close()
		took := s.within(10*time.Second, "nobody sees it alive", func() bool {
			return !slices.ContainsFunc(s.nodes[:4], func(n *simNode) bool { return n.g.Alive(gone) })
		})
		t.Logf("a goodbye is known after %s", took)
		if took > time.Second {
			t.Errorf("a goodbye is known after %s, want at most a second: probes alone notice it after four", took)
		}
	})
}

// A node that is alone has news that no other node collects. Its ticker rests all the same, before it meets others and
// after they have gone.
func TestGossipRestsAlone(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 2, 1)
		defer s.end()
		s.within(10*time.Second, "both alive", s.meshed(s.nodes))
		p := s.nodes[0].g.wide.Load().pace.Load()
		s.within(time.Minute, "no news", func() bool { return resting(p) })
		s.nodes[1].g.Close()
		s.within(10*time.Second, "one is alone", func() bool { return !s.nodes[0].g.Alive(s.nodes[1].key.ID()) })
		s.within(time.Minute, "no news", func() bool { return resting(p) })
		s.publish(0, "elsewhere")
		s.within(10*time.Second, "it rests with news that nobody is there for", func() bool { return resting(p) })
	})
}

func resting(p *pacer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.quick
}

// Late hosts gossip in fewer packets, and still send all news.
func TestGossipOfLateHosts(t *testing.T) {
	packets := func(late time.Duration) (sent int) {
		simtime.Test(t, func(t *testing.T) {
			var meters []*lag.Meter
			note := func() {
				for _, m := range meters {
					m.Note(time.Now().Add(-late), time.Now())
				}
			}
			s := &sim{t: t, net: newSimNet(1), roster: newRoster()}
			defer s.end()
			const n = 12
			for i := range n {
				s.roster.add(simKey(i))
				meters = append(meters, &lag.Meter{})
			}
			note()
			for i := range n {
				s.start(i, Config{Lag: meters[i]})
			}
			s.within(time.Minute, "all alive", s.meshed(s.nodes))
			sent -= s.net.sent()
			for i := range 60 {
				s.publish(i%n, fmt.Sprintf("change-%d", i))
				time.Sleep(500 * time.Millisecond)
				note()
			}
			sent += s.net.sent()
			s.within(10*time.Second, "all see the last change", sees(s.nodes, s.nodes[59%n].key.ID(), "change-59"))
		})
		return sent
	}
	prompt, late := packets(0), packets(400*time.Millisecond)
	t.Logf("%d packets of hosts that are prompt, %d of such that are late", prompt, late)
	if late > prompt*2/3 {
		t.Errorf("%d packets of hosts that are late, %d of others", late, prompt)
	}
	if gossipEvery(0) != gossipInterval || gossipEvery(time.Hour) != gossipMost {
		t.Errorf("gossip each %s, and %s on a host that is late", gossipEvery(0), gossipEvery(time.Hour))
	}
}

// A host that becomes late while there is news slows down at once, and one that recovers is as quick as before.
func TestGossipFollowsLateness(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := &sim{t: t, net: newSimNet(1), roster: newRoster(simKey(0))}
		defer s.end()
		var m lag.Meter
		p := s.start(0, Config{Lag: &m}).g.wide.Load().pace.Load()
		every := func() time.Duration {
			p.news()
			p.collected()
			p.collected() // the first is what ends the pause before the first round
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.every
		}
		if got := every(); got != gossipInterval {
			t.Errorf("rounds each %s on a prompt host", got)
		}
		m.Note(time.Now().Add(-time.Second), time.Now())
		if p.collected(); every() != gossipMost {
			t.Errorf("rounds each %s on a host that is a second late", every())
		}
		time.Sleep(5 * time.Minute)
		if got := every(); got != gossipInterval {
			t.Errorf("rounds each %s on a host that was late", got)
		}
	})
}
