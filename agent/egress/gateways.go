package egress

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egresshost"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	// partConnections limits the connections in one part of a TakeOver.
	partConnections = 2000
	maxParts        = 1024
)

// GatewaysConfig is what a node's gateways need.
type GatewaysConfig struct {
	Self   identity.ID
	Dir    string // of the network namespaces' files
	Known  string // directory of the files that preserve the gateways' clients across restarts
	Driver string // of FoU: auto, kernel or userspace
	Tunnel string // the mesh's link
	// Numbers are the agent's numbers on this host; the zero value: the defaults.
	Numbers dataplane.Numbers
	Leader  Leader
	Clocks  Clocks // of other machines; nil: none
	// TakeOver sends a part of a slot's connections to another node.
	TakeOver func(ctx context.Context, node identity.ID, r *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error)
	// Links are the host's links with their networks, except skein's.
	Links func() []announce.Link
	// Journal records events of slots.
	Journal func(*skeinv1.SlotHeld)
	// Changed is called when Exported or Serving may return something else.
	Changed func()
	Log     *slog.Logger
}

// Gateways are a node's gateways of egresses. NewGateways makes them, Run works, and Follow passes the agreed state
// on. All methods are safe for concurrent use.
type Gateways struct {
	cfg         GatewaysConfig
	leaseClient *LeaseClient
	host        host

	mu        sync.Mutex
	announcer *announce.Announcer // nil: no gateway here, or it could not be opened
	state     *events.State
	mtu       int
	ports     dataplane.FoUPorts
	links     []string // names of the host's links at the last Follow
	served    map[Ref]*gateway
	announced map[Slot]announcement
	taken     map[Slot]taken // connections received with a slot
	problems  map[string]string
}

// announcement is a slot whose addresses this host answers for.
type announcement struct {
	addrs map[netip.Addr]string // link; empty: the address is on no link, so a routing daemon announces it
	since time.Time
}

// taken counts the connections received with a slot in an epoch.
type taken struct {
	epoch uint64
	count uint32
}

// NewGateways makes a node's gateways. It changes nothing in the kernel before the first Follow.
func NewGateways(cfg GatewaysConfig) *Gateways {
	cfg.Numbers = cfg.Numbers.Filled()
	g := &Gateways{cfg: cfg, served: map[Ref]*gateway{}, announced: map[Slot]announcement{}, taken: map[Slot]taken{},
		problems: map[string]string{}}
	g.newHost()
	g.leaseClient = NewLeaseClient(LeaseClientConfig{
		Self: cfg.Self, Kernel: kernel{g}, Leader: cfg.Leader, Clocks: cfg.Clocks, Peers: kernel{g}, Gateways: g.states,
		Announce: g.announce, Tell: g.logEvent, Log: cfg.Log,
	})
	return g
}

// Run works until the context ends. Slots continue to forward until their tickets end.
func (g *Gateways) Run(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { g.leaseClient.Run(ctx) })
	all.Go(func() { g.runHost(ctx) })
	<-ctx.Done()
	all.Wait()
	g.mu.Lock()
	announcer := g.announcer
	g.announcer = nil
	served := slices.Collect(maps.Values(g.served))
	g.mu.Unlock()
	if announcer != nil {
		announcer.Close()
	}
	for _, r := range served {
		r.close()
	}
}

// Follow passes on the agreed state, the MTU of the mesh's link, and the tunnels' ports. It must also be called when
// the host's links have changed.
func (g *Gateways) Follow(s *events.State, mtu int, ports dataplane.FoUPorts) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.served) > 0 {
		if now := g.uplinks(); !slices.Equal(now, g.links) {
			g.links = now
			g.hostWanted()
		}
	}
	if g.state == s && g.mtu == mtu && g.ports == ports {
		return
	}
	g.state, g.mtu, g.ports = s, mtu, ports
	self := s.Node(g.cfg.Self)
	var agreed []SlotState
	wanted := map[Ref]bool{}
	for _, e := range s.Egresses() {
		ref := RefOf(e)
		slots := s.Slots(ref.Namespace, ref.Name)
		mine := slices.ContainsFunc(slots, func(x *skeinv1.EgressSlot) bool { return x.GetNodeId() == g.cfg.Self.String() })
		if !mine && !g.busy(ref) && !Eligible(self.GetLabels(), e.GetGateways()) {
			continue
		}
		wanted[ref] = true
		for _, slot := range slots {
			agreed = append(agreed, StateOf(e, slot))
		}
		r := g.served[ref]
		if r == nil {
			r = g.open(ref)
			if r == nil {
				continue
			}
		}
		r.set(e, slots)
	}
	g.leaseClient.Agree(agreed)
	for ref, r := range g.served {
		if !wanted[ref] {
			delete(g.served, ref)
			go r.remove()
		}
	}
	g.hostWanted()
}

