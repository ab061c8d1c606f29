package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
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
var backoff = wait.Backoff{Duration: 500 * time.Millisecond, Cap: 8 * time.Second, Steps: 5, Factor: 2, Jitter: 0.5}

// dialTimeout is short, since an apiserver that returns shall be heard soon: a connection that nobody answers is what
// a host that is away looks like.
const dialTimeout = 3 * time.Second

// An agent asks the apiserver for a few things; the one that takes custom resources to the log, for as many as there
// are.
const (
	requestsPerSecond = 50
	requestsBurst     = 200
)

// configEvery is how often a kubeconfig that is not there, or cannot be used, is looked for.
const configEvery = 5 * time.Second

// apiserver is the way to the apiserver.
type apiserver struct {
	metadata metadata.Interface
	dynamic  dynamic.Interface
}

// restConfig reads where the apiserver is and how to show who we are.
func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == config.InCluster {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", kubeconfig)
}

// newAPIServer makes the clients. Nothing is sent yet.
func newAPIServer(c *rest.Config) (*apiserver, error) {
	c.UserAgent, c.QPS, c.Burst = "skein", requestsPerSecond, requestsBurst
	c.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext
	h, err := rest.HTTPClientFor(c) // one connection for all
	if err != nil {
		return nil, err
	}
	a := &apiserver{}
	if a.metadata, err = metadata.NewForConfigAndClient(c, h); err != nil {
		return nil, err
	}
	a.dynamic, err = dynamic.NewForConfigAndClient(c, h)
	return a, err
}

// connect waits until the kubeconfig can be used; nil: ctx has ended.
func (p *Part) connect(ctx context.Context) *apiserver {
	for {
		c, err := restConfig(p.cfg.Kubeconfig)
		if err == nil {
			var a *apiserver
			if a, err = newAPIServer(c); err == nil {
				p.host.Report(subjectConfig, "", "", "")
				return a
			}
		}
		advice := "correct it, or take kubernetes.kubeconfig out of the configuration; the mesh works without"
		if errors.Is(err, fs.ErrNotExist) {
			advice = "it is used as soon as it is there; the mesh works without"
		}
		p.host.Report(subjectConfig, "warning", fmt.Sprintf("kubeconfig %s: %v", p.cfg.Kubeconfig, err), advice)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(configEvery):
		}
	}
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
	reflect(ctx, kind, &metav1.PartialObjectMetadata{}, list, follow, store, h)
}

// watchWhole does the same with whole objects, of a kind that has a resource definition.
func (a *apiserver) watchWhole(ctx context.Context, kind schema.GroupVersionResource, store cache.ReflectorStore,
	h *health) {
	r := a.dynamic.Resource(kind)
	list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }
	reflect(ctx, kind, &unstructured.Unstructured{}, list, r.Watch, store, h)
}

// reflect runs a reflector, and tells how its requests go.
func reflect(ctx context.Context, kind schema.GroupVersionResource, like runtime.Object,
	list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	follow func(context.Context, metav1.ListOptions) (watch.Interface, error), store cache.ReflectorStore, h *health) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, err := list(ctx, o)
			h.result("read the "+kind.Resource, "list", kind.Resource, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := follow(ctx, o)
			h.result("watch the "+kind.Resource, "watch", kind.Resource, err)
			if err == nil { // a watch brings the list with it, or comes behind one
				h.result("", "list", kind.Resource, nil)
			}
			return w, err
		},
	}
	b := backoff
	cache.NewReflectorWithOptions(lw, like, store, cache.ReflectorOptions{Name: kind.Resource, Backoff: &b}).
		RunWithContext(ctx)
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
