package agent

import (
	"encoding/hex"
	"maps"
	"path/filepath"
	"sync/atomic"

	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/planlog"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// plansInMemory is how many plans an agent keeps that cannot write them to its disk.
const plansInMemory = 1000

// plans is the plan that this agent follows, and those that it followed.
type plans struct {
	journal *journal.Journal
	log     *planlog.Log
	now     atomic.Pointer[planNow]
}

// planNow is the newest plan, and the names that its text has.
type planNow struct {
	spec  dataplane.Spec
	state *events.State
	names map[dataplane.Key]string
}

func (p *plans) open(a *Agent) {
	var err error
	file := filepath.Join(a.cfg.StateDir, "plans.db")
	p.journal, err = journal.Open(file, planlog.MaxPlans, journal.MaxBytes(planlog.MaxBytes))
	if err != nil {
		a.report("plans", warning, err.Error(), "the plans of this run are kept in memory only")
		p.journal = journal.Memory(plansInMemory)
	}
	p.log = planlog.New(p.journal)
}

func (p *plans) close() error { return p.journal.Close() }

// notePlan keeps the plan that the loop has just made, if it is another one or names its peers otherwise.
func (a *Agent) notePlan(spec dataplane.Spec) {
	last := a.plans.now.Load()
	same := last != nil && spec.Equal(last.spec)
	if same && last.state == a.loop.state {
		return
	}
	names := a.peerNames(spec)
	if same && maps.Equal(names, last.names) {
		a.plans.now.Store(&planNow{spec: spec, state: a.loop.state, names: names})
		return
	}
	a.plans.log.Append(a.loop.state.Index(), planText(spec, names))
	a.plans.now.Store(&planNow{spec: spec, state: a.loop.state, names: names})
}

// peerNames names the owners of the WireGuard keys of a Spec that this node's peers have.
func (a *Agent) peerNames(spec dataplane.Spec) map[dataplane.Key]string {
	names := make(map[dataplane.Key]string, len(spec.WireGuard.Peers))
	add := func(id identity.ID, wg identity.WireGuardKey, what string) {
		k := dataplane.Key(wg)
		if _, ok := spec.WireGuard.Peers[k]; ok {
			names[k] = a.loop.state.Node(id).GetName() + what
		}
	}
	for id, k := range a.keys.Next() {
		add(id, k, " (next key)")
	}
	for id, wg := range a.loop.members {
		add(id, wg, "")
	}
	return names
}

func planText(spec dataplane.Spec, names map[dataplane.Key]string) string {
	return projection.Text(spec, keyName(names))
}

// keyName names a WireGuard key's owner, or the key where that is not known.
func keyName(names map[dataplane.Key]string) func(dataplane.Key) string {
	return func(k dataplane.Key) string {
		if n := names[k]; n != "" {
			return n
		}
		return hex.EncodeToString(k[:4])
	}
}
