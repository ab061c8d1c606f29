package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// defaultNamespace is the one of pods that name none, as in Kubernetes.
const defaultNamespace = "default"

// Pod is a network namespace on a node that the real CNI plugin has given its link and addresses. The lab is its
// container runtime: it keeps what ADD returned, and gives that back with DEL.
type Pod struct {
	Node        string            `json:"node"`
	Name        string            `json:"name"`
	Namespace   string            `json:"namespace"`
	ContainerID string            `json:"containerId"`
	NetNS       string            `json:"netns"` // path
	Pool        string            `json:"pool,omitempty"`
	Asked       []netip.Addr      `json:"asked,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Addresses   []netip.Addr      `json:"addresses,omitempty"` // that ADD returned
	Result      json.RawMessage   `json:"result,omitempty"`
}

// Place is the pod as steps and commands write it: NODE/POD.
func (p Pod) Place() string { return p.Node + "/" + p.Name }

func newPod(l *Lab, node, name string, s StartPods) Pod {
	p := Pod{Node: node, Name: name, Namespace: s.Namespace, Pool: s.Pool, Asked: s.IPs, Annotations: s.Annotations,
		NetNS: fabric.Path(fabric.PodNS(l.Spec.Name, node, name))}
	if p.Namespace == "" {
		p.Namespace = defaultNamespace
	}
	const most = 24 // of each name, so that the whole stays below the 64 characters that skein allows
	p.ContainerID = fmt.Sprintf("%.*s.%.*s.%08x", most, node, most, name, rand.Uint32())
	return p
}

func (a *agent) podDir() string             { return filepath.Join(a.dir, "pods") }
func (a *agent) podFile(name string) string { return filepath.Join(a.podDir(), name+".json") }

// Pods lists a node's pods, by name.
func (l *Lab) Pods(node string) ([]Pod, error) {
	a, err := l.agent(node)
	if err != nil {
		return nil, err
	}
	names, err := fabric.Pods(l.Spec.Name, node)
	if err != nil {
		return nil, err
	}
	var out []Pod
	for _, n := range names {
		p, err := a.pod(n)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// pod reads what the lab noted of a pod.
func (a *agent) pod(name string) (Pod, error) {
	b, err := os.ReadFile(a.podFile(name))
	if errors.Is(err, os.ErrNotExist) {
		return Pod{}, fmt.Errorf("node %s has no pod %q; pods: %s", a.node.Name, name, a.podNames())
	}
	var p Pod
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil {
		return p, fmt.Errorf("pod %s of node %s: its record: %w", name, a.node.Name, err)
	}
	return p, nil
}

func (a *agent) podNames() string {
	entries, err := os.ReadDir(a.podDir())
	if err != nil || len(entries) == 0 {
		return "none"
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	return strings.Join(names, ", ")
}

func (a *agent) notePod(p Pod) error {
	b, err := json.MarshalIndent(p, "", "  ")
	if err == nil {
		err = os.MkdirAll(a.podDir(), 0o700)
	}
	if err == nil {
		err = os.WriteFile(a.podFile(p.Name), b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("pod %s: record: %w", p.Place(), err)
	}
	return nil
}

// StartPods makes the pods' namespaces and lets the plugin add each to the mesh, all at once. One that fails is
// taken away again; until within is over it is tried again, as a kubelet would.
func (l *Lab) StartPods(ctx context.Context, within time.Duration, s StartPods) error {
	agents, err := l.pick(s.Nodes)
	if err != nil {
		return err
	}
	start := time.Now()
	var mu sync.Mutex
	var slowest time.Duration
	err = eachPod(agents, func(*agent) ([]string, error) { return s.Pods, nil }, func(a *agent, name string) error {
		return eventually(ctx, within, 0, func(ctx context.Context) error {
			took, err := l.startPod(ctx, a, name, s)
			mu.Lock()
			slowest = max(slowest, took)
			mu.Unlock()
			if s.Told != nil && err == nil {
				s.Told(name, took)
			}
			return err
		})
	})
	if n := len(s.Nodes) * len(s.Pods); err == nil && n > 1 {
		l.progress("%d pods in %s, the slowest ADD in %s", n, round(time.Since(start)), round(slowest))
	}
	return err
}

// startPod is one try; it tells how long the plugin took.
func (l *Lab) startPod(ctx context.Context, a *agent, name string, s StartPods) (took time.Duration, err error) {
	p := newPod(l, a.node.Name, name, s)
	if err := fabric.AddPod(l.Spec.Name, p.Node, name); err != nil {
		return 0, finalError{fmt.Errorf("pod %s: %w", p.Place(), err)}
	}
	start := time.Now()
	result, err := l.plugin(ctx, a, "ADD", p)
	took = time.Since(start)
	if err == nil {
		p.Result = result
		p.Addresses, err = addressesIn(result)
	}
	if err == nil && !s.Fails {
		err = l.keepPod(a, p)
	}
	if err != nil || s.Fails {
		left, lerr := fabric.Links(fabric.PodNS(l.Spec.Name, p.Node, name))
		if lerr == nil && err != nil && len(left) > 0 {
			lerr = fmt.Errorf("the failed ADD left %s in the pod; it failed with: %w", strings.Join(left, ", "), err)
		}
		if err := errors.Join(lerr, l.removePod(context.WithoutCancel(ctx), a, p)); err != nil {
			return took, finalError{fmt.Errorf("pod %s: %w", p.Place(), err)}
		}
	}
	if err = s.judge(p, err); err != nil {
		return took, err
	}
	if s.Longest > 0 && took > s.Longest {
		return took, finalError{fmt.Errorf("pod %s: the plugin took %s, allowed: %s", p.Place(), round(took), s.Longest)}
	}
	return took, nil
}

// keepPod notes a pod that was started, and looks whether the kernel has what the plugin says.
func (l *Lab) keepPod(a *agent, p Pod) error {
	has, err := fabric.Addresses(p.NetNS)
	if err != nil {
		return err
	}
	want := slices.SortedFunc(slices.Values(p.Addresses), netip.Addr.Compare)
	if !slices.Equal(has, want) {
		return fmt.Errorf("CNI ADD says that it has given %s, the pod's interface has %s", list(want), list(has))
	}
	return a.notePod(p)
}

// judge compares what became of an ADD with what was expected.
func (s StartPods) judge(p Pod, err error) error {
	var said *PluginError
	switch {
	case !s.Fails && err != nil:
		return fmt.Errorf("pod %s: %w", p.Place(), err)
	case !s.Fails:
		return nil
	case err == nil:
		return fmt.Errorf("pod %s got %s, but should have been refused", p.Place(), list(p.Addresses))
	case !errors.As(err, &said):
		return fmt.Errorf("pod %s should have been refused by the plugin: %w", p.Place(), err)
	case s.Code != 0 && said.Code != s.Code:
		return fmt.Errorf("pod %s was refused with another code than %d: %w", p.Place(), s.Code, err)
	case !strings.Contains(said.Error(), s.Text):
		return fmt.Errorf("pod %s was refused, but not with %q: %w", p.Place(), s.Text, err)
	}
	return nil
}

// StopPods takes pods out of the mesh and removes their namespaces; DEL has to succeed, whatever state the agent is in.
func (l *Lab) StopPods(ctx context.Context, s StopPods) error {
	agents, err := l.pick(s.Nodes)
	if err != nil {
		return err
	}
	names := func(a *agent) ([]string, error) {
		if s.Pods != nil {
			return s.Pods, nil
		}
		return fabric.Pods(l.Spec.Name, a.node.Name)
	}
	return eachPod(agents, names, func(a *agent, name string) error {
		p, err := a.pod(name)
		if err != nil {
			return err
		}
		if err := l.removePod(ctx, a, p); err != nil {
			return fmt.Errorf("pod %s: %w", p.Place(), err)
		}
		return nil
	})
}

func (l *Lab) removePod(ctx context.Context, a *agent, p Pod) error {
	_, err := l.plugin(ctx, a, "DEL", p)
	if err != nil {
		return err
	}
	if err := fabric.RemovePod(l.Spec.Name, p.Node, p.Name); err != nil {
		return err
	}
	if err := os.Remove(a.podFile(p.Name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("record: %w", err)
	}
	return nil
}

// eachPod runs fn for pods of several nodes, all at once, and joins what went wrong, in order.
func eachPod(agents []*agent, names func(*agent) ([]string, error), fn func(*agent, string) error) error {
	return each(agents, func(a *agent) error {
		list, err := names(a)
		if err != nil {
			return err
		}
		return eachPlace(list, func(name string) error { return fn(a, name) })
	})
}

func list(addrs []netip.Addr) string {
	if len(addrs) == 0 {
		return "no address"
	}
	var words []string
	for _, a := range addrs {
		words = append(words, a.String())
	}
	return strings.Join(words, " and ")
}
