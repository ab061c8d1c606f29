package owners

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	target = "target" // in each mesh: what clients send to, on the gateways' network
	port   = 80
)

// mesh is a lab, and what there is of whom in it.
type mesh struct {
	source                     []byte
	servers, gateways, clients []string
	egresses                   []lab.Ref
	// of each client, the first for each of the egresses in turn; one name each, since they fall on slots by it
	pods     []string
	udp, tcp time.Duration // between two numbers of a stream
}

//go:embed owners.yaml
var fullSource []byte

//go:embed small.yaml
var smallSource []byte

var (
	full = mesh{fullSource, []string{"dc1", "dc2", "dc3"}, []string{"gw1", "gw2", "gw3"},
		[]string{"home1", "cloud1", "office1"},
		[]lab.Ref{{Namespace: "out", Name: "fixed"}, {Namespace: "out", Name: "masked"}}, []string{"a", "m", "b"},
		10 * time.Millisecond, 50 * time.Millisecond}
	small = mesh{smallSource, []string{"dc1"}, []string{"gw1", "gw2"}, []string{"home1"},
		[]lab.Ref{{Namespace: "out", Name: "fixed"}}, []string{"a"},
		50 * time.Millisecond, 250 * time.Millisecond}
)

// Options say how the owners are tried.
type Options struct {
	Lab       lab.Options
	Name      string // of the lab; default owners
	Schedules int
	Seed      uint64
	Recovery  time.Duration // what the mesh gets after each schedule; default 40 s
	Small     bool          // a mesh for an emulated machine: one server, two gateways, one client
	Clock     bool          // this machine's wall clock is turned, too: it has to be for nothing but this
	Artifacts string        // where logs are left when something went wrong; "": nowhere
	Progress  func(string)
}

type run struct {
	mesh
	opts    Options
	lab     *lab.Lab
	capture *Capture
	names   map[string]string // of nodes, by ID
	slots   []string          // in order
	streams []*stream
	next    uint64 // first event not read
	grants  map[string][]Grant
	planned map[uint64]bool // epochs of planned moves
	report  *Report

	mu  sync.Mutex
	hit map[string]bool // nodes that a fault has now
}

// Run raises a lab, tries the schedules, and takes it down. The error is nil only when the observer was there all the
// time, the mesh recovered after each schedule, and nothing was seen that the log does not allow.
func Run(ctx context.Context, opts Options) (report *Report, err error) {
	if opts.Recovery <= 0 {
		opts.Recovery = 40 * time.Second
	}
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	r := &run{mesh: full, opts: opts, names: map[string]string{}, next: 1, grants: map[string][]Grant{},
		planned: map[uint64]bool{}, hit: map[string]bool{},
		report: &Report{Seed: opts.Seed, At: time.Now()}}
	if opts.Small {
		r.mesh = small
	}
	spec, err := lab.Parse("owners.yaml", r.source)
	if err != nil {
		return r.report, err
	}
	if opts.Name != "" {
		spec.Name = opts.Name
	}
	if err := lab.Down(ctx, spec.Name, opts.Lab.Dir); err != nil { // what a run that was killed has left is in the way
		return r.report, err
	}
	if r.lab, err = lab.Up(ctx, spec, opts.Lab); err != nil {
		return r.report, err
	}
	defer func() {
		down := context.WithoutCancel(ctx)
		if err != nil && ctx.Err() == nil {
			r.reportOpinions(down)
		}
		if err != nil && ctx.Err() == nil && opts.Artifacts != "" {
			if dir, aerr := r.lab.SaveArtifacts(down, opts.Artifacts); aerr == nil {
				err = fmt.Errorf("%w\nlogs and states are in %s", err, dir)
			}
		}
		err = errors.Join(err, r.lab.Down(down))
	}()
	began := time.Now()
	err = r.all(ctx)
	r.report.Seconds = time.Since(began).Seconds()
	if err == nil && len(r.report.Violations) > 0 {
		err = fmt.Errorf("%d violations: %s", len(r.report.Violations), r.report.Violations[0].Text)
	}
	return r.report, err
}

// reportOpinions says what everybody thinks when something went wrong.
func (r *run) reportOpinions(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for _, n := range slices.Concat(r.servers, r.gateways, r.clients) {
		r.opts.Progress(r.lab.Opinion(ctx, n))
	}
	for _, e := range r.egresses {
		out, _, err := r.lab.Exec(ctx, r.alive(), "skein", "egress", "show", e.String())
		if err != nil {
			out = err.Error()
		}
		r.opts.Progress(strings.TrimSpace(out))
	}
}

