package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/skeinmesh/skein/agent/config"
)

// fieldManager is who an agent's writes are by. It is the same after a restart, which so takes over its own fields.
const fieldManager = "skein-agent"

// eventNamespace is where Events about objects without a namespace go.
const eventNamespace = "default"

var (
	nodeResource      = schema.GroupVersionResource{Version: "v1", Resource: "nodes"}
	namespaceResource = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	podResource       = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	eventResource     = schema.GroupVersionResource{Version: "v1", Resource: "events"}
)

// backoff is how the watch waits between attempts: an apiserver that returns is heard within seconds, and a thousand
// agents do not all ask at once.
//
// The longest wait is the cap and half of it by chance: what is shown in the cluster is to be true ten seconds after
// the apiserver's return. An overloaded one says itself when to come again (Retry-After).
var backoff = wait.Backoff{Duration: 500 * time.Millisecond, Cap: 4 * time.Second, Steps: 5, Factor: 2, Jitter: 0.5}

// dialTimeout is short, since an apiserver that returns shall be heard soon: a connection that nobody answers is what
// a host that is away looks like.
const dialTimeout = 3 * time.Second

// An agent asks the apiserver for a few things; the one that takes custom resources to the log, for as many as there
// are.
const (
	requestsPerSecond = 50
	requestsBurst     = 200
)

// configEvery is how often a kubeconfig is looked at: whether one is there, and whether it has become another.
const configEvery = 5 * time.Second

// How long requests may take. The apiserver ends a watch after watchLeast to watchLeast and watchSpread, by chance, and
// it begins anew where it was. One that it does not end hangs, with a connection that looks well, and is given up.
const (
	listAtMost  = time.Minute
	watchLeast  = 100 * time.Second
	watchSpread = 50 * time.Second
	watchAtMost = 3 * time.Minute
)

// apiserver is the way to the apiserver.
type apiserver struct {
	metadata metadata.Interface
	dynamic  dynamic.Interface
	back     func()        // called when a watch stands again after it did not
	atMost   time.Duration // that a watch may last
	// namespace is skein's own: where its ServiceAccounts are.
	namespace string
}

// restConfig reads where the apiserver is and how to show who we are. Two files with one mark say the same.
func restConfig(kubeconfig string) (c *rest.Config, mark string, err error) {
	if kubeconfig == config.InCluster {
		c, err = rest.InClusterConfig() // its token's file is read again by the client
		return c, "", err
	}
	b, err := os.ReadFile(kubeconfig)
	if err != nil {
		return nil, "", err
	}
	// From the file again, and not from the bytes: paths in it are relative to it.
	c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	return c, string(b), err
}

// ownNamespace is that of the pod that the agent runs in, or of the kubeconfig's context, or the usual one.
func ownNamespace(kubeconfig string) string {
	const usual = "skein-system"
	if kubeconfig == config.InCluster {
		if ns, err := podNamespace(); err == nil {
			return ns
		}
		return usual
	}
	if c, err := clientcmd.LoadFromFile(kubeconfig); err == nil && c.Contexts[c.CurrentContext] != nil {
		return cmp.Or(c.Contexts[c.CurrentContext].Namespace, usual)
	}
	return usual
}

// newAPIServer makes the clients. Nothing is sent yet.
func newAPIServer(c *rest.Config) (*apiserver, error) {
	c.UserAgent, c.QPS, c.Burst = "skein", requestsPerSecond, requestsBurst
	c.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext
	h, err := rest.HTTPClientFor(c) // one connection for all
	if err != nil {
		return nil, err
	}
	h.Transport = later{h.Transport}
	a := &apiserver{back: func() {}, atMost: watchAtMost}
	if a.metadata, err = metadata.NewForConfigAndClient(c, h); err != nil {
		return nil, err
	}
	a.dynamic, err = dynamic.NewForConfigAndClient(c, h)
	return a, err
}

