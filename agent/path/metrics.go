package path

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Metrics are the manager's counters.
type Metrics struct {
	pingsSent, pingErrors, pingsReceived        atomic.Uint64
	pongsReceived, pongsUnknown, dropped        atomic.Uint64
	punchesSent, punchErrors, punchesReceived   atomic.Uint64
	upgrades, downgrades, reroutes, relaySwaps  atomic.Uint64
	portsUsed, portsLost, suspicions            atomic.Uint64
	peersDirect, peersRelay, peersNone, peersUp atomic.Int64
	peersPort                                   atomic.Int64

	mu       sync.Mutex
	blackout Blackouts
}

// Blackouts are estimates of how long traffic was interrupted when a direct path died: from the last answered ping to
// the switch, so rather too long than too short.
type Blackouts struct {
	Count          uint64
	Sum, Max, Last time.Duration
}

// Numbers is a reading of Metrics.
type Numbers struct {
	PingsSent, PingErrors, PingsReceived       uint64
	PongsReceived, PongsUnknown                uint64 // unknown: no ping of ours outstanding, or far too late
	InputsDropped                              uint64
	PunchesSent, PunchErrors, PunchesReceived  uint64
	Upgrades, Downgrades, Reroutes, RelaySwaps uint64 // to direct, from direct, between endpoints, between relays
	PortsUsed, PortsLost                       uint64 // from a relay's session to its reserved port, and back
	Suspicions                                 uint64 // of peers whose traffic others can carry
	PeersDirect, PeersRelay, PeersNone         int64
	PeersUDP                                   int64 // of PeersRelay: through a reserved port
	PeersAlive                                 int64
	Blackouts                                  Blackouts
}

// Metrics reads the counters.
func (m *Manager) Metrics() Numbers {
	c := &m.metrics
	c.mu.Lock()
	b := c.blackout
	c.mu.Unlock()
	return Numbers{
		PingsSent: c.pingsSent.Load(), PingErrors: c.pingErrors.Load(), PingsReceived: c.pingsReceived.Load(),
		PongsReceived: c.pongsReceived.Load(), PongsUnknown: c.pongsUnknown.Load(), InputsDropped: c.dropped.Load(),
		PunchesSent: c.punchesSent.Load(), PunchErrors: c.punchErrors.Load(), PunchesReceived: c.punchesReceived.Load(),
		Upgrades: c.upgrades.Load(), Downgrades: c.downgrades.Load(), Reroutes: c.reroutes.Load(),
		RelaySwaps:  c.relaySwaps.Load(),
		PeersDirect: c.peersDirect.Load(), PeersRelay: c.peersRelay.Load(), PeersNone: c.peersNone.Load(),
		PeersAlive: c.peersUp.Load(),
		PortsUsed:  c.portsUsed.Load(), PortsLost: c.portsLost.Load(), PeersUDP: c.peersPort.Load(),
		Suspicions: c.suspicions.Load(),
		Blackouts:  b,
	}
}

func (c *Metrics) switched(from, to Path, now, lastPong time.Time) {
	switch {
	case from.probed() && from.Alive && !(to.probed() && to.Alive):
		if from.UDP() {
			c.portsLost.Add(1)
		} else {
			c.downgrades.Add(1)
		}
		d := now.Sub(lastPong)
		c.mu.Lock()
		c.blackout.Count++
		c.blackout.Sum += d
		c.blackout.Last = d
		c.blackout.Max = max(c.blackout.Max, d)
		c.mu.Unlock()
	case to.Kind == Direct && to.Alive && from.Kind == Direct && from.Alive:
		if from.Endpoint == to.Endpoint {
			return // the peer's agent stopped or returned
		}
		c.reroutes.Add(1)
	case to.Kind == Direct && to.Alive:
		c.upgrades.Add(1)
	case to.UDP() && to.Alive:
		c.portsUsed.Add(1)
	case from.Kind == Relay && to.Kind == Relay && from.Relay != to.Relay:
		c.relaySwaps.Add(1)
	}
}

func (c *Metrics) count(paths map[identity.ID]Path) {
	var direct, relay, none, up, port int64
	for _, p := range paths {
		switch p.Kind {
		case Direct:
			direct++
		case Relay:
			relay++
			if p.UDP() {
				port++
			}
		default:
			none++
		}
		if p.Alive {
			up++
		}
	}
	c.peersDirect.Store(direct)
	c.peersRelay.Store(relay)
	c.peersNone.Store(none)
	c.peersUp.Store(up)
	c.peersPort.Store(port)
}
