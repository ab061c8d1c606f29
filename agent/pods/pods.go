// Package pods gives this host's pods their addresses and links: it puts ipam, the CNI plugin's server and the kernel
// together, and frees what vanished pods have left.
package pods

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/instant"
)

// subjectPods begins what status says about pods' addresses.
const subjectPods = "pods: "

// Config is what the agent gives to Pods. The functions may be called from any goroutine.
type Config struct {
	Self    identity.ID
	File    string // keeps the addresses
	BootID  string // of this start of the kernel
	RunDir  string
	Link    string        // of the tunnel
	Table   int           // of the routes to pods
	IdleFor time.Duration // after which an empty block is given back
	State   func() *events.State
	Leader  func() (identity.ID, bool)
	Propose func(context.Context, *skeinv1.Command) (*skeinv1.Answer, error)
	// Site is where this host says that it is; said is false while it may still say something else.
	Site     func() (site string, said bool)
	MTU      func() int
	Egresses *clients.Clients
	// Facts are what others know of a pod; it may be nil.
	Facts func(ctx context.Context, namespace, pod string) (part.PodFacts, error)
	// Ready is closed when the data plane has come up since the agent's start. Applied says whether it is as it should be.
	Ready   <-chan struct{}
	Applied func() bool
	// Asked is told of each request of the CNI plugin.
	Asked   func(verb string, code uint32, took time.Duration)
	Journal func(*skeinv1.PodAddress)
	// Wake has the agent's loop call Follow and Routes again.
	Wake   func()
	Report func(subject string, severity part.Severity, message, advice string)
	Log    *slog.Logger
}

// Pods gives this host's pods their addresses and links.
type Pods struct {
	c          Config
	ipam       *ipam.Manager
	cni        *cniserver.Server
	told       map[string]bool // subjects of the problems that status shows; of the goroutine that calls Follow
	leaderless instant.Instant // since when no leader is known; none: one is
	rescan     chan struct{}   // the kernel is to be read again
	blocks     int             // that this node had last; of the goroutine that calls Follow
}

// Open reads who has which address, from its file and from the kernel, before anybody may ask for one.
func Open(c Config) (*Pods, error) {
	p := &Pods{c: c, told: map[string]bool{}, rescan: make(chan struct{}, 1)}
	var odd []string
	var err error
	p.ipam, odd, err = ipam.Open(ipam.Config{
		Self: c.Self, File: c.File, BootID: c.BootID, Log: c.Log.With("component", "ipam"), IdleFor: c.IdleFor,
		Propose: p.propose, OnChange: c.Wake, Leaderless: p.withoutLeader, OnEvent: c.Journal,
	})
	if err != nil {
		return nil, err
	}
	for _, text := range odd {
		c.Log.Warn("the record of pods' addresses was corrected", "note", text)
	}
	p.ipam.Follow(c.State())
	found, err := podnet.Scan(c.Link, c.Table)
	if err != nil {
		return nil, fmt.Errorf("read which pods this host has: %w", err)
	}
	p.ipam.Adopt(found)
	p.cni = cniserver.New(cniserver.Config{
		Allocator: p.ipam, Network: cniserver.Kernel{Table: c.Table}, Egresses: c.Egresses,
		MTU: func() uint32 { return uint32(c.MTU()) }, Condition: Condition(c.Ready, c.Applied), Ready: c.Ready,
		Facts: c.Facts, NoteDir: cni.NoteDir(filepath.Join(c.RunDir, cniserver.SocketName)),
		Done: c.Asked, Log: c.Log.With("component", "cni"),
	})
	return p, nil
}

// IPAM has the addresses.
func (p *Pods) IPAM() *ipam.Manager { return p.ipam }

// Able says why no pod can start now; nil: one can.
func (p *Pods) Able(ctx context.Context) error { return p.cni.Able(ctx) }

// withoutLeader is for how long no leader has been known. The loop asks at least once a second.
func (p *Pods) withoutLeader() time.Duration {
	now := time.Now()
	if _, ok := p.c.Leader(); ok {
		p.leaderless.Clear()
		return 0
	}
	if p.leaderless.SetOnce(now) {
		return 0
	}
	since := p.leaderless.Load()
	if since.IsZero() { // another request has just heard of a leader
		return 0
	}
	return now.Sub(since)
}

// Annotated has a running pod use the egresses that its annotations name now.
func (p *Pods) Annotated(namespace, pod string, annotations map[string]string) {
	if p == nil {
		return
	}
	for _, l := range p.ipam.Leases() {
		if l.Namespace == namespace && l.Pod == pod && l.Until.IsZero() && l.NetNS != "" {
			p.c.Egresses.Annotate(l.Attachment, annotations)
		}
	}
}

