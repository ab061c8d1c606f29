package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// How often a condition is looked at again.
const (
	lookAgain    = 100 * time.Millisecond
	restPerLook  = 3 // times what a look took, at more than
	crowdAgents  = 16
	restMost     = 5 * time.Second
	echoInterval = 20 * time.Millisecond // between echoes of one expectation
	crowdPairs   = 256                   // more of them are a crowd: each has to answer once
	// that one expectation looks at: thousands of first packets at one moment are no fair question
	pairsAtOnce = 8
)

// eventually tries until check holds, and then for as long as it has to keep holding; the error of the
// last try is returned when within is over. What check reports as final is not tried again.
func eventually(ctx context.Context, within, hold time.Duration, check func(context.Context) error) error {
	return eventuallyWith(ctx, within, hold, 0, check)
}

// restAfter is how many times as long as a look took the next one waits that asks so many agents or pairs: who asks
// forty agents ten times a second sees how that makes them busy.
func restAfter(asked int) time.Duration {
	if asked > crowdAgents {
		return restPerLook
	}
	return 0
}

// eventuallyWith rests so many times what a look took, and looks once more when within is over.
func eventuallyWith(ctx context.Context, within, hold, rest time.Duration, check func(context.Context) error) error {
	start := time.Now()
	var held time.Time
	for {
		began := time.Now()
		err := check(ctx)
		took := time.Since(began)
		var f finalError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &f):
			return f.error
		case err == nil && held.IsZero():
			held = time.Now()
		case err != nil:
			held = time.Time{}
		}
		if err == nil && time.Since(held) >= hold {
			return nil
		}
		if err != nil && time.Since(start) >= within {
			return fmt.Errorf("not met within %s: %w", within, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(lookAgain, min(rest*took, restMost, within-time.Since(start)))):
		}
	}
}

// finalError is one that time does not repair.
type finalError struct{ error }

// WaitConverged waits until the agents of the nodes (none named: all) that should be running have, mesh by mesh,
// applied the same index with the same state hash and hold the same records, and those of them that are servers vote.
func (l *Lab) WaitConverged(ctx context.Context, within time.Duration, nodes ...string) error {
	if len(nodes) == 0 {
		nodes = l.Spec.NodeNames()
	}
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	return eventuallyWith(ctx, within, 0, restAfter(len(agents)), func(ctx context.Context) error {
		var up []*agent
		for _, a := range agents {
			if a.record().Condition == Running {
				up = append(up, a)
			}
		}
		for _, mesh := range l.Spec.meshes() {
			var of []*agent
			for _, a := range up {
				if a.node.Mesh == mesh {
					of = append(of, a)
				}
			}
			if err := converged(ctx, of); err != nil {
				return err
			}
		}
		return nil
	})
}

func converged(ctx context.Context, agents []*agent) error {
	views := make([]*skeinv1.StatusResponse, len(agents))
	if err := each(agents, func(a *agent) (err error) {
		if err := a.died(); err != nil {
			return finalError{err}
		}
		views[slices.Index(agents, a)], err = a.status(ctx)
		return err
	}); err != nil {
		return err
	}
	return agree(views)
}

// agree compares what agents say of their state and records.
func agree(views []*skeinv1.StatusResponse) error {
	var table []string
	same := true
	for _, v := range views {
		table = append(table, fmt.Sprintf("    %-16s index %d state %.12s records %.12s", v.GetName(), v.GetIndex(),
			v.GetStateHash(), v.GetRecordsHash()))
		same = same && v.GetIndex() == views[0].GetIndex() && v.GetRecordsHash() == views[0].GetRecordsHash() &&
			v.GetStateHash() == views[0].GetStateHash()
	}
	for _, v := range views {
		for _, w := range views {
			if v.GetIndex() == w.GetIndex() && v.GetStateHash() != w.GetStateHash() {
				return finalError{fmt.Errorf("two agents differ at the same index, which must never happen:\n%s",
					strings.Join(table, "\n"))}
			}
		}
	}
	if !same {
		return fmt.Errorf("the agents do not agree:\n%s", strings.Join(table, "\n"))
	}
	return allVote(views)
}

// allVote reports the servers among the agents that do not vote yet, as any of the agents sees it. Until they do, the
// loss of those that vote is the loss of the quorum.
func allVote(views []*skeinv1.StatusResponse) error {
	asked := map[string]bool{}
	for _, v := range views {
		asked[v.GetNodeId()] = true
	}
	for _, v := range views {
		for _, s := range v.GetServers() {
			if asked[s.GetNodeId()] && !s.GetVoter() {
				return fmt.Errorf("server %s does not vote yet, says %s: %s", s.GetName(), v.GetName(), s.GetWaiting())
			}
		}
	}
	return nil
}

// pairError is what is wrong between two places.
type pairError struct {
	from, to string
	error
}

func (e pairError) Unwrap() error { return e.error }

// pairsIn finds the pairs that an error speaks of.
func pairsIn(err error) []pairError {
	var out []pairError
	switch e := err.(type) {
	case pairError:
		return []pairError{e}
	case interface{ Unwrap() []error }:
		for _, x := range e.Unwrap() {
			out = append(out, pairsIn(x)...)
		}
	case interface{ Unwrap() error }:
		return pairsIn(e.Unwrap())
	}
	return out
}

