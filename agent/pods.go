package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/instant"
)

const (
	ipamFile   = "ipam.db"
	bootIDFile = "/proc/sys/kernel/random/boot_id"
	// subjectPods begins what status says about pods' addresses.
	subjectPods = "pods: "
)

// pods is what gives this host's pods their addresses and links.
type pods struct {
	a          *Agent
	ipam       *ipam.Manager
	cni        *cniserver.Server
	told       map[string]bool // subjects of the problems that status shows; of the agent's loop
	leaderless instant.Instant // since when no leader is known; none: one is
	rescan     chan struct{}   // the kernel is to be read again
	blocks     int             // that this node had last; of the agent's loop
}

// withoutLeader is for how long no leader has been known. The loop asks at least once a second.
func (p *pods) withoutLeader() time.Duration {
	now := time.Now()
	if _, ok := p.a.leader(); ok {
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

// openPods reads who has which address, from its file and from the kernel, before anybody may ask for one.
func (a *Agent) openPods() error {
	boot, err := os.ReadFile(bootIDFile)
	if err != nil {
		return fmt.Errorf("tell this start of the kernel from others: %w", err)
	}
	p := &pods{a: a, told: map[string]bool{}, rescan: make(chan struct{}, 1)}
	var odd []string
	p.ipam, odd, err = ipam.Open(ipam.Config{
		Self: a.id, File: filepath.Join(a.cfg.StateDir, ipamFile), BootID: strings.TrimSpace(string(boot)),
		Log:     a.log.With("component", "ipam"),
		IdleFor: seconds(a.conf().EmptyBlockSeconds),
		Propose: p.propose, OnChange: a.wakeUp, Leaderless: p.withoutLeader,
		OnEvent: func(e *skeinv1.PodAddress) {
			a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
				Body: &skeinv1.JournalEntry_PodAddress{PodAddress: e}})
		},
	})
	if err != nil {
		return err
	}
	a.pods = p
	for _, text := range odd {
		a.log.Warn("pods' addresses", "note", text)
	}
	p.ipam.Follow(a.replica.State())
	found, err := podnet.Scan(a.numbers.Link, a.numbers.PodTable())
	if err != nil {
		return fmt.Errorf("read which pods this host has: %w", err)
	}
	p.ipam.Adopt(found)
	p.cni = cniserver.New(cniserver.Config{
		Allocator: p.ipam, Network: cniserver.Kernel{Table: a.numbers.PodTable()}, Egresses: a.egresses.Clients(),
		MTU: func() uint32 { return uint32(a.linkMTU()) }, Condition: p.condition, Ready: a.planeStands,
		Facts: a.podFacts(), NoteDir: cni.NoteDir(filepath.Join(a.cfg.RunDir, cniserver.SocketName)),
		Done: a.metrics.cni.observe, Log: a.log.With("component", "cni"),
	})
	return nil
}

// podFacts asks the parts that know of pods; nil: there are none.
func (a *Agent) podFacts() func(ctx context.Context, namespace, pod string) (part.PodFacts, error) {
	for _, p := range a.opts.Parts {
		if s, ok := p.(part.PodSource); ok {
			return s.PodFacts
		}
	}
	return nil
}

// annotated has a running pod use the egresses that its annotations name now.
func (p *pods) annotated(namespace, pod string, annotations map[string]string) {
	if p == nil || p.a.egresses == nil {
		return
	}
	for _, l := range p.ipam.Leases() {
		if l.Namespace == namespace && l.Pod == pod && l.Until.IsZero() && l.NetNS != "" {
			p.a.egresses.Clients().Annotate(cniserver.ClientOf(l), annotations)
		}
	}
}

// condition is what the plugin's STATUS tells the container runtime, beside what the server sees by itself: rights, and
// whether there are addresses.
func (p *pods) condition(context.Context) (c cniserver.Condition) {
	select {
	case <-p.a.planeStands:
	default: // what an agent before this one left goes on
		c.NoAdd = "the data plane has not come up since the agent's start"
		return c
	}
	if !p.a.applied.Load() {
		c.Limited = "the data plane is not as it should be; see `skein status`"
	}
	return c
}

// errUndecided is for those who wait for a pod; how the proposal failed is in the agent's log.
var errUndecided = errors.New("none has answered in time")

// propose is the agent's, with errors that say to a pod's owner what he can understand.
func (p *pods) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if b := c.GetAllocateBlocks(); b != nil {
		b.Site, b.SiteSaid = p.a.saysSite()
	}
	answer, err := p.a.propose(ctx, c)
	var refused *events.Error
	if err == nil || errors.As(err, &refused) || ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return answer, err
	}
	p.a.log.Debug("a proposal for pods' addresses was not decided", "error", err)
	return nil, errUndecided
}

// listen opens the plugin's socket. An agent that says that it is up has it; nil: it could not be opened.
func (p *pods) listen() net.Listener {
	l, err := cniserver.Listen(filepath.Join(p.a.cfg.RunDir, cniserver.SocketName))
	if err != nil {
		p.a.report(subjectPods+"CNI", failure, err.Error(), "no pod gets a network until the agent is started again")
	}
	return l
}

// run answers the plugin on l, gives back and asks for blocks, and looks after what pods have left behind.
func (p *pods) run(ctx context.Context, l net.Listener) {
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
func (p *pods) audit() {
	found, err := podnet.Scan(p.a.numbers.Link, p.a.numbers.PodTable())
	if err != nil {
		p.a.report(subjectPods+"audit", warning, err.Error(), "addresses of pods that have vanished are not found until "+
			"this works again")
		return
	}
	p.a.report(subjectPods+"audit", "", "", "")
	for _, l := range p.ipam.Audit(found, vanished) {
		p.a.log.Warn("an address without a pod was freed", "ipv4", l.IPv4, "ipv6", l.IPv6, "namespace", l.Namespace, "pod",
			l.Pod, "container", l.Key.ContainerID)
		if err := podnet.Del(l.NetNS, l.Key.Interface, l.Key.ContainerID); err != nil {
			p.a.log.Warn("remove what a pod left behind", "container", l.Key.ContainerID, "error", err)
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

// routes are the ways to this host's pods.
func (p *pods) routes() []dataplane.PodRoute {
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
func (p *pods) lookAgain() {
	n := len(p.a.loop.state.BlocksOf(p.a.id.String()))
	if n > p.blocks {
		p.look()
	}
	p.blocks = n
}

// look has the kernel read again soon.
func (p *pods) look() {
	select {
	case p.rescan <- struct{}{}:
	default:
	}
}

// follow takes in the newest agreed state and tells what is wrong. It belongs to the agent's loop.
func (p *pods) follow() {
	if p == nil {
		return
	}
	p.ipam.Follow(p.a.loop.state)
	p.lookAgain()
	p.withoutLeader()
	now := map[string]bool{}
	for _, x := range p.ipam.Problems() {
		now[subjectPods+x.Subject] = true
		p.a.report(subjectPods+x.Subject, warning, x.Message, x.Advice)
	}
	for subject := range p.told {
		if !now[subject] {
			p.a.report(subject, "", "", "")
		}
	}
	p.told = now
}
