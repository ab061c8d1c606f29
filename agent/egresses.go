package agent

import (
	"context"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/agent/egress/node"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// openEgresses begins with what a former run left.
func (a *Agent) openEgresses() (err error) {
	a.egresses, err = node.New(node.Config{
		Self: a.id, Epoch: a.epoch, RunDir: a.cfg.RunDir, StateDir: a.cfg.StateDir, Driver: a.cfg.Dataplane.FoU,
		Numbers: a.numbers, State: a.replica.State, Leader: a.leader, Alive: a.gossip.Alive, MTU: a.linkMTU,
		Links: a.announceLinks, Configured: a.configured, Leases: func() []ipam.Lease { return a.pods.IPAM().Leases() },
		Of:      a.egressOf,
		LeaseOf: func(id identity.ID) skeinv1connect.EgressServiceClient { return a.egressBy(a.leaseConns, id) },
		Expect:  a.client.Expect, Wake: a.wakeUp,
		Journal: func(h *skeinv1.SlotHeld) {
			a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
				Body: &skeinv1.JournalEntry_SlotHeld{SlotHeld: h}})
			a.metrics.Egress.SlotHeld(h, a.replica.State().Slot(h.GetNamespace(), h.GetName(), h.GetNumber()).GetPlanned())
		},
		Renewed: a.metrics.Egress.Renewed, Report: partHost{a}.Report, Log: a.log.With("component", "egress"),
	})
	return err
}

// announceLinks are this host's own links, on which addresses of egresses can be announced.
func (a *Agent) announceLinks() []announce.Link {
	var out []announce.Link
	for _, l := range a.links.Get() {
		if l.Name != a.cfg.Dataplane.Link {
			out = append(out, announce.Link{Name: l.Name, Networks: l.Addrs})
		}
	}
	return out
}

// egressOf is the service of a node for egresses.
func (a *Agent) egressOf(id identity.ID) skeinv1connect.EgressServiceClient {
	return a.egressBy(a.conns, id)
}

func (a *Agent) egressBy(conns *consensus.Conns, id identity.ID) skeinv1connect.EgressServiceClient {
	if id == a.id {
		own := a.egressService()
		own.Own = true
		return own
	}
	return node.Client(conns, id)
}

// egressService is what this node answers about egresses.
func (a *Agent) egressService() node.Service {
	return node.Service{Self: a.id, State: a.replica.State, SlotController: a.slotController.Load, Node: a.egresses,
		LeaderName: func() string {
			if leader, ok := a.leader(); ok {
				return a.roster.Name(leader)
			}
			return ""
		}}
}

// lead runs the slot controller of egress slots in each term that this server leads.
func (a *Agent) lead(ctx context.Context, lead consensus.Lead) {
	k := egress.NewSlotController(egress.SlotControllerConfig{
		Self: a.id, Lead: lead, Since: lead.Since, Log: a.log,
		View: func() egress.View { return viewOf(lead.State()) },
		Wait: a.replica.Wait,
		Site: func(n *skeinv1.Node) string {
			if sites := a.sites.Load(); sites != nil {
				return (*sites)[n.GetId()]
			}
			return ""
		},
	})
	a.slotController.Store(k)
	defer a.slotController.Store(nil)
	expiring := make(chan struct{})
	go func() {
		defer close(expiring)
		a.expirePlainPeers(ctx, lead)
	}()
	k.Run(ctx)
	<-expiring
}

// viewOf is what the slot controller works on.
func viewOf(st *events.State) egress.View {
	v := egress.View{Index: st.Index(), Egresses: st.Egresses(), Nodes: st.Nodes()}
	for _, e := range v.Egresses {
		v.Slots = append(v.Slots, st.Slots(e.GetNamespace(), e.GetName())...)
	}
	return v
}

// noteSites keeps where nodes stand, as their records say, or where there is none here what they have told or the log
// implies. Servers alone need it.
func (a *Agent) noteSites() {
	if a.server.Load() == nil {
		return
	}
	sites, records := map[string]string{}, a.gossip.Records()
	for id, e := range records {
		if site := e.Record.GetSite(); site != "" {
			sites[id.String()] = site
		}
	}
	if a.placed.Load() != nil {
		for _, id := range a.roster.Members() {
			if _, here := records[id]; here {
				continue
			}
			if site, known := a.elsewhere(id); known && site != "" {
				sites[id.String()] = site
			}
		}
	}
	a.sites.Store(&sites)
}

// configured are the clients that this host's configuration names.
func (a *Agent) configured() ([]clients.Configured, error) {
	self := a.self()
	if self == nil {
		return nil, nil
	}
	var out []clients.Configured
	for _, c := range a.conf().Egress.Clients {
		x := clients.Configured{NetNS: c.NetNS, Uplink: c.Interface}
		if c.NetNS == "" { // the host itself
			x.Uplink, x.MTU = a.cfg.Dataplane.Link, a.linkMTU()
			x.IPv4, _ = netip.ParseAddr(self.GetIpv4())
			x.IPv6, _ = netip.ParseAddr(self.GetIpv6())
		}
		for _, text := range c.Egresses {
			ref, err := egress.ParseRef(text)
			if err != nil {
				return nil, err
			}
			x.Egresses = append(x.Egresses, ref)
		}
		out = append(out, x)
	}
	return out, nil
}
