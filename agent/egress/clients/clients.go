package clients

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressclient"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Ref names an egress.
type Ref = egress.Ref

// Sender sends SyncEgressClients to a gateway node, which may be this one.
type Sender interface {
	Sync(ctx context.Context, node identity.ID,
		r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error)
}

// Namespace is the kernel's side of one client (*egressclient.Client).
type Namespace interface {
	Apply(dataplane.ClientSpec) (writes int, notes []string, err error)
	Watch(changed func()) error
	Diff(dataplane.ClientSpec) ([]string, error)
	Flows(to []netip.Prefix) (slots []int, err error)
	Remove() error
	Driver() string
	Close() error
}

// Config is what Clients need. Open, File and Sender are required.
type Config struct {
	File   string // file with the egresses that running pods have chosen
	Sender Sender
	Open   func(netns string) (Namespace, error) // see OpenNamespace
	// Addresses reads a namespace's addresses from one of its links; nil: egressclient.Addresses.
	Addresses func(netns, link string) (ipv4, ipv6 netip.Addr, err error)
	// Changed is called when the report changes. It must not block or call back. nil: not called.
	Changed func()
	Epoch   uint64 // of this agent's start; higher for each start; 0: now
	// GatewayDir holds the namespaces of gateways, which must not become clients.
	GatewayDir string
	// Owner is the agent's dataplane.Numbers.Owner on this host.
	Owner string
	Log   *slog.Logger
}

// OpenNamespace returns a Config.Open that uses the configured driver. Driver auto is resolved once, when the first
// namespace is opened, so that no pod waits for the test. Argument host is the path of the namespace that this host's
// own traffic leaves; empty: the process's. Argument numbers applies there; other namespaces use the defaults.
func OpenNamespace(driver, host string, numbers dataplane.Numbers,
	log *slog.Logger) func(netns string) (Namespace, error) {
	chosen := sync.OnceValue(func() string {
		switch {
		case driver != "" && driver != fou.Auto:
			return driver
		case fou.TryKernel() == nil:
			return fou.Kernel
		}
		return fou.Userspace
	})
	return func(netns string) (Namespace, error) {
		n := numbers
		if netns != "" {
			n = dataplane.DefaultNumbers()
		}
		c, err := egressclient.Open(egressclient.Options{NetNS: cmp.Or(netns, host), Numbers: n, Driver: chosen(), Log: log})
		if err != nil {
			return nil, err
		}
		return c, nil
	}
}

// AddWait is how long AddPod waits until gateways know a pod, so that its first packet is not lost.
const AddWait = time.Second

// keyOf is the key that determines a pod's slots.
func keyOf(a podnet.Attachment) string {
	if a.Namespace != "" && a.Pod != "" {
		return a.Namespace + "/" + a.Pod
	}
	return addressKey(a.IPv4, a.IPv6)
}

func addressKey(ipv4, ipv6 netip.Addr) string {
	if ipv4.IsValid() {
		return ipv4.String()
	}
	return ipv6.String()
}

// Configured is a client from this host's configuration: the host itself, or one of its network namespaces.
type Configured struct {
	NetNS string // path; empty: the host's own
	// IPv4 and IPv6 are the host's addresses in the mesh; a namespace's are read from its Uplink.
	IPv4, IPv6 netip.Addr
	Uplink     string // skein's link on the host; else the link that leads to the host
	MTU        int    // of the uplink, in bytes; 0: the kernel's
	Egresses   []Ref
}

// member is a client and its state. Clients.mu guards it.
type member struct {
	pod      podnet.Attachment
	client   Client // its Wanted is noted and attached together
	noted    []Ref  // from annotations or the configuration
	attached []Ref  // at run time
	wrong    error  // with the annotations
	inode    inode  // of the network namespace, to recognise another one at the same path
	absent   error  // why a configured namespace cannot be used now
	since    uint64 // order of entry

	spec    dataplane.ClientSpec
	choices []Choice
	flows   map[Ref][]uint32 // see KeepFlows
	worker  *worker
}

