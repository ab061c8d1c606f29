package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/bench"
	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/identity"
)

const (
	memoryLimit = 80 // MiB
	rest        = 30 * time.Second
	// kubelet writes its Node's status every five minutes when nothing changes (nodeStatusReportFrequency); each is an
	// event of the watch.
	heartbeats = 12 // an hour
)

const nodesLab = `name: nodes
sites:
  dc:   {nat: none}
  home: {nat: port-restricted-cone}
nodes:
  dc1:   {site: dc, server: true, relay: true, config: {kubernetes: {kubeconfig: DIR/dc1.kubeconfig, node: dc1}}}
  home1: {site: home, config: {kubernetes: {kubeconfig: DIR/home1.kubeconfig, node: home1}}}
`

// field is a control plane for which Nodes are data, and an agent that watches them.
type field struct {
	*run
	lab     *lab.Lab
	cluster *kube.Cluster
	api     *kube.Client
	watcher lab.Info
	like    *skeinv1.Record
	key     *identity.Key
	have    int // Nodes
}

// nodes measures what many Nodes cost an agent, and what the agents cost the apiserver.
func (r *run) nodes(ctx context.Context) (err error) {
	dir := filepath.Join(r.dir, "n")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	spec, err := lab.Parse("nodes.yaml", []byte(strings.ReplaceAll(nodesLab, "DIR", dir)))
	if err != nil {
		return err
	}
	spec.Name = fmt.Sprintf("n%d", os.Getpid())
	f := &field{run: r}
	if f.lab, err = lab.Up(ctx, spec, lab.Options{Dir: filepath.Join(dir, "lab"), Binary: r.binary}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.lab.Down(context.WithoutCancel(ctx))) }()
	if err := f.raise(ctx, dir); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.cluster.Close()) }()
	for _, n := range []int{10, 100, 1000} {
		if err := f.count(ctx, n); err != nil {
			return fmt.Errorf("%d Nodes: %w", n, err)
		}
	}
	return nil
}

func (f *field) raise(ctx context.Context, dir string) error {
	if err := f.lab.WaitConverged(ctx, 30*time.Second); err != nil {
		return err
	}
	on, err := f.lab.Node("dc1")
	if err != nil {
		return err
	}
	if f.watcher, err = f.lab.Node("home1"); err != nil {
		return err
	}
	programs, err := kube.Programs(".")
	if err != nil {
		return err
	}
	if f.cluster, err = kube.Raise(ctx, kube.Config{On: on, Dir: filepath.Join(dir, "control-plane"),
		Programs: programs}); err != nil {
		return err
	}
	return errors.Join(f.fill(ctx, dir), countBytes(f.watcher.Namespace))
}

// fill gives the cluster what the agents need of it.
func (f *field) fill(ctx context.Context, dir string) (err error) {
	for _, file := range []string{"crds", "agent", "admin"} {
		manifest, err := filepath.Abs("deploy/kubernetes/" + file + ".yaml")
		if err != nil {
			return err
		}
		if _, err := f.cluster.Kubectl(ctx, nil, "apply", "-f", manifest); err != nil {
			return err
		}
	}
	for host, account := range map[string]string{"dc1": "skein-admin", "home1": "skein-agent"} {
		if err := f.cluster.AddNode(ctx, host); err != nil {
			return err
		}
		token, err := f.cluster.Token(ctx, account, host)
		if err != nil {
			return err
		}
		if err := f.cluster.WriteKubeconfig(filepath.Join(dir, host+".kubeconfig"), token); err != nil {
			return err
		}
		f.have++
	}
	if f.api, err = f.cluster.Client(); err != nil {
		return err
	}
	if f.key, _, err = identity.LoadOrCreate(dir); err != nil {
		return err
	}
	c, err := f.lab.Client("home1")
	if err != nil {
		return err
	}
	nodes, err := c.Nodes(ctx, &skeinv1.NodesRequest{})
	for _, n := range nodes.GetNodes() {
		if n.GetNode().GetName() == "home1" {
			f.like = n.GetRecord()
		}
	}
	if err == nil && f.like == nil {
		err = errors.New("home1 has no record of itself")
	}
	return err
}

