package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// repeats are when an address is announced, counted from the first time.
var repeats = []time.Duration{0, 100 * time.Millisecond, 500 * time.Millisecond, 2 * time.Second}

const (
	reportEvery = time.Second // at most, for each address
	defendAfter = time.Second // an address that another host claims is announced again
	validEvery  = 20 * time.Millisecond
)

// Options are for New.
type Options struct {
	// NetNS is the file of the network namespace of the links; "" is the calling thread's own.
	NetNS string
	Log   *slog.Logger
	// Valid is asked before each answer and announcement. It must be quick.
	Valid func(netip.Addr) bool
	// Conflict is told of an address that another host answers for, at most once a second for each. Nil: it is logged.
	Conflict func(addr netip.Addr, link string, other net.HardwareAddr)
}

// Announcer answers for addresses. Make one with New.
type Announcer struct {
	o        Options
	ns       netns.NsHandle
	nl       *rtnl.Conn
	listener rtnl.Listener
	runner   *reconcile.Runner
	target   *reconcile.Target
	stop     context.CancelFunc
	ended    chan struct{} // the runner has

	mu    sync.Mutex
	addrs map[netip.Addr]*address
	ports map[string]*port
	up    map[string]bool
}

type address struct {
	link   string
	due    time.Time
	first  time.Time // announcement; zero: none yet
	next   int       // of repeats
	report time.Time // last conflict
}

// New makes an Announcer without addresses.
func New(o Options) (*Announcer, error) {
	ns, err := rtnl.Namespace(o.NetNS)
	if err != nil {
		return nil, fmt.Errorf("announcing addresses: %w", err)
	}
	nl, err := rtnl.OpenAt(ns)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("announcing addresses: %w", err)
	}
	ctx, stop := context.WithCancel(context.Background())
	a := &Announcer{o: o, ns: ns, nl: nl, stop: stop, ended: make(chan struct{}), addrs: map[netip.Addr]*address{},
		ports: map[string]*port{}, up: map[string]bool{}}
	a.target = &reconcile.Target{Name: "announced addresses", Reconcile: a.reconcile}
	a.runner = reconcile.New(reconcile.Options{Log: o.Log}, a.target)
	changed := func() { a.runner.Mark(reconcile.Changed, a.target) }
	a.listener.Log = o.Log
	if err := a.listener.Routing(int(ns), rtnl.Links, rtnl.When(a.concerns, changed)); err != nil {
		o.Log.Warn("cannot watch links: addresses are announced late on links that come up", "error", err)
	}
	go func() { defer close(a.ended); a.runner.Run(ctx) }()
	return a, nil
}

// Set names all addresses to answer for, and the link of each. A link need not be there yet.
func (a *Announcer) Set(want map[netip.Addr]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for addr, s := range a.addrs {
		if want[addr] != s.link {
			delete(a.addrs, addr)
		}
	}
	for addr, link := range want {
		if a.addrs[addr] == nil {
			a.addrs[addr] = a.begin(link)
		}
	}
	a.runner.Mark(reconcile.Wanted, a.target)
}

func (a *Announcer) begin(link string) *address {
	return &address{link: link, due: time.Now()}
}

// Close ends all answers.
func (a *Announcer) Close() error {
	a.stop()
	<-a.ended
	err := a.listener.Close()
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.ns.IsOpen() {
		return nil
	}
	for name := range a.ports {
		a.closePort(name)
	}
	a.nl.Close()
	return errors.Join(err, a.ns.Close())
}

// concerns says whether a notification is about a link with addresses, or about one that was so named before.
func (a *Announcer) concerns(m netlink.Message) bool {
	name, index := rtnl.LinkName(m), rtnl.Index(m)
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.addrs {
		if s.link == name {
			return true
		}
	}
	for _, p := range a.ports {
		if p.index == index {
			return true
		}
	}
	return false
}

// reconcile brings links and sockets to what is named, and sends what is due.
func (a *Announcer) reconcile(_ context.Context, c reconcile.Cause) (r reconcile.Result) {
	if c&^reconcile.Again != 0 {
		r.Err = a.refresh()
	}
	r.Again = a.step(time.Now())
	return r
}

// refresh opens links that have addresses, anew those that are others than before, and closes those without. A link
// that is not there is no error: the kernel tells when it comes.
func (a *Announcer) refresh() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	groups := map[string]map[netip.Addr]bool{}
	for addr, s := range a.addrs {
		if groups[s.link] == nil {
			groups[s.link] = map[netip.Addr]bool{}
		}
		if addr.Is6() {
			groups[s.link][solicitedNode(addr)] = true
		}
	}
	for name := range a.ports {
		if groups[name] == nil {
			a.closePort(name)
			delete(a.up, name)
		}
	}
	var errs []error
	for name, g := range groups {
		if err := a.refreshLink(name); err != nil {
			errs = append(errs, fmt.Errorf("link %s: %w", name, err))
		} else if p := a.ports[name]; p != nil {
			p.join(g)
		}
	}
	return errors.Join(errs...)
}

func (a *Announcer) closePort(link string) {
	if p := a.ports[link]; p != nil {
		p.close()
		delete(a.ports, link)
	}
}