// Clients sends the packets of this host's clients into tunnels, and informs gateways about them. Open makes one,
// Close ends it. All methods are safe for concurrent use.
type Clients struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	all    sync.WaitGroup
	turns  turns

	mu      sync.Mutex
	members map[podnet.Key]*member
	count   uint64
	state   *events.State // the latest; nil: not known yet
	read    *events.State // state that agreed was made from
	ports   dataplane.FoUPorts
	agreed  *Agreed
	visits  chan struct{}                   // signals that addresses must be read
	changed chan struct{}                   // closed and replaced at each change
	told    map[Ref]bool                    // egresses whose gateways may know clients of this host
	lists   map[Ref][]*skeinv1.EgressClient // that gateways should have
	pairs   map[pairKey]*pair
	gen     uint64
	saved   []byte // content of the file
	// slots of clients' flows from the file, until enter or Configure has assigned or discarded them
	before map[podnet.Key]map[Ref][]uint32
}

// Open reads the file, and skips pods whose network namespace is gone.
func Open(cfg Config) (*Clients, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Addresses == nil {
		cfg.Addresses = egressclient.Addresses
	}
	if cfg.Changed == nil {
		cfg.Changed = func() {}
	}
	if cfg.Epoch == 0 {
		cfg.Epoch = uint64(time.Now().UnixNano())
	}
	c := &Clients{
		cfg: cfg, turns: newTurns(), members: map[podnet.Key]*member{}, changed: make(chan struct{}),
		visits: make(chan struct{}, 1), told: map[Ref]bool{}, lists: map[Ref][]*skeinv1.EgressClient{},
		pairs: map[pairKey]*pair{}, before: map[podnet.Key]map[Ref][]uint32{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	err := c.load()
	c.all.Go(c.look)
	c.all.Go(c.visit)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replan()
	return c, err
}

// Close ends the work in this process; the clients' rules, routes and devices stay.
func (c *Clients) Close() {
	c.cancel()
	c.all.Wait()
}

// look drops pods whose network namespace disappeared without a CNI DEL, and re-checks flows and addresses.
func (c *Clients) look() {
	tick := time.NewTicker(egress.SyncEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-tick.C:
		}
		c.forgetFlows()
		c.mu.Lock()
		for id, m := range c.members {
			if id.ContainerID != "" && gone(m.pod.NetNS, m.inode) {
				c.cfg.Log.Info("a client of egresses is gone with its network namespace", "client", m.client.Key,
					"netns", m.pod.NetNS)
				c.drop(id, false)
			}
		}
		c.replan()
		c.mu.Unlock()
		c.revisit()
	}
}

// forgetFlows removes the extra slots by which clients no longer have flows. It asks the kernel, which reports the
// end of a connection only to listeners that were there at its beginning.
func (c *Clients) forgetFlows() {
	type question struct {
		of  *member
		ref Ref
		ns  Namespace
		had []uint32
		to  []netip.Prefix
	}
	var all []question
	c.mu.Lock()
	for _, m := range c.members {
		for ref, had := range m.flows {
			if m.worker != nil && m.worker.ns != nil && c.agreed != nil {
				all = append(all, question{m, ref, m.worker.ns, slices.Clone(had), c.agreed.Egresses[ref].Destinations})
			}
		}
	}
	c.mu.Unlock()
	for _, q := range all {
		have, err := q.ns.Flows(q.to)
		if err != nil {
			c.cfg.Log.Debug("by which slots a client has flows is not known now", "client", q.of.client.Key, "error", err)
			continue
		}
		c.mu.Lock()
		left := slices.DeleteFunc(slices.Clone(q.of.flows[q.ref]), func(n uint32) bool {
			return slices.Contains(q.had, n) && !slices.Contains(have, int(n))
		})
		if q.of.flows[q.ref] = left; len(left) == 0 {
			delete(q.of.flows, q.ref)
		}
		c.mu.Unlock()
	}
}

// visit reads the addresses of configured namespaces, which may appear and disappear.
func (c *Clients) visit() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.visits:
		}
		c.mu.Lock()
		var all []podnet.Key
		uplinks := map[podnet.Key]string{}
		for id, m := range c.members {
			if id.ContainerID == "" && m.client.NetNS != "" {
				all = append(all, id)
				uplinks[id] = m.client.Uplink
			}
		}
		c.mu.Unlock()
		for _, id := range all {
			path := id.Interface
			ipv4, ipv6, err := c.cfg.Addresses(path, uplinks[id])
			at, _ := inodeOf(path)
			c.mu.Lock()
			if m := c.members[id]; m != nil && (m.client.IPv4 != ipv4 || m.client.IPv6 != ipv6 || m.inode != at ||
				fmt.Sprint(m.absent) != fmt.Sprint(err)) {
				if m.worker != nil && m.inode != at { // another namespace at the same path
					m.worker.stop(false)
					m.worker = nil
				}
				m.inode, m.absent = at, err
				m.client.IPv4, m.client.IPv6, m.client.Key = ipv4, ipv6, addressKey(ipv4, ipv6)
				c.replan()
			}
			c.mu.Unlock()
		}
	}
}

