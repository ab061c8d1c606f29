package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/filewatch"
)

const (
	subjectConfig  = "configuration"
	subjectRestart = "restart"
	subjectWatch   = "configuration watch"

	configSettles  = 100 * time.Millisecond // a file that is replaced makes several events, and may be empty between two
	configLatest   = time.Second            // and one that is written all the time is read so often
	configFollowed = 5 * time.Second        // how long whoever asks for a reload waits for the data plane
)

// liveConfig is the configuration that the agent runs with: that of its start, with the live keys of the file as it was
// last read. A snapshot is not changed once it is here.
type liveConfig struct {
	running atomic.Pointer[config.Config]

	reading sync.Mutex // held while the file is read and taken over

	mu             sync.Mutex // guards what follows
	read           *config.Config
	last           []config.Change // that took effect last
	lastAt         time.Time
	lastTook       time.Duration  // until the loop had followed that
	changed        chan struct{}  // closed at the next change
	followed       chan struct{}  // closed once the loop has followed the newest; nil: it has
	dueFrom, dueTo *config.Config // between which restartDue are what differs
	restartDue     []config.Change
}

func (l *liveConfig) open(c config.Config) {
	l.running.Store(&c)
	l.read, l.changed = &c, make(chan struct{})
}

// set makes c what the agent runs with. It returns what is closed once the loop has followed it.
func (l *liveConfig) set(c *config.Config) (followed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running.Store(c)
	close(l.changed)
	l.changed = make(chan struct{})
	if l.followed == nil {
		l.followed = make(chan struct{})
	}
	return l.followed
}

// follows notes that the loop has done all that follows from c.
func (l *liveConfig) follows(c *config.Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.followed != nil && l.running.Load() == c {
		close(l.followed)
		l.followed, l.lastTook = nil, time.Since(l.lastAt)
	}
}

// due are the keys of the file that wait for the agent's next start.
func (l *liveConfig) due() []config.Change {
	l.mu.Lock()
	defer l.mu.Unlock()
	running := l.running.Load()
	if l.read == nil || l.dueFrom == running && l.dueTo == l.read {
		return l.restartDue
	}
	l.dueFrom, l.dueTo, l.restartDue = running, l.read, nil
	for _, c := range config.Changes(*running, *l.read) {
		if c.Class == config.Restart {
			l.restartDue = append(l.restartDue, c)
		}
	}
	return l.restartDue
}

// conf is the configuration that holds now. Its live keys may be others at the next call; whoever needs several that
// belong together keeps the pointer.
func (a *Agent) conf() *config.Config {
	if c := a.live.running.Load(); c != nil {
		return c
	}
	return &a.cfg
}

// confChanged is conf, and a channel that is closed when there is another one.
func (a *Agent) confChanged() (*config.Config, <-chan struct{}) {
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	return a.conf(), a.live.changed
}

// errNoFile is what an agent says that was started without a way to read its configuration anew.
var errNoFile = errors.New("this agent was started without a configuration file, so it has none to reload")

// reloaded is what came of reading the file.
type reloaded struct {
	live, restart, agreed []config.Change
	last                  []config.Change // that took effect before, where live is empty
	followed              <-chan struct{} // closed once the loop has followed; nil: it has
}

// reload reads the configuration file and goes over to what it says. A file that is wrong in any key, or that asks for
// what this host cannot give, changes nothing and is a problem until it is repaired.
func (a *Agent) reload(dryRun bool) (r reloaded, err error) {
	if a.opts.Load == nil {
		return r, errNoFile
	}
	l := &a.live
	l.reading.Lock()
	defer l.reading.Unlock()
	read, err := a.opts.Load()
	if err != nil {
		return r, a.refuseConfig(dryRun, err)
	}
	running := a.conf()
	next := config.Adopt(*running, read)
	r.live = config.Changes(*running, next)
	for _, c := range config.Changes(next, read) {
		if c.Class == config.Agreed {
			r.agreed = append(r.agreed, c)
		} else {
			r.restart = append(r.restart, c)
		}
	}
	if dryRun {
		return r, nil
	}
	if to := next.Ports.Metrics; to != running.Ports.Metrics {
		if err := a.metrics.Move(to); err != nil {
			return reloaded{}, a.refuseConfig(false, fmt.Errorf("%s: %w", config.Locate(a.opts.File, "ports.metrics"), err))
		}
	}
	a.report(subjectConfig, "", "", "")
	l.mu.Lock()
	l.read = &read
	if len(r.live) == 0 {
		// the watch may have read the file first, and the parts may not have followed yet
		r.last, r.followed = l.last, l.followed
	} else {
		l.last, l.lastAt, l.lastTook = r.live, time.Now(), 0
	}
	l.mu.Unlock()
	a.report(subjectRestart, warning, restartText(r.restart), "restart the agent, or take these changes back")
	if len(r.live) == 0 {
		return r, nil
	}
	a.log.Info("the configuration file was read anew", "changed", keyNames(r.live))
	r.followed = l.set(&next)
	if a.opts.OnConfig != nil {
		a.opts.OnConfig(next)
	}
	a.wakeUp()
	return r, nil
}

