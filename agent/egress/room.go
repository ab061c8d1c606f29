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
	"github.com/skeinmesh/skein/dataplane/tunprobe"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	// mendEvery is how often a gateway's namespace is compared with what is wanted when nobody says that it has changed.
	mendEvery   = 10 * time.Second
	roomRetry   = time.Second            // after an error
	askPatience = 250 * time.Millisecond // for the answer to a probe
	newSuffix   = ".new"                 // of a file that is being written
)

// errNotReady is for leases of a namespace that is still being made, or changed.
var errNotReady = errors.New("the egress's network namespace is not yet as it shall be")

// room is the network namespace of one egress that this node is a gateway of, and what looks after it.
type room struct {
	g      *Gateways
	ref    Ref
	number int
	file   string
	known  string // the file with its clients
	// formerKnown is the same of an earlier version; empty: there was none
	formerKnown string
	pokes       chan struct{}
	stop        context.CancelFunc
	ended       chan struct{}
	gone        bool // it is to be removed at the end; set before stop

	mu       sync.Mutex
	egress   *skeinv1.Egress
	ns       *egressns.NS    // nil: not made yet
	queue    *hold.Queue     // nil: not made yet, or this kernel has none
	asked    uint64          // version that is wanted
	done     uint64          // version that the kernel has
	epochs   []uint64        // of its slots, as of egress
	has      *skeinv1.Egress // as the kernel has it; nil: not known yet
	err      error           // of the last try
	notes    []string
	changed  chan struct{} // closed at the next end of a try
	born     time.Time
	registry *Registry
	saved    []byte         // of it, in its file
	clients  map[int]uint32 // by slot
	health   Health
	probes   []*skeinv1.EgressProbe
}

func newRoom(g *Gateways, ref Ref, number int) *room {
	ctx, stop := context.WithCancel(context.Background())
	r := &room{g: g, ref: ref, number: number, file: g.namespaceFile(number, ref), pokes: make(chan struct{}, 1), stop: stop,
		ended: make(chan struct{}), changed: make(chan struct{}), born: time.Now(), asked: 1}
	r.known, r.formerKnown = g.clientsFiles(number, ref)
	r.registry = r.load()
	go func() {
		defer close(r.ended)
		r.run(ctx)
	}()
	return r
}

// load reads which clients a former run of the agent knew. Without the file they are told again within seconds.
func (r *room) load() *Registry {
	b, err := os.ReadFile(r.known)
	if errors.Is(err, os.ErrNotExist) && r.formerKnown != "" {
		b, err = os.ReadFile(r.formerKnown)
	}
	if errors.Is(err, os.ErrNotExist) {
		return NewRegistry()
	}
	var known *Registry
	if err == nil {
		known, err = DecodeRegistry(b)
	}
	if err != nil {
		r.g.cfg.Log.Warn("the clients that this gateway knew are not read", "egress", r.ref.String(), "err", err)
		return NewRegistry()
	}
	return known
}

// save writes the clients that are known. The caller has mu.
func (r *room) save() {
	b, err := r.registry.Encode()
	if err == nil && bytes.Equal(b, r.saved) {
		return
	}
	tmp := r.known + newSuffix
	if err == nil {
		err = os.MkdirAll(r.g.cfg.Known, 0o700)
	}
	if err == nil {
		err = os.WriteFile(tmp, b, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, r.known)
	}
	if err != nil {
		r.g.cfg.Log.Warn("the clients of this gateway are not kept over a restart", "egress", r.ref.String(), "err", err)
		return
	}
	if r.saved = b; r.formerKnown != "" {
		_ = os.Remove(r.formerKnown) // the present one is read first
	}
}

// sync takes a node's clients, and returns the version that has them, and who was refused.
func (r *room) sync(from identity.ID, q *skeinv1.SyncEgressClientsRequest, st *events.State) (uint64, []*skeinv1.SyncEgressClientsResponse_RefusedClient, error) {
	r.mu.Lock()
	changed, refused, err := r.registry.Sync(from, q, holder(st))
	if changed {
		r.save()
	}
	version := r.asked
	r.mu.Unlock()
	if changed {
		version = r.poke()
	}
	return version, refused, err
}