func (r *run) all(ctx context.Context) error {
	if err := r.prepare(ctx); err != nil {
		return fmt.Errorf("before the first fault: %w", err)
	}
	defer r.capture.Close()
	streaming, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() { stop(); wg.Wait() }()
	for _, s := range r.streams {
		wg.Go(func() { s.run(streaming, r.lab) })
	}
	if err := r.seesAll(ctx); err != nil {
		return fmt.Errorf("before the first fault: %w", err)
	}
	w := World{Slots: len(r.slots), Gateways: len(r.gateways), Servers: len(r.servers), Clock: r.opts.Clock}
	for i := range r.opts.Schedules {
		s := w.Plan(r.opts.Seed, i)
		if err := r.schedule(ctx, s); err != nil {
			return fmt.Errorf("schedule %d of seed %d (%s): %w", i, r.opts.Seed, s, err)
		}
		if len(r.report.Violations) > 0 {
			return nil // more would only hide it
		}
	}
	return nil
}

// seesAll waits until all is well, and the observer has seen packets of every slot: else the run would prove nothing.
func (r *run) seesAll(ctx context.Context) error {
	if err := r.recovered(ctx, time.Now()); err != nil {
		return err
	}
	seen, err := r.capture.Seen()
	for _, slot := range r.slots {
		if err == nil && len(seen.Spells[slot]) == 0 {
			err = fmt.Errorf(
				"no client falls on slot %s, or the observer does not see its packets: this run would prove nothing", slot)
		}
	}
	return err
}

// prepare starts pods, the target's server and the observer.
func (r *run) prepare(ctx context.Context) error {
	l := r.lab
	if err := l.WaitConverged(ctx, r.opts.Recovery); err != nil {
		return err
	}
	if err := l.Serve(lab.Serve{Nodes: []string{target}, Port: port}); err != nil {
		return err
	}
	if err := r.learn(ctx); err != nil {
		return err
	}
	info, err := l.Node(target)
	if err != nil {
		return err
	}
	for _, p := range r.senders() {
		if err := l.StartPods(ctx, 10*time.Second, lab.StartPods{Nodes: []string{p.node}, Pods: []string{p.name},
			Annotations: map[string]string{"skein.dev/egress." + p.egress.Namespace: p.egress.Name}}); err != nil {
			return err
		}
		for _, addr := range []netip.Addr{info.Host.Addr, info.Host.Addr6} {
			pod, to := p.node+"/"+p.name, netip.AddrPortFrom(addr, port)
			r.streams = append(r.streams, &stream{pod: pod, proto: "udp", to: to, every: r.udp}, &stream{pod: pod, proto: "tcp",
				to: to, every: r.tcp})
		}
	}
	return nil
}

// client is a pod that sends.
type client struct {
	node, name string
	egress     lab.Ref
}

// senders are the pods that send, and by which egress.
func (m mesh) senders() (out []client) {
	for _, n := range m.clients {
		for i, p := range m.pods {
			out = append(out, client{n, n + p, m.egresses[i%len(m.egresses)]})
		}
	}
	return out
}

// learn finds out what addresses mean to the observer, and opens it.
func (r *run) learn(ctx context.Context) error {
	w, slots, err := WatchOf(ctx, r.lab, target, port, r.gateways, r.egresses)
	if err != nil {
		return err
	}
	r.slots = slots
	c, err := r.lab.Client(r.servers[0])
	if err != nil {
		return err
	}
	nodes, err := c.Nodes(ctx, &skeinv1.NodesRequest{})
	if err != nil {
		return err
	}
	for _, n := range nodes.GetNodes() {
		r.names[n.GetNode().GetId()] = n.GetNode().GetName()
	}
	r.capture, err = Open(w)
	return err
}

