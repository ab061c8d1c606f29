package bench

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/events"
)

//go:embed egressscale.yaml
var scaleLab []byte

const (
	scaleFrom, scaleTo = 3, 4
	scalePatience      = 2 * time.Minute
	scaleFlows         = 20 // pods with flows, half of them on each host
	scaleEvery         = 20 * time.Millisecond
)

// egressScale measures what clients and their flows notice when an egress gets one slot more.
func (b *bench) egressScale(ctx context.Context) []Figure {
	f, err := b.measureScale(ctx, b.opts.runs(1000, 100))
	if err != nil {
		f = append(f, notMeasured("an egress with more slots", "", err))
	}
	return f
}

// scaled is a lab whose pods all use one egress.
type scaled struct {
	*bench
	lab    *lab.Lab
	ref    lab.Ref
	target netip.AddrPort
	pods   int
}

func (b *bench) measureScale(ctx context.Context, pods int) (out []Figure, err error) {
	l, down, err := b.raise(ctx, scaleLab)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	if err := l.Serve(lab.Serve{Nodes: []string{"target"}, Port: egressPort}); err != nil {
		return nil, err
	}
	info, err := l.Node("target")
	if err != nil {
		return nil, err
	}
	s := &scaled{bench: b, lab: l, ref: lab.Ref{Namespace: "out", Name: "nat"}, pods: pods,
		target: netip.AddrPortFrom(info.Host.Addr, egressPort)}
	if err := l.WaitConverged(ctx, formedWithin); err != nil {
		return nil, err
	}
	if err := s.createEgress(ctx); err != nil {
		return nil, err
	}
	b.note("an egress of %d slots with %d clients", scaleFrom, pods)
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	return s.grow(ctx)
}

// createEgress makes the egress with one slot, and gives it the others once all gateways are ready, so that each has
// one.
func (s *scaled) createEgress(ctx context.Context) error {
	client, err := s.lab.Client("dc1")
	if err != nil {
		return err
	}
	if _, err := client.CreateEgress(ctx, &skeinv1.CreateEgressRequest{Egress: &skeinv1.Egress{
		Namespace: s.ref.Namespace, Name: s.ref.Name, Destinations: []string{"0.0.0.0/0"}, Replicas: 1,
		Gateways: map[string]string{"gateway": "yes"}, LeaseMillis: 10_000,
	}}); err != nil {
		return err
	}
	show := &skeinv1.ShowEgressRequest{Namespace: s.ref.Namespace, Name: s.ref.Name}
	if err := s.untilEvery(ctx, 100*time.Millisecond, formedWithin, func() error {
		r, err := client.ShowEgress(ctx, show)
		if err != nil {
			return err
		}
		ready := 0
		for _, g := range r.GetGateways() {
			if g.GetState().GetReady() {
				ready++
			}
		}
		if ready < scaleTo {
			return fmt.Errorf("%d gateways are ready, want %d", ready, scaleTo)
		}
		return nil
	}); err != nil {
		return err
	}
	if err := s.scale(ctx, client, scaleFrom); err != nil {
		return err
	}
	return s.untilEvery(ctx, 100*time.Millisecond, formedWithin, func() error {
		e, err := s.lab.Egress(ctx, s.ref)
		if err != nil {
			return err
		}
		owners := map[string]bool{}
		for _, slot := range e.GetSlots() {
			owners[slot.GetOwner()] = true
		}
		if len(owners) != scaleFrom || owners[""] {
			return fmt.Errorf("%d slots have the owners %v", scaleFrom, owners)
		}
		return nil
	})
}

func (s *scaled) scale(ctx context.Context, client skeinv1connect.AgentServiceClient, slots uint32) error {
	_, err := client.ChangeEgress(ctx, &skeinv1.ChangeEgressRequest{Change: &skeinv1.ChangeEgress{
		Namespace: s.ref.Namespace, Name: s.ref.Name, Set: &skeinv1.Egress{Replicas: slots}, Fields: []string{"replicas"}}})
	return err
}

