package kube

import (
	"context"
	"encoding/base64"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/kube/join"
)

// tokensEvery is how often the admin node that does the controller's work looks at what hosts join by. It is shorter than
// join.Quiet, in which a mesh that exists has to say so.
const tokensEvery = time.Second

// keepTokens keeps the chart's Secrets good for Nodes that have no agent yet, and says in the ConfigMap which mesh it is.
// It works where agents run in pods.
func (p *Part) keepTokens(ctx context.Context, a *apiserver) {
	if p.cfg.Kubeconfig != config.InCluster {
		return
	}
	ns, err := podNamespace()
	if err != nil {
		p.health.result("keep tokens for hosts that join", "get", "namespace", err)
		return
	}
	tick := time.NewTicker(tokensEvery)
	defer tick.Stop()
	for {
		s := p.snapshot.Load()
		if _, does := mayControl(s); does {
			err := p.adopt(ctx, a, ns, s)
			for name, role := range map[string]events.Role{agentTokenName: events.RoleAgent, serverTokenName: events.RoleServer} {
				if err == nil {
					err = p.keepToken(ctx, a, ns, name, role, s)
				}
			}
			if ctx.Err() == nil && !apierrors.IsConflict(err) {
				p.health.result("keep what hosts join by", "update", "secrets", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// adopt says in the ConfigMap which mesh there is, where it does not say so.
func (p *Part) adopt(ctx context.Context, a *apiserver, ns string, s *part.Snapshot) error {
	o, err := a.object(ctx, configMapResource, ns, claimName)
	if err != nil || o == nil {
		return err
	}
	c := claimOf(o)
	if !join.Adopt(&c) {
		return nil
	}
	return a.replaceData(ctx, configMapResource, o,
		map[string]string{"node": p.cfg.Node, "cluster": s.State.Cluster().GetId()})
}

// waiting is how many Nodes have no member: none has put its record there, or those that say so were revoked.
func waiting(all map[string]*Node, s *part.Snapshot) (n int) {
	claimed := map[string]bool{}
	for id, e := range s.Records {
		if s.State.Node(id) != nil {
			claimed[e.Record.GetKubernetesNode()] = true
		}
	}
	for name, node := range all {
		if !node.hasRecord || !claimed[name] {
			n++
		}
	}
	return n
}

func (p *Part) keepToken(ctx context.Context, a *apiserver, ns, name string, role events.Role, s *part.Snapshot) error {
	n := waiting(p.nodes.snapshot(), s)
	if n == 0 {
		return nil
	}
	o, err := a.object(ctx, secretResource, ns, name)
	if err != nil || o == nil {
		return err
	}
	k := join.Kept{Text: tokenOf(o)}
	if k.Text != "" {
		if cluster, id, err := p.cfg.TokenOf(k.Text); err == nil {
			k.Cluster, k.Token = cluster, s.State.Token(id)
		}
	}
	uses := join.Keep(k, s.State.Cluster().GetId(), n, time.Now())
	if uses == 0 {
		return nil
	}
	text, err := p.host.CreateToken(ctx, &skeinv1.CreateTokenRequest{
		Uses: uses, LifetimeNanos: int64(join.Lifetime), Label: "Secret " + name, Role: string(role),
	})
	if err != nil {
		return fmt.Errorf("make a token for Secret %s/%s: %w", ns, name, err)
	}
	return a.replaceData(ctx, secretResource, o, map[string]string{"token": base64.StdEncoding.EncodeToString([]byte(text))})
}
