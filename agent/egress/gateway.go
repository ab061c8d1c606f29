package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/dataplane/tunprobe"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	drainEvery  = 2 * time.Second        // interval of counting flows while a slot drains; less than DrainLeast
	askPatience = 250 * time.Millisecond // limit for the answer to a probe
	newSuffix   = ".new"                 // suffix of a file that is being written
)

// errNotReady is the error for leases in a namespace that is still being made or changed.
var errNotReady = errors.New("the egress's network namespace is not set up yet")

// gateway manages the network namespace of one egress that this node is a gateway of.
type gateway struct {
	g      *Gateways
	ref    Ref
	number int
	file   string
	known  string // file with its clients
	// formerKnown is the same file under its name in an earlier version; empty: none
	formerKnown string
	runner      *reconcile.Runner
	target      *reconcile.Target
	stop        context.CancelFunc
	ended       chan struct{}
	gone        bool // the namespace must be removed at the end; set before stop
	probing     bool // only for the runner's goroutine

	mu       sync.Mutex
	egress   *skeinv1.Egress
	ns       *egressns.NS    // nil: not made yet
	queue    *hold.Queue     // nil: not made yet, or not supported by this kernel
	asked    uint64          // version requested
	done     uint64          // version that the kernel has
	epochs   []uint64        // of its slots, matching egress
	has      *skeinv1.Egress // the egress that the kernel has; nil: not known yet
	unsure   map[int]bool    // slots whose source address in the kernel may differ from has
	err      error           // of the last attempt
	notes    []string
	changed  chan struct{} // closed at the end of the next attempt
	born     time.Time
	registry *Registry
	saved    []byte         // content of the clients' file
	clients  map[int]uint32 // number of clients by slot
	health   Health
	probes   []*skeinv1.EgressProbe
	idle     []uint32 // draining slots without flows here
}

func newGateway(g *Gateways, ref Ref, number int) *gateway {
	ctx, stop := context.WithCancel(context.Background())
	gw := &gateway{g: g, ref: ref, number: number, file: g.namespaceFile(number, ref),
		stop: stop, ended: make(chan struct{}), changed: make(chan struct{}), born: time.Now(), asked: 1,
		unsure: map[int]bool{}}
	gw.known, gw.formerKnown = g.clientsFiles(number, ref)
	gw.registry = gw.load()
	gw.target = &reconcile.Target{Name: "gateway of egress " + ref.String(), Reconcile: gw.reconcile}
	gw.runner = reconcile.New(reconcile.Options{Log: g.cfg.Log}, gw.target)
	go func() {
		defer close(gw.ended)
		gw.runner.Run(ctx)
		gw.finish()
	}()
	return gw
}

// load reads the clients that an earlier run knew. Without the file, their hosts send them again within seconds.
func (gw *gateway) load() *Registry {
	b, err := os.ReadFile(gw.known)
	if errors.Is(err, os.ErrNotExist) && gw.formerKnown != "" {
		b, err = os.ReadFile(gw.formerKnown)
	}
	if errors.Is(err, os.ErrNotExist) {
		return NewRegistry()
	}
	var known *Registry
	if err == nil {
		known, err = DecodeRegistry(b)
	}
	if err != nil {
		gw.g.cfg.Log.Warn("cannot read which clients this gateway knew; it learns them anew", "egress", gw.ref.String(),
			"error", err)
		return NewRegistry()
	}
	return known
}

// save writes the known clients to their file. The caller holds mu.
func (gw *gateway) save() {
	b, err := gw.registry.Encode()
	if err == nil && bytes.Equal(b, gw.saved) {
		return
	}
	tmp := gw.known + newSuffix
	if err == nil {
		err = os.MkdirAll(gw.g.cfg.Known, 0o700)
	}
	if err == nil {
		err = os.WriteFile(tmp, b, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, gw.known)
	}
	if err != nil {
		gw.g.cfg.Log.Warn("the clients of this gateway are not kept over a restart", "egress", gw.ref.String(), "error", err)
		return
	}
	if gw.saved = b; gw.formerKnown != "" {
		_ = os.Remove(gw.formerKnown) // load prefers the present file
	}
}

