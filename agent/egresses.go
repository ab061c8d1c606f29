package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api/egresses"
	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/egress/clients"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	gatewayDir     = "netns"          // in the run directory: the namespaces of gateways
	gatewayClients = "egress-clients" // in the run directory: the clients that gateways know
	subjectEgress  = "egress: "
	// lingerFor is how long a slot that moves by plan is still led to its former owner. By then the new one knows, too:
	// all servers hear of a move at once. A client's host may even be Handover − lingerFor behind the former owner, and
	// nothing is lost.
	lingerFor = 80 * time.Millisecond
	// hedgeAfter is how long the leader may take before the other servers are asked for leases as well: they may have
	// another.
	hedgeAfter = 60 * time.Millisecond
	maxSync    = 8 << 20 // bytes of a message between gateways and clients' hosts
)

// ownEgresses is what this node does for egresses: as a gateway, and for its own clients.
type ownEgresses struct {
	a          *Agent
	gateways   *egress.Gateways
	clients    *clients.Clients
	told       map[string]bool      // subjects of the problems that status shows; of the agent's loop
	configured []clients.Configured // as they were given last; of the loop
	swept      bool                 // strays of a former run are being removed; of the loop

	seen  *events.State      // of the loop
	ports fouPorts           // of the loop
	woken dataplane.FoUPorts // those after which the loop is to be woken; of the loop

	mu    sync.Mutex
	moved map[uint64]time.Time // slots that moved by plan, by epoch, and when that was seen
}

// openEgresses begins with what a former run left.
func (a *Agent) openEgresses() error {
	e := &ownEgresses{a: a, told: map[string]bool{}, moved: map[uint64]time.Time{}}
	log := a.log.With("component", "egress")
	e.gateways = egress.NewGateways(egress.GatewaysConfig{
		Self: a.id, Dir: filepath.Join(a.cfg.RunDir, gatewayDir), Known: filepath.Join(a.cfg.RunDir, gatewayClients),
		Driver: a.cfg.Dataplane.FoU,
		Tunnel: a.cfg.Dataplane.Link, Numbers: a.numbers, Leader: e, Clocks: e, Links: a.announceLinks,
		Changed: a.wakeUp, Log: log,
		TakeOver: func(ctx context.Context, node identity.ID, r *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error) {
			return a.egressOf(node).TakeOver(ctx, r)
		},
		Journal: func(h *skeinv1.SlotHeld) {
			a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
				Body: &skeinv1.JournalEntry_SlotHeld{SlotHeld: h}})
			a.metrics.egress.slotHeld(h, a.replica.State().Slot(h.GetNamespace(), h.GetName(), h.GetNumber()).GetPlanned())
		},
	})
	var err error
	e.clients, err = clients.Open(clients.Config{
		File: filepath.Join(a.cfg.StateDir, clients.ClientsFile), Sender: e, Open: clients.OpenNamespace(a.cfg.Dataplane.FoU,
			"", a.numbers, log), Changed: a.wakeUp,
		Epoch: a.epoch, GatewayDir: filepath.Join(a.cfg.RunDir, gatewayDir), Owner: a.numbers.Owner(), Log: log,
	})
	if err != nil {
		return err
	}
	a.egresses = e
	st := a.replica.State()
	e.clients.Follow(st, e.followPorts(st, time.Now())) // before the first pod asks
	return nil
}