// busy reports whether a slot of the egress is still in use here. The caller holds mu.
func (g *Gateways) busy(ref Ref) bool {
	return slices.ContainsFunc(g.leaseClient.Report(), func(h LeaseReport) bool {
		return h.Slot.Ref == ref && h.State != Idle
	})
}

// open makes the gateway of an egress; nil: it recorded a problem. The caller holds mu.
func (g *Gateways) open(ref Ref) *gateway {
	number := g.number(ref)
	if number == 0 {
		g.problem(ref.String(), fmt.Sprintf("this node is a gateway of %d egresses already, the most that it serves",
			maxEgresses))
		return nil
	}
	if g.announcer == nil { // not earlier: a node without gateways may lack the right to enter network namespaces
		var err error
		if g.announcer, err = announce.New(announce.Options{Log: g.cfg.Log, Valid: g.answers}); err != nil {
			g.problem("announcing", err.Error())
		} else {
			g.problem("announcing", "")
		}
	}
	r := newGateway(g, ref, number)
	g.served[ref] = r
	return r
}

// Strays are namespace files whose egress this node does not serve, such as those of an egress that was removed while
// the agent was away.
func (g *Gateways) Strays() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state == nil {
		return nil
	}
	files, _ := egressns.Files(g.cfg.Dir)
	return slices.DeleteFunc(files, func(f string) bool {
		for ref, r := range g.served {
			if n, its := parseFile(filepath.Base(f), ref); its && n == r.number {
				return true
			}
		}
		return false
	})
}

// ForgetStrays removes files with clients of egresses that this node does not serve, left by an earlier run.
func (g *Gateways) ForgetStrays() error {
	g.mu.Lock() // so that no gateway is made meanwhile
	defer g.mu.Unlock()
	if g.state == nil {
		return nil
	}
	files, err := os.ReadDir(g.cfg.Known)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the directory of gateways' clients: %w", err)
	}
	mine := map[string]bool{}
	for _, r := range g.served {
		mine[filepath.Base(r.known)], mine[filepath.Base(r.formerKnown)] = true, true
	}
	var errs []error
	for _, f := range files {
		if !mine[strings.TrimSuffix(f.Name(), newSuffix)] {
			errs = append(errs, os.Remove(filepath.Join(g.cfg.Known, f.Name())))
		}
	}
	return errors.Join(errs...)
}

// problem records a problem under a subject; an empty text clears it. The caller holds mu.
func (g *Gateways) problem(subject, text string) {
	if text == "" {
		delete(g.problems, subject)
	} else {
		g.problems[subject] = text
	}
}

// Problems are the present problems, by subject.
func (g *Gateways) Problems() map[string]string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.problems)
}

// states are this node's gateway states, for the leader.
func (g *Gateways) states() []*skeinv1.GatewayState {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]*skeinv1.GatewayState, 0, len(g.served))
	for _, r := range g.served {
		out = append(out, r.stateNow())
	}
	slices.SortFunc(out, func(a, b *skeinv1.GatewayState) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	return out
}

// serves lists the slots whose packets this host accepts: it owns them, or is still leaving them.
func (g *Gateways) serves() []Slot {
	var out []Slot
	for _, h := range g.leaseClient.Report() {
		if h.State != Idle && h.State != Handing {
			out = append(out, h.Slot)
		}
	}
	return out
}

// Serving reports whether this node is a gateway of any egress.
func (g *Gateways) Serving() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.served) > 0
}

