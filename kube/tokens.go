package kube

import (
	"context"
	"encoding/base64"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/join"
)

// doors are what hosts join by, as the apiserver has it: the chart's ConfigMap and Secrets, each nil where there is
// none.
type doors struct {
	claim  *mirror[custom]
	tokens map[events.Role]*mirror[custom]
}

// keepTokens keeps the chart's Secrets good for Nodes that have no agent yet, and says in the ConfigMap which mesh it
// is. It works where agents run in pods, on the admin node that does the controller's work.
func (p *Part) keepTokens(ctx context.Context, a *apiserver) {
	if p.cfg.Kubeconfig != config.InCluster {
		return
	}
	ns, err := podNamespace()
	if err != nil {
		p.health.result("keep tokens for hosts that join", "get", "namespace", err)
		return
	}
	for may := false; !may; may, _ = mayControl(p.snapshot.Load()) {
		select {
		case <-ctx.Done():
			return
		case <-p.entering:
		}
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	follow := func(kind schema.GroupVersionResource, name string) *mirror[custom] {
		store := newMirror(func(o metav1.Object) custom { return custom{o.(*unstructured.Unstructured)} },
			p.metrics.heard.SetToCurrentTime)
		watching.Go(func() { a.watchWhole(ctx, kind, ns, "metadata.name="+name, store, &p.health) })
		return store
	}
	d := doors{claim: follow(configMapResource, claimName), tokens: map[events.Role]*mirror[custom]{
		events.RoleAgent:  follow(secretResource, agentTokenName),
		events.RoleServer: follow(secretResource, serverTokenName),
	}}
	var failed retry
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.entering:
		case <-d.claim.changed:
		case <-d.tokens[events.RoleAgent].changed:
		case <-d.tokens[events.RoleServer].changed:
		case <-timer.C:
		}
		now := time.Now()
		s := p.snapshot.Load()
		if _, does := mayControl(s); !does {
			continue
		}
		if wait := failed.wait(now); wait > 0 {
			timer.Reset(wait)
			continue
		}
		next, err := p.openDoors(ctx, a, d, s, now)
		if err != nil && !apierrors.IsConflict(err) { // after a conflict the watch brings what was written instead
			failed.fail(now, retryAfter(err))
			next = failed.wait(now)
		} else {
			failed.succeed()
		}
		if ctx.Err() == nil && !apierrors.IsConflict(err) {
			p.health.result("keep what hosts join by", "update", "secrets", err)
		}
		if next > 0 {
			timer.Reset(next)
		}
	}
}

// openDoors writes what is due now, and returns when to look again if nothing changes; 0: no matter.
func (p *Part) openDoors(ctx context.Context, a *apiserver, d doors, s *part.Snapshot,
	now time.Time) (time.Duration, error) {
	if o := only(d.claim); o != nil {
		if c := claimOf(o); join.Adopt(&c) {
			err := a.replaceData(ctx, configMapResource, o,
				map[string]string{"node": p.cfg.Node, "cluster": s.State.Cluster().GetId()})
			if err != nil {
				return 0, err
			}
		}
	}
	nodes := p.nodes.snapshot()
	if nodes == nil {
		return 0, nil
	}
	n := waiting(nodes, proven(s, nodes, p.nodes.holders.of))
	if n == 0 {
		return 0, nil
	}
	next := join.Lifetime
	for role, store := range d.tokens {
		o := only(store)
		if o == nil {
			continue
		}
		good, err := p.keepToken(ctx, a, o, role, n, s, now)
		if err != nil {
			return 0, err
		}
		next = min(next, good)
	}
	return next, nil
}

// only is the one object that a watch by its name brings; nil: there is none, or it is not known yet.
func only(m *mirror[custom]) *unstructured.Unstructured {
	for _, o := range m.snapshot() {
		return o.Unstructured
	}
	return nil
}

// waiting is how many Nodes have no member, by both proofs.
func waiting(nodes map[string]*Node, members map[identity.ID]*Node) int {
	have := map[string]bool{}
	for _, n := range members {
		have[n.Name] = true
	}
	n := 0
	for name := range nodes {
		if !have[name] {
			n++
		}
	}
	return n
}

// keepToken makes a new token where a Secret's is not good enough for the Nodes that wait. It returns for how long the
// Secret needs no look.
func (p *Part) keepToken(ctx context.Context, a *apiserver, o *unstructured.Unstructured, role events.Role, waiting int,
	s *part.Snapshot, now time.Time) (time.Duration, error) {
	k := join.Kept{Text: tokenOf(o)}
	if k.Text != "" {
		if cluster, id, err := p.cfg.TokenOf(k.Text); err == nil {
			k.Cluster, k.Token = cluster, s.State.Token(id)
		}
	}
	uses, good := join.Keep(k, s.State.Cluster().GetId(), waiting, s.LeadersTime(now))
	if uses == 0 {
		return good, nil
	}
	text, err := p.host.CreateToken(ctx, &skeinv1.CreateTokenRequest{
		Uses: uses, LifetimeNanos: int64(join.Lifetime), Label: "Secret " + o.GetName(), Role: string(role),
	})
	if err != nil {
		return 0, fmt.Errorf("make a token for Secret %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	return join.Lifetime, a.replaceData(ctx, secretResource, o,
		map[string]string{"token": base64.StdEncoding.EncodeToString([]byte(text))})
}