// followPorts are the ports of tunnels that hold now. The loop is woken when others do.
func (e *ownEgresses) followPorts(st *events.State, now time.Time) dataplane.FoUPorts {
	p, next := e.ports.follow(st, e.seen == nil, now)
	if next > 0 && p != e.woken {
		time.AfterFunc(next, e.a.wakeUp)
	}
	e.woken = p
	return p
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

// run works until the context ends. What forwards and leads goes on.
func (e *ownEgresses) run(ctx context.Context) {
	e.gateways.Run(ctx)
}

// sweep removes what is left of egresses that ended, or left this node, while the agent was away.
func (e *ownEgresses) sweep() {
	for _, file := range e.gateways.Strays() {
		if err := egressns.Remove(file); err != nil {
			e.a.log.Warn("remove the network namespace of an egress that has ended", "file", file, "error", err)
		}
	}
	if err := e.gateways.ForgetStrays(); err != nil {
		e.a.log.Warn("remove the clients of an egress that has ended", "error", err)
	}
}

// purge takes away everything of ours, in pods too.
func (e *ownEgresses) purge() error {
	if e == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	e.clients.Clear(ctx)
	return purgeGateways(e.a.cfg.RunDir, e.a.numbers)
}

// follow takes in the newest agreed state and tells what is wrong. It belongs to the agent's loop.
func (e *ownEgresses) follow() {
	if e == nil {
		return
	}
	st := e.a.loop.state
	if st.Cluster() == nil {
		return
	}
	ports := e.followPorts(st, time.Now())
	e.gateways.Follow(st, e.a.linkMTU(), ports)
	if !e.swept { // not before the gateways know which egresses are theirs
		e.swept = true
		go e.sweep()
	}
	e.clients.Follow(st, ports)
	e.configure()
	e.noteMoves(st, time.Now())
	now := map[string]bool{}
	for subject, text := range e.gateways.Problems() {
		now[subjectEgress+subject] = true
		e.a.report(subjectEgress+subject, warning, text, "this node is a worse gateway until it is repaired; "+
			"it is tried again")
	}
	for subject := range e.told {
		if !now[subject] {
			e.a.report(subject, "", "", "")
		}
	}
	e.told = now
}

// noteMoves sees which slots have just moved by plan.
func (e *ownEgresses) noteMoves(st *events.State, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for epoch, at := range e.moved {
		if now.Sub(at) >= lingerFor {
			delete(e.moved, epoch)
		}
	}
	if st == e.seen {
		return
	}
	for _, epoch := range plannedSince(e.seen, st) {
		e.moved[epoch] = now
		time.AfterFunc(lingerFor, e.a.wakeUp)
	}
	e.seen = st
}

// plannedSince are the epochs of slots that moved by plan after a state.
func plannedSince(old, now *events.State) (out []uint64) {
	if old == nil {
		return nil
	}
	for _, e := range now.Egresses() {
		for _, s := range now.Slots(e.GetNamespace(), e.GetName()) {
			if s.GetPlanned() && s.GetEpoch() > old.Index() {
				out = append(out, s.GetEpoch())
			}
		}
	}
	return out
}

// lingering are the slots that still lead to their former owner.
func (e *ownEgresses) lingering() map[uint64]bool {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[uint64]bool{}
	for epoch, at := range e.moved {
		if time.Since(at) < lingerFor {
			out[epoch] = true
		}
	}
	return out
}

// egressOf is the EgressService of a node.
func (a *Agent) egressOf(id identity.ID) skeinv1connect.EgressServiceClient {
	return a.egressBy(a.conns, id)
}

func (a *Agent) egressBy(conns *consensus.Conns, id identity.ID) skeinv1connect.EgressServiceClient {
	if id == a.id {
		return egressService{a: a, self: true}
	}
	return skeinv1connect.NewEgressServiceClient(conns.HTTP(), consensus.URL(id), connect.WithReadMaxBytes(maxSync))
}

// Sync tells a gateway of this host's clients.
func (e *ownEgresses) Sync(ctx context.Context, node identity.ID,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	return e.a.egressOf(node).SyncEgressClients(ctx, r)
}

// Report is what a node does for egresses.
func (e *ownEgresses) Report(ctx context.Context, node identity.ID,
	r *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error) {
	return e.a.egressOf(node).EgressReport(ctx, r)
}

// Attach changes which egresses a pod of this host uses.
func (e *ownEgresses) Attach(ctx context.Context,
	r *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error) {
	var refs []egress.Ref
	for _, text := range r.GetEgresses() {
		ref, err := egress.ParseRef(text)
		if err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
		refs = append(refs, ref)
	}
	var found []clients.Pod
	for _, l := range e.a.pods.ipam.Leases() {
		same := r.GetContainerId() != "" && l.Key.ContainerID == r.GetContainerId() ||
			r.GetContainerId() == "" && l.Pod == r.GetPod() && (r.GetNamespace() == "" || l.Namespace == r.GetNamespace())
		if same && l.Key.ContainerID != "" && l.Until.IsZero() {
			found = append(found, clients.Pod{ContainerID: l.Key.ContainerID, Interface: l.Key.Interface, NetNS: l.NetNS,
				Namespace: l.Namespace, Name: l.Pod, IPv4: l.IPv4, IPv6: l.IPv6})
		}
	}
	name := cmp.Or(r.GetContainerId(), r.GetNamespace()+"/"+r.GetPod())
	switch len(found) {
	case 0:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no pod %s has an address on this host; ask on its "+
			"own host, `skein ip who` tells which that is", name))
	case 1:
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%d interfaces of this host's pods are %s: "+
			"name the namespace or the container", len(found), name))
	}
	out, err := e.clients.Attach(ctx, found[0], refs, r.GetDetach())
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return &skeinv1.AttachEgressResponse{Egresses: out}, nil
}

// RenewLeases asks for leases and counts the answers. A gateway whose subscription hangs learns from them that it is
// behind.
func (e *ownEgresses) RenewLeases(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	answer, err := e.askServers(ctx, r)
	e.a.client.Expect(answer.GetIndex())
	count := e.a.metrics.egress.renewed
	for _, s := range answer.GetGranted() {
		count(s.GetNamespace(), s.GetName(), "granted")
	}
	for _, d := range answer.GetDenied() {
		count(d.GetSlot().GetNamespace(), d.GetSlot().GetName(), "denied")
	}
	if err != nil {
		for _, w := range r.GetWishes() {
			count(w.GetSlot().GetNamespace(), w.GetSlot().GetName(), "none")
		}
	}
	return answer, err
}