func (c *Clients) revisit() {
	select {
	case c.visits <- struct{}{}:
	default:
	}
}

// Follow sets the agreed state, which must not be modified afterwards.
func (c *Clients) Follow(s *events.State, ports dataplane.FoUPorts) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != s || c.ports != ports {
		c.state, c.ports, c.read = s, ports, nil
		c.replan()
	}
}

// AddPod lets a pod use the egresses of its annotations. It returns when the pod's network namespace is configured and
// its gateways know the pod, or when AddWait or ctx is over. Failures are reported in the result; the pod still starts,
// and they are tried again. Without such annotations it does nothing.
func (c *Clients) AddPod(ctx context.Context, p podnet.Attachment,
	annotations map[string]string) []*skeinv1.EgressOfClient {
	refs, wrong := ParseAnnotations(annotations)
	if len(refs) == 0 && wrong == nil {
		return nil
	}
	if wrong != nil {
		c.cfg.Log.Warn("annotations about egresses", "client", keyOf(p), "error", wrong)
	}
	c.mu.Lock()
	c.drop(p.Key, false) // of an earlier container with this key
	c.enter(&member{pod: p, client: Client{Key: keyOf(p), NetNS: p.NetNS, IPv4: p.IPv4, IPv6: p.IPv6, Uplink: p.Interface},
		noted: refs, wrong: wrong})
	c.replan()
	c.mu.Unlock()
	return c.await(ctx, p.Key)
}

