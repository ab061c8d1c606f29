package replace

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
)

const (
	pageSize    = 500 // pods of one answer
	mostAnew    = 3   // times that a list begins anew since its pages have expired
	listAtMost  = time.Minute
	evictAtMost = 30 * time.Second
	watchLeast  = 100 * time.Second // the apiserver ends a watch after this and a part of watchSpread, by chance
	watchSpread = 50 * time.Second
	watchAtMost = 3 * time.Minute // one that it does not end hangs, and is given up
	watchAgain  = time.Second     // between two tries, at least
)

var podResource = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// rights are what a run needs, for the errors of a user who has not all of them.
const rights = "the kubeconfig's user needs the verbs list and watch of pods, and create of pods/eviction, " +
	"in all namespaces"

// Kubernetes is a Cluster behind an apiserver.
type Kubernetes struct{ Client dynamic.Interface }

// Pods reads them in pages, and keeps none.
func (k Kubernetes) Pods(ctx context.Context, restart func(), take func(Pod)) (version string, err error) {
	for try := 1; ; try++ {
		version, err = k.pages(ctx, take)
		if !expired(err) || try == mostAnew {
			break
		}
		restart()
	}
	if err != nil {
		return "", describe(ctx, "list pods", err)
	}
	return version, nil
}

func (k Kubernetes) pages(ctx context.Context, take func(Pod)) (version string, err error) {
	for o := (metav1.ListOptions{Limit: pageSize}); ; {
		within, cancel := context.WithTimeout(ctx, listAtMost)
		l, err := k.Client.Resource(podResource).List(within, o)
		cancel()
		if err != nil {
			return "", err
		}
		if version == "" {
			version = l.GetResourceVersion()
		}
		for i := range l.Items {
			take(slim(&l.Items[i]))
		}
		if o.Continue = l.GetContinue(); o.Continue == "" {
			return version, nil
		}
	}
}

// Watch begins anew, where it was, whenever the apiserver ends it or is not heard.
func (k Kubernetes) Watch(ctx context.Context, version string) <-chan Change {
	out := make(chan Change)
	go func() {
		defer close(out)
		send := func(c Change) bool {
			select {
			case out <- c:
				return true
			case <-ctx.Done():
				return false
			}
		}
		for {
			begun := time.Now()
			err := k.watch(ctx, &version, send)
			switch {
			case ctx.Err() != nil:
				return
			case expired(err):
				send(Change{Err: ErrExpired})
				return
			case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
				send(Change{Err: describe(ctx, "watch pods", err)})
				return
			case err != nil:
				send(Change{Err: describe(ctx, "watch pods", err)})
			}
			rest := watchAgain + rand.N(watchAgain) - time.Since(begun)
			if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
				rest = max(rest, time.Duration(seconds)*time.Second)
			}
			select {
			case <-time.After(max(rest, 0)):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

// watch sends what changes until the watch ends, and moves the version on.
func (k Kubernetes) watch(ctx context.Context, version *string, send func(Change) bool) error {
	ctx, cancel := context.WithTimeout(ctx, watchAtMost)
	defer cancel()
	seconds := int64((watchLeast + rand.N(watchSpread)).Seconds())
	w, err := k.Client.Resource(podResource).Watch(ctx, metav1.ListOptions{
		ResourceVersion: *version, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
	})
	if err != nil {
		return err
	}
	defer w.Stop()
	if !send(Change{}) {
		return nil
	}
	for e := range w.ResultChan() {
		if e.Type == watch.Error {
			return apierrors.FromObject(e.Object)
		}
		o, ok := e.Object.(*unstructured.Unstructured)
		if !ok {
			continue
		}
		if e.Type != watch.Bookmark && !send(Change{Pod: slim(o), Gone: e.Type == watch.Deleted}) {
			return nil
		}
		*version = o.GetResourceVersion()
	}
	return nil
}

// Evict names the pod by its UID: one that came in its place with the same name is not meant.
func (k Kubernetes) Evict(ctx context.Context, p Pod) error {
	within, cancel := context.WithTimeout(ctx, evictAtMost)
	defer cancel()
	e := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata":      map[string]any{"namespace": p.Namespace, "name": p.Name},
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": p.UID}},
	}}
	_, err := k.Client.Resource(podResource).Namespace(p.Namespace).Create(within, e, metav1.CreateOptions{}, "eviction")
	status := apierrors.APIStatus(nil)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case apierrors.IsNotFound(err):
		return ErrGone
	case apierrors.IsConflict(err):
		return k.conflict(ctx, p, err)
	case apierrors.IsTooManyRequests(err), apierrors.IsServiceUnavailable(err):
		seconds, _ := apierrors.SuggestsClientDelay(err)
		return &LaterError{shown(err.Error()), time.Duration(seconds) * time.Second}
	case apierrors.IsServerTimeout(err), apierrors.IsTimeout(err), !errors.As(err, &status):
		return &UnheardError{describe(ctx, "create pods/eviction", err).Error()}
	case apierrors.IsForbidden(err) && apierrors.HasStatusCause(err, "NamespaceTerminating"):
		return &RefusedError{shown(err.Error())} // it ends by itself
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return describe(ctx, "create pods/eviction", err)
	}
	return &RefusedError{shown(err.Error())}
}