// sync handles a node's clients, and returns the version that includes them and the refused ones.
func (gw *gateway) sync(from identity.ID, q *skeinv1.SyncEgressClientsRequest,
	st *events.State) (uint64, []*skeinv1.SyncEgressClientsResponse_RefusedClient, error) {
	gw.mu.Lock()
	changed, refused, err := gw.registry.Sync(from, q, holder(st))
	if changed {
		gw.save()
	}
	version := gw.asked
	gw.mu.Unlock()
	if changed {
		version = gw.requestUpdate()
	}
	return version, refused, err
}

// set sets the egress and its slots as agreed now.
func (gw *gateway) set(e *skeinv1.Egress, slots []*skeinv1.EgressSlot) {
	gw.mu.Lock()
	gw.egress, gw.epochs = e, gw.epochs[:0]
	for _, s := range slots {
		gw.epochs = append(gw.epochs, s.GetEpoch())
	}
	gw.mu.Unlock()
	gw.requestUpdate()
}

// requestUpdate requests a reconciliation, and returns its version.
func (gw *gateway) requestUpdate() uint64 {
	gw.mu.Lock()
	gw.asked++
	v := gw.asked
	gw.mu.Unlock()
	gw.runner.Mark(reconcile.Wanted, gw.target)
	return v
}

// wait returns when the kernel has a version, or with the reason why it does not.
func (gw *gateway) wait(ctx context.Context, version uint64) error {
	for {
		gw.mu.Lock()
		done, err, changed := gw.done, gw.err, gw.changed
		gw.mu.Unlock()
		if done >= version {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-gw.ended:
			return fmt.Errorf("this node is no longer a gateway of egress %s", gw.ref)
		}
	}
}

// reconcile brings the namespace to the wanted state.
func (gw *gateway) reconcile(ctx context.Context, c reconcile.Cause) (r reconcile.Result) {
	gw.mu.Lock()
	version, e, ns := gw.asked, gw.egress, gw.ns
	gw.mu.Unlock()
	if e == nil {
		return r
	}
	r.Writes, r.Err = gw.apply(e, ns, c)
	text := ""
	if r.Err != nil {
		text = r.Err.Error()
	}
	gw.g.mu.Lock()
	gw.g.problem(gw.ref.String(), text)
	gw.g.mu.Unlock()
	gw.mu.Lock()
	if gw.err = r.Err; r.Err == nil {
		gw.done, gw.has = version, e
		clear(gw.unsure)
	}
	close(gw.changed)
	gw.changed = make(chan struct{})
	gw.mu.Unlock()
	if r.Err == nil && !gw.probing {
		gw.probing = true
		go gw.probe(ctx)
	}
	if r.Again = max(0, time.Until(gw.complete())); gw.countFlows() && (r.Again == 0 || r.Again > drainEvery) {
		r.Again = drainEvery
	}
	return r
}

// apply writes an egress into its namespace, and makes the namespace first if there is none.
func (gw *gateway) apply(e *skeinv1.Egress, ns *egressns.NS, c reconcile.Cause) (writes int, err error) {
	if ns == nil {
		if ns, err = gw.open(); err != nil {
			return 0, err
		}
	}
	if c&reconcile.Changed != 0 {
		ns.Forget()
	}
	spec := gw.spec(e)
	gw.changing(e)
	writes, notes, err := ns.Apply(spec)
	gw.mu.Lock()
	gw.notes = notes
	gw.mu.Unlock()
	return writes, err
}

// finish ends the gateway, after its runner.
func (gw *gateway) finish() {
	gw.mu.Lock()
	ns, queue := gw.ns, gw.queue
	gw.ns, gw.queue = nil, nil
	gone := gw.gone
	gw.mu.Unlock()
	if queue != nil {
		queue.Close()
	}
	if ns != nil {
		ns.Close()
	}
	if gone {
		gw.removeClients()
		if err := egressns.Remove(gw.file); err != nil {
			gw.g.cfg.Log.Warn("cannot remove the network namespace of an egress", "egress", gw.ref.String(), "error", err)
		}
	}
}

// complete is when all nodes have sent their clients; clients that are still missing then are removed.
func (gw *gateway) complete() time.Time { return gw.born.Add(2 * SyncEvery) }