// Annotate applies a running pod's changed annotations. Egresses added by Attach stay.
func (c *Clients) Annotate(p podnet.Attachment, annotations map[string]string) {
	refs, wrong := ParseAnnotations(annotations)
	if wrong != nil {
		c.cfg.Log.Warn("annotations about egresses", "client", keyOf(p), "error", wrong)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[p.Key]
	switch {
	case m == nil && len(refs) == 0 && wrong == nil:
		return
	case m == nil:
		m = &member{pod: p, client: Client{Key: keyOf(p), NetNS: p.NetNS, IPv4: p.IPv4, IPv6: p.IPv6, Uplink: p.Interface}}
		c.enter(m)
	case slices.Equal(m.noted, refs) && fmt.Sprint(m.wrong) == fmt.Sprint(wrong):
		return
	}
	m.noted, m.wrong = refs, wrong
	m.attached = slices.DeleteFunc(slices.Clone(m.attached), func(r Ref) bool { return slices.Contains(refs, r) })
	m.attached = m.attached[:min(len(m.attached), MaxEgresses-len(refs))]
	if len(m.noted)+len(m.attached) == 0 && m.wrong == nil {
		c.drop(p.Key, true)
	}
	c.replan()
}

// enter adds a member.
func (c *Clients) enter(m *member) {
	c.count++
	m.since = c.count
	m.inode, _ = inodeOf(m.pod.NetNS)
	c.members[m.pod.Key] = m
	m.flows = c.before[m.pod.Key]
	delete(c.before, m.pod.Key)
}

// await waits for kernel and gateways, and returns the client's egresses with their states.
func (c *Clients) await(ctx context.Context, id podnet.Key) []*skeinv1.EgressOfClient {
	patience, cancel := context.WithTimeout(ctx, AddWait)
	defer cancel()
	for {
		c.mu.Lock()
		m, changed := c.members[id], c.changed
		if m == nil {
			c.mu.Unlock()
			return nil
		}
		applied := m.worker == nil || m.worker.tried()
		out := c.report(m).GetEgresses()
		waits := slices.ContainsFunc(out, func(e *skeinv1.EgressOfClient) bool {
			return e.GetState() == Waiting && e.GetOwner() != ""
		})
		c.mu.Unlock()
		if applied && (!waits || patience.Err() != nil) || ctx.Err() != nil {
			return out
		}
		over := patience.Done()
		if !applied {
			over = ctx.Done()
		}
		select {
		case <-changed:
		case <-over:
		case <-c.ctx.Done():
			return out
		}
	}
}

// DelPod ends a pod's use of egresses. It waits until that is done or ctx ends; a pod without egresses costs nothing.
func (c *Clients) DelPod(ctx context.Context, k podnet.Key) {
	c.mu.Lock()
	w := c.drop(k, true)
	if w != nil {
		c.replan()
	}
	c.mu.Unlock()
	if w == nil {
		return
	}
	select {
	case <-w.done:
	case <-ctx.Done():
	}
}

// Clear removes everything of egresses from all clients, and forgets them. It returns when that is done or ctx ends.
func (c *Clients) Clear(ctx context.Context) {
	c.mu.Lock()
	var ended []*worker
	for id := range c.members {
		if w := c.drop(id, true); w != nil {
			ended = append(ended, w)
		}
	}
	c.replan()
	c.mu.Unlock()
	for _, w := range ended {
		select {
		case <-w.done:
		case <-ctx.Done():
			return
		}
	}
}

// drop removes a member and returns its worker, or nil. Argument remove: its rules, routes and devices are removed,
// too.
func (c *Clients) drop(id podnet.Key, remove bool) *worker {
	m := c.members[id]
	if m == nil {
		return nil
	}
	delete(c.members, id)
	if m.worker != nil {
		m.worker.stop(remove)
	}
	return m.worker
}

// CheckPod returns an error if a pod's egresses in its network namespace differ from their spec; nil also without
// egresses.
func (c *Clients) CheckPod(k podnet.Key) error {
	c.mu.Lock()
	m := c.members[k]
	var ns Namespace
	var spec dataplane.ClientSpec
	if m != nil && m.worker != nil {
		ns, spec = m.worker.ns, m.spec
	}
	c.mu.Unlock()
	if ns == nil {
		return nil
	}
	diff, err := ns.Diff(spec)
	if err != nil || len(diff) == 0 {
		return err
	}
	return fmt.Errorf("egresses of %s differ from what was set up: %s", spec.Name, joinAll(diff))
}

func joinAll(all []string) string {
	text := ""
	for _, s := range all {
		text = join(text, s)
	}
	return text
}

// ErrNotAttached says that a pod uses an egress because of its annotations, or not at all.
var ErrNotAttached = errors.New("is not attached")

// Attach adds egresses to those of a running pod, or with detach removes attached ones. It returns like AddPod.
func (c *Clients) Attach(ctx context.Context, p podnet.Attachment, refs []Ref,
	detach bool) ([]*skeinv1.EgressOfClient, error) {
	c.mu.Lock()
	m := c.members[p.Key]
	have := []Ref(nil)
	if m != nil {
		have = m.attached
	}
	next := slices.Clone(have)
	for _, r := range refs {
		i := slices.Index(next, r)
		switch {
		case detach && i < 0 && m != nil && slices.Contains(m.noted, r):
			c.mu.Unlock()
			return nil, fmt.Errorf("egress %s %w to %s by command but by its annotations: change those, and restart "+
				"the pod", r, ErrNotAttached, keyOf(p))
		case detach && i < 0:
			c.mu.Unlock()
			return nil, fmt.Errorf("egress %s %w to %s", r, ErrNotAttached, keyOf(p))
		case detach:
			next = slices.Delete(next, i, i+1)
		case i < 0 && !(m != nil && slices.Contains(m.noted, r)):
			next = append(next, r)
		}
	}
	if m == nil && len(next) > 0 {
		m = &member{pod: p, client: Client{Key: keyOf(p), NetNS: p.NetNS, IPv4: p.IPv4, IPv6: p.IPv6, Uplink: p.Interface}}
		c.enter(m)
	}
	if m != nil && len(next)+len(m.noted) > MaxEgresses {
		c.mu.Unlock()
		return nil, fmt.Errorf("%s would use %d egresses; %d are allowed", keyOf(p), len(next)+len(m.noted), MaxEgresses)
	}
	var ended *worker
	if m != nil {
		m.attached = next
		if len(next)+len(m.noted) == 0 && m.wrong == nil {
			ended = c.drop(p.Key, true)
		}
	}
	c.replan()
	c.mu.Unlock()
	if ended != nil {
		select {
		case <-ended.done:
		case <-ctx.Done():
		}
	}
	return c.await(ctx, p.Key), nil
}

// Configure sets the clients of the configuration, and ends those that are no longer in it.
func (c *Clients) Configure(all []Configured) {
	c.mu.Lock()
	defer c.mu.Unlock()
	left := map[podnet.Key]bool{}
	for _, one := range all {
		id := podnet.Key{Interface: one.NetNS}
		left[id] = true
		m := c.members[id]
		if m == nil {
			m = &member{pod: podnet.Attachment{Key: id, NetNS: one.NetNS}}
			c.enter(m)
		}
		if one.NetNS != "" { // read by visit
			one.IPv4, one.IPv6 = m.client.IPv4, m.client.IPv6
		}
		m.client = Client{Key: addressKey(one.IPv4, one.IPv6), NetNS: one.NetNS, IPv4: one.IPv4, IPv6: one.IPv6,
			Uplink: one.Uplink, MTU: one.MTU, Host: one.NetNS == "", Owner: c.cfg.Owner}
		m.noted = slices.Clone(one.Egresses)
	}
	for id := range c.members {
		if id.ContainerID == "" && !left[id] {
			c.drop(id, true)
		}
	}
	clear(c.before)
	c.replan()
	c.revisit()
}

// replan computes every client's spec and gives changed ones to the workers. The caller holds mu.
func (c *Clients) replan() {
	if c.ctx.Err() != nil {
		return
	}
	if c.state != c.read && (len(c.members) > 0 || len(c.told) > 0 || len(c.pairs) > 0) {
		c.agreed, c.read = AgreedOf(c.state, c.ports), c.state
	}
	spaces := map[string]*member{} // the member that uses each network namespace
	var clients []Client
	for _, m := range c.ordered() {
		m.client.Wanted = append(slices.Clone(m.noted), m.attached...)
		if state, refusal := c.refusal(m, spaces); refusal != "" {
			m.choices = nil
			for _, r := range m.client.Wanted {
				m.choices = append(m.choices, Choice{Ref: r, State: state, Reason: refusal})
			}
			continue
		}
		spaces[m.client.NetNS] = m
		if c.agreed != nil {
			m.flows = KeepFlows(m.flows, m.choices, m.client, c.agreed)
			m.client.Flows = m.flows
		}
		clients = append(clients, m.client)
		spec, choices := Plan(m.client, c.agreed)
		m.choices = choices
		if c.agreed == nil { // what exists stays until the agreed state is known
			continue
		}
		if m.worker == nil {
			m.worker = c.start(m.client.Key, m.client.NetNS)
		} else if reflect.DeepEqual(spec, m.spec) {
			continue
		}
		m.spec = spec
		m.worker.apply(spec)
	}
	c.resync(clients)
	c.save()
	c.broadcast()
}

// ordered returns the members in order of entry.
func (c *Clients) ordered() []*member {
	out := make([]*member, 0, len(c.members))
	for _, m := range c.members {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b *member) int { return int(int64(a.since) - int64(b.since)) })
	return out
}

