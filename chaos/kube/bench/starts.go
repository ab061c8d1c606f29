package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/bench"
	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	oneByOne    = 30  // pods on each of the two nodes, in turns
	atOnce      = 100 // pods on one node
	startSlower = 1.2 // of what the reference plugins take
	startWithin = 8 * time.Minute
	reference   = "cloud1" // the node that gets the reference plugins
	outside     = "vm1"    // a host without Kubernetes
)

// referenceNetwork chains what skein's own configuration of these nodes chains. Its name comes first, so containerd
// takes it.
const (
	referenceFile    = "etc/cni/net.d/00-reference.conflist"
	referenceNetwork = `{"cniVersion": "1.0.0", "name": "reference", "plugins": [
{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "ipam": {"type": "host-local",
 "ranges": [[{"subnet": "10.200.0.0/16"}], [{"subnet": "fd00:200::/112"}]], "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}},
{"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`
)

// times are when a pod went through its states, as a watch told.
type times struct{ scheduled, running, gone time.Time }

// pods follows the pods of this bench.
type pods struct {
	mu      sync.Mutex
	of      map[string]times
	changed chan struct{} // gets one when something was told
}

func (p *pods) observe(kind string, object json.RawMessage) {
	var pod kube.PodState
	if json.Unmarshal(object, &pod) != nil {
		return
	}
	p.mu.Lock()
	t, now := p.of[pod.Metadata.Name], time.Now()
	if pod.Spec.NodeName != "" && t.scheduled.IsZero() {
		t.scheduled = now
	}
	if pod.Status.Phase == "Running" && t.running.IsZero() {
		t.running = now
	}
	if kind == "DELETED" {
		t.gone = now
	}
	p.of[pod.Metadata.Name] = t
	p.mu.Unlock()
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

// wait waits until every one of some pods is as it should be, and returns its times.
func (p *pods) wait(ctx context.Context, names []string, is func(times) bool) (out []times, err error) {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	for {
		out = out[:0]
		p.mu.Lock()
		for _, n := range names {
			if t := p.of[n]; is(t) {
				out = append(out, t)
			}
		}
		p.mu.Unlock()
		if len(out) == len(names) {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d pods have come that far: %w", len(out), len(names), ctx.Err())
		case <-p.changed:
		}
	}
}

func isRunning(t times) bool { return !t.running.IsZero() }
func isGone(t times) bool    { return !t.gone.IsZero() }

// starts compares skein with CNI's reference plugins, on two nodes that are alike otherwise.
func (c *cluster) starts(ctx context.Context) error {
	for _, plugin := range []string{"bridge", "host-local"} {
		out, err := exec.CommandContext(ctx, "cp", "-L", filepath.Join("bin/tools", plugin),
			filepath.Join(c.Machines[reference].Dir, "opt/cni/bin")).CombinedOutput()
		if err != nil {
			return fmt.Errorf("reference plugins: %w: %s", err, out)
		}
	}
	if err := c.Machines[reference].WriteFile(referenceFile, referenceNetwork); err != nil {
		return err
	}
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &pods{of: map[string]times{}, changed: make(chan struct{}, 1)}
	ended := make(chan error, 1)
	go func() {
		ended <- c.api.Watch(watching, "/api/v1/namespaces/default/pods?watch=1&labelSelector=bench%3Dpod", p.observe)
	}()
	if err := c.usesReference(ctx, p); err != nil {
		return err
	}
	err := c.onePod(ctx, p)
	if err == nil {
		err = c.manyPods(ctx, p)
	}
	cancel()
	return errors.Join(err, <-ended)
}

// usesReference waits until the runtime of that node has taken the other configuration.
func (c *cluster) usesReference(ctx context.Context, p *pods) error {
	for i := range 20 {
		name := fmt.Sprintf("try-%d", i)
		if err := c.startPod(ctx, name, reference); err != nil {
			return err
		}
		if _, err := p.wait(ctx, []string{name}, isRunning); err != nil {
			return err
		}
		state, err := c.Cluster.Pod(ctx, "default", name)
		if err != nil {
			return err
		}
		if err := c.removePods(ctx, p, name); err != nil {
			return err
		}
		if strings.HasPrefix(state.Status.PodIP, "10.200.") {
			return nil
		}
	}
	return fmt.Errorf("containerd on %s does not take %s", reference, referenceFile)
}

func (c *cluster) removePods(ctx context.Context, p *pods, names ...string) error {
	for _, n := range names {
		if err := c.api.Delete(ctx, "/api/v1/namespaces/default/pods/"+n); err != nil {
			return err
		}
	}
	_, err := p.wait(ctx, names, isGone)
	return err
}

// onePod starts pods one after another, on the two nodes in turns.
func (c *cluster) onePod(ctx context.Context, p *pods) error {
	c.say("pods one after another: %d on each of two nodes", oneByOne)
	took := map[string]*bench.Times{subject: {}, reference: {}}
	for i := range oneByOne {
		for node, into := range took {
			name := fmt.Sprintf("one-%s-%d", node, i)
			if err := c.startPod(ctx, name, node); err != nil {
				return err
			}
			t, err := p.wait(ctx, []string{name}, isRunning)
			if err != nil {
				return err
			}
			into.Add(t[0].running.Sub(t[0].scheduled), name)
			if err := c.removePods(ctx, p, name); err != nil {
				return err
			}
		}
	}
	ratio := float64(took[subject].Median()) / float64(took[reference].Median())
	c.add(bench.NewFigure("pod start, scheduled to Running", fmt.Sprintf("≤ %.1f × the reference plugins", startSlower),
		fmt.Sprintf("%.2f ×: %s beside %s", ratio, took[subject].Text(95), took[reference].Text(95)), ratio <= startSlower,
		"kubelet and containerd on two nodes alike, image present, dual stack, chained with portmap and bandwidth; the "+
			"other node has bridge with host-local; pods in turns, medians"))
	return nil
}

// manyPods starts a hundred on each of the two nodes, all at the same time, so that what else this machine does burdens
// both; and a hundred on a host without Kubernetes.
func (c *cluster) manyPods(ctx context.Context, p *pods) error {
	c.say("%d pods at once on each of two nodes", atOnce)
	sum, count, err := c.added(ctx, subject)
	if err != nil {
		return err
	}
	names := map[string][]string{}
	began := time.Now()
	for i := range atOnce {
		for _, node := range []string{subject, reference} {
			name := fmt.Sprintf("many-%s-%d", node, i)
			if err := c.startPod(ctx, name, node); err != nil {
				return err
			}
			names[node] = append(names[node], name)
		}
	}
	took := map[string]time.Duration{}
	for node, of := range names {
		all, err := p.wait(ctx, of, isRunning)
		if err != nil {
			return err
		}
		for _, t := range all {
			took[node] = max(took[node], t.running.Sub(began))
		}
	}
	after, n, err := c.added(ctx, subject)
	if err != nil {
		return err
	}
	ratio := float64(took[subject]) / float64(took[reference])
	c.add(bench.NewFigure(fmt.Sprintf("%d pods at once on one node", atOnce),
		fmt.Sprintf("≤ %.1f × the reference plugins", startSlower),
		fmt.Sprintf("%.2f ×: %.1f s beside %.1f s", ratio, took[subject].Seconds(), took[reference].Seconds()),
		ratio <= startSlower,
		"from the first request to the apiserver until the last of a node's pods is told to run; both nodes at the same "+
			"time, on the same processors"))
	if err := c.removePods(ctx, p, append(names[subject], names[reference]...)...); err != nil {
		return err
	}
	return c.withoutKubernetes(ctx, (after-sum)/(n-count))
}

// withoutKubernetes starts a hundred pods on a host that is not a Node. with is what the agent took for an ADD with
// Kubernetes, in seconds.
func (c *cluster) withoutKubernetes(ctx context.Context, with float64) error {
	var names []string
	for i := range atOnce {
		names = append(names, fmt.Sprintf("many-%d", i))
	}
	began := time.Now()
	if err := c.Lab.StartPods(ctx, time.Minute, lab.StartPods{Nodes: []string{outside}, Pods: names}); err != nil {
		return err
	}
	took := time.Since(began)
	sum, count, err := c.added(ctx, outside)
	if err != nil {
		return err
	}
	c.add(bench.NewFigure("the same without Kubernetes", "", fmt.Sprintf("%.1f s; an ADD at the agent takes %.0f ms, "+
		"with Kubernetes %.0f ms",
		took.Seconds(), sum/count*1000, with*1000), true,
		"as many processes of the plugin at once on a virtual machine of the same mesh; no kubelet, no containerd, no "+
			"container. Means by the agents' own histogram"))
	return c.Lab.StopPods(ctx, lab.StopPods{Nodes: []string{outside}, Pods: names})
}

// added is how long an agent took for all ADDs of its plugin, in seconds, and how many they were.
func (c *cluster) added(ctx context.Context, agent string) (sum, count float64, err error) {
	on, err := c.Lab.Node(agent)
	if err != nil {
		return 0, 0, err
	}
	m, err := metrics(ctx, on.Namespace)
	return m[`skein_cni_request_seconds_sum{verb="ADD"}`], m[`skein_cni_request_seconds_count{verb="ADD"}`], err
}

// metrics are what the agent in a network namespace tells.
func metrics(ctx context.Context, namespace string) (map[string]float64, error) {
	h := &http.Client{Transport: &http.Transport{DialContext: kube.DialIn(namespace), DisableKeepAlives: true}}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9469/metrics", nil)
	if err != nil {
		return nil, err
	}
	a, err := h.Do(r)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	return readMetrics(bufio.NewScanner(a.Body))
}

// readMetrics reads Prometheus' text.
func readMetrics(s *bufio.Scanner) (map[string]float64, error) {
	out := map[string]float64{}
	for s.Scan() {
		i := strings.LastIndexByte(s.Text(), ' ')
		if i < 0 || strings.HasPrefix(s.Text(), "#") {
			continue
		}
		var v float64
		if _, err := fmt.Sscan(s.Text()[i+1:], &v); err == nil {
			out[s.Text()[:i]] = v
		}
	}
	return out, s.Err()
}
