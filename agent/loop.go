package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/ownrecord"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
)

const (
	trafficEvery = 250 * time.Millisecond // interval of reading the counters while a peer has traffic
	trafficRest  = time.Second            // interval otherwise: how soon a peer whose traffic begins gets heartbeats
	trafficFor   = 5 * time.Second        // how long past traffic counts
	manyPeers    = 1000                   // a reading costs in proportion to its peers: so many add another interval
	// from so many members on, this one included, there are too many pairs to maintain a path for each
	lazyFrom    = 24
	syncSpacing = 5 * time.Millisecond // collects wake-ups that arrive together
	// the paths ask for their relays at most this often: each time costs a query per peer
	relaysSpacing = 50 * time.Millisecond
	tickEvery     = time.Second      // between two rounds without a cause
	tickRest      = 5 * time.Second  // the same after a quiet period
	tickBusy      = 10 * time.Second // how long past activity counts
	reopenEvery   = 5 * time.Second  // between attempts to open a port that is taken
	farewell      = 500 * time.Millisecond
)

// errRevoked ends an agent whose node was revoked.
var errRevoked = errors.New("this node was revoked")

// downOrder is a request to stop.
type downOrder struct {
	purge bool
	done  chan error // receives the result of the purge; buffered for one
}

// loopState is the loop's state between two rounds. No other goroutine may access it.
type loopState struct {
	state       *events.State
	conf        *config.Config                        // that the parts were given
	settled     *events.State                         // state whose settings the paths were given
	members     map[identity.ID]identity.WireGuardKey // WireGuard's peers
	unprobed    map[identity.ID]roster.Member         // members that the prober does not know yet
	records     map[identity.ID]*skeinv1.Record
	relays      []client.Relay
	misfits     map[string]bool           // links of another CNI, as in status
	reached     map[identity.ID]time.Time // relays with a direct path, and its start
	stun        []string
	stunOff     bool
	retry       time.Time // when a failed Apply is repeated
	reopen      time.Time // when a public host retries to open its ports
	asked       time.Time // when the servers were last asked whether this node is still a member
	own         ownrecord.Clock
	ownTurn     *time.Timer // triggers the next check of the own record
	sites       siteState
	place       placeState
	roamed      tunnels.Roaming
	unanswered  tunnels.Unanswered
	mesh        sitemesh.Mesh
	replaceable map[identity.ID]bool // leaders that others can replace, as the paths were told
	replaceIn   *sites.Plan          // plan that replaceable was derived from
	projected   projection.Last
	happened    time.Time // last change other than of WireGuard's endpoints
	counted     bool      // the counters have been read once
	reading     reading
}

// run serves and reconciles until ctx ends, a request to stop arrives, or an error prevents it from continuing.
func (a *Agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := a.control.Bind(a.overlayAddrs()...); err != nil {
		return err
	}
	a.metrics.Serve(ctx, a.conf().Ports.Metrics, a.metricsPort)
	a.serve(ctx)
	stopAPI, err := a.serveAPI(ctx)
	if err != nil {
		return err
	}
	defer stopAPI()
	go a.watchConfig(ctx)
	a.reportReady(ctx)
	partsEnded := a.runParts(ctx)
	a.phase.Store(PhaseRunning)
	a.log.Info("agent is up", "node", a.id.String(), "name", a.name(), "cluster", a.cluster.String(), "epoch", a.epoch,
		"index", a.replica.State().Index())
	order, err := a.loopUntil(ctx)
	a.ended = err == nil || errors.Is(err, errRevoked)
	cancel()
	partsEnded()
	a.discovery.Wait() // until it has released the routers' mappings
	if a.pods != nil {
		<-a.podsDone
	}
	if a.egresses != nil {
		<-a.egressDone
	}
	if a.plainDone != nil {
		<-a.plainDone
	}
	if a.relay != nil {
		err = errors.Join(err, a.relay.Close())
	}
	if l := a.listener.Load(); l != nil {
		<-l.Done()
	}
	var purged error
	if errors.Is(err, errRevoked) || order.purge {
		purged = a.purge()
	}
	if order.done != nil {
		order.done <- purged
	}
	return errors.Join(err, purged)
}