// count measures with so many Nodes.
func (f *field) count(ctx context.Context, n int) error {
	f.say("%d Nodes", n)
	items, err := kube.DataNodes(f.have, n-f.have, f.like, f.key)
	if err != nil {
		return err
	}
	for _, o := range items {
		if err := f.api.Create(ctx, "/api/v1/nodes", o); err != nil {
			return err
		}
	}
	first := f.have
	f.have = n
	if err := until(ctx, time.Minute, func() error { return f.knows(ctx, n) }); err != nil {
		return err
	}
	// What came of the Nodes that are new may still be written.
	if err := f.quiet(ctx); err != nil {
		return err
	}
	writes, err := f.writes(ctx)
	if err != nil {
		return err
	}
	bytesBefore, err := readBytes(f.watcher.Namespace)
	if err != nil {
		return err
	}
	for i := first; i < n; i++ { // one heartbeat of each that is new; the others' are as long
		err := f.api.Patch(ctx, fmt.Sprintf("/api/v1/nodes/data-%d/status", i),
			map[string]any{"status": map[string]any{"conditions": []any{map[string]any{
				"type": "Ready", "status": "True", "reason": "KubeletReady",
				"lastHeartbeatTime": time.Now().UTC().Format(time.RFC3339)}}}})
		if err != nil {
			return err
		}
	}
	if !pause.For(ctx, rest) {
		return ctx.Err()
	}
	written, err := f.writes(ctx)
	if err != nil {
		return err
	}
	written -= writes + float64(n-first) // this bench's own
	received, err := readBytes(f.watcher.Namespace)
	if err != nil {
		return err
	}
	each := float64(received-bytesBefore) / float64(n-first)
	f.add(bench.NewFigure(fmt.Sprintf("%d Nodes: writes to the apiserver, of a Node and hour", n), "",
		fmt.Sprintf("%.1f", written*float64(time.Hour/rest)/float64(n)), true,
		fmt.Sprintf("all requests that write, Leases left out, by the apiserver's own metrics, while %d Nodes send a "+
			"heartbeat each and for %s after it: %.0f", n-first, rest, written)))
	f.add(bench.NewFigure(fmt.Sprintf("%d Nodes: what an agent's watches receive in an hour", n), "",
		fmt.Sprintf("%.2f MiB", each*float64(n*heartbeats)/(1<<20)), true,
		fmt.Sprintf("%.0f bytes of TCP and TLS from the apiserver's port for a heartbeat, counted by nft where the agent "+
			"is, times %d an hour of each Node", each, heartbeats)))
	m, err := metrics(ctx, f.watcher.Namespace)
	if err != nil {
		return err
	}
	mib := m["process_resident_memory_bytes"] / (1 << 20)
	target, reached := "", true
	if n == 1000 {
		target, reached = fmt.Sprintf("≤ %d MiB", memoryLimit), mib <= memoryLimit
	}
	f.add(bench.NewFigure(fmt.Sprintf("%d Nodes: an agent's memory", n), target, fmt.Sprintf("%.1f MiB", mib), reached,
		"RSS after the above, userspace WireGuard, two members; each Node holds a record"))
	return nil
}

func (f *field) knows(ctx context.Context, n int) error {
	m, err := metrics(ctx, f.watcher.Namespace)
	if err == nil && int(m["skein_kubernetes_nodes"]) != n {
		err = fmt.Errorf("the agent knows %.0f", m["skein_kubernetes_nodes"])
	}
	return err
}

// quiet waits until nothing was written for five seconds.
func (f *field) quiet(ctx context.Context) error {
	last, since := -1.0, time.Now()
	return until(ctx, 2*time.Minute, func() error {
		now, err := f.writes(ctx)
		if err != nil {
			return err
		}
		if now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) < 5*time.Second {
			return errors.New("something is written")
		}
		return nil
	})
}

// writes are the requests that wrote something, as the apiserver counts them. Leases are its own.
func (f *field) writes(ctx context.Context) (sum float64, err error) {
	b, err := f.api.Get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	s := bufio.NewScanner(bytes.NewReader(b))
	s.Buffer(nil, 1<<20)
	all, err := readMetrics(s)
	for name, v := range all {
		if !strings.HasPrefix(name, "apiserver_request_total{") || strings.Contains(name, `resource="leases"`) {
			continue
		}
		for _, verb := range []string{"POST", "PUT", "PATCH", "APPLY", "DELETE"} {
			if strings.Contains(name, `verb="`+verb+`"`) {
				sum += v
			}
		}
	}
	return sum, err
}

// counted is the table of the rule that counts what comes from the apiserver.
var counted = &nftables.Table{Family: nftables.TableFamilyINet, Name: "bench"}

func inNamespace(name string, f func(*nftables.Conn) error) error {
	ns, err := netns.GetFromPath(fabric.Path(name))
	if err != nil {
		return err
	}
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		return err
	}
	return f(c)
}

// countBytes counts what comes from TCP port 6443 into a network namespace.
func countBytes(namespace string) error {
	return inNamespace(namespace, func(c *nftables.Conn) error {
		c.AddTable(counted)
		chain := c.AddChain(&nftables.Chain{Name: "in", Table: counted, Type: nftables.ChainTypeFilter,
			Hooknum:  nftables.ChainHookInput,
			Priority: nftables.ChainPriorityFilter})
		c.AddRule(&nftables.Rule{Table: counted, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1,
				Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{6443 >> 8, 6443 & 0xff}}, &expr.Counter{}}})
		return c.Flush()
	})
}

func readBytes(namespace string) (n uint64, err error) {
	err = inNamespace(namespace, func(c *nftables.Conn) error {
		rules, err := c.GetRules(counted, &nftables.Chain{Name: "in", Table: counted})
		for _, r := range rules {
			for _, e := range r.Exprs {
				if k, ok := e.(*expr.Counter); ok {
					n = k.Bytes
				}
			}
		}
		return err
	})
	return n, err
}