func (a *Announcer) refreshLink(name string) error {
	l, there, err := a.nl.Link(name)
	if err != nil || !there {
		a.closePort(name)
		a.up[name] = false
		return err
	}
	attrs := l.Attrs()
	if len(attrs.HardwareAddr) != len(mac{}) {
		return errors.New("addresses are announced on Ethernet links only, and this is another kind")
	}
	p := a.ports[name]
	if p == nil || p.index != attrs.Index || p.mac != mac(attrs.HardwareAddr) {
		a.closePort(name)
		if p, err = openPort(int(a.ns), name, attrs.Index, mac(attrs.HardwareAddr), a.hear); err != nil {
			return err
		}
		a.ports[name] = p
		a.up[name] = false
	}
	up := attrs.RawFlags&unix.IFF_UP != 0 && attrs.RawFlags&unix.IFF_RUNNING != 0
	if up && !a.up[name] {
		for _, s := range a.addrs {
			if s.link == name {
				*s = *a.begin(name)
			}
		}
	}
	a.up[name] = up
	return nil
}

// step sends what is due, and tells when the next is; 0: nothing is.
func (a *Announcer) step(now time.Time) (wait time.Duration) {
	valid := a.validNow(now)
	a.mu.Lock()
	var jobs []job
	soonest := func(d time.Duration) {
		if wait == 0 || d < wait {
			wait = d
		}
	}
	for addr, s := range a.addrs {
		p := a.ports[s.link]
		switch {
		case p == nil || !a.up[s.link] || s.next >= len(repeats):
		case now.Before(s.due):
			soonest(s.due.Sub(now))
		case !valid[addr]:
			soonest(validEvery)
		default:
			jobs = append(jobs, a.due(s, p, addr, now))
			if s.next < len(repeats) {
				soonest(max(s.due.Sub(now), time.Millisecond))
			}
		}
	}
	a.mu.Unlock()
	for _, j := range jobs {
		if !a.valid(j.addr) { // the right has ended while others were announced; it may still have repeats
			continue
		}
		if err := j.send(); err != nil {
			a.o.Log.Warn("an address could not be announced", "address", j.addr, "link", j.p.name, "error", err)
		}
	}
	return wait
}

// validNow asks about the addresses that are due; nothing is locked meanwhile.
func (a *Announcer) validNow(now time.Time) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	a.mu.Lock()
	for addr, s := range a.addrs {
		if s.next < len(repeats) && !now.Before(s.due) {
			out[addr] = false
		}
	}
	a.mu.Unlock()
	for addr := range out {
		out[addr] = a.valid(addr)
	}
	return out
}

// job is what is sent about one address.
type job struct {
	p     *port
	addr  netip.Addr
	probe bool // also asks whether another host has the address
}

// due moves an address on, and tells what is to be sent.
func (a *Announcer) due(s *address, p *port, addr netip.Addr, now time.Time) job {
	j := job{p: p, addr: addr, probe: s.next == 0}
	if s.next == 0 {
		s.first = now
	}
	if s.next++; s.next < len(repeats) {
		s.due = s.first.Add(repeats[s.next])
	}
	return j
}

func (j job) send() error {
	var errs []error
	for _, f := range announcement(j.p.mac, j.addr) {
		errs = append(errs, j.p.send(f))
	}
	if j.probe {
		errs = append(errs, j.p.send(probe(j.p.mac, j.addr)))
	}
	return errors.Join(errs...)
}

func (a *Announcer) valid(addr netip.Addr) bool { return a.o.Valid == nil || a.o.Valid(addr) }

// hear answers a question, and takes note of another host that claims an address.
func (a *Announcer) hear(p *port, m message) {
	if a.has(p, m.sender) && a.valid(m.sender) {
		a.conflict(p, m)
	}
	if m.asks && a.claims(p, m.target) && a.valid(m.target) {
		if err := p.send(answer(p.mac, m)); err != nil {
			a.o.Log.Debug("a neighbour got no answer", "address", m.target, "link", p.name, "error", err)
		}
	}
}

// has tells whether an address is named for a link.
func (a *Announcer) has(p *port, addr netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.addrs[addr]
	return s != nil && s.link == p.name && a.ports[p.name] == p
}

// claims tells whether an address has been announced besides.
func (a *Announcer) claims(p *port, addr netip.Addr) bool {
	if !a.has(p, addr) {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.addrs[addr]
	return s != nil && s.next > 0
}

func (a *Announcer) conflict(p *port, m message) {
	a.mu.Lock()
	s := a.addrs[m.sender]
	now := time.Now()
	if s == nil || now.Sub(s.report) < reportEvery {
		a.mu.Unlock()
		return
	}
	s.report = now
	if s.next >= len(repeats) { // not at once: where the address has moved, we hear of it a little later
		s.next, s.due = len(repeats)-1, now.Add(defendAfter)
		a.runner.Mark(reconcile.Wanted, a.target)
	}
	a.mu.Unlock()
	a.reportConflict(p, m)
}

func (a *Announcer) reportConflict(p *port, m message) {
	if a.o.Conflict != nil {
		a.o.Conflict(m.sender, p.name, net.HardwareAddr(m.from[:]))
		return
	}
	a.o.Log.Warn("another host answers for an address that this host announces", "address", m.sender, "link",
		p.name, "other", net.HardwareAddr(m.from[:]).String())
}
