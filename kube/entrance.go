package kube

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/wholefile"
	"github.com/skeinmesh/skein/kube/join"
)

// The objects by which hosts become members. All are made with the chart.
const (
	claimName       = "skein-cluster"
	agentTokenName  = "skein-join"
	serverTokenName = "skein-join-server"
)

// namespaceFile has the namespace of the pod that the agent runs in.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// meantFile is the ID of the mesh that this host has decided to make, until it has.
const meantFile = "cluster-to-make"

var (
	secretResource    = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	configMapResource = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
)

// Entrance is how the agent of a pod becomes a member.
type Entrance struct {
	Kubeconfig string
	Node       string
	Server     bool                                              // this host is to be a server
	Dir        string                                            // the state directory
	Namespace  string                                            // of the chart's objects; empty: the pod's own
	TokenOf    func(text string) (cluster, id string, err error) // what a token says of itself
	Log        *slog.Logger

	api   *apiserver
	claim join.Claim // as it was seen last
	since time.Time  // when it was first seen so
	said  string
}

// lookEvery is how often a host that waits looks, at first; up to lookSeldom later.
const (
	lookEvery  = 500 * time.Millisecond
	lookSeldom = 5 * time.Second
)

// Enter waits until it is decided how this host becomes a member: by a token, or by making the mesh with an ID. refused
// is the token that did not do; empty: none was tried.
func (e *Entrance) Enter(ctx context.Context, refused string) (token string, create identity.ClusterID, err error) {
	for pause := lookEvery; ; pause = min(pause+pause/8, lookSeldom) {
		step, w, err := e.look(ctx, refused)
		if err == nil {
			switch step.Act {
			case join.Join:
				return w.Token, create, nil
			case join.Take:
				err = e.writeClaim(ctx)
			case join.Settle:
				create, err = e.commit(ctx)
			case join.Create:
				create, err = identity.ParseClusterID(e.claim.Cluster)
			}
			if err == nil && create != (identity.ClusterID{}) {
				return "", create, nil
			}
		}
		e.say(step.Why, err)
		if step.Look > 0 {
			pause = min(pause, step.Look)
		}
		select {
		case <-ctx.Done():
			return "", identity.ClusterID{}, fmt.Errorf("waiting to become a member of a mesh: %w", ctx.Err())
		case <-time.After(pause):
		}
	}
}

// say logs why this host waits, once for each reason. Another host's write in between is none.
func (e *Entrance) say(why string, err error) {
	if err != nil && !apierrors.IsConflict(err) {
		why = err.Error()
	}
	if why != "" && why != e.said {
		e.said = why
		e.Log.Info("this host is not a member of a mesh yet", "why", why)
	}
}