// start starts the pods, and waits until each of them uses its slot.
func (s *scaled) start(ctx context.Context) error {
	for i, host := range []string{"home1", "home2"} {
		var names []string
		for n := i; n < s.pods; n += 2 {
			names = append(names, podNumber(n))
		}
		err := s.lab.StartPods(ctx, scalePatience, lab.StartPods{Nodes: []string{host}, Pods: names,
			Annotations: map[string]string{"skein.dev/egress." + s.ref.Namespace: s.ref.Name}})
		if err != nil {
			return err
		}
	}
	return s.spread(ctx, scaleFrom)
}

func podNumber(n int) string { return fmt.Sprintf("p%d", n) }

// spread waits until every client uses the slot that it falls on among so many.
func (s *scaled) spread(ctx context.Context, slots uint32) error {
	client, err := s.lab.Client("dc1")
	if err != nil {
		return err
	}
	return s.untilEvery(ctx, 500*time.Millisecond, scalePatience, func() error {
		r, err := client.ShowEgress(ctx, &skeinv1.ShowEgressRequest{Namespace: s.ref.Namespace, Name: s.ref.Name})
		if err != nil {
			return err
		}
		ready := 0
		for _, h := range r.GetClients() {
			for _, c := range h.GetClients() {
				for _, e := range c.GetEgresses() {
					if e.GetState() == "ready" && e.GetSlot() == events.SlotFor(c.GetKey(), slots) {
						ready++
					}
				}
			}
		}
		if ready != s.pods {
			return fmt.Errorf("%d of %d clients use the slot that they fall on among %d", ready, s.pods, slots)
		}
		return nil
	})
}

// grow gives the egress one slot more under running flows.
func (s *scaled) grow(ctx context.Context) (out []Figure, err error) {
	type running struct {
		*lab.FlowStream
		proto string
	}
	var flows []running
	defer func() {
		for _, f := range flows {
			f.Abandon()
		}
	}()
	answered := func(n int) error {
		within, cancel := context.WithTimeout(ctx, formedWithin)
		defer cancel()
		for _, f := range flows {
			if err := f.Answered(within, f.Count()+n); err != nil {
				return err
			}
		}
		return nil
	}
	for n := range scaleFlows {
		from := fmt.Sprintf("home%d/%s", n%2+1, podNumber(n))
		for _, proto := range []string{"tcp", "udp"} {
			f, err := s.lab.OpenFlow(ctx, from, s.target, proto, scaleEvery)
			if err != nil {
				return nil, err
			}
			flows = append(flows, running{f, proto})
		}
	}
	if err := answered(50); err != nil {
		return nil, err
	}
	client, err := s.lab.Client("dc1")
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := s.scale(ctx, client, scaleTo); err != nil {
		return nil, err
	}
	if err := s.spread(ctx, scaleTo); err != nil {
		return nil, err
	}
	took := time.Since(began)
	if err := answered(50); err != nil {
		return nil, err
	}
	lost, sent, broken, connections := 0, 0, 0, 0
	var longest sample
	for _, f := range flows {
		r := f.Stop()
		lost, sent = lost+r.Lost(), sent+r.Sent
		longest.add(r.Longest(), f.proto)
		if f.proto == "tcp" {
			if connections++; f.Broken() != nil {
				broken++
			}
		}
	}
	flows = nil
	return []Figure{{
		Name: fmt.Sprintf("an egress with %d clients gets a slot more: lost of running flows", s.pods), Target: "0",
		Got: fmt.Sprintf("%d of %s numbers lost, %d of %d TCP connections broken", lost, thousands(float64(sent)), broken,
			connections),
		Verdict: verdict(lost == 0 && broken == 0), Load: loadAverage(),
		How: fmt.Sprintf("%d to %d slots; pods on two hosts behind a NAT, %d of them with one TCP connection and one UDP "+
			"flow, a number each %d ms both ways", scaleFrom, scaleTo, scaleFlows, scaleEvery.Milliseconds()),
	}, {
		Name: "  from the command until every client's new flows use the slot that they fall on", Got: ms(took),
		Load: loadAverage(), How: "asked of all hosts every half second; the new gateway has to get the slot first",
	}, {
		Name: "  longest time without an answer", Got: longest.text(99), Load: loadAverage(), How: "of each of these flows",
	}}, nil
}