// conflict tells whether another pod has the name by now, or whether somebody else has written at the same moment.
func (k Kubernetes) conflict(ctx context.Context, p Pod, conflict error) error {
	within, cancel := context.WithTimeout(ctx, evictAtMost)
	defer cancel()
	l, err := k.Client.Resource(podResource).Namespace(p.Namespace).
		List(within, metav1.ListOptions{FieldSelector: "metadata.name=" + p.Name})
	if err != nil {
		return &LaterError{Cause: shown(conflict.Error())}
	}
	for i := range l.Items {
		if string(l.Items[i].GetUID()) == p.UID {
			return &LaterError{Cause: shown(conflict.Error())}
		}
	}
	return ErrGone
}

func expired(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

// describe words an error of the apiserver: what was asked for, what it says, and what to do. Its words are printable.
func describe(ctx context.Context, asked string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	status, next := apierrors.APIStatus(nil), "give the command again when it is repaired"
	switch {
	case apierrors.IsForbidden(err):
		next = rights + "; name a kubeconfig of such a user with --kubeconfig"
	case apierrors.IsUnauthorized(err):
		next = "the kubeconfig's credentials are not valid any more: name another one with --kubeconfig"
	case !errors.As(err, &status):
		next = "see that this host reaches the apiserver that the kubeconfig names"
	}
	return fmt.Errorf("%s: %s: %s", asked, shown(err.Error()), next)
}

// slim is what is kept of a pod.
func slim(o *unstructured.Unstructured) Pod {
	p := Pod{Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID())}
	p.Node, _, _ = unstructured.NestedString(o.Object, "spec", "nodeName")
	p.HostNetwork, _, _ = unstructured.NestedBool(o.Object, "spec", "hostNetwork")
	_, p.Static = o.GetAnnotations()["kubernetes.io/config.mirror"]
	if c := metav1.GetControllerOf(o); c != nil {
		p.Controller = Controller{Kind: c.Kind, Name: c.Name, UID: string(c.UID)}
	}
	phase, _, _ := unstructured.NestedString(o.Object, "status", "phase")
	p.Succeeded, p.Failed = phase == "Succeeded", phase == "Failed"
	p.Ready = isReady(o) && o.GetDeletionTimestamp() == nil
	ips, _, _ := unstructured.NestedFieldNoCopy(o.Object, "status", "podIPs")
	list, _ := ips.([]any)
	for _, ip := range list {
		m, _ := ip.(map[string]any)
		text, _ := m["ip"].(string)
		if a, err := netip.ParseAddr(text); err == nil {
			p.Addresses = append(p.Addresses, a.Unmap())
		}
	}
	return p
}

func isReady(o *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedFieldNoCopy(o.Object, "status", "conditions")
	list, _ := conditions.([]any)
	for _, c := range list {
		if m, _ := c.(map[string]any); m["type"] == "Ready" {
			return m["status"] == "True"
		}
	}
	return false
}