// refusal is the reason why a member can use no egress at all now; empty: none.
func (c *Clients) refusal(m *member, spaces map[string]*member) (state, why string) {
	switch other := spaces[m.client.NetNS]; {
	case other != nil:
		return Refused, fmt.Sprintf("%s of %s in the same network namespace uses egresses already", other.pod.Interface,
			other.client.Key)
	case c.cfg.GatewayDir != "" && isUnder(c.cfg.GatewayDir, m.client.NetNS):
		return Refused, "its network namespace is a gateway's own: tunnels are not nested"
	case m.absent != nil:
		return Waiting, m.absent.Error()
	case !m.client.IPv4.IsValid() && !m.client.IPv6.IsValid():
		return Waiting, "it has no address in the mesh"
	}
	return "", ""
}

// broadcast wakes all waiters, and notifies the agent. The caller holds mu.
func (c *Clients) broadcast() {
	close(c.changed)
	c.changed = make(chan struct{})
	c.cfg.Changed()
}

// Report returns the clients of this host, by key.
func (c *Clients) Report() []*skeinv1.EgressClientReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []*skeinv1.EgressClientReport
	for _, m := range c.ordered() {
		out = append(out, c.report(m))
	}
	slices.SortStableFunc(out, func(a, b *skeinv1.EgressClientReport) int {
		if a.GetKey() < b.GetKey() {
			return -1
		} else if a.GetKey() > b.GetKey() {
			return 1
		}
		return 0
	})
	return out
}

