package agent

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// openParts lets the parts say what they know from their disks.
func (a *Agent) openParts() error {
	for _, p := range a.opts.Parts {
		if err := p.Open(partHost{a}, a.metrics.Registry); err != nil {
			return err
		}
	}
	return nil
}

// runParts runs the parts until ctx ends, once the data plane is as it should be: whom they talk to may be in the
// mesh, and what is sent there before would leave by another way. The function that it returns waits for their ends.
func (a *Agent) runParts(ctx context.Context) (wait func()) {
	var running sync.WaitGroup
	for _, p := range a.opts.Parts {
		running.Go(func() {
			select {
			case <-a.planeStands:
				p.Run(ctx)
			case <-ctx.Done():
			}
		})
	}
	return running.Wait
}

// readyAtLatest is how long others, such as kubelet, wait for a data plane that does not come up. What is wrong is
// then in status, and may be repaired while they run.
const readyAtLatest = 20 * time.Second

// reportReady tells whoever started this agent when it is up: once the data plane is as it should be.
func (a *Agent) reportReady(ctx context.Context) {
	if a.opts.OnReady == nil {
		return
	}
	go func() {
		select {
		case <-a.planeStands:
		case <-time.After(readyAtLatest):
		case <-ctx.Done():
			return
		}
		a.opts.OnReady()
	}()
}

// notePlane notes that the data plane has come up.
func (a *Agent) notePlane() {
	if a.applied.Load() || a.relayOnly() {
		a.planeUp.Do(func() { close(a.planeStands) })
	}
}

// followParts shows the parts what the loop has just taken in.
func (a *Agent) followParts() {
	if len(a.opts.Parts) == 0 {
		return
	}
	s := part.Snapshot{Self: a.id, State: a.loop.state, Records: a.gossip.Records(), Alive: a.gossip.Alive,
		Elsewhere: a.elsewhere, ClockOff: time.Duration(a.clock.Load()),
		RevokeAfter: seconds(a.conf().Kubernetes.RevokeAfterSeconds)}
	for _, p := range a.opts.Parts {
		p.Follow(s)
	}
}

// partHost is the agent as its parts see it.
type partHost struct{ a *Agent }

func (h partHost) Merge(records []*skeinv1.SignedRecord) []error {
	_, errs := h.a.gossip.Merge(records)
	return errs
}

func (h partHost) Report(subject string, severity part.Severity, message, advice string) {
	h.a.report(subject, string(severity), message, advice)
}

func (h partHost) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	return h.a.propose(ctx, c)
}

func (h partHost) CreateToken(ctx context.Context, r *skeinv1.CreateTokenRequest) (string, error) {
	answer, err := h.a.memberService().CreateToken(ctx, r)
	return answer.GetToken(), err
}

func (h partHost) Serves() <-chan struct{} { return h.a.podReady.Ready() }

func (h partHost) FreshBoot() bool { return h.a.podReady.FreshBoot() }

func (h partHost) PodChanged(namespace, pod string, annotations map[string]string) {
	h.a.pods.Annotated(namespace, pod, annotations)
}

func (h partHost) Wish(w part.Wishes) {
	a := h.a
	if old := a.wishes.Swap(&w); old != nil && *old == w {
		return
	}
	a.applyHost()
}

// applyHost gives discovery what holds for this host now, and has the record looked at.
func (a *Agent) applyHost() {
	if own := a.host(); a.discovery != nil {
		if err := a.discovery.SetHost(own.ForceEndpoint, own.InternalIP); err != nil {
			a.log.Warn("the endpoint set for this host cannot be used", "error", err)
		}
	}
	a.wakeUp()
}

// saysSite is where this host says that it is, when the log asks; said is false while Kubernetes may still name another
// site.
func (a *Agent) saysSite() (site string, said bool) {
	h := a.host()
	return h.Site, h.Site != "" || a.cfg.Kubernetes.Kubeconfig == "" || a.wishes.Load() != nil
}

// host is what holds for this host now: what the log says of it first, then its configuration, then what parts wish.
func (a *Agent) host() part.Wishes {
	var h part.Wishes
	if p := a.wishes.Load(); p != nil {
		h = *p
	}
	c := a.conf()
	if c.Site != "" {
		h.Site = c.Site
	}
	if c.Leader {
		h.Leader = true
	}
	if ip, err := netip.ParseAddr(c.InternalIP); err == nil {
		h.InternalIP = ip
	}
	if c.ForceEndpoint != "" {
		h.ForceEndpoint = c.ForceEndpoint
	}
	if c.PersistentKeepalive > 0 {
		h.PersistentKeepalive = c.PersistentKeepalive
	}
	if a.replica != nil {
		setByLog(&h, a.self().GetSettings())
	}
	return h
}