// schedule lets the faults happen, waits until all is well again, and judges.
func (r *run) schedule(ctx context.Context, s Schedule) error {
	began := time.Now()
	errs := make([]error, len(s.Faults))
	words := make([]string, len(s.Faults))
	var wg sync.WaitGroup
	for i, f := range s.Faults {
		wg.Go(func() { words[i], errs[i] = r.fault(ctx, f) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	healed := time.Now()
	if err := r.lab.Heal(ctx); err != nil {
		return err
	}
	if err := r.recovered(ctx, healed); err != nil {
		return fmt.Errorf("it does not recover: %w", err)
	}
	if err := r.readLog(ctx); err != nil {
		return err
	}
	seen, err := r.capture.Seen()
	if err != nil {
		return fmt.Errorf("the observer ended: %w", err)
	}
	r.report.count(s)
	found := 0
	for _, slot := range r.slots {
		r.report.add(s, Judge(slot, r.grants[slot], seen.Spells[slot]))
		for _, c := range Changes(slot, seen.Spells[slot], began) {
			found++
			r.report.change(s, strings.Join(words, "; "), c, r.wasPlanned(c))
		}
	}
	r.report.Schedules, r.report.Packets, r.report.Missed = r.report.Schedules+1, seen.Packets, seen.Lost
	r.report.Recovery = append(r.report.Recovery, time.Since(healed))
	r.opts.Progress(fmt.Sprintf("%3d  %s: %d changes of owner, well again after %s", s.Number, strings.Join(words, "; "),
		found, time.Since(healed).Round(10*time.Millisecond)))
	return ctx.Err()
}

// wasPlanned tells by which kind of grant a change came about: the last one before it.
func (r *run) wasPlanned(c Change) bool {
	planned := false
	for _, g := range r.grants[c.Slot] {
		if g.Node == c.To && !g.Since.After(c.At) {
			planned = r.planned[g.Epoch]
		}
	}
	return planned
}

// fault makes one fault happen and ends it. It tells whom it hit.
func (r *run) fault(ctx context.Context, f Fault) (string, error) {
	pause.For(ctx, f.At)
	node, err := r.who(ctx, f)
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	taken := r.hit[node]
	r.hit[node] = true
	r.mu.Unlock()
	if taken {
		return node + ": has another fault already", nil
	}
	defer func() {
		r.mu.Lock()
		delete(r.hit, node)
		r.mu.Unlock()
	}()
	do, undo := r.actions(ctx, f, node)
	if err := do(); err != nil {
		return "", fmt.Errorf("%s: %s: %w", node, f.Kind, err)
	}
	pause.For(ctx, f.For)
	if err := undo(); err != nil {
		return "", fmt.Errorf("%s: end of %s: %w", node, f.Kind, err)
	}
	what := string(f.Kind)
	if f.Kind == Clock {
		what += " of " + f.Jump.String() + " for"
	}
	return fmt.Sprintf("%s: %s %s", node, what, f.For.Round(10*time.Millisecond)), nil
}

// actions are what begins and what ends a fault.
func (r *run) actions(ctx context.Context, f Fault, node string) (do, undo func() error) {
	l, others := r.lab, slices.DeleteFunc(slices.Clone(r.servers), func(s string) bool { return s == node })
	heal := func() error { return l.Heal(ctx, node) }
	drain := func(undo bool) func() error {
		return func() error {
			c, err := l.Client(r.alive())
			if err != nil {
				return err
			}
			for deadline := time.Now().Add(r.opts.Recovery); ; { // another fault may have taken the leader
				_, err := c.DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: node, Undo: undo})
				if err == nil || time.Now().After(deadline) || !pause.For(ctx, 100*time.Millisecond) {
					return err
				}
			}
		}
	}
	switch f.Kind {
	case Clock:
		return func() error { return turnClock(f.Jump) }, func() error { return turnClock(-f.Jump) }
	case Kill:
		return func() error { return l.Kill(ctx, node) }, func() error { return l.Start(ctx, node) }
	case Pause:
		return func() error { return l.Pause(node) }, func() error { return l.Resume(node) }
	case CutOff:
		all := slices.DeleteFunc(l.Spec.HostNames(), func(n string) bool { return n == node })
		return func() error { return l.Partition([]string{node}, all) }, heal
	case NoServers:
		return func() error { return l.Block(lab.Block{From: []string{node}, To: others}) }, heal
	case ToServers:
		return func() error { return l.Block(lab.Block{From: []string{node}, To: others, Oneway: true}) }, heal
	case FromServers:
		return func() error { return l.Block(lab.Block{From: others, To: []string{node}, Oneway: true}) }, heal
	}
	return drain(false), drain(true)
}

// turnClock sets this machine's wall clock ahead, or back.
func turnClock(by time.Duration) error {
	t := unix.Timex{Modes: unix.ADJ_SETOFFSET | unix.ADJ_NANO}
	t.Time.Sec, t.Time.Usec = int64(by/time.Second), int64(by%time.Second)
	if t.Time.Usec < 0 { // nanoseconds here, and not below zero
		t.Time.Sec, t.Time.Usec = t.Time.Sec-1, t.Time.Usec+int64(time.Second)
	}
	if _, err := unix.ClockAdjtime(unix.CLOCK_REALTIME, &t); err != nil {
		return fmt.Errorf("turn the wall clock by %s: %w", by, err)
	}
	return nil
}

// alive is a client's node, which no fault hits.
func (r *run) alive() string { return r.clients[0] }

// who finds the node that a fault hits.
func (r *run) who(ctx context.Context, f Fault) (string, error) {
	switch f.Role {
	case Machine:
		return string(Machine), nil
	case Server:
		return r.servers[f.Slot], nil
	case Leader:
		c, err := r.lab.Client(r.alive())
		if err != nil {
			return "", err
		}
		s, err := c.Status(ctx, &skeinv1.StatusRequest{})
		if err == nil && slices.Contains(r.servers, s.GetLeaderName()) {
			return s.GetLeaderName(), nil
		}
		return r.servers[0], err
	case Owner:
		owners, err := r.owners(ctx)
		if err != nil {
			return "", err
		}
		if o := owners[r.slots[f.Slot]]; o != "" {
			return o, nil
		}
	}
	return r.gateways[f.Slot], nil
}

// owners are the slots' owners by what a client's agent knows.
func (r *run) owners(ctx context.Context) (map[string]string, error) {
	c, err := r.lab.Client(r.alive())
	if err != nil {
		return nil, err
	}
	list, err := c.Egresses(ctx, &skeinv1.EgressesRequest{})
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, e := range list.GetEgresses() {
		for _, s := range e.GetSlots() {
			out[SlotName(lab.Ref{Namespace: s.GetSlot().GetNamespace(), Name: s.GetSlot().GetName()},
				s.GetSlot().GetNumber())] = s.GetOwner()
		}
	}
	return out, nil
}

// recovered waits until every slot has an owner, every client hears from the target, and all agents agree.
func (r *run) recovered(ctx context.Context, after time.Time) error {
	for deadline := time.Now().Add(r.opts.Recovery); ; {
		err := r.well(ctx, after)
		if err == nil {
			return r.lab.WaitConverged(ctx, time.Until(deadline))
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not so within %s: %w", r.opts.Recovery, err)
		}
		if !pause.For(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (r *run) well(ctx context.Context, after time.Time) error {
	owners, err := r.owners(ctx)
	if err != nil {
		return err
	}
	for _, s := range r.slots {
		if owners[s] == "" {
			return fmt.Errorf("slot %s has no owner", s)
		}
	}
	for _, s := range r.streams {
		if !s.since(after) {
			return fmt.Errorf("%s hears nothing from %s over %s", s.pod, s.to, s.proto)
		}
	}
	return nil
}

// logPatience is for servers to answer: a client's own archive may begin later than what is asked for.
const logPatience = 20 * time.Second

// readLog reads what was decided about slots since it was read last.
func (r *run) readLog(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, logPatience)
	defer cancel()
	for {
		err := r.readMore(ctx)
		if connect.CodeOf(err) != connect.CodeUnavailable || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Second):
		}
	}
}

// readMore reads what is there of it.
func (r *run) readMore(ctx context.Context) error {
	c, err := r.lab.Client(r.alive())
	if err != nil {
		return err
	}
	stream, err := c.Events(ctx, &skeinv1.EventsRequest{Since: r.next})
	if err != nil {
		return fmt.Errorf("read the log: %w", err)
	}
	defer stream.Close()
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		r.next = max(r.next, e.GetIndex()+1)
		s := slotOf(e)
		if s == nil {
			continue
		}
		name := SlotName(lab.Ref{Namespace: s.GetNamespace(), Name: s.GetName()}, s.GetNumber())
		since := time.Unix(0, e.GetTime())
		if r.opts.Clock {
			since = time.Time{} // the log's time, which never runs backwards, is ahead of the observer's from the first jump on
		}
		r.grants[name] = append(r.grants[name], Grant{Epoch: e.GetIndex(), Node: r.names[s.GetNodeId()], Since: since})
		r.planned[e.GetIndex()] = s.GetPlanned()
	}
	if err := stream.Err(); err != nil {
		return fmt.Errorf("read the log: %w", err)
	}
	return nil
}

// slotOf is the slot that an event is about; nil: none.
func slotOf(e *skeinv1.Event) *skeinv1.EgressSlot {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_SlotAssigned:
		return b.SlotAssigned.GetSlot()
	case *skeinv1.Event_SlotMoved:
		return b.SlotMoved.GetSlot()
	case *skeinv1.Event_SlotReleased:
		return b.SlotReleased.GetSlot()
	}
	return nil
}