// Expect waits until an expectation holds.
func (l *Lab) Expect(ctx context.Context, within time.Duration, e Expect) error {
	e.Count = max(e.Count, 1)
	type pair struct{ from, to string }
	var pairs []pair
	for _, f := range e.From {
		for _, t := range e.To {
			if f != t {
				pairs = append(pairs, pair{f, t})
			}
		}
	}
	// In a large lab a few pairs are asked at a time, and both directions of a pair one after the other: when both ends
	// begin a session of WireGuard's at the same moment, each drops its own for the other's, and they try again after
	// five seconds.
	ends, atOnce := map[pair][]int{}, len(pairs)
	for i, p := range pairs {
		if len(l.Spec.Nodes) > crowdAgents {
			p, atOnce = pair{min(p.from, p.to), max(p.from, p.to)}, pairsAtOnce
		}
		ends[p] = append(ends[p], i)
	}
	crowd := len(pairs) > crowdPairs && e.For == 0 && e.Reach != nil && *e.Reach
	return eventuallyWith(ctx, within, e.For, restAfter(len(pairs)), func(ctx context.Context) error {
		errs := make([]error, len(pairs))
		turns := make(chan struct{}, atOnce)
		var wg sync.WaitGroup
		for _, both := range ends {
			turns <- struct{}{}
			wg.Go(func() {
				defer func() { <-turns }()
				for _, i := range both {
					p := pairs[i]
					if err := l.holds(ctx, e, p.from, p.to); err != nil {
						errs[i] = pairError{p.from, p.to, err}
					}
				}
			})
		}
		wg.Wait()
		for k, both := range ends {
			// So many pairs are never asked at one moment: who has answered is not asked again.
			if crowd && !slices.ContainsFunc(both, func(i int) bool { return errs[i] != nil }) {
				delete(ends, k)
			}
		}
		return errors.Join(errs...)
	})
}

func (l *Lab) holds(ctx context.Context, e Expect, from, to string) error {
	if len(e.Path) > 0 {
		if err := l.pathIs(ctx, e.Path, nodeOf(from), nodeOf(to)); err != nil {
			return err
		}
	}
	if e.Reach == nil {
		return nil
	}
	targets, err := l.addresses(to, e.Family)
	if err == nil {
		targets, err = l.common(from, targets)
	}
	if err != nil {
		return err
	}
	streams := make([]*ping.Stream, len(targets))
	for i, dst := range targets {
		if streams[i], err = l.PingSized(from, dst, echoInterval, e.Count, e.Size); err != nil {
			for _, s := range streams[:i] {
				s.Stop()
			}
			return finalError{err}
		}
	}
	reports := make([]ping.Report, len(targets))
	for i, s := range streams {
		reports[i] = s.Finish()
	}
	for i, dst := range targets {
		r := reports[i]
		switch {
		case *e.Reach && r.Received < e.Count:
			return fmt.Errorf("%s does not reach %s: %d of %d echoes to %s were answered", from, to, r.Received, e.Count, dst)
		case !*e.Reach && r.Received > 0:
			return fmt.Errorf("%s still reaches %s: %d of %d echoes to %s were answered", from, to, r.Received, e.Count, dst)
		}
	}
	return nil
}

func (l *Lab) pathIs(ctx context.Context, allowed []string, from, to string) error {
	p, err := l.Path(ctx, from, to)
	if err != nil {
		return err
	}
	got := p.GetPath()
	if got == "" {
		got = "none"
	}
	if slices.Contains(allowed, got) {
		return nil
	}
	why := ""
	if p.GetReason() != "" {
		why = " (" + p.GetReason() + ")"
	}
	return fmt.Errorf("the path from %s to %s is %s%s, not %s", from, to, got, why, strings.Join(allowed, " or "))
}

// Path asks an agent for its view of a peer. A peer it does not have has no path.
func (l *Lab) Path(ctx context.Context, from, to string) (*skeinv1.PeerView, error) {
	a, err := l.agent(from)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := a.client.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask %s for its peers: %w", from, err)
	}
	for _, p := range r.GetPeers() {
		if p.GetName() == to {
			return p, nil
		}
	}
	return &skeinv1.PeerView{Name: to, Path: "none", Reason: "not a peer"}, nil
}

// overlay lists a node's overlay addresses, of one family or both.
func (l *Lab) overlay(name, family string) ([]netip.Addr, error) {
	a, err := l.agent(name)
	if err != nil {
		return nil, err
	}
	rec := a.record()
	var out []netip.Addr
	if rec.IPv4.IsValid() && family != "ipv6" {
		out = append(out, rec.IPv4)
	}
	if rec.IPv6.IsValid() && family != "ipv4" {
		out = append(out, rec.IPv6)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("node %s has not reported its overlay address yet", name)
	}
	return out, nil
}

// Overlay returns a node's overlay address of a family, ipv4 or ipv6.
func (l *Lab) Overlay(name, family string) (netip.Addr, error) {
	all, err := l.overlay(name, family)
	if err != nil {
		return netip.Addr{}, err
	}
	return all[0], nil
}

// Ping starts a stream of echoes from a node, or a pod as NODE/POD, to an address: count of them, or 0 until it is
// stopped. They leave from inside its namespace.
func (l *Lab) Ping(from string, dst netip.Addr, interval time.Duration, count int) (*ping.Stream, error) {
	return l.PingSized(from, dst, interval, count, 0)
}

// PingSized is Ping with so many bytes of data in each echo; 0: few.
func (l *Lab) PingSized(from string, dst netip.Addr, interval time.Duration, count, size int) (*ping.Stream, error) {
	_, ns, err := l.place(from)
	if err != nil {
		return nil, err
	}
	var conn net.PacketConn
	if err := fabric.In(ns, func() (err error) {
		conn, err = ping.Open(dst)
		return err
	}); err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return ping.Start(conn, dst, interval, count, size), nil
}

// PingNode is Ping to a node's IPv4 overlay address.
func (l *Lab) PingNode(from, to string, interval time.Duration, count int) (*ping.Stream, error) {
	dst, err := l.Overlay(to, "ipv4")
	if err != nil {
		return nil, err
	}
	return l.Ping(from, dst, interval, count)
}