// set takes the egress and its slots as they are agreed now.
func (r *room) set(e *skeinv1.Egress, slots []*skeinv1.EgressSlot) {
	r.mu.Lock()
	r.egress, r.epochs = e, r.epochs[:0]
	for _, s := range slots {
		r.epochs = append(r.epochs, s.GetEpoch())
	}
	r.mu.Unlock()
	r.poke()
}

// poke asks for another look, and returns its version.
func (r *room) poke() uint64 {
	r.mu.Lock()
	r.asked++
	v := r.asked
	r.mu.Unlock()
	select {
	case r.pokes <- struct{}{}:
	default:
	}
	return v
}

// wait returns when the kernel has a version, or with the reason why not.
func (r *room) wait(ctx context.Context, version uint64) error {
	for {
		r.mu.Lock()
		done, err, changed := r.done, r.err, r.changed
		r.mu.Unlock()
		if done >= version {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-r.ended:
			return fmt.Errorf("this node is no gateway of egress %s any more", r.ref)
		}
	}
}

// run makes the namespace and keeps it, until it is stopped.
func (r *room) run(ctx context.Context) {
	tick := time.NewTimer(0)
	defer tick.Stop()
	probing := false
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-r.pokes:
		case <-tick.C:
		}
		if ctx.Err() != nil {
			break
		}
		next := mendEvery
		if err := r.apply(); err != nil {
			next = roomRetry
		} else if !probing {
			probing = true
			go r.probe(ctx)
		}
		tick.Reset(next)
	}
	r.mu.Lock()
	ns, queue := r.ns, r.queue
	r.ns, r.queue = nil, nil
	gone := r.gone
	r.mu.Unlock()
	if queue != nil {
		queue.Close()
	}
	if ns != nil {
		ns.Close()
	}
	if gone {
		r.removeClients()
		if err := egressns.Remove(r.file); err != nil {
			r.g.cfg.Log.Warn("remove the network namespace of an egress", "egress", r.ref.String(), "err", err)
		}
	}
}

// apply makes the namespace what is wanted now.
func (r *room) apply() error {
	r.mu.Lock()
	version, e, ns := r.asked, r.egress, r.ns
	r.mu.Unlock()
	if e == nil {
		return nil
	}
	err := func() error {
		if ns == nil {
			var err error
			if ns, err = r.open(); err != nil {
				return err
			}
		}
		spec := r.spec(e)
		_, notes, err := ns.Apply(spec)
		r.mu.Lock()
		r.notes = notes
		r.mu.Unlock()
		return err
	}()
	text := ""
	if err != nil {
		text = err.Error()
	}
	r.g.mu.Lock()
	r.g.problem(r.ref.String(), text)
	r.g.mu.Unlock()
	r.mu.Lock()
	if r.err = err; err == nil {
		r.done, r.has = version, e
	}
	close(r.changed)
	r.changed = make(chan struct{})
	r.mu.Unlock()
	return err
}

// open makes or adopts the namespace and its queue.
func (r *room) open() (*egressns.NS, error) {
	ns, err := egressns.Open(egressns.Options{File: r.file, Egress: r.ref.String(), Driver: r.g.cfg.Driver, Log: r.g.cfg.Log, Changed: func() { r.poke() }})
	if err != nil {
		return nil, err
	}
	var queue *hold.Queue
	if ns.Holds() {
		if queue, err = hold.Open(r.file, egressns.HoldQueue, r.g.cfg.Log); err != nil {
			r.g.cfg.Log.Warn("packets of a slot that moves here cannot wait: some may be lost", "egress", r.ref.String(), "err", err)
			queue = nil
		}
	}
	r.mu.Lock()
	r.ns, r.queue = ns, queue
	r.mu.Unlock()
	r.g.renewer.Retry(r.ref)
	r.g.wakeHost()
	return ns, nil
}