func (a *Agent) loopUntil(ctx context.Context) (downOrder, error) {
	a.loop.members, a.loop.records = map[identity.ID]identity.WireGuardKey{}, map[identity.ID]*skeinv1.Record{}
	a.loop.unprobed = map[identity.ID]roster.Member{}
	tick := time.NewTimer(tickEvery)
	defer tick.Stop()
	resting := false
	a.loop.happened = time.Now()
	traffic, trafficAt := time.NewTimer(trafficEvery), time.Now().Add(trafficEvery)
	defer traffic.Stop()
	read := func(now time.Time) { // schedules the next reading of the counters
		wait := a.nextReading(now)
		traffic.Reset(wait)
		trafficAt = now.Add(wait)
	}
	planTick := func(now time.Time, ticked bool) { // an agent at rest that becomes active ticks sooner
		if wait := a.nextTick(now); ticked || resting && wait == tickEvery {
			resting = wait > tickEvery
			tick.Reset(wait)
		}
	}
	var pathChanged, count <-chan struct{}
	if a.paths != nil {
		pathChanged, count = a.paths.Changed(), a.paths.Count()
	}
	a.wakeUp()
	var pace syncPace
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	relays, relaysAt := time.NewTimer(time.Hour), time.Time{} // next and last time that the paths ask for their relays
	defer relays.Stop()
	for {
		urgent, ticked := false, false
		select {
		case <-ctx.Done():
			return downOrder{}, nil
		case order := <-a.down:
			return order, nil
		case <-due.C:
			began := time.Now()
			if err := a.sync(ctx); err != nil {
				return downOrder{}, err
			}
			now := time.Now()
			pace.ran(began, now)
			planTick(now, false)
			continue
		case <-traffic.C:
			a.opts.Procs.Look(a.lag.Late(time.Now()))
			a.readTraffic(ctx)
			read(time.Now())
			continue
		case <-count:
			a.readTraffic(ctx)
			continue
		case <-a.loop.reading.due():
			a.publishOpenReading()
			continue
		case <-a.gossip.Changed():
		case <-pathChanged:
			urgent = true
			a.retryRelays()
			if now := time.Now(); now.Add(a.nextReading(now)).Before(trafficAt) {
				read(now)
			}
		case <-a.pool.Changed():
			now := time.Now()
			relays.Reset(max(relaysSpacing+a.lag.Late(now)-now.Sub(relaysAt), 0))
			continue
		case relaysAt = <-relays.C:
			if a.paths != nil {
				a.paths.RelaysChanged()
			}
		case <-tick.C:
			ticked = true
			a.stale.Store(true) // apply again, in case a change was missed, such as a peer that roamed again
			a.checkUDPRelay()
			a.inquire(ctx)
		case <-a.decided: // urgent since a slot in a planned move stays at its former owner only briefly
			urgent = true
		case <-a.wake:
		}
		now := time.Now()
		planTick(now, ticked)
		due.Reset(pace.next(now, urgent))
	}
}

// nextReading is the time until the next reading of the counters.
func (a *Agent) nextReading(now time.Time) time.Duration {
	every := trafficRest
	if a.paths != nil && now.Sub(a.paths.TrafficAt()) < trafficFor {
		every = trafficEvery
	}
	if len(a.gone(now)) > 0 {
		every = tunnels.GoneEvery + a.lag.Late(now)
	}
	return every * time.Duration(1+min(len(a.loop.members)/manyPeers, 3))
}

