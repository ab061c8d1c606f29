package redteam

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// inSites has sites speak through leaders, of which the log chooses those of dc and of mallory's site, and starts the
// nodes that are late. local is then known to its own site alone, and others hear that it is alive from those who speak
// for the site.
func (f *Field) inSites(ctx context.Context) error {
	if err := f.throughLeaders(ctx); err != nil || f.sited {
		return err
	}
	for n, site := range map[string]string{relayNode: "dc", second: "dc", attacker: "evil"} {
		if err := f.setNode(ctx, n, &skeinv1.NodeSettings{Leader: "yes", SiteSet: true, Site: site},
			"leader", "site"); err != nil {
			return err
		}
	}
	// The local node comes last: who has not heard yet of one that wishes to lead is next in turn itself, and known to
	// everybody for a while.
	if err := f.lab.Start(ctx, heir, mate, pal); err != nil {
		return err
	}
	if err := until(ctx, 2*patience, func() error {
		for _, n := range []string{relayNode, second} {
			if r, err := f.recordAt(ctx, n, heir); err != nil || !r.GetLeaderWish() {
				return cmp.Or(err, fmt.Errorf("%s has no record of %s", n, heir))
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := f.lab.Start(ctx, local); err != nil {
		return err
	}
	for _, n := range []string{heir, mate, pal, local} {
		if err := f.startedNow(ctx, n); err != nil {
			return err
		}
	}
	if err := f.refresh(ctx); err != nil {
		return err
	}
	if err := until(ctx, 6*patience, func() error {
		s, err := f.api(local).Status(ctx, &skeinv1.StatusRequest{})
		if err == nil && s.GetGossip().GetWith() != "site" {
			err = fmt.Errorf("%s is known to everybody: %s", local, s.GetGossip().GetBecause())
		}
		return err
	}); err != nil {
		return err
	}
	f.sited = true
	return nil
}

func (f *Field) setNode(ctx context.Context, name string, s *skeinv1.NodeSettings, fields ...string) error {
	_, err := f.api(relayNode).SetNode(ctx, &skeinv1.SetNodeRequest{Node: name, Settings: s, Fields: fields})
	if err != nil {
		return fmt.Errorf("set the %v of %s: %w", fields, name, err)
	}
	return nil
}

// startedNow notes the run of an agent that the red team itself has started.
func (f *Field) startedNow(ctx context.Context, node string) error {
	return until(ctx, 2*patience, func() error {
		s, err := f.api(node).Status(ctx, &skeinv1.StatusRequest{})
		if err == nil {
			f.started[node] = s.GetStartedAt()
		}
		return err
	})
}

// restart stops agents and starts them again.
func (f *Field) restart(ctx context.Context, node string) error {
	if err := errors.Join(f.lab.Stop(ctx, node), f.lab.Start(ctx, node)); err != nil {
		return err
	}
	return f.startedNow(ctx, node)
}

// alive tells whether a node takes another one for alive.
func (f *Field) alive(ctx context.Context, by, of string) (bool, error) {
	r, err := f.api(by).ShowNode(ctx, &skeinv1.ShowNodeRequest{Node: of})
	return r.GetNode().GetAlive(), err
}

// recordAt is a node's record as another node shows it.
func (f *Field) recordAt(ctx context.Context, at, of string) (*skeinv1.Record, error) {
	r, err := f.api(at).ShowNode(ctx, &skeinv1.ShowNodeRequest{Node: of})
	return r.GetNode().GetRecord(), err
}

// siteOf is a new member without an agent, which the log has in a site.
func (f *Field) siteOf(ctx context.Context, name, site string) (*person, error) {
	p, err := f.newcomer(stranger)
	if err != nil {
		return nil, err
	}
	name += "-" + p.id()[:6]
	if err := p.enrol(ctx, name); err != nil {
		return nil, err
	}
	return p, f.setNode(ctx, name, &skeinv1.NodeSettings{SiteSet: true, Site: site}, "site")
}

// says pushes records of mallory's own to some nodes for a while, each with a higher number than its agent's, and looks
// at each whether something holds that should. It returns how long that was not so at one of them, at most.
func (f *Field) says(ctx context.Context, at []string, lie func(*skeinv1.Record), during time.Duration,
	holds func(node string) (bool, error)) (gone time.Duration, err error) {
	since, taken := map[string]time.Time{}, map[string]bool{}
	for end := time.Now().Add(during); time.Now().Before(end); {
		for _, n := range at {
			r, err := f.recordAt(ctx, n, attacker)
			if err != nil {
				return gone, err
			}
			told := r.GetVersion() == forgedSite
			if taken[n] = taken[n] || told; !told && r != nil {
				r.Epoch, r.Version, r.Scope = r.GetEpoch()+1, forgedSite, skeinv1.RecordScope_RECORD_SCOPE_BOTH
				lie(r)
				s, err := signed(f.mallory, r)
				if err != nil {
					return gone, err
				}
				if _, err := f.mallory.push(ctx, n, s); err != nil {
					return gone, err
				}
			}
			switch is, err := holds(n); {
			case err != nil:
				return gone, err
			case is:
				delete(since, n)
			case since[n].IsZero():
				since[n] = time.Now()
			default:
				gone = max(gone, time.Since(since[n]))
			}
		}
		pause.For(ctx, 20*time.Millisecond)
	}
	for _, n := range at {
		if !taken[n] {
			return gone, fmt.Errorf("%s does not take in what mallory says of itself", n)
		}
	}
	return gone, ctx.Err()
}

// truthful waits until some nodes have mallory's record as its agent writes it.
func (f *Field) truthful(ctx context.Context, at ...string) error {
	return until(ctx, 4*patience, func() error {
		for _, n := range at {
			switch r, err := f.recordAt(ctx, n, attacker); {
			case err != nil:
				return err
			case r.GetVersion() == forgedSite:
				return fmt.Errorf("%s still has the record that mallory's agent has not written", n)
			}
		}
		return nil
	})
}