// spec is the namespace's as it is wanted now.
func (r *room) spec(e *skeinv1.Egress) dataplane.GatewaySpec {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	st := r.g.state
	in := GatewayInput{Egress: e, Number: r.number, MTU: r.g.mtu, Complete: time.Since(r.born) > 2*SyncEvery,
		Mesh: slices.Concat(projection.Overlays(st.Cluster()), projection.Pools(st))}
	r.mu.Lock()
	defer r.mu.Unlock()
	in.Clients = r.registry.Clients(holder(st))
	r.clients = map[int]uint32{}
	for _, c := range in.Clients {
		r.clients[c.Slot]++
	}
	return PlanGateway(in)
}

// link is the host's end of the link to the namespace; empty: it is not made yet.
func (r *room) link() string {
	if ns := r.space(); ns != nil {
		return ns.HostLink()
	}
	return ""
}

func (r *room) space() *egressns.NS {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ns
}

// close ends what this process does. The namespace stays.
func (r *room) close() {
	r.stop()
	<-r.ended
}

// remove takes the namespace away.
func (r *room) remove() {
	r.mu.Lock()
	r.gone = true
	r.mu.Unlock()
	r.close()
	r.g.mu.Lock()
	r.g.problem(r.ref.String(), "")
	r.g.mu.Unlock()
	r.g.renewer.Retry(r.ref)
	r.g.wakeHost()
}

// current says that the kernel has the slot's source address as it is agreed for the epoch. The caller has mu.
func (r *room) current(slot int, epoch uint64) bool {
	return slot < len(r.epochs) && r.epochs[slot] == epoch && r.has != nil && slices.Equal(sources(r.has, slot), sources(r.egress, slot))
}

// begin starts a ticket, for packets that leave with the source address that is agreed in the epoch: the kernel has to have it.
func (r *room) begin(slot int, epoch uint64, lease time.Duration) (Ticket, error) {
	r.mu.Lock()
	ns, ready := r.ns, r.current(slot, epoch)
	r.mu.Unlock()
	if ns == nil || !ready {
		return 0, errNotReady
	}
	t, err := ns.Begin(slot, lease)
	return Ticket(t), err
}

func (r *room) grant(slot int, t Ticket) error {
	ns := r.space()
	if ns == nil {
		return errNotReady
	}
	return ns.Grant(slot, egressns.Ticket(t))
}

// drop fails until the namespace is open: a former run's ticket may run in it.
func (r *room) drop(slot int) error {
	ns := r.space()
	if ns == nil {
		return errNotReady
	}
	return ns.Drop(slot)
}

// hold lets packets of a slot wait, or lets those that wait go on in order. The rule that brings packets to the queue ends first, so
// that none comes after the last that waited.
func (r *room) hold(slot int, on bool) error {
	r.mu.Lock()
	ns, queue := r.ns, r.queue
	r.mu.Unlock()
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

// probe asks the egress's targets through the namespace, for as long as there are any.
func (r *room) probe(ctx context.Context) {
	tick := time.NewTicker(ProbeEvery)
	defer tick.Stop()
	var prober *tunprobe.Prober
	defer func() {
		if prober != nil {
			prober.Close()
		}
	}()
	var made int // of so many slots
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.mu.Lock()
		e := r.egress
		r.mu.Unlock()
		targets := e.GetProbes()
		if len(targets) == 0 {
			r.judge(nil)
			continue
		}
		if prober != nil && made != len(e.GetEndpoints()) {
			prober.Close()
			prober = nil
		}
		if prober == nil {
			p, err := tunprobe.Open(r.proberOptions(len(e.GetEndpoints())))
			if err != nil {
				r.g.mu.Lock()
				r.g.problem(r.ref.String()+" probes", err.Error())
				r.g.mu.Unlock()
				continue
			}
			prober, made = p, len(e.GetEndpoints())
		}
		r.judge(r.ask(ctx, prober, targets))
	}
}

