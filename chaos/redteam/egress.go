package redteam

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// slotNow is slot 0 of an egress as a server has it.
func slotNow(s *skeinv1.State, egress string) *skeinv1.EgressSlot {
	for _, x := range s.GetSlots() {
		if x.GetNamespace() == "out" && x.GetName() == egress {
			return x
		}
	}
	return nil
}

// leader is the server that leads now.
func (f *Field) leader(ctx context.Context) (string, error) {
	s, err := f.api(relayNode).Status(ctx, &skeinv1.StatusRequest{})
	if err == nil && s.GetLeaderName() == "" {
		err = errors.New("no server leads")
	}
	return s.GetLeaderName(), err
}

// slotMoves judges that a slot has another owner or epoch.
func slotMoves(s Seen) string {
	if g := given(s); g != "" {
		return g
	}
	b, a := slotNow(s.Before, "fixed"), slotNow(s.After, "fixed")
	if b.GetEpoch() != a.GetEpoch() || b.GetNodeId() != a.GetNodeId() {
		return "the slot of another gateway has moved"
	}
	return lost(s)
}

// renewing sends a RenewLeases of the attacker's to the leader, and watches the slot of the honest gateway.
func renewing(name string, make func(*Field, *skeinv1.EgressSlot) *skeinv1.RenewLeasesRequest) Attempt {
	return Attempt{Name: name, From: Member, Guard: Leases, Judge: slotMoves,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			if seen.Before, err = f.log(ctx); err != nil {
				return seen, err
			}
			leader, err := f.leader(ctx)
			if err != nil {
				return seen, err
			}
			for range 5 {
				r, err := f.mallory.egress(leader).RenewLeases(ctx, make(f, slotNow(seen.Before, "fixed")))
				if err != nil {
					seen.Refusal = err.Error()
				}
				if len(r.GetGranted()) > 0 {
					seen.Given = append(seen.Given, "a lease for another's slot")
				}
				if d := r.GetDenied(); len(d) > 0 {
					seen.Refusal = d[0].GetReason()
				}
				pause.For(ctx, 100*time.Millisecond)
			}
			if seen.After, err = f.log(ctx); err != nil {
				return seen, err
			}
			r, err := f.mallory.egress(gateway).EgressReport(ctx, &skeinv1.EgressReportRequest{Namespace: "out", Name: "fixed"})
			if err != nil {
				return seen, err
			}
			for _, g := range r.GetGateways() {
				if len(g.GetSlots()) == 0 || !g.GetSlots()[0].GetForwarding() {
					seen.Lost = append(seen.Lost, "the honest gateway forwards no more")
				}
			}
			return seen, nil
		}}
}

func memberEgress() []Attempt {
	ref := func(s *skeinv1.EgressSlot) *skeinv1.SlotRef {
		return &skeinv1.SlotRef{Namespace: s.GetNamespace(), Name: s.GetName(), Number: s.GetNumber(), Epoch: s.GetEpoch()}
	}
	return []Attempt{
		renewing("ask for the lease of another's slot", func(_ *Field, s *skeinv1.EgressSlot) *skeinv1.RenewLeasesRequest {
			return &skeinv1.RenewLeasesRequest{Wishes: []*skeinv1.RenewLeasesRequest_LeaseWish{{Slot: ref(s), Held: true}}}
		}),
		renewing("say in another gateway's place that it has let its slot go",
			func(_ *Field, s *skeinv1.EgressSlot) *skeinv1.RenewLeasesRequest {
				return &skeinv1.RenewLeasesRequest{Released: []*skeinv1.SlotRef{ref(s)}}
			}),
		renewing("praise itself as a gateway that it is not",
			func(_ *Field, s *skeinv1.EgressSlot) *skeinv1.RenewLeasesRequest {
				return &skeinv1.RenewLeasesRequest{Gateways: []*skeinv1.GatewayState{{Namespace: "out", Name: "fixed", Ready: true,
					Health: skeinv1.GatewayState_HEALTH_GOOD}}}
			}),
		{Name: "register another node's pod as its own client", From: Member, Guard: Clients,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.registerClient(ctx, "fixed",
					&skeinv1.EgressClient{Key: "default/" + honestPod, Ipv4: f.podAddr(honestPod, true).String()})
			}, Judge: given},
		{Name: "register another node as its own client", From: Member, Guard: Clients,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.registerClient(ctx, "fixed",
					&skeinv1.EgressClient{Key: f.overlay(other, true).String(), Ipv4: f.overlay(other, true).String()})
			}, Judge: given},
		{Name: "register clients of an egress that is called like a path", From: Member, Guard: Names,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.registerClient(ctx, "../../../../tmp/x",
					&skeinv1.EgressClient{Key: "x", Ipv4: f.overlay(attacker, true).String()})
			}, Judge: given},
		{Name: "register 20,000 clients", From: Member, Guard: Clients,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				var all []*skeinv1.EgressClient
				for i := range 20000 {
					all = append(all, &skeinv1.EgressClient{Key: fmt.Sprintf("evil/%05d", i),
						Ipv4: fmt.Sprintf("10.%d.%d.%d", 101+i>>16, i>>8&255, i&255)})
				}
				return f.registerClient(ctx, "fixed", all...)
			}, Judge: given},
		{Name: "bring connections to a gateway as the former owner of its slot", From: Member, Guard: Leases,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				state, err := f.log(ctx)
				if err != nil {
					return seen, err
				}
				conntrack := func() (uint64, error) {
					r, err := f.mallory.egress(gateway).EgressReport(ctx,
						&skeinv1.EgressReportRequest{Namespace: "out", Name: "fixed"})
					if err != nil {
						return 0, err
					}
					if len(r.GetGateways()) == 0 {
						return 0, errors.New("the gateway has no such egress")
					}
					return r.GetGateways()[0].GetConntrack(), nil
				}
				before, err := conntrack()
				if err != nil {
					return seen, err
				}
				r, err := f.mallory.egress(gateway).TakeOver(ctx,
					&skeinv1.TakeOverRequest{Slot: ref(slotNow(state, "fixed")), Last: true,
						Connections: [][]byte{make([]byte, 64), make([]byte, 64)}})
				seen.Refusal = r.GetReason()
				if err != nil {
					seen.Refusal = err.Error()
				}
				after, err := conntrack()
				if err != nil {
					return seen, err
				}
				if r.GetLoaded() > 0 || after > before || seen.Refusal == "" {
					seen.Given = append(seen.Given, "it takes part in a handover that is none of its own")
				}
				return seen, nil
			}, Judge: given},
		// 20 a second to one address, and a burst of 40: the document allows it, since a NAT's outside address is such a
		// third party.
		filterTest("have a server send to a bystander", bystander, 60),
		filterTest("have a server send into a private network", lodger, 0),
	}
}

