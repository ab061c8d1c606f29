package path

import (
	"fmt"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

// Two hosts that start together may learn their NATs at different times. The faster one's pings before the other knew
// whom to let in were in vain, and must not cost the pair its first attempt.
func TestOneEndKnowsItsNATLater(t *testing.T) {
	for _, nats := range [][2]skeinv1.NatType{{natRestricted, natSymmetric}, {natRestricted, natPortRestricted},
		{natPortRestricted, natPortRestricted}} {
		for slow := range 2 {
			// until the other end has a record
			for _, heard := range []time.Duration{60 * time.Millisecond, 400 * time.Millisecond} {
				for late := time.Duration(0); late <= 4*time.Second; late += 100 * time.Millisecond {
					t.Run(fmt.Sprintf("%s/%s/%d/%s/%s", candidate.NATName(nats[0]), candidate.NATName(nats[1]), slow, heard, late),
						func(t *testing.T) {
							s := newSim(t, 1, nats[0], nats[1])
							const soonest = 600 * time.Millisecond
							for i, n := range s.nodes {
								at := soonest
								if i == slow {
									at += late
								}
								s.startLate(n, at, heard)
							}
							s.run(soonest + late + heard + 1500*time.Millisecond)
							wantPaths(t, s, "soon after both know", Direct, true)
						})
				}
			}
		}
	}
}

// startLate starts a node that knows only its LAN address, and its NAT some time later. The other end gets each of its
// records after the duration heard.
func (s *sim) startLate(n *simNode, at, heard time.Duration) {
	all := s.record(n)
	first := Node{Candidates: all.Candidates[:1]}
	other := s.nodes[1-n.id]
	s.input(n, Input{Kind: InputSelf, Node: &first})
	s.input(n, Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID, RTT: 2 * s.relay}})
	s.after(heard, func() { s.input(other, Input{Kind: InputPeer, Node: &first}) })
	s.after(at, func() { s.input(n, Input{Kind: InputNetwork}) })
	s.after(at+8*time.Millisecond, func() { s.input(n, Input{Kind: InputSelf, Node: &all}) })
	s.after(at+heard, func() { s.input(other, Input{Kind: InputPeer, Node: &all}) })
}