// Dial makes a client of the apiserver that a kubeconfig names; config.InCluster is a pod's own. Nothing is sent yet.
// What the apiserver says beside its answers is not shown, and a refusal that says when to come again is an error at
// once.
func Dial(kubeconfig string) (dynamic.Interface, error) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	c, _, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	c.WarningHandler = rest.NoWarnings{}
	a, err := newAPIServer(c)
	if err != nil {
		return nil, err
	}
	return a.dynamic, nil
}

// connect waits until there is a kubeconfig that can be used and is not the one that used is the mark of; nil: ctx has
// ended.
func (p *Part) connect(ctx context.Context, used string) (a *apiserver, mark string) {
	for {
		c, mark, err := restConfig(p.cfg.Kubeconfig)
		if err == nil && mark != used {
			if a, err = newAPIServer(c); err == nil {
				a.namespace = ownNamespace(p.cfg.Kubeconfig)
				p.host.Report(subjectConfig, "", "", "")
				return a, mark
			}
		}
		p.reportConfig(err)
		select {
		case <-ctx.Done():
			return nil, ""
		case <-time.After(p.every):
		}
	}
}

func (p *Part) reportConfig(err error) {
	advice := "correct it, or take kubernetes.kubeconfig out of the configuration; the mesh works without"
	switch {
	case err == nil:
		p.host.Report(subjectConfig, "", "", "")
		return
	case errors.Is(err, fs.ErrNotExist):
		advice = "it is used as soon as it is there; the mesh works without"
	}
	p.host.Report(subjectConfig, "warning", fmt.Sprintf("kubeconfig %s: %v", p.cfg.Kubeconfig, err), advice)
}

// sessions uses the apiserver of the kubeconfig until ctx ends: with each that the file names, such as the same one
// with a new token, everything begins anew. What is known already stays meanwhile.
func (p *Part) sessions(ctx context.Context, connected chan<- *apiserver) {
	a, mark := p.connect(ctx, noMark)
	for a != nil {
		inner, cancel := context.WithCancel(ctx)
		select {
		case connected <- a:
		case <-ctx.Done():
		}
		var all sync.WaitGroup
		all.Go(func() { p.session(inner, a) })
		used := mark
		if p.cfg.Kubeconfig == config.InCluster {
			<-ctx.Done()
			a = nil
		} else if a, mark = p.connect(ctx, used); a != nil {
			p.log.Info("the kubeconfig has changed and is used from now on", "file", p.cfg.Kubeconfig)
		}
		cancel()
		all.Wait()
	}
}

// noMark is the mark of no kubeconfig.
const noMark = "\x00"

// session watches by one way to the apiserver until ctx ends.
func (p *Part) session(ctx context.Context, a *apiserver) {
	a.back = func() { signal(p.back) }
	var all sync.WaitGroup
	all.Go(func() { a.watch(ctx, nodeResource, "", p.nodes, &p.health) })
	all.Go(func() { a.watchWhole(ctx, nodeResource, "", "metadata.name="+p.cfg.Node, p.whole, &p.health) })
	all.Go(func() { a.watch(ctx, namespaceResource, "", p.namespaces, &p.health) })
	all.Go(func() { a.watch(ctx, podResource, "spec.nodeName="+p.cfg.Node, p.pods, &p.health) })
	all.Go(func() { p.controller.run(ctx, a) })
	all.Go(func() { p.keepTokens(ctx, a) })
	all.Wait()
}

const subjectConfig = "kubernetes: kubeconfig"

// watch keeps the store as the apiserver has the objects of a kind, until ctx ends: all of them, or those that a
// field selector picks. Their metadata alone is sent.
func (a *apiserver) watch(ctx context.Context, kind schema.GroupVersionResource, fields string,
	store cache.ReflectorStore, h *health) {
	r := a.metadata.Resource(kind)
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		o.FieldSelector = fields
		return r.List(ctx, o)
	}
	follow := func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		o.FieldSelector = fields
		return r.Watch(ctx, o)
	}
	a.reflect(ctx, kind, &metav1.PartialObjectMetadata{}, list, follow, store, h)
}

