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

// Sender brings SyncEgressClients to a gateway node, which may be this one.
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
	File   string // where the opt-ins of running pods are kept
	Sender Sender
	Open   func(netns string) (Namespace, error) // see OpenNamespace
	// Addresses reads a namespace's addresses from one of its links; nil: egressclient.Addresses.
	Addresses func(netns, link string) (ipv4, ipv6 netip.Addr, err error)
	// Changed says that something in the report is different. It must only take note. It may be nil.
	Changed func()
	Epoch   uint64 // start of this agent; rises from one to the next; 0: now
	// GatewayDir is where the namespaces of gateways are, which are no clients.
	GatewayDir string
	// Owner is dataplane.Numbers.Owner of this host's agent.
	Owner string
	Log   *slog.Logger
}

// OpenNamespace opens namespaces with the driver of the configuration, for Config.Open. What auto means is found out
// once, when the first one is opened: no pod shall wait for a kernel to say again what it cannot do. host is the path
// of the namespace that this host's own traffic leaves; empty: the process's. There numbers count, in all others the
// default ones do.
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

// AddWait is how long AddPod waits for gateways to know a pod, so that its first packet is not lost.
const AddWait = time.Second

// keyOf is what a pod's slots follow from.
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
	MTU        int    // of the uplink, in bytes; 0: as the kernel has it
	Egresses   []Ref
}

// member is a client with what becomes of it. Clients.mu guards it.
type member struct {
	pod      podnet.Attachment
	client   Client // Wanted is all that is wanted
	noted    []Ref  // by annotations, or by the configuration
	attached []Ref  // at run time
	wrong    error  // with the annotations
	inode    inode  // of the network namespace, by which another one at the same path is told apart
	absent   error  // why a configured namespace cannot be used now
	since    uint64 // rises from one client to the next

	spec    dataplane.ClientSpec
	choices []Choice
	flows   map[Ref][]uint32 // see KeepFlows
	worker  *worker
}

// Clients lead the packets of this host's clients into tunnels and tell gateways of them. Make them with Open; Close
// ends them. The methods may be called by anybody, at any time.
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
	read    *events.State // that agreed was made of
	ports   dataplane.FoUPorts
	agreed  *Agreed
	visits  chan struct{}                   // has something when addresses shall be read
	changed chan struct{}                   // closed when something has changed, and made anew
	told    map[Ref]bool                    // gateways of these may know clients of this host
	lists   map[Ref][]*skeinv1.EgressClient // that gateways shall know
	pairs   map[pairKey]*pair
	gen     uint64
	saved   []byte // what the file has
	// by which slots clients had flows when the agent started, until Configure knows whose
	before map[podnet.Key]map[Ref][]uint32
}

// Open reads the file, and forgets pods whose network namespace is gone.
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

// Close ends what this process does for clients; their rules, routes and devices stay.
func (c *Clients) Close() {
	c.cancel()
	c.all.Wait()
}

// look forgets pods whose network namespace went away without a word.
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

// forgetFlows finds out by which slots besides their own clients have flows no more. The kernel does not tell: it
// reports the end only of connections that began while somebody listened.
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

// visit reads the addresses of configured namespaces, which come and go.
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
				if m.worker != nil && m.inode != at { // it is another one
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

// Follow takes the agreed state, which is not changed any more.
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
	c.drop(p.Key, false) // of a container that came before
	c.enter(&member{pod: p, client: Client{Key: keyOf(p), NetNS: p.NetNS, IPv4: p.IPv4, IPv6: p.IPv6, Uplink: p.Interface},
		noted: refs, wrong: wrong})
	c.replan()
	c.mu.Unlock()
	return c.await(ctx, p.Key)
}

// Annotate has a running pod use the egresses of its annotations, which are others now. What Attach has added stays.
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

// await waits for kernel and gateways, and tells how it stands then.
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
		applied := m.worker == nil || m.worker.settled()
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

// DelPod ends what a pod had. It waits until that is done, or ctx is over; a pod that uses nothing costs nothing.
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

// Clear takes away everything that clients have of ours, and forgets them. It returns when that is done, or ctx is
// over.
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

// drop takes a member out; nil: there was none with a worker. remove says that its rules, routes and devices go too.
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

// CheckPod says what of a pod's egresses is not in its network namespace as it shall be; nil: all is, or it has none.
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

// ErrNotAttached says that a pod uses an egress by its annotations, or not at all.
var ErrNotAttached = errors.New("is not attached")

// Attach has a running pod use more egresses, after those that it has, or with detach no more those that were attached.
// It returns as AddPod does.
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

// Configure sets the clients of the configuration; those that are no more in it end.
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
		if one.NetNS != "" { // visit reads them
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

// replan decides anew what everybody shall have, and starts what makes it so. The caller has mu.
func (c *Clients) replan() {
	if c.ctx.Err() != nil {
		return
	}
	if c.state != c.read && (len(c.members) > 0 || len(c.told) > 0 || len(c.pairs) > 0) {
		c.agreed, c.read = AgreedOf(c.state, c.ports), c.state
	}
	spaces := map[string]*member{} // who has a network namespace
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
		if c.agreed == nil { // what is there stays until it is known what shall be
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

// ordered are the members, the oldest first.
func (c *Clients) ordered() []*member {
	out := make([]*member, 0, len(c.members))
	for _, m := range c.members {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b *member) int { return int(int64(a.since) - int64(b.since)) })
	return out
}

// refusal says why a member can use no egress at all now; empty: it can.
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

// broadcast tells everybody who waits, and the agent. The caller has mu.
func (c *Clients) broadcast() {
	close(c.changed)
	c.changed = make(chan struct{})
	c.cfg.Changed()
}

// Report is the clients of this host, by key.
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

// report tells of one member. The caller has mu.
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
		case !w.settled():
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
	if m.wrong != nil && len(out.Egresses) == 0 { // there is no egress that could carry the reason
		out.Egresses = append(out.Egresses, &skeinv1.EgressOfClient{State: Refused, Reason: m.wrong.Error()})
	}
	return out
}

// Ready says whether all egresses of a client get its packets through.
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
