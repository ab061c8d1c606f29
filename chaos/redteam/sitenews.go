package redteam

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// watchers are nodes of other sites, which know of local what is said of it.
var watchers = []string{victim, other}

// saysAway has mallory call a living node of dc away, which is known to its site alone. Two others lead dc and say
// nothing of the kind.
func saysAway(name string, lie func(*skeinv1.Record)) Attempt {
	return Attempt{Name: name, From: Member, Guard: Away, Judge: believed,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if err := f.watched(ctx); err != nil {
				return seen, err
			}
			id := f.id(local)
			seen.Believed, err = f.says(ctx, watchers, func(r *skeinv1.Record) {
				r.Away = [][]byte{id[:]}
				lie(r)
			}, 4*time.Second, func(node string) (bool, error) { return f.alive(ctx, node, local) })
			if err == nil {
				err = f.truthful(ctx, watchers...)
			}
			return seen, err
		}}
}

// watched waits until all watchers take local for alive.
func (f *Field) watched(ctx context.Context) error {
	if err := f.inSites(ctx); err != nil {
		return err
	}
	return until(ctx, 4*patience, func() error {
		for _, n := range watchers {
			if is, err := f.alive(ctx, n, local); err != nil || !is {
				return cmp.Or(err, fmt.Errorf("%s takes %s for away before anybody lies", n, local))
			}
		}
		return nil
	})
}

// siteNews are attempts with what is said of who is alive.
func siteNews() []Attempt {
	return []Attempt{
		saysAway("call a node of another site away", func(*skeinv1.Record) {}),
		saysAway("call a node away as a member of its site that does not lead it",
			func(r *skeinv1.Record) { r.Site, r.Leads = "dc", 0 }),
		saysAway("call a node away as one that says it leads the node's site",
			func(r *skeinv1.Record) { r.Site, r.Leads = "dc", 1<<40 }),
		{Name: "keep a dead node alive as one that says it leads the node's site", From: Member, Guard: Away, Long: true,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.keepAlive(ctx) }, Judge: believedAlive},
		{Name: "lead another site, by its own record alone", From: Member, Guard: Chosen,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.leadsByItself(ctx) }, Judge: usedAsLeader},
	}
}

// usedAsLeader judges that a node took somebody for a leader of its site whom the log has not chosen.
func usedAsLeader(s Seen) string {
	if s.Believed > 0 {
		return "a node uses it as a leader of its site"
	}
	return ""
}

// leadsByItself has mallory tell nodes of dc that it is in dc and leads there, where the log has chosen others.
func (f *Field) leadsByItself(ctx context.Context) (seen Seen, err error) {
	if err := f.inSites(ctx); err != nil {
		return seen, err
	}
	nodes := []string{local, heir}
	seen.Believed, err = f.says(ctx, nodes, func(r *skeinv1.Record) {
		r.Site, r.LeaderWish, r.Leads = "dc", true, 1<<40
	}, 4*time.Second, func(node string) (bool, error) {
		s, err := f.api(node).Status(ctx, &skeinv1.StatusRequest{})
		if err == nil && len(s.GetSiteLeaders()) == 0 {
			err = fmt.Errorf("%s knows no leader of its site", node)
		}
		return !slices.Contains(s.GetSiteLeaders(), attacker), err
	})
	if err == nil {
		err = f.truthful(ctx, nodes...)
	}
	return seen, err
}

// keepAlive ends the local node and says in its site's name that it is alive.
func (f *Field) keepAlive(ctx context.Context) (seen Seen, err error) {
	if err := f.watched(ctx); err != nil {
		return seen, err
	}
	if err := f.lab.Kill(ctx, local); err != nil {
		return seen, err
	}
	defer func() {
		if rerr := f.lab.Start(context.WithoutCancel(ctx), local); err == nil {
			err = rerr
		}
		if rerr := f.startedNow(context.WithoutCancel(ctx), local); err == nil {
			err = rerr
		}
	}()
	id := f.id(local)
	named := func() error {
		r, err := f.recordAt(ctx, victim, relayNode)
		if err == nil && !calls(r, id[:]) {
			err = fmt.Errorf("%s does not call %s away", relayNode, local)
		}
		return err
	}
	if err := until(ctx, 4*patience, named); err != nil {
		return seen, err
	}
	seen.Believed, err = f.says(ctx, watchers, func(r *skeinv1.Record) {
		r.Site, r.Leads, r.Away = "dc", 1<<40, nil
	}, 5*time.Second, func(node string) (bool, error) {
		is, err := f.alive(ctx, node, local)
		return !is, err
	})
	return seen, err
}

// calls tells whether a record calls a node away.
func calls(r *skeinv1.Record, id []byte) bool {
	return slices.ContainsFunc(r.GetAway(), func(b []byte) bool { return string(b) == string(id) })
}

// believedAlive judges that a dead node passed for alive long after those that lead its site had said that it is away.
func believedAlive(s Seen) string {
	if s.Believed > 2*time.Second {
		return fmt.Sprintf("a dead member passes for alive for %s", s.Believed.Round(time.Millisecond))
	}
	return ""
}