// Condition is what the plugin's STATUS tells the container runtime, beside what the server sees by itself: rights, and
// whether there are addresses. ready is closed when the data plane has come up since the agent's start; applied says
// whether it is as it should be.
func Condition(ready <-chan struct{}, applied func() bool) func(context.Context) cniserver.Condition {
	return func(context.Context) (c cniserver.Condition) {
		select {
		case <-ready:
		default: // what an agent before this one left goes on
			c.NoAdd = "the data plane has not come up since the agent's start"
			return c
		}
		if !applied() {
			c.Limited = "the data plane is not as it should be; see `skein status`"
		}
		return c
	}
}

// errUndecided is for those who wait for a pod; how the proposal failed is in the agent's log.
var errUndecided = errors.New("no server has answered in time")

// propose is the agent's, with errors that say to a pod's owner what he can understand.
func (p *Pods) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if b := c.GetAllocateBlocks(); b != nil {
		b.Site, b.SiteSaid = p.c.Site()
	}
	answer, err := p.c.Propose(ctx, c)
	var refused *events.Error
	if err == nil || errors.As(err, &refused) || ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return answer, err
	}
	p.c.Log.Debug("a proposal for pods' addresses was not decided", "error", err)
	return nil, errUndecided
}

// Listen opens the plugin's socket. An agent that says that it is up has it; nil: it could not be opened.
func (p *Pods) Listen() net.Listener {
	l, err := cniserver.Listen(filepath.Join(p.c.RunDir, cniserver.SocketName))
	if err != nil {
		p.c.Report(subjectPods+"CNI", part.Fails, err.Error(), "no pod gets a network until the agent is started again")
	}
	return l
}

// Run answers the plugin on l, gives back and asks for blocks, and looks after what pods have left behind.
func (p *Pods) Run(ctx context.Context, l net.Listener) {
	go p.ipam.Run(ctx)
	if l != nil {
		stop := p.cni.Serve(ctx, l)
		defer stop()
	}
	next := time.NewTimer(p.ipam.NextAudit())
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.rescan:
		case <-next.C:
		}
		p.audit()
		next.Reset(p.ipam.NextAudit())
	}
}

// audit frees the addresses of pods that are gone without having been taken back.
func (p *Pods) audit() {
	found, err := podnet.Scan(p.c.Link, p.c.Table)
	if err != nil {
		p.c.Report(subjectPods+"audit", part.Warns, err.Error(), "addresses of pods that have vanished are not found until "+
			"this works again")
		return
	}
	p.c.Report(subjectPods+"audit", part.Warns, "", "")
	for _, l := range p.ipam.Audit(found, vanished) {
		p.c.Log.Warn("an address without a pod was freed", "ipv4", l.IPv4, "ipv6", l.IPv6, "namespace", l.Namespace, "pod",
			l.Pod, "container", l.Key.ContainerID)
		if err := podnet.Del(l.NetNS, l.Key); err != nil {
			p.c.Log.Warn("cannot remove what a pod left behind", "container", l.Key.ContainerID, "error", err)
		}
	}
}

// vanished tells whether a pod's network namespace is gone.
func vanished(l ipam.Lease) bool {
	if l.NetNS == "" {
		return true
	}
	_, err := os.Stat(l.NetNS)
	return errors.Is(err, fs.ErrNotExist)
}

// Routes are the ways to this host's pods.
func (p *Pods) Routes() []dataplane.PodRoute {
	if p == nil {
		return nil
	}
	var out []dataplane.PodRoute
	for _, l := range p.ipam.Leases() {
		link := cniserver.LinkOf(l)
		if link == "" || l.Link != "" {
			continue // somebody else's link, and route
		}
		if l.IPv4.IsValid() {
			out = append(out, dataplane.PodRoute{Addr: l.IPv4, Link: link})
		}
		if l.IPv6.IsValid() {
			out = append(out, dataplane.PodRoute{Addr: l.IPv6, Link: link})
		}
	}
	return out
}

// lookAgain has the kernel read again when this node has a block more: an import gives it blocks in which other
// software has started pods since the last time.
func (p *Pods) lookAgain(st *events.State) {
	n := len(st.BlocksOf(p.c.Self.String()))
	if n > p.blocks {
		p.Look()
	}
	p.blocks = n
}

// Look has the kernel read again soon.
func (p *Pods) Look() {
	select {
	case p.rescan <- struct{}{}:
	default:
	}
}

// Follow takes in the newest agreed state and tells what is wrong. It is called by one goroutine at a time.
func (p *Pods) Follow(st *events.State) {
	if p == nil {
		return
	}
	p.ipam.Follow(st)
	p.lookAgain(st)
	p.withoutLeader()
	now := map[string]bool{}
	for _, x := range p.ipam.Problems() {
		now[subjectPods+x.Subject] = true
		p.c.Report(subjectPods+x.Subject, part.Warns, x.Message, x.Advice)
	}
	for subject := range p.told {
		if !now[subject] {
			p.c.Report(subject, part.Warns, "", "")
		}
	}
	p.told = now
}
