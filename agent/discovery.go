package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/filtertest"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/forced"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/imds"
	"github.com/skeinmesh/skein/gossip/candidate/portmap"
	"github.com/skeinmesh/skein/gossip/candidate/reflexive"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

const (
	subjectDiscovery = "discovery by " // followed by the step's source
	firmware         = "/sys/class/dmi/id"
	lateForNAT       = 200 * time.Millisecond
)

// openDiscovery prepares the discovery of this host's own addresses, and on public hosts the STUN server that other
// hosts use for theirs.
func (a *Agent) openDiscovery() error {
	var err error
	set := a.replica.State().Settings()
	a.reflexive, err = reflexive.New(reflexive.Config{
		Socket: a.socket, Port: int(a.cfg.Ports.WireGuard), Mark: a.numbers.MarkWG,
		Off: !stunOn(*a.conf(), set), Servers: stunServers(*a.conf(), set, nil), Alive: a.stunAlive,
		Ping: a.askPeer, Log: a.log,
	})
	if err != nil {
		return err
	}
	steps, err := a.discoverySteps()
	if err != nil {
		return err
	}
	a.discoverer = candidate.New(candidate.Config{
		Steps: steps, First: []candidate.Step{a.reflexive, a.ownAddresses}, OnResult: a.onDiscovered, Log: a.log,
		Network: hostaddr.Kernel{SkipLinks: []string{a.cfg.Dataplane.Link},
			Overlay: projection.Overlays(a.replica.State().Cluster())},
	})
	return a.openStun()
}

// discoverySteps are the steps in order of trust: an address found by two belongs to the earlier one.
func (a *Agent) discoverySteps() ([]candidate.Step, error) {
	own := a.host()
	var err error
	if a.forced, err = forced.New(own.ForceEndpoint, nil, a.log); err != nil {
		return nil, err
	}
	a.ownAddresses = &hostaddr.Step{Port: a.cfg.Ports.WireGuard}
	a.ownAddresses.SetInternal(own.InternalIP)
	steps := []candidate.Step{a.forced}
	secret := sha256.Sum256(append([]byte("skein port mapping\x00"), a.keys.Keys().Device[:]...))
	a.portmap, err = portmap.New(portmap.Config{
		Port: a.cfg.Ports.WireGuard, Mark: a.numbers.MarkWG, Protocols: a.conf().NatTraversal.Protocols(),
		Secret: secret[:], Prove: filterTests(a).Prove, Log: a.log,
	})
	if err != nil {
		return nil, err
	}
	a.imds = candidate.NewSwitch(imds.New(a.cfg.Ports.WireGuard, a.numbers.MarkWG, a.log), asksIMDS(a.conf().NatTraversal))
	return append(steps, a.portmap, a.reflexive, a.imds, a.ownAddresses), nil
}

// asksIMDS reports whether this host queries Amazon's instance metadata service (IMDS).
func asksIMDS(n config.NatTraversal) bool {
	return n.IMDS == config.On || n.IMDS == config.Auto && imds.Likely(firmware)
}

// stunOn reports whether this host asks STUN servers, and answers STUN where it is public.
func stunOn(cfg config.Config, set *skeinv1.Settings) bool {
	return cmp.Or(cfg.NatTraversal.Stun, set.GetStun()) != "disabled"
}

// stunServers chooses the servers to ask: this host's own, else the cluster's, else the mesh's public nodes; none
// where STUN is off. The caller may modify the result.
func stunServers(cfg config.Config, set *skeinv1.Settings, mesh []string) []string {
	switch {
	case !stunOn(cfg, set):
		return nil
	case len(cfg.StunServers) > 0:
		return slices.Clone(cfg.StunServers)
	case len(set.GetStunServers()) > 0:
		return slices.Clone(set.GetStunServers())
	}
	return mesh
}

// openStun starts the STUN server on a public host, and closes it where STUN is disabled.
func (a *Agent) openStun() error {
	if !stunOn(*a.conf(), a.replica.State().Settings()) {
		if s := a.stun.Swap(nil); s != nil {
			return s.Close()
		}
		return nil
	}
	if a.listener.Load() == nil || !a.hasPublicAddress() || a.stun.Load() != nil {
		return nil
	}
	s, err := stunserver.Listen(stunserver.Config{
		Port: int(a.cfg.Ports.Stun), Mark: a.numbers.MarkWG, ChangeIP: filterTests(a).Delegate, Log: a.log,
	})
	if err != nil {
		return err
	}
	a.stun.Store(s)
	return nil
}

// followAddresses opens a public host's services for others, as soon as the host is public. It checks the present
// state, not news of changes, since its knowledge of addresses may be older than the news. Open services stay open:
// an address may return, and others use only addresses in the record.
func (a *Agent) followAddresses(ctx context.Context) {
	if a.discoverer == nil || time.Now().Before(a.loop.reopen) {
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
	if err := a.openStun(); err != nil {
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
		a.reflexive.Revalidate()
	}
}

func (a *Agent) onDiscovered(r candidate.Result) {
	old := a.netcheck.Swap(&r)
	entry := &skeinv1.NatObserved{NatType: r.NAT, Detail: fmt.Sprintf("mapping %s, filtering %s", r.Mapping, r.Filtering)}
	for _, m := range r.Mapped {
		entry.Mapped = append(entry.Mapped, mappedText(m))
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

// publicPorts are the addresses at which a public node's WireGuard port is reachable from everywhere.
func publicPorts(r *skeinv1.Record) (out []netip.AddrPort) {
	for _, c := range r.GetCandidates() {
		a, err := netip.ParseAddrPort(c.GetAddress())
		open := c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_FORCED ||
			c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_HOST && addr.Public(a.Addr())
		if err == nil && open && len(out) < 2 {
			out = append(out, a)
		}
	}
	return out
}

func mappedText(o candidate.Observation) string { return o.Server.String() + ": " + o.Mapped.String() }

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
		Await:  func(tx [12]byte) (<-chan struct{}, func()) { return a.reflexive.Await(tx) },
		Server: a.stun.Load,
	}
}
