package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/bench"
)

const (
	changes   = 100
	newsLimit = time.Second
	patience  = 20 * time.Second
	subject   = "home1" // whose Node and pod are changed
)

// news measures how long a change at the apiserver takes to where it counts, from before the request on.
func (c *cluster) news(ctx context.Context) error {
	for _, one := range []struct {
		name, how string
		change    func(ctx context.Context, i int) (time.Duration, error)
	}{
		{"a Node's annotation in all agents' records",
			"skein.dev/persistent-keepalive of home1's Node; from before the request to the apiserver until the last of the " +
				"five agents has the new record, by its own clock",
			c.nodeAnnotation},
		{"an AddressPool in all agents' state",
			"its cooldown; from before the request until the last of the five agents answers with it: through the controller, " +
				"the log, and back",
			c.addressPool},
		{"a pod's annotation in its kernel",
			"an egress, on and off in turns, of a pod that runs behind a NAT; from before the request until table 118 in its " +
				"network namespace has the route, or has it no more",
			c.podAnnotation},
	} {
		c.say("%d changes: %s", changes, one.name)
		var took bench.Times
		for i := range changes {
			d, err := one.change(ctx, i)
			if err != nil {
				return fmt.Errorf("%s, change %d: %w", one.name, i, err)
			}
			took.Add(d, fmt.Sprintf("change %d", i))
		}
		c.add(took.Figure(one.name, 99, newsLimit, one.how))
	}
	return nil
}

// onAll waits until f holds on every agent, and returns the latest time that f tells.
func (c *cluster) onAll(ctx context.Context,
	f func(ctx context.Context, agent string) (time.Time, error)) (last time.Time, err error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, n := range c.Lab.Spec.NodeNames() {
		wg.Go(func() {
			var at time.Time
			werr := until(ctx, patience, func() (err error) {
				at, err = f(ctx, n)
				return err
			})
			mu.Lock()
			defer mu.Unlock()
			if werr != nil {
				err = fmt.Errorf("%s: %w", n, werr)
			}
			if at.After(last) {
				last = at
			}
		})
	}
	wg.Wait()
	return last, err
}

func (c *cluster) nodeAnnotation(ctx context.Context, i int) (time.Duration, error) {
	want := uint32(100 + i)
	began := time.Now()
	err := c.api.Patch(ctx, "/api/v1/nodes/"+subject,
		map[string]any{"metadata": map[string]any{"annotations": map[string]string{
			"skein.dev/persistent-keepalive": fmt.Sprint(want)}}})
	if err != nil {
		return 0, err
	}
	last, err := c.onAll(ctx, func(ctx context.Context, agent string) (time.Time, error) {
		client, err := c.Lab.Client(agent)
		if err != nil {
			return time.Time{}, err
		}
		r, err := client.Nodes(ctx, &skeinv1.NodesRequest{})
		if err != nil {
			return time.Time{}, err
		}
		for _, n := range r.GetNodes() {
			if n.GetNode().GetName() == subject && n.GetRecord().GetPersistentKeepalive() == want {
				return time.Now().Add(-time.Duration(n.GetRecordAgeNanos())), nil
			}
		}
		return time.Time{}, fmt.Errorf("it has another record")
	})
	return last.Sub(began), err
}

const poolPath = "/apis/skein.dev/v1alpha1/addresspools"

func (c *cluster) addressPool(ctx context.Context, i int) (time.Duration, error) {
	if i == 0 {
		err := c.api.Create(ctx, poolPath, map[string]any{"apiVersion": "skein.dev/v1alpha1", "kind": "AddressPool",
			"metadata": map[string]any{"name": "bench"},
			"spec":     map[string]any{"subnets": []any{map[string]any{"ipv4": "10.101.0.0/24"}}, "cooldownSeconds": 1}})
		if err != nil {
			return 0, err
		}
	}
	want := uint32(1000 + i)
	began := time.Now()
	if err := c.api.Patch(ctx, poolPath+"/bench",
		map[string]any{"spec": map[string]any{"cooldownSeconds": want}}); err != nil {
		return 0, err
	}
	last, err := c.onAll(ctx, func(ctx context.Context, agent string) (time.Time, error) {
		client, err := c.Lab.Client(agent)
		if err != nil {
			return time.Time{}, err
		}
		r, err := client.Pools(ctx, &skeinv1.PoolsRequest{})
		if err != nil {
			return time.Time{}, err
		}
		for _, p := range r.GetPools() {
			if p.GetPool().GetName() == "bench" && p.GetPool().GetCooldownSeconds() == want {
				return time.Now(), nil
			}
		}
		return time.Time{}, fmt.Errorf("its state has another pool")
	})
	return last.Sub(began), err
}

func (c *cluster) podAnnotation(ctx context.Context, i int) (time.Duration, error) {
	const name = "client"
	if i == 0 {
		if err := c.startPod(ctx, name, subject); err != nil {
			return 0, err
		}
		if _, err := c.Cluster.Kubectl(ctx, nil, "wait", "--for=condition=Ready", "--timeout=60s", "pod/"+name); err != nil {
			return 0, err
		}
	}
	p, err := c.Cluster.Pod(ctx, "default", name)
	if err != nil {
		return 0, err
	}
	pid, err := c.Workers[subject].Sandbox(p.Metadata.UID)
	if err != nil {
		return 0, err
	}
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	on := i%2 == 0
	value := any("nat")
	if !on {
		value = nil
	}
	began := time.Now()
	err = c.api.Patch(ctx, "/api/v1/namespaces/default/pods/"+name,
		map[string]any{"metadata": map[string]any{"annotations": map[string]any{"skein.dev/egress.out": value}}})
	if err != nil {
		return 0, err
	}
	err = until(ctx, patience, func() error {
		routes, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: 118}, netlink.RT_FILTER_TABLE)
		if err == nil && (len(routes) > 0) != on {
			err = fmt.Errorf("table 118 has %d routes", len(routes))
		}
		return err
	})
	return time.Since(began), err
}

// startPod makes a pod that does nothing on a node. The scheduler gives it to the node.
func (c *cluster) startPod(ctx context.Context, name, node string) error {
	return c.api.Create(ctx, "/api/v1/namespaces/default/pods", map[string]any{"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "labels": map[string]string{"bench": "pod"}},
		"spec": map[string]any{"nodeSelector": map[string]string{"kubernetes.io/hostname": node},
			"automountServiceAccountToken":  false,
			"terminationGracePeriodSeconds": 0,
			"containers":                    []any{map[string]any{"name": "c", "image": "skein.test/tools:1"}}}})
}