// countFlows finds the draining slots without flows, and reports whether any slot drains. It asks the kernel, which
// reports the end of a connection only to listeners that were there at its beginning.
func (gw *gateway) countFlows() (draining bool) {
	gw.mu.Lock()
	e, ns := gw.egress, gw.ns
	gw.mu.Unlock()
	var idle []uint32
	if e.GetDraining() > 0 && ns != nil {
		flows, err := ns.Flows()
		if err != nil {
			gw.g.cfg.Log.Warn("cannot tell whether draining slots still have flows", "egress", gw.ref.String(), "error", err)
		}
		for n := events.Replicas(e); err == nil && n < e.GetReplicas(); n++ {
			if flows[int(n)] == 0 {
				idle = append(idle, n)
			}
		}
	}
	gw.mu.Lock()
	defer gw.mu.Unlock()
	gw.idle = idle
	return e.GetDraining() > 0
}

// changing records that an egress's source addresses are about to be written. Until that has succeeded, a slot whose
// addresses change may have either, since a failed change may have been made in part.
func (gw *gateway) changing(e *skeinv1.Egress) {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	for slot := range max(len(gw.has.GetAddresses()), len(e.GetAddresses())) {
		if gw.has != nil && !slices.Equal(sources(gw.has, slot), sources(e, slot)) {
			gw.unsure[slot] = true
		}
	}
}

// open makes or adopts the namespace and its queue.
func (gw *gateway) open() (*egressns.NS, error) {
	ns, err := egressns.Open(egressns.Options{File: gw.file, Egress: gw.ref.String(), Owner: gw.g.cfg.Numbers.Owner(),
		Driver: gw.g.cfg.Driver, Log: gw.g.cfg.Log, Changed: func() { gw.runner.Mark(reconcile.Changed, gw.target) }})
	if err != nil {
		return nil, err
	}
	var queue *hold.Queue
	if ns.Holds() {
		if queue, err = hold.Open(gw.file, egressns.HoldQueue, gw.g.cfg.Log); err != nil {
			gw.g.cfg.Log.Warn("packets of a slot that moves here cannot wait: some may be lost", "egress",
				gw.ref.String(), "error", err)
			queue = nil
		}
	}
	gw.mu.Lock()
	gw.ns, gw.queue = ns, queue
	gw.mu.Unlock()
	gw.g.leaseClient.Retry(gw.ref)
	gw.g.hostWanted()
	return ns, nil
}

// spec is the wanted state of the namespace.
func (gw *gateway) spec(e *skeinv1.Egress) dataplane.GatewaySpec {
	gw.g.mu.Lock()
	defer gw.g.mu.Unlock()
	st := gw.g.state
	in := GatewayInput{Numbers: gw.g.cfg.Numbers, Egress: e, Number: gw.number, MTU: gw.g.mtu, Ports: gw.g.ports,
		Complete: !time.Now().Before(gw.complete()),
		Mesh: slices.Concat(projection.Overlays(st.Cluster()), projection.Pools(st), projection.PodCIDRs(st),
			projection.PlainNetworks(st),
			projection.Elsewhere(st))}
	gw.mu.Lock()
	defer gw.mu.Unlock()
	in.Clients = gw.registry.Clients(holder(st))
	gw.clients = map[int]uint32{}
	for _, c := range in.Clients {
		gw.clients[c.Slot]++
	}
	return PlanGateway(in)
}

// link is the host's end of the link to the namespace; empty: not made yet.
func (gw *gateway) link() string {
	if ns := gw.space(); ns != nil {
		return ns.HostLink()
	}
	return ""
}

func (gw *gateway) space() *egressns.NS {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	return gw.ns
}

// close ends the gateway in this process. The namespace stays.
func (gw *gateway) close() {
	gw.stop()
	<-gw.ended
}

// remove ends the gateway and removes the namespace.
func (gw *gateway) remove() {
	gw.mu.Lock()
	gw.gone = true
	gw.mu.Unlock()
	gw.close()
	gw.g.mu.Lock()
	gw.g.problem(gw.ref.String(), "")
	gw.g.mu.Unlock()
	gw.g.leaseClient.Retry(gw.ref)
	gw.g.hostWanted()
}