// look reads what the apiserver has, and decides.
func (e *Entrance) look(ctx context.Context, refused string) (join.Step, join.World, error) {
	w := join.World{Refused: refused}
	if err := e.connect(); err != nil {
		return join.Step{}, w, err
	}
	name := agentTokenName
	if e.Server {
		name = serverTokenName
		o, err := e.get(ctx, configMapResource, claimName)
		if err != nil {
			return join.Step{}, w, err
		}
		if o != nil {
			c := claimOf(o)
			if e.since.IsZero() || c != e.claim {
				e.claim, e.since = c, time.Now()
			}
			w.Claim, w.Stood = &c, time.Since(e.since)
		}
	}
	o, err := e.get(ctx, secretResource, name)
	if err != nil {
		return join.Step{}, w, err
	}
	if w.Token = tokenOf(o); w.Token != "" {
		if w.TokenCluster, _, err = e.TokenOf(w.Token); err != nil {
			return join.Step{}, w, fmt.Errorf("Secret %s: %w", name, err)
		}
	}
	meant, err := os.ReadFile(filepath.Join(e.Dir, meantFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return join.Step{}, w, err
	}
	return join.Next(join.Host{Node: e.Node, Server: e.Server, Meant: string(meant)}, w), w, nil
}

func (e *Entrance) connect() error {
	if e.api != nil {
		return nil
	}
	c, _, err := restConfig(e.Kubeconfig)
	if err != nil {
		return fmt.Errorf("the way to the apiserver: %w", err)
	}
	if e.Namespace == "" {
		if e.Namespace, err = podNamespace(); err != nil {
			return err
		}
	}
	e.api, err = newAPIServer(c)
	return err
}

// podNamespace is the namespace of the pod that this process runs in.
func podNamespace() (string, error) {
	b, err := os.ReadFile(namespaceFile)
	if err != nil {
		return "", fmt.Errorf("the namespace of this pod: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// get is an object of the chart's; nil: it is not there.
func (e *Entrance) get(ctx context.Context, kind schema.GroupVersionResource, name string) (*unstructured.Unstructured,
	error) {
	return e.api.object(ctx, kind, e.Namespace, name)
}

func (a *apiserver) object(ctx context.Context, kind schema.GroupVersionResource, ns, name string) (
	*unstructured.Unstructured, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	o, err := a.dynamic.Resource(kind).Namespace(ns).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s %s/%s: %w", kind.Resource, ns, name, err)
	}
	return o, nil
}

// replaceData writes fields of an object's data, if the object is as it was read.
func (a *apiserver) replaceData(ctx context.Context, kind schema.GroupVersionResource, o *unstructured.Unstructured,
	data map[string]string) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	o = o.DeepCopy()
	if err := unstructured.SetNestedStringMap(o.Object, data, "data"); err != nil {
		return err
	}
	_, err := a.dynamic.Resource(kind).
		Namespace(o.GetNamespace()).
		Update(ctx, o, metav1.UpdateOptions{FieldManager: fieldManager})
	if err != nil {
		return fmt.Errorf("write %s %s/%s: %w", kind.Resource, o.GetNamespace(), o.GetName(), err)
	}
	return nil
}

func claimOf(o *unstructured.Unstructured) join.Claim {
	data, _, _ := unstructured.NestedStringMap(o.Object, "data")
	return join.Claim{Node: data["node"], Cluster: data["cluster"]}
}

// tokenOf is the token in a Secret; empty: there is none.
func tokenOf(o *unstructured.Unstructured) string {
	if o == nil {
		return ""
	}
	data, _, _ := unstructured.NestedStringMap(o.Object, "data")
	b, err := base64.StdEncoding.DecodeString(data["token"])
	if err != nil {
		return ""
	}
	return string(b)
}

// reread is the ConfigMap, if it is as the decision took it for.
func (e *Entrance) reread(ctx context.Context) (*unstructured.Unstructured, error) {
	o, err := e.get(ctx, configMapResource, claimName)
	if err == nil && (o == nil || claimOf(o) != e.claim) {
		err = errors.New("ConfigMap skein-cluster has just been changed by another host")
	}
	return o, err
}

// writeClaim claims the right to make the mesh.
func (e *Entrance) writeClaim(ctx context.Context) error {
	o, err := e.reread(ctx)
	if err != nil {
		return err
	}
	return e.api.replaceData(ctx, configMapResource, o, map[string]string{"node": e.Node})
}

// commit writes down which mesh is made, first here, so that this host makes it also after a crash, and then there.
func (e *Entrance) commit(ctx context.Context) (id identity.ClusterID, err error) {
	o, err := e.reread(ctx)
	if err != nil {
		return id, err
	}
	var fresh identity.ClusterID
	rand.Read(fresh[:])
	if err := wholefile.Replace(filepath.Join(e.Dir, meantFile), []byte(fresh.String())); err != nil {
		return id, err
	}
	data := map[string]string{"node": e.Node, "cluster": fresh.String()}
	if err := e.api.replaceData(ctx, configMapResource, o, data); err != nil {
		return id, err // if it has arrived all the same, the next look finds it
	}
	return fresh, nil
}

// Entered forgets that this host had a mesh to make: it is a member now.
func Entered(dir string) error {
	err := os.Remove(filepath.Join(dir, meantFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
