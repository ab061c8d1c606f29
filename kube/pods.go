package kube

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/cni"
)

// Annotations of Namespaces by which their pods get their addresses from another pool than "default".
const (
	poolAnnotation     = Prefix + "pool"
	coilPoolAnnotation = "coil.cybozu.com/pool"
)

// namespace is what skein uses of a Namespace: the pool that its pods get addresses from; empty: the log's choice.
type namespace string

func slimNamespace(o metav1.Object) namespace {
	a := o.GetAnnotations()
	if pool, ok := a[poolAnnotation]; ok {
		return namespace(strings.TrimSpace(pool))
	}
	return namespace(strings.TrimSpace(a[coilPoolAnnotation]))
}

func (n namespace) same(o namespace) bool { return n == o }

// pod is what skein uses of a Pod: its annotations about egresses.
type pod map[string]string

func slimPod(o metav1.Object) pod {
	return kept(o.GetAnnotations(), func(name string) bool {
		return strings.HasPrefix(name, cni.EgressAnnotation) || strings.HasPrefix(name, cni.EgressAnnotationCoil)
	})
}

func (p pod) same(o pod) bool { return maps.Equal(p, o) }

// How long a pod that starts waits for news of it that are on their way: kubelet may hear of it before this agent
// does.
const (
	namespaceWait = 3 * time.Second
	podWait       = time.Second
)

// PodFacts tells which pool a pod's namespace has chosen, and the pod's annotations. A pod whose namespace nobody has
// told of is not to be started: it could get an address of the wrong pool.
func (p *Part) PodFacts(ctx context.Context, ns, name string) (f part.PodFacts, err error) {
	if ns == "" {
		return f, nil // a container that is not Kubernetes'
	}
	chosen, known := p.namespaceOf(ctx, ns)
	if !known {
		why := "the apiserver has not reported this Namespace"
		if _, synced := p.namespaces.count(); !synced {
			why = "the apiserver has not answered since this agent started, and had not reported this Namespace before"
		}
		return f, fmt.Errorf("the pool of namespace %s is not known: %s", ns, why)
	}
	f.Pool = string(chosen)
	if name != "" {
		if a, known := p.annotationsOf(ctx, ns+"/"+name); known {
			f.Annotations = map[string]string{}
			maps.Copy(f.Annotations, a)
		}
	}
	return f, nil
}

func (p *Part) namespaceOf(ctx context.Context, ns string) (namespace, bool) {
	if _, synced := p.namespaces.count(); !synced {
		if n, known := p.before.Namespaces[ns]; known {
			return n, true
		}
	}
	ctx, cancel := context.WithTimeout(ctx, namespaceWait)
	defer cancel()
	return p.namespaces.await(ctx, ns)
}

func (p *Part) annotationsOf(ctx context.Context, key string) (pod, bool) {
	if _, synced := p.pods.count(); !synced {
		a, known := p.before.Pods[key]
		return a, known
	}
	ctx, cancel := context.WithTimeout(ctx, podWait)
	defer cancel()
	return p.pods.await(ctx, key)
}

// notifyPods tells the agent of pods whose annotations have changed.
func (p *Part) notifyPods() {
	all := p.pods.snapshot()
	if all == nil {
		return
	}
	for key, now := range all {
		if before, known := p.toldPods[key]; known && before.same(now) || !known && len(now) == 0 {
			continue
		}
		ns, name, _ := strings.Cut(key, "/")
		p.host.PodChanged(ns, name, now)
	}
	p.toldPods = all
}