// report describes one member. The caller holds mu.
func (c *Clients) report(m *member) *skeinv1.EgressClientReport {
	out := &skeinv1.EgressClientReport{Key: m.client.Key, Netns: m.client.NetNS}
	e := entry(m.client, Choice{})
	out.Ipv4, out.Ipv6 = e.GetIpv4(), e.GetIpv6()
	problem, notes := "", ""
	if w := m.worker; w != nil {
		out.Driver = w.driver
		notes = joinAll(w.notes)
		switch {
		case w.err != nil:
			problem = w.err.Error()
		case !w.tried():
			problem = "its network namespace is being set up"
		}
	}
	for _, ch := range m.choices {
		state, reason := ch.State, ch.Reason
		if state == Ready {
			if s, r := c.known(m.client, ch); s != Ready {
				state, reason = s, join(r, reason)
			}
		}
		if problem != "" && state != Unknown && state != Refused {
			state, reason = Waiting, join(problem, reason)
		}
		if notes != "" && state != Unknown {
			reason = join(reason, notes)
		}
		if m.wrong != nil {
			reason = join(reason, m.wrong.Error())
		}
		out.Egresses = append(out.Egresses, &skeinv1.EgressOfClient{Namespace: ch.Namespace, Name: ch.Name, Slot: ch.Slot,
			Owner: ch.OwnerName, State: state, Reason: reason})
	}
	if m.wrong != nil && len(out.Egresses) == 0 { // without an egress, an entry of its own carries the reason
		out.Egresses = append(out.Egresses, &skeinv1.EgressOfClient{State: Refused, Reason: m.wrong.Error()})
	}
	return out
}

// Ready reports whether packets pass through all egresses of a client.
func (c *Clients) Ready(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.members {
		if m.client.Key == key {
			return !slices.ContainsFunc(c.report(m).GetEgresses(), func(e *skeinv1.EgressOfClient) bool {
				return e.GetState() != Ready
			})
		}
	}
	return false
}