// current reports whether the kernel has the slot's source address as agreed for the epoch. The caller holds mu.
func (gw *gateway) current(slot int, epoch uint64) bool {
	return slot < len(gw.epochs) && gw.epochs[slot] == epoch && gw.has != nil && !gw.unsure[slot] &&
		slices.Equal(sources(gw.has, slot), sources(gw.egress, slot))
}

// begin starts a ticket for the epoch. The kernel must already use the source address agreed for it.
func (gw *gateway) begin(slot int, epoch uint64, lease time.Duration) (Ticket, error) {
	gw.mu.Lock()
	ns, ready := gw.ns, gw.current(slot, epoch)
	gw.mu.Unlock()
	if ns == nil || !ready {
		return 0, errNotReady
	}
	t, err := ns.Begin(slot, lease)
	return Ticket(t), err
}

func (gw *gateway) grant(slot int, t Ticket) error {
	ns := gw.space()
	if ns == nil {
		return errNotReady
	}
	return ns.Grant(slot, egressns.Ticket(t))
}

// drop fails until the namespace is open, since a ticket of an earlier run may run in it.
func (gw *gateway) drop(slot int) error {
	ns := gw.space()
	if ns == nil {
		return errNotReady
	}
	return ns.Drop(slot)
}

// hold queues packets of a slot, or releases them in order. The rule that sends packets to the queue is removed
// before the last queued packet leaves, so that none arrives after it.
func (gw *gateway) hold(slot int, on bool) error {
	gw.mu.Lock()
	ns, queue := gw.ns, gw.queue
	gw.mu.Unlock()
	if ns == nil || queue == nil {
		return nil
	}
	mark := egressns.Mark(slot)
	if on {
		queue.Keep(mark)
		return ns.Hold(slot, true)
	}
	_, err := queue.Accept(mark)
	return errors.Join(ns.Hold(slot, false), err)
}

// probe probes the egress's targets through the namespace until ctx ends.
func (gw *gateway) probe(ctx context.Context) {
	tick := time.NewTicker(ProbeEvery)
	defer tick.Stop()
	var prober *tunprobe.Prober
	defer func() {
		if prober != nil {
			prober.Close()
		}
	}()
	var made int // number of slots it was made for
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		gw.mu.Lock()
		e := gw.egress
		gw.mu.Unlock()
		targets := e.GetProbes()
		if len(targets) == 0 {
			gw.judge(nil)
			continue
		}
		if prober != nil && made != len(e.GetEndpoints()) {
			prober.Close()
			prober = nil
		}
		if prober == nil {
			p, err := tunprobe.Open(gw.proberOptions(len(e.GetEndpoints())))
			if err != nil {
				gw.g.mu.Lock()
				gw.g.problem(gw.ref.String()+" probes", err.Error())
				gw.g.mu.Unlock()
				continue
			}
			prober, made = p, len(e.GetEndpoints())
		}
		gw.judge(gw.ask(ctx, prober, targets))
	}
}

func (gw *gateway) proberOptions(slots int) tunprobe.Options {
	o := tunprobe.Options{NetNS: gw.file, Slots: map[int]tunprobe.Source{}, Log: gw.g.cfg.Log}
	source := func(slot int) tunprobe.Source {
		return tunprobe.Source{IPv4: egressns.ProbeSource(slot, false), IPv6: egressns.ProbeSource(slot, true)}
	}
	o.Source = source(tunprobe.NoSlot)
	for i := range slots {
		o.Slots[i] = source(i)
	}
	return o
}

// ask probes all targets at once: with the source of a slot that forwards here, otherwise with the gateway's own.
func (gw *gateway) ask(ctx context.Context, p *tunprobe.Prober, targets []string) []*skeinv1.EgressProbe {
	slot := tunprobe.NoSlot
	for _, h := range gw.g.leaseClient.Report() {
		if h.Slot.Ref == gw.ref && h.State == Holding {
			slot = h.Slot.Number
			break
		}
	}
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	out := make([]*skeinv1.EgressProbe, len(targets))
	var all sync.WaitGroup
	for i, target := range targets {
		all.Go(func() {
			rtt, err := p.Ping(ctx, slot, target)
			out[i] = &skeinv1.EgressProbe{Target: target, Answered: err == nil, RttNanos: int64(rtt), At: time.Now().UnixNano()}
			if err != nil {
				out[i].Reason = err.Error()
			}
		})
	}
	all.Wait()
	return out
}