func (r *room) proberOptions(slots int) tunprobe.Options {
	o := tunprobe.Options{NetNS: r.file, Slots: map[int]tunprobe.Source{}, Log: r.g.cfg.Log}
	source := func(slot int) tunprobe.Source {
		return tunprobe.Source{IPv4: egressns.ProbeSource(slot, false), IPv6: egressns.ProbeSource(slot, true)}
	}
	o.Source = source(tunprobe.NoSlot)
	for i := range slots {
		o.Slots[i] = source(i)
	}
	return o
}

// ask probes all targets at once: on the way of a slot that forwards here, else on the gateway's own.
func (r *room) ask(ctx context.Context, p *tunprobe.Prober, targets []string) []*skeinv1.EgressProbe {
	slot := tunprobe.NoSlot
	for _, h := range r.g.renewer.Report() {
		if h.Slot.Ref == r.ref && h.State == Holding {
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

// judge takes a round of probes.
func (r *room) judge(round []*skeinv1.EgressProbe) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.probes = round
	var results []ProbeResult
	for _, p := range round {
		x := ProbeResult{Target: p.GetTarget()}
		if !p.GetAnswered() {
			x.Err = errors.New(p.GetReason())
		}
		results = append(results, x)
	}
	r.health.Observe(time.Now(), results)
}

// stateNow is how this node fares as the egress's gateway.
func (r *room) stateNow() *skeinv1.GatewayState {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &skeinv1.GatewayState{Namespace: r.ref.Namespace, Name: r.ref.Name, Ready: r.ns != nil && r.done > 0 && r.err == nil, Health: skeinv1.GatewayState_HEALTH_UNKNOWN}
	if !s.Ready {
		s.Reason = "its network namespace is being made"
		if r.err != nil {
			s.Reason = r.err.Error()
		}
		return s
	}
	if len(r.egress.GetProbes()) == 0 {
		return s
	}
	condition, why := r.health.Judge(time.Now())
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

// report is what this node does for the egress.
func (r *room) report() *skeinv1.EgressGateway {
	out := &skeinv1.EgressGateway{Namespace: r.ref.Namespace, Name: r.ref.Name, NodeId: r.g.cfg.Self.String(), State: r.stateNow(), Netns: r.file}
	r.mu.Lock()
	ns := r.ns
	clients := maps.Clone(r.clients)
	for _, p := range r.probes {
		out.Probes = append(out.Probes, proto.CloneOf(p))
	}
	r.mu.Unlock()
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
	out.DroppedStrangers, out.DroppedInvalid, out.DroppedLease = c.Dropped.Strangers+c.Dropped.Nested, c.Dropped.Invalid, c.Dropped.Lease
	out.DroppedDestination = c.Dropped.Destination
	for _, h := range r.g.renewer.Report() {
		if h.Slot.Ref != r.ref || h.State == Idle {
			continue
		}
		x := c.Slots[h.Slot.Number]
		s := &skeinv1.EgressSlotReport{
			Number: uint32(h.Slot.Number), Epoch: h.Epoch, Forwarding: h.State == Holding || h.State == Leaving, PacketsOut: x.SentPackets, BytesOut: x.SentBytes,
			PacketsIn: x.ReceivedPackets, BytesIn: x.ReceivedBytes, Clients: clients[h.Slot.Number], FailoverNanos: int64(h.Failover),
		}
		if !h.End.IsZero() {
			s.LeaseUntil = h.End.UnixNano()
		}
		s.TakenOver, s.Announced = r.g.about(h.Slot, h.Epoch)
		out.Slots = append(out.Slots, s)
	}
	return out
}

// about tells how many connections came with a slot, and on which links its addresses are announced.
func (g *Gateways) about(slot Slot, epoch uint64) (takenOver uint32, links string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.taken[slot]; t.epoch == epoch {
		takenOver = t.count
	}
	var on []string
	for addr, link := range g.announced[slot].addrs {
		if link == "" {
			link = fmt.Sprintf("table %d (%s)", dataplane.ExportTable, addr)
		}
		on = append(on, link)
	}
	slices.Sort(on)
	return takenOver, strings.Join(slices.Compact(on), ", ")
}