// gone are the peers whose direct path died so recently that they may not have noticed yet.
func (a *Agent) gone(now time.Time) map[dataplane.Key]bool {
	var keys map[dataplane.Key]bool
	for id, p := range a.currentPaths() {
		wg, ok := a.loop.members[id]
		if !ok || p.Kind != path.Relay || p.Rule != path.RuleDirectDead || now.Sub(p.Since) >= tunnels.GoneFor {
			continue
		}
		if keys == nil {
			keys = make(map[dataplane.Key]bool)
		}
		keys[dataplane.Key(wg)] = true
	}
	return keys
}

// nextTick is the time until the next round without a cause: a second during activity, failures or silence of the
// log, longer otherwise.
func (a *Agent) nextTick(now time.Time) time.Duration {
	for _, at := range []time.Time{a.loop.happened, a.loop.retry, a.loop.reopen} {
		if now.Sub(at) < tickBusy {
			return tickEvery
		}
	}
	if a.loop.roamed.Lately(now) {
		return tickEvery
	}
	ask := a.heard.Load().Add(silence) // when inquire has something to do
	return min(max(ask.Sub(now), tickEvery), tickRest)
}

// syncPace spaces the loop's rounds in proportion to their duration: rounds take at most a tenth of the time, urgent
// ones (a changed path, the log) at most a third. So an overloaded host, whose rounds take longer, runs fewer.
type syncPace struct {
	ended time.Time
	took  time.Duration
	due   time.Time // the round that is planned; zero: none
}

const (
	syncShare       = 9 // pause after a round, in multiples of its duration
	syncUrgentShare = 2
	syncLatest      = time.Second // limit of that pause
	syncUrgentBy    = 150 * time.Millisecond
)

// next returns the time until the round that is requested now.
func (p *syncPace) next(now time.Time, urgent bool) time.Duration {
	rest := min(syncShare*p.took, syncLatest)
	if urgent {
		rest = min(syncUrgentShare*p.took, syncUrgentBy)
	}
	at := p.ended.Add(rest)
	if soonest := now.Add(syncSpacing); at.Before(soonest) {
		at = soonest
	}
	if p.due.IsZero() || at.Before(p.due) {
		p.due = at
	}
	return max(p.due.Sub(now), 0)
}

// ran records a round.
func (p *syncPace) ran(began, ended time.Time) { *p = syncPace{ended: ended, took: ended.Sub(began)} }

func (a *Agent) revoked(reason string) error {
	return fmt.Errorf("%w (%s): its links are removed; move %s away to get a new identity, and join with a new token",
		errRevoked, api.ReasonText(reason), a.cfg.StateDir)
}

func seconds(n uint32) time.Duration { return time.Duration(n) * time.Second }

// onDrift records a repaired drift.
func (a *Agent) onDrift(subsystem string) {
	a.metrics.Repaired.WithLabelValues(subsystem).Inc()
	a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
		Body: &skeinv1.JournalEntry_Reconciled{Reconciled: &skeinv1.Reconciled{Subsystem: subsystem, Foreign: true,
			Cause: "changed by somebody else, and repaired"}}})
}

// report sets or clears a problem and logs it once.
func (a *Agent) report(subject, severity, message, advice string) {
	if !a.problems.set(subject, severity, message, advice) {
		return
	}
	if message == "" {
		a.log.Info("problem is gone", "subject", subject)
		return
	}
	a.log.Warn("problem", "subject", subject, "severity", severity, "message", message)
}

// purge removes everything of this agent from the kernel.
func (a *Agent) purge() error {
	relayed := errors.Join(a.closeRelayTable(true), a.egresses.Purge(), podready.Purge(*a.conf()))
	if a.plane == nil {
		return relayed
	}
	if err := a.plane.Close(); err != nil {
		return errors.Join(relayed, err)
	}
	a.plane = nil
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(relayed,
		plane.Purge(ctx, plane.Options{Numbers: a.numbers, Driver: a.cfg.Dataplane.WireGuard, Log: a.log}))
}