// judge records a round of probes.
func (gw *gateway) judge(round []*skeinv1.EgressProbe) {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	gw.probes = round
	var results []ProbeResult
	for _, p := range round {
		x := ProbeResult{Target: p.GetTarget()}
		if !p.GetAnswered() {
			x.Err = errors.New(p.GetReason())
		}
		results = append(results, x)
	}
	gw.health.Observe(time.Now(), results)
}

// stateNow is this node's state as a gateway of the egress.
func (gw *gateway) stateNow() *skeinv1.GatewayState {
	gw.mu.Lock()
	defer gw.mu.Unlock()
	s := &skeinv1.GatewayState{Namespace: gw.ref.Namespace, Name: gw.ref.Name, Ready: gw.ns != nil && gw.done > 0 &&
		gw.err == nil, Health: skeinv1.GatewayState_HEALTH_UNKNOWN}
	if !s.Ready {
		s.Reason = "its network namespace is being made"
		if gw.err != nil {
			s.Reason = gw.err.Error()
		}
		return s
	}
	s.Idle = gw.idle
	if len(gw.egress.GetProbes()) == 0 {
		return s
	}
	condition, why := gw.health.Judge(time.Now())
	switch condition {
	case Good:
		s.Health = skeinv1.GatewayState_HEALTH_GOOD
	case Bad:
		s.Health, s.Reason = skeinv1.GatewayState_HEALTH_BAD, why
	default:
		s.Reason = why
	}
	return s
}

// report is this node's work for the egress, for status.
func (gw *gateway) report() *skeinv1.EgressGateway {
	out := &skeinv1.EgressGateway{Namespace: gw.ref.Namespace, Name: gw.ref.Name, NodeId: gw.g.cfg.Self.String(),
		State: gw.stateNow(), Netns: gw.file}
	gw.mu.Lock()
	ns := gw.ns
	clients := maps.Clone(gw.clients)
	for _, p := range gw.probes {
		out.Probes = append(out.Probes, proto.CloneOf(p))
	}
	gw.mu.Unlock()
	for _, n := range clients {
		out.Clients += n
	}
	var c egressns.Counters
	if ns != nil {
		out.Driver = ns.Driver()
		var err error
		if c, err = ns.Read(); err != nil && out.State.Reason == "" {
			out.State.Reason = err.Error()
		}
	}
	out.Conntrack, out.ConntrackMax = uint64(c.Conntrack), uint64(c.ConntrackMax)
	out.DroppedStrangers, out.DroppedInvalid, out.DroppedLease = c.Dropped.Strangers+c.Dropped.Nested,
		c.Dropped.Invalid, c.Dropped.Lease
	out.DroppedDestination = c.Dropped.Destination
	for _, h := range gw.g.leaseClient.Report() {
		if h.Slot.Ref != gw.ref || h.State == Idle {
			continue
		}
		x := c.Slots[h.Slot.Number]
		s := &skeinv1.EgressSlotReport{
			Number: uint32(h.Slot.Number), Epoch: h.Epoch, Forwarding: h.State == Holding || h.State == Leaving,
			PacketsOut: x.SentPackets, BytesOut: x.SentBytes,
			PacketsIn: x.ReceivedPackets, BytesIn: x.ReceivedBytes, Clients: clients[h.Slot.Number],
			FailoverNanos: int64(h.Failover),
		}
		if !h.End.IsZero() {
			s.LeaseUntil = h.End.UnixNano()
		}
		s.TakenOver, s.Announced = gw.g.about(h.Slot, h.Epoch)
		out.Slots = append(out.Slots, s)
	}
	return out
}

// about returns how many connections arrived with a slot, and on which links its addresses are announced.
func (g *Gateways) about(slot Slot, epoch uint64) (takenOver uint32, links string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.taken[slot]; t.epoch == epoch {
		takenOver = t.count
	}
	var on []string
	for addr, link := range g.announced[slot].addrs {
		if link == "" {
			link = fmt.Sprintf("table %d (%s)", g.cfg.Numbers.ExportTable(), addr)
		}
		on = append(on, link)
	}
	slices.Sort(on)
	return takenOver, strings.Join(slices.Compact(on), ", ")
}
