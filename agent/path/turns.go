package path

import (
	"slices"
	"time"
)

// burstsMax is how many bursts run at a time in a large mesh; half as many for each step by which this process is
// late.
const burstsMax = 16

// turns limits the bursts of a large mesh to what this host can bear. The others wait in the order of their requests.
type turns struct {
	waiting []*peer
	running []*peer
}

// room is how many bursts may run when the process is this late.
func room(late time.Duration) int {
	n := burstsMax
	for late > lateStep/2 && n > 1 {
		n, late = n/2, late/2
	}
	return n
}

const lateStep = 50 * time.Millisecond

// next is the time until the first running burst ends, if another burst waits.
func (t *turns) next(now time.Time) time.Duration {
	wait := time.Hour
	if len(t.waiting) > 0 {
		for _, p := range t.running {
			wait = min(wait, p.machine.BurstTo.Sub(now))
		}
	}
	return max(wait, 0)
}

// runTurns passes this process's lateness to the machines and begins the next bursts.
func (m *Manager) runTurns() {
	now := m.cfg.Clock()
	if late := m.cfg.Lag.Level(now); late != m.o.late {
		m.o.late = late
		m.broadcast(now, Input{Kind: InputLate, RTT: late})
	}
	t := &m.o.turns
	if len(t.waiting) == 0 && len(t.running) == 0 {
		return
	}
	t.running = slices.DeleteFunc(t.running, func(p *peer) bool {
		return !p.machine.BurstTo.After(now) || p.machine.direct() // a direct path was found
	})
	for len(t.waiting) > 0 && len(t.running) < room(m.o.late) {
		p := t.waiting[0]
		t.waiting[0], t.waiting = nil, t.waiting[1:]
		if m.o.peers[p.machine.Peer] != p {
			continue // the peer has left the mesh
		}
		m.step(p, now, Input{Kind: InputGo})
		if p.machine.BurstTo.After(now) {
			t.running = append(t.running, p)
		}
	}
}

func (m *Machine) direct() bool { return m.Path.Kind == Direct && m.Path.Alive }
