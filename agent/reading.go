package agent

import (
	"context"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/tunnels"
	"github.com/skeinmesh/skein/identity"
)

// secondLook is how long after WireGuard's counters those of the control net are read once more, on a host that is not
// late, where the first look leaves bytes unexplained. WireGuard counts a packet first, and the control net when the
// kernel has handed it on.
const secondLook = 20 * time.Millisecond

// reading is what was read of WireGuard's counters.
type reading struct {
	last map[identity.ID]path.Counters // of the reading before, without the control net's share
	open map[identity.ID]path.Counters // that waits for its second look; nil: none does
	at   time.Time                     // of that one
	wait *time.Timer
}

// due tells when the second look is due.
func (r *reading) due() <-chan time.Time {
	if r.wait == nil {
		return nil
	}
	return r.wait.C
}

// clear tells whether the control net's counters explain all that peers sent since the reading before.
func (r *reading) clear(now map[identity.ID]path.Counters) bool {
	for id, c := range now {
		if last, ok := r.last[id]; ok && c.Unexplained(last) {
			return false
		}
	}
	return true
}

// published notes a reading that the paths were told.
func (r *reading) published(now map[identity.ID]path.Counters) {
	r.open = nil
	if r.last == nil {
		r.last = make(map[identity.ID]path.Counters, len(now))
	}
	for id := range r.last {
		if _, ok := now[id]; !ok {
			delete(r.last, id)
		}
	}
	for id, c := range now {
		r.last[id] = c.WithoutControl(r.last[id])
	}
}

// readTraffic tells the paths which peers talk.
func (a *Agent) readTraffic(ctx context.Context) {
	if a.plane == nil {
		return
	}
	r := &a.loop.reading
	if r.open != nil {
		a.publishOpenReading()
	}
	at := time.Now()
	all, err := a.plane.Peers(ctx)
	if err != nil {
		return // Apply reports what is wrong with the device
	}
	stats := (*tunnels.Stats)(&all)
	a.stats.Store(stats)
	counters := make(map[identity.ID]path.Counters, len(all))
	for id, wg := range a.loop.members {
		if p, ok := stats.Of(a.keys.DeviceKey(id, wg)); ok {
			counters[id] = path.Counters{
				RxBytes: p.RxBytes, TxBytes: p.TxBytes, Endpoint: p.Endpoint, Handshake: p.LastHandshake, At: at,
			}
		}
	}
	r.open, r.at = counters, at
	a.countControl(counters)
	if at.Sub(a.paths.TrafficAt()) >= trafficFor && !r.clear(counters) {
		if r.wait == nil {
			r.wait = time.NewTimer(time.Hour)
		}
		r.wait.Reset(secondLook + a.lag.Late(at))
	} else {
		a.publishReading()
	}
	if a.loop.roamed.Look(a.spec.WireGuard.Peers, all, a.gone(at), at) {
		a.stale.Store(true) // reading them has told the data plane where they are; now it puts them back
		a.apply(ctx)
	}
}

// publishOpenReading tells the paths of a reading that waited for its second look.
func (a *Agent) publishOpenReading() {
	if a.loop.reading.open != nil {
		a.countControl(a.loop.reading.open)
		a.publishReading()
	}
}

// countControl notes what the control net and the relays' sessions have carried until now.
func (a *Agent) countControl(counters map[identity.ID]path.Counters) {
	for id, c := range counters {
		own := a.control.Carried(id)
		c.Relayed = a.proxies.Brought(id)
		c.ControlRx, c.ControlTx, c.AcksRx, c.AcksTx = own.Received, own.Sent, own.AcksReceived, own.AcksSent
		counters[id] = c
	}
}

// publishReading tells whoever goes by it what was read.
func (a *Agent) publishReading() {
	r := &a.loop.reading
	counters, at := r.open, r.at
	a.paths.Traffic(counters)
	if a.loop.mesh.Returned.Proven(counters) {
		a.wakeUp()
	}
	late := a.lag.Late(at) >= lateForNAT // then answers may be, too
	if peer, ok := a.loop.unanswered.Look(counters, a.alive, at); ok && !late {
		a.askForHandshake(peer)
	}
	r.published(counters)
}