// askServers asks the leader, and when it does not answer soon all other servers: one of them may lead by now. The
// first answer that is no error counts.
func (e *ownEgresses) askServers(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		r   *skeinv1.RenewLeasesResponse
		err error
	}
	var servers []identity.ID
	for _, s := range e.a.replica.State().Servers() {
		if id, err := identity.ParseID(s.GetNodeId()); err == nil {
			servers = append(servers, id)
		}
	}
	if leader, ok := e.a.leader(); ok {
		if i := slices.Index(servers, leader); i > 0 {
			servers[0], servers[i] = servers[i], servers[0]
		}
	}
	answers := make(chan answer, len(servers))
	ask := func(id identity.ID) {
		go func() {
			a, err := e.a.egressBy(e.a.leaseConns, id).RenewLeases(ctx, r)
			answers <- answer{a, err}
		}()
	}
	hedge := time.NewTimer(hedgeAfter)
	defer hedge.Stop()
	asked := 0
	more := func(n int) {
		for ; asked < min(n, len(servers)); asked++ {
			ask(servers[asked])
		}
	}
	more(1)
	var errs []error
	for len(errs) < len(servers) {
		select {
		case a := <-answers:
			if a.err == nil {
				return a.r, nil
			}
			errs = append(errs, a.err)
			more(len(servers))
		case <-hedge.C:
			more(len(servers))
		case <-ctx.Done():
			return nil, errors.Join(append(errs, ctx.Err())...)
		}
	}
	if len(errs) == 0 {
		return nil, errors.New("no server is known")
	}
	return nil, errors.Join(errs...)
}

// lead runs the keeper of egress slots in each term that this server leads.
func (a *Agent) lead(ctx context.Context, lead consensus.Lead) {
	k := egress.NewKeeper(egress.KeeperConfig{
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
	a.keeper.Store(k)
	defer a.keeper.Store(nil)
	expiring := make(chan struct{})
	go func() {
		defer close(expiring)
		a.expirePlainPeers(ctx, lead)
	}()
	k.Run(ctx)
	<-expiring
}

// viewOf is what the keeper of slots works on.
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

// configure gives the clients of this host's configuration what has changed of them. It belongs to the agent's loop.
func (e *ownEgresses) configure() {
	all, err := e.a.configured()
	if err != nil {
		e.a.report(subjectEgress+"configuration", failure, err.Error(), "correct egress.clients in the configuration")
		return
	}
	if !reflect.DeepEqual(all, e.configured) {
		e.configured = all
		e.clients.Configure(all)
	}
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

// egressService answers other nodes.
type egressService struct {
	a    *Agent
	self bool // it is this node that asks
}

var (
	_ skeinv1connect.EgressServiceHandler = egressService{}
	_ skeinv1connect.EgressServiceClient  = egressService{}
)

// egressHandler is the path and handler to mount.
func (a *Agent) egressHandler() (string, http.Handler) {
	return skeinv1connect.NewEgressServiceHandler(egressService{a: a}, connect.WithReadMaxBytes(maxSync))
}

// caller is the member that asks.
func (s egressService) caller(ctx context.Context) (identity.ID, error) {
	if s.self {
		return s.a.id, nil
	}
	id, ok := consensus.PeerFromContext(ctx)
	if !ok {
		return id, connect.NewError(connect.CodeUnauthenticated, errors.New("the caller is unknown: it did not come over "+
			"the control net"))
	}
	if s.a.replica.State().Node(id) == nil {
		return id, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("node %s is no member as of index %d", id,
			s.a.replica.State().Index()))
	}
	return id, nil
}

func (s egressService) RenewLeases(ctx context.Context,
	r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if k := s.a.keeper.Load(); k != nil {
		return k.RenewLeases(ctx, from, r)
	}
	name := ""
	if leader, ok := s.a.leader(); ok {
		name = s.a.roster.Name(leader)
	}
	return nil, egress.NotLeading(name)
}

// errNoGateway is for nodes that only relay.
var errNoGateway = connect.NewError(connect.CodeFailedPrecondition, egresses.ErrNone)

func (s egressService) SyncEgressClients(ctx context.Context,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if s.a.egresses == nil {
		return nil, errNoGateway
	}
	return s.a.egresses.gateways.SyncClients(ctx, from, r), nil
}

func (s egressService) TakeOver(ctx context.Context, r *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error) {
	from, err := s.caller(ctx)
	if err != nil {
		return nil, err
	}
	if s.a.egresses == nil {
		return nil, errNoGateway
	}
	return s.a.egresses.gateways.TakeOver(from, r), nil
}

func (s egressService) EgressReport(ctx context.Context,
	r *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error) {
	if _, err := s.caller(ctx); err != nil {
		return nil, err
	}
	if s.a.egresses == nil {
		return nil, errNoGateway
	}
	want := func(ref egress.Ref) bool {
		return r.GetName() == "" || ref == egress.Ref{Namespace: r.GetNamespace(), Name: r.GetName()}
	}
	return &skeinv1.EgressReportResponse{Gateways: s.a.egresses.gateways.Report(want),
		Clients: s.a.egresses.clients.Report()}, nil
}