// registerClient tells the gateway of clients, and asks it how many it knows afterwards.
func (f *Field) registerClient(
	ctx context.Context, egress string, clients ...*skeinv1.EgressClient,
) (seen Seen, err error) {
	count := func() (uint32, error) {
		r, err := f.mallory.egress(gateway).EgressReport(ctx, &skeinv1.EgressReportRequest{Namespace: "out", Name: "fixed"})
		if err != nil || len(r.GetGateways()) == 0 {
			return 0, errors.Join(err, errors.New("the gateway does not report"))
		}
		return r.GetGateways()[0].GetClients(), nil
	}
	before, err := count()
	if err != nil {
		return seen, err
	}
	r, err := f.mallory.egress(gateway).SyncEgressClients(ctx,
		&skeinv1.SyncEgressClientsRequest{Namespace: "out", Name: egress, Generation: uint64(time.Now().UnixNano()), Epoch: 1,
			Clients: clients})
	if err != nil {
		seen.Refusal = err.Error()
	}
	if x := r.GetRefused(); len(x) > 0 {
		seen.Refusal = x[0].GetReason()
	}
	if r.GetReason() != "" {
		seen.Refusal = r.GetReason()
	}
	after, err := count()
	if err != nil {
		return seen, err
	}
	if after > before {
		seen.Given = append(seen.Given, fmt.Sprintf("%d clients more at the gateway", after-before))
	}
	files, err := f.strayFiles()
	for _, x := range files {
		seen.Given = append(seen.Given, "a file at "+x)
	}
	return seen, err
}

// filterTest asks a server for STUN answers to somebody else's address, a hundred within a second.
func filterTest(name, host string, bound int) Attempt {
	return Attempt{Name: name, From: Member, Guard: Filters, Judge: bounded("packets to a host that asked for none"),
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			const port, asks = 24680, 100
			at := f.address(host)
			seen.Bound = bound
			var mu sync.Mutex
			// A private address leads nowhere from there: that the server sends at all is what counts.
			err = sniff(f.ns(relayNode), func(b []byte, out bool) {
				if _, to, _, ok := udpOf(b); ok && out && to.Addr() == at && to.Port() == port {
					seen.Count++
				}
			}, func() error {
				ctx, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				var all sync.WaitGroup
				for i := range asks {
					all.Go(func() {
						_, err := f.mallory.cluster(relayNode).FilterTest(ctx,
							&skeinv1.FilterTestRequest{Address: fmt.Sprintf("%s:%d", at, port),
								TransactionId: fmt.Appendf(nil, "redteam%05d", i), Silent: i%2 == 0})
						if err != nil && ctx.Err() == nil {
							mu.Lock()
							defer mu.Unlock()
							seen.Refusal = err.Error()
						}
					})
				}
				all.Wait()
				return nil
			})
			return seen, err
		}}
}
