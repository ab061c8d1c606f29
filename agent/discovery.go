package agent

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/discovery"
	"github.com/skeinmesh/skein/agent/filtertest"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
)

const (
	subjectDiscovery = "discovery by " // followed by the step's source
	lateForNAT       = 200 * time.Millisecond
)

// openDiscovery prepares the discovery of this host's own addresses, and on public hosts the STUN server that other
// hosts use for theirs.
func (a *Agent) openDiscovery() error {
	own, set := a.host(), a.replica.State().Settings()
	secret := sha256.Sum256(append([]byte("skein port mapping\x00"), a.keys.Keys().Device[:]...))
	var err error
	a.discovery, err = discovery.New(discovery.Config{
		Socket: a.socket, Port: a.cfg.Ports.WireGuard, StunPort: a.cfg.Ports.Stun, Mark: a.numbers.MarkWG,
		Secret: secret[:],
		Network: hostaddr.Kernel{SkipLinks: []string{a.cfg.Dataplane.Link},
			Overlay: projection.Overlays(a.replica.State().Cluster())},
		Settings: discovery.Settings{ForceEndpoint: own.ForceEndpoint, InternalIP: own.InternalIP,
			Traversal: a.conf().NatTraversal, StunServers: discovery.StunServers(*a.conf(), set, nil),
			StunOff: !discovery.StunOn(*a.conf(), set)},
		Ping: a.prober.SendPing, ServerAlive: a.stunAlive, Tests: filterTests(a), OnResult: a.onDiscovered, Log: a.log,
	})
	if err != nil {
		return err
	}
	return a.serveStun()
}

// serveStun opens the STUN server on a public host, and closes it where STUN is disabled.
func (a *Agent) serveStun() error {
	on := discovery.StunOn(*a.conf(), a.replica.State().Settings())
	if on && (a.listener.Load() == nil || !a.hasPublicAddress()) {
		return nil
	}
	return a.discovery.Serve(on)
}

// followAddresses opens a public host's services for others, as soon as the host is public. It checks the present
// state, not news of changes, since its knowledge of addresses may be older than the news. Open services stay open:
// an address may return, and others use only addresses in the record.
func (a *Agent) followAddresses(ctx context.Context) {
	if a.discovery == nil || time.Now().Before(a.loop.reopen) {
		return
	}
	message := ""
	if a.listener.Load() == nil {
		err := a.openRelayServer()
		if l := a.listener.Load(); err == nil && l != nil {
			a.log.Info("others find this host's port for relay sessions and joins open now")
			go l.Serve(ctx)
		}
		if err != nil {
			message = err.Error()
		}
	}
	if err := a.serveStun(); err != nil {
		message = err.Error()
	}
	if message != "" {
		a.loop.reopen = time.Now().Add(reopenEvery)
	}
	a.report("public host", warning, message, "this host is public, and others cannot use it for joins, relay or STUN: "+
		"free the port, or set another one in the configuration")
}

// revalidateNAT repeats the NAT discovery after the death of a direct path. If this host itself is late, the death
// indicates no other NAT.
func (a *Agent) revalidateNAT() {
	if a.lag.Late(time.Now()) < lateForNAT {
		a.discovery.STUN.Revalidate()
	}
}

func (a *Agent) onDiscovered(r candidate.Result) {
	old := a.netcheck.Swap(&r)
	entry := &skeinv1.NatObserved{NatType: r.NAT, Detail: fmt.Sprintf("mapping %s, filtering %s", r.Mapping, r.Filtering)}
	for _, m := range r.Mapped {
		entry.Mapped = append(entry.Mapped, m.String())
	}
	for _, p := range r.Problems {
		a.report(subjectDiscovery+p.Source, warning, p.Text, p.Help)
	}
	if old != nil {
		for _, p := range old.Problems {
			if !slices.ContainsFunc(r.Problems, func(q candidate.Problem) bool { return q.Source == p.Source }) {
				a.report(subjectDiscovery+p.Source, "", "", "")
			}
		}
	}
	a.journal.Append(&skeinv1.JournalEntry{Time: r.At.UnixNano(),
		Body: &skeinv1.JournalEntry_NatObserved{NatObserved: entry}})
	if old != nil && !old.SameCandidates(r) {
		a.reflection.Forget()
		a.predictor.NetworkChanged()
		a.paths.NetworkChanged()
	}
	a.wakeUp()
}

// stunAlive reports whether the node that answers STUN at an address is known to be up from a relay session with it.
// Its silence then means that UDP is blocked.
func (a *Agent) stunAlive(server netip.AddrPort) bool {
	records := a.gossip.Records()
	for _, l := range a.pool.Links() {
		if l.Relay != a.id && slices.Contains(records[l.Relay].Record.GetStunAddresses(), server.String()) {
			return true
		}
	}
	return false
}

// filterTests asks other public nodes for answers from their addresses, and gives such answers.
func filterTests(a *Agent) filtertest.Tests {
	return filtertest.Tests{
		Helpers: func() (out []identity.ID) {
			for id, e := range a.gossip.Records() {
				if id != a.id && len(e.Record.GetStunAddresses()) > 0 && a.gossip.Alive(id) {
					out = append(out, id)
				}
			}
			return out
		},
		Ask: func(ctx context.Context, id identity.ID, r *skeinv1.FilterTestRequest) error {
			_, err := a.conns.Cluster(id).FilterTest(ctx, r)
			return err
		},
		Await:  func(tx [12]byte) (<-chan struct{}, func()) { return a.discovery.STUN.Await(tx) },
		Server: func() *stunserver.Server { return a.discovery.Server() },
	}
}