// watchWhole does the same with whole objects: all of a namespace, or of all where it is empty, that a field selector
// picks.
func (a *apiserver) watchWhole(ctx context.Context, kind schema.GroupVersionResource, namespace, fields string,
	store cache.ReflectorStore, h *health) {
	r := a.dynamic.Resource(kind).Namespace(namespace)
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		o.FieldSelector = fields
		return r.List(ctx, o)
	}
	follow := func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		o.FieldSelector = fields
		return r.Watch(ctx, o)
	}
	a.reflect(ctx, kind, &unstructured.Unstructured{}, list, follow, store, h)
}

// reflect runs a reflector, and tells how its requests go.
func (a *apiserver) reflect(ctx context.Context, kind schema.GroupVersionResource, like runtime.Object,
	list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	follow func(context.Context, metav1.ListOptions) (watch.Interface, error), store cache.ReflectorStore, h *health) {
	away, notBefore := false, time.Time{} // of the reflector's goroutine
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			pause(ctx, notBefore)
			ctx, cancel := context.WithTimeout(ctx, listAtMost)
			defer cancel()
			l, err := list(ctx, o)
			notBefore = time.Now().Add(retryAfter(err))
			h.result("read the "+kind.Resource, "list", kind.Resource, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			pause(ctx, notBefore)
			seconds := int64((watchLeast + rand.N(watchSpread)).Seconds())
			o.TimeoutSeconds = &seconds
			w, err := bounded(ctx, a.atMost, func(ctx context.Context) (watch.Interface, error) { return follow(ctx, o) })
			notBefore = time.Now().Add(retryAfter(err))
			h.result("watch the "+kind.Resource, "watch", kind.Resource, err)
			if err == nil { // a watch brings the list with it, or comes behind one
				h.result("", "list", kind.Resource, nil)
				if away {
					a.back()
				}
			}
			away = err != nil
			return w, err
		},
	}
	b := backoff
	cache.NewReflectorWithOptions(lw, like, store, cache.ReflectorOptions{Name: kind.Resource, Backoff: &b}).
		RunWithContext(ctx)
}

// bounded opens a watch that ends after a while, whether the other side is heard or not.
func bounded(ctx context.Context, most time.Duration,
	open func(context.Context) (watch.Interface, error)) (watch.Interface, error) {
	ctx, cancel := context.WithTimeout(ctx, most)
	w, err := open(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	return &boundedWatch{Interface: w, cancel: cancel}, nil
}

type boundedWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (w *boundedWatch) Stop() {
	w.cancel()
	w.Interface.Stop()
}

// annotate sets an annotation of a Node by server-side apply. It fails where the Node is not the one that was seen,
// so that it never makes one.
func (a *apiserver) annotate(ctx context.Context, n *Node, name, value string) error {
	body, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Node",
		"metadata": map[string]any{"name": n.Name, "uid": n.UID, "annotations": map[string]string{name: value}},
	})
	if err != nil {
		return err
	}
	force := true
	_, err = a.metadata.Resource(nodeResource).
		Patch(ctx, n.Name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: fieldManager, Force: &force})
	return err
}

// event makes a warning about a Node.
func (a *apiserver) event(ctx context.Context, n *Node, reason, message string) error {
	now := metav1.Now().UTC().Format(time.RFC3339)
	e := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":       map[string]any{"generateName": n.Name + ".", "namespace": eventNamespace},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "Node", "name": n.Name, "uid": n.UID},
		"reason":         reason, "message": message, "type": "Warning",
		"firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
		"source": map[string]any{
			"component": "skein",
			"host":      n.Name,
		}, "reportingComponent": "skein", "reportingInstance": n.Name,
	}}
	_, err := a.dynamic.Resource(eventResource).
		Namespace(eventNamespace).
		Create(ctx, e, metav1.CreateOptions{FieldManager: fieldManager})
	return err
}

// retryAfter is how long the apiserver asks to be left alone.
func retryAfter(err error) time.Duration {
	if s, ok := apierrors.SuggestsClientDelay(err); ok {
		return time.Duration(s) * time.Second
	}
	return 0
}
