package agent

import (
	"context"
	"path/filepath"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/pods"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// openPods reads who has which address, from its file and from the kernel, before anybody may ask for one.
func (a *Agent) openPods() (err error) {
	a.pods, err = pods.Open(pods.Config{
		Self: a.id, File: filepath.Join(a.cfg.StateDir, "ipam.db"), BootID: a.podReady.BootID(), RunDir: a.cfg.RunDir,
		Link: a.numbers.Link, Table: a.numbers.PodTable(), IdleFor: seconds(a.conf().EmptyBlockSeconds),
		State: a.replica.State, Leader: a.leader, Propose: a.propose, Site: a.saysSite, MTU: a.linkMTU,
		Egresses: a.egresses.Clients(), Facts: a.podFacts(), Ready: a.planeStands, Applied: a.applied.Load,
		Asked: a.metrics.CNI.Observe,
		Journal: func(e *skeinv1.PodAddress) {
			a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
				Body: &skeinv1.JournalEntry_PodAddress{PodAddress: e}})
		},
		Wake: a.wakeUp, Report: partHost{a}.Report, Log: a.log,
	})
	return err
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