// Exported are the slots' addresses that lie on no link of this host, so a routing daemon announces them.
func (g *Gateways) Exported() []netip.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []netip.Addr
	for _, a := range g.announced {
		for addr, link := range a.addrs {
			if link == "" {
				out = append(out, addr)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// logEvent writes an event of a slot to the journal.
func (g *Gateways) logEvent(slot Slot, text string) {
	g.cfg.Log.Info("egress slot", "slot", slot.String(), "what", text)
	var h LeaseReport
	for _, x := range g.leaseClient.Report() {
		if x.Slot == slot {
			h = x
		}
	}
	what := map[LeaseHolderState]string{Holding: "held", Lost: "lost"}[h.State]
	if what == "" {
		what = "released"
	}
	g.cfg.Journal(&skeinv1.SlotHeld{What: what, Namespace: slot.Namespace, Name: slot.Name, Number: uint32(slot.Number),
		Epoch: h.Epoch, Reason: text, TookNanos: int64(h.Failover)})
}

// SyncClients handles a node's list of clients of one egress, and answers when the kernel has them.
func (g *Gateways) SyncClients(ctx context.Context, from identity.ID,
	r *skeinv1.SyncEgressClientsRequest) *skeinv1.SyncEgressClientsResponse {
	ref := RefOf(r)
	g.mu.Lock()
	gw, st := g.served[ref], g.state
	if gw == nil {
		g.mu.Unlock()
		return &skeinv1.SyncEgressClientsResponse{Reason: "this node is not a gateway of egress " + ref.String() +
			" as far as it knows"}
	}
	g.mu.Unlock()
	version, refused, err := gw.sync(from, r, st)
	if err == nil {
		err = gw.wait(ctx, version)
	}
	out := &skeinv1.SyncEgressClientsResponse{Installed: err == nil, Refused: refused}
	if err != nil {
		out.Reason = err.Error()
	}
	return out
}

// holder is holds with a fixed state.
func holder(st *events.State) func(identity.ID, netip.Addr) error {
	return func(node identity.ID, addr netip.Addr) error { return holds(st, node, addr) }
}

// holds returns an error unless the address is the node's: its overlay address, or in its blocks or static addresses.
func holds(st *events.State, node identity.ID, addr netip.Addr) error {
	n := st.Node(node)
	if n == nil {
		return fmt.Errorf("node %s is not a member", node)
	}
	if addr.String() == n.GetIpv4() || addr.String() == n.GetIpv6() {
		return nil
	}
	in := func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && p.Contains(addr)
	}
	for _, b := range st.BlocksOf(node.String()) {
		if in(b.GetIpv4()) || in(b.GetIpv6()) {
			return nil
		}
	}
	for _, s := range st.StaticsOf(node.String()) {
		if addr.String() == s.GetIpv4() || addr.String() == s.GetIpv6() {
			return nil
		}
	}
	return fmt.Errorf("address %s is not of node %s as of index %d", addr, n.GetName(), st.Index())
}

// kernel implements Kernel and Peers for the LeaseClient.
type kernel struct{ g *Gateways }

func (k kernel) gateway(slot Slot) (*gateway, error) {
	k.g.mu.Lock()
	defer k.g.mu.Unlock()
	if r := k.g.served[slot.Ref]; r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("there is no network namespace for egress %s here", slot.Ref)
}

func (k kernel) Begin(slot Slot, epoch uint64, lease time.Duration) (Ticket, error) {
	r, err := k.gateway(slot)
	if err != nil {
		return 0, err
	}
	return r.begin(slot.Number, epoch, lease)
}

func (k kernel) Grant(slot Slot, t Ticket) error {
	r, err := k.gateway(slot)
	if err != nil {
		return err
	}
	return r.grant(slot.Number, t)
}

// Drop succeeds if the egress has no namespace, since nothing is forwarded then. A namespace without a gateway may
// still forward until it is removed: then Drop fails.
func (k kernel) Drop(slot Slot) error {
	defer k.g.hostWanted()
	if r, err := k.gateway(slot); err == nil {
		return r.drop(slot.Number)
	}
	files, err := egressns.Files(k.g.cfg.Dir)
	for _, f := range files {
		if _, its := parseFile(filepath.Base(f), slot.Ref); its {
			return errNotReady
		}
	}
	return err
}

func (k kernel) Hold(slot Slot, on bool) error {
	defer k.g.hostWanted()
	r, err := k.gateway(slot)
	if err != nil {
		return err
	}
	return r.hold(slot.Number, on)
}

// Report is this node's work as a gateway, for status.
func (g *Gateways) Report(want func(Ref) bool) []*skeinv1.EgressGateway {
	g.mu.Lock()
	all := slices.Collect(maps.Values(g.served))
	g.mu.Unlock()
	slices.SortFunc(all, func(a, b *gateway) int { return strings.Compare(a.ref.String(), b.ref.String()) })
	var out []*skeinv1.EgressGateway
	for _, r := range all {
		if want(r.ref) {
			out = append(out, r.report())
		}
	}
	return out
}

// Purge removes everything of gateways from this host.
func Purge(dir string, n dataplane.Numbers) error {
	files, err := egressns.Files(dir)
	errs := []error{err}
	for _, f := range files {
		errs = append(errs, egressns.Remove(f))
	}
	return errors.Join(append(errs, egresshost.Purge(n))...)
}