// refuseConfig makes an error of the file a problem, unless nobody wanted to go over to it.
func (a *Agent) refuseConfig(dryRun bool, err error) error {
	if !dryRun {
		a.report(subjectConfig, warning, err.Error(), "the agent goes on with the settings that it has; "+
			"it reads the file again when the file changes")
	}
	return err
}

// restartText says which keys wait for a restart; empty: none.
func restartText(due []config.Change) string {
	if len(due) == 0 {
		return ""
	}
	parts := make([]string, len(due))
	for i, c := range due {
		parts[i] = fmt.Sprintf("%s (%s, now %s)", c.Name, orUnset(c.New), orUnset(c.Old))
	}
	return "the configuration file has values that take effect at the next start: " + strings.Join(parts, ", ")
}

func orUnset(value string) string {
	if value == "" {
		return "not set"
	}
	return value
}

func keyNames(changes []config.Change) string {
	names := make([]string, len(changes))
	for i, c := range changes {
		names[i] = c.Name
	}
	return strings.Join(names, " ")
}

// followConfig hands the parts a configuration that has changed since the loop's last round. What reads conf in each
// round needs nothing here. The function that it returns is called when the data plane has followed, too.
func (a *Agent) followConfig() (followed func()) {
	c := a.conf()
	before := a.loop.conf
	a.loop.conf = c
	if before == nil || before == c {
		return func() { a.live.follows(c) }
	}
	a.loop.happened = time.Now()
	a.loop.settled = nil // the paths get their settings anew
	a.noteLabels(a.self())
	if a.relay != nil {
		a.relay.SetLimits(relayLimits(c.RelayLimits))
	}
	if a.pods != nil {
		a.pods.IPAM().SetIdleFor(seconds(c.EmptyBlockSeconds))
	}
	if a.discovery != nil {
		a.discovery.SetTraversal(c.NatTraversal)
	}
	a.applyHost()
	return func() { a.live.follows(c) }
}

// watchConfig reads the configuration file anew when it may have changed, and when a signal asks for it, until ctx
// ends.
func (a *Agent) watchConfig(ctx context.Context) {
	if a.opts.Load == nil {
		return
	}
	changed := make(chan struct{}, 1)
	go func() {
		err := filewatch.Watch(ctx, a.opts.File, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
		if err != nil {
			a.report(subjectWatch, warning, err.Error(), "a changed file is not noticed: run `skein reload` after a change")
		}
	}()
	settle := time.NewTimer(time.Hour)
	settle.Stop()
	defer settle.Stop()
	var latest time.Time // zero: no event waits
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			now := time.Now()
			if latest.IsZero() {
				latest = now.Add(configLatest)
			}
			settle.Reset(min(configSettles, latest.Sub(now)))
			continue
		case <-settle.C:
			latest = time.Time{}
		case <-a.opts.Reread:
		}
		_, _ = a.reload(false) // what is wrong is a problem now
	}
}

// Reload reads the configuration file anew. Whoever may use the socket gives commands that change more; the request
// names no file, so that nobody has the agent read another one.
func (s services) Reload(ctx context.Context, q *skeinv1.ReloadRequest) (*skeinv1.ReloadResponse, error) {
	began := time.Now()
	r, err := s.a.reload(q.GetDryRun())
	switch {
	case errors.Is(err, errNoFile):
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	case err != nil:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("nothing is changed: %w", err))
	}
	out := &skeinv1.ReloadResponse{
		File: s.a.opts.File, Live: changeViews(r.live), RestartDue: changeViews(r.restart), Agreed: changeViews(r.agreed),
	}
	if r.followed != nil {
		ctx, cancel := context.WithTimeout(ctx, configFollowed)
		defer cancel()
		select {
		case <-r.followed:
		case <-ctx.Done():
			out.NotFollowed = true
		}
	}
	l := &s.a.live
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(r.live) > 0 {
		out.TookNanos = int64(time.Since(began))
	} else if len(r.last) > 0 {
		out.Last, out.LastAt, out.LastTookNanos = changeViews(r.last), l.lastAt.UnixNano(), int64(l.lastTook)
	}
	return out, nil
}

func changeViews(changes []config.Change) (out []*skeinv1.ConfigChange) {
	for _, c := range changes {
		out = append(out, &skeinv1.ConfigChange{Key: c.Name, Old: c.Old, New: c.New, Why: c.Why})
	}
	return out
}
