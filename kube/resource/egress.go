package resource

import (
	"maps"
	"slices"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// ForEgress decides about an egress.
func ForEgress(st *events.State, e Egress) Decision {
	have := st.Egress(e.Namespace, e.Name)
	if e.Deleting {
		return deleting(
			e.Meta,
			e.Observed,
			have != nil,
			&skeinv1.Command{
				RequestId: requestID(e.Meta, "remove"),
				Body: &skeinv1.Command_RemoveEgress{
					RemoveEgress: &skeinv1.RemoveEgress{Namespace: e.Namespace, Name: e.Name},
				},
			},
		)
	}
	d := Decision{Observed: e.Observed, Finalize: !e.Finalized()}
	known := e.Observed == e.Generation
	want := e.wanted(have)
	switch {
	case have == nil && known:
		d.Condition = differs(ReasonRemoved,
			"egress %s/%s was removed by a command since; change this resource to create it again, or delete it",
			e.Namespace, e.Name)
	case have == nil:
		d.Condition = pending
		d.Command = &skeinv1.Command{
			RequestId: requestID(e.Meta, "define"),
			Body:      &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: want}},
		}
	default:
		fields := egressDiff(have, want)
		switch {
		case len(fields) == 0:
			d.Condition, d.Observed = applied(), e.Generation
		case known:
			d.Condition = differs(ReasonCommand,
				"a command has changed %s of egress %s/%s since; change this resource to apply its values again",
				strings.Join(fields, ", "), e.Namespace, e.Name)
		default:
			d.Condition = pending
			d.Command = &skeinv1.Command{
				RequestId: requestID(e.Meta, "change"),
				Body: &skeinv1.Command_ChangeEgress{
					ChangeEgress: &skeinv1.ChangeEgress{
						Namespace: e.Namespace,
						Name:      e.Name,
						Set:       want,
						Fields:    fields,
					},
				},
			}
		}
	}
	return d
}

// wanted is the egress as the resource wishes it, with the log's own values for what it leaves out.
func (e Egress) wanted(have *skeinv1.Egress) *skeinv1.Egress {
	w := &skeinv1.Egress{Replicas: 1}
	if have != nil {
		w = events.Lasting(have)
	}
	w.Namespace, w.Name, w.Destinations, w.Gateways = e.Namespace, e.Name, e.Spec.Destinations, e.Spec.Gateways
	if normal, err := events.Destinations(e.Spec.Destinations); err == nil { // else the log says what is wrong
		w.Destinations = normal
	}
	set(&w.Replicas, e.Spec.Replicas)
	set(&w.FouSourcePortAuto, e.Spec.FouSourcePortAuto)
	set(&w.LeaseMillis, e.Spec.LeaseMillis)
	if e.Spec.Addresses != nil {
		w.Addresses = nil
		for _, a := range e.Spec.Addresses {
			w.Addresses = append(w.Addresses, &skeinv1.EgressAddress{Ipv4: address(a.IPv4), Ipv6: address(a.IPv6)})
		}
	}
	if e.Spec.Probes != nil {
		w.Probes = e.Spec.Probes
	}
	return w
}

// egressDiff names the fields that differ, as ChangeEgress does.
func egressDiff(have, want *skeinv1.Egress) (fields []string) {
	have = events.Lasting(have) // slots that drain are no wish
	for _, f := range []struct {
		name string
		same bool
	}{
		{"destinations", sameSet(have.GetDestinations(), want.GetDestinations())},
		{"gateways", maps.Equal(have.GetGateways(), want.GetGateways())},
		{"replicas", have.GetReplicas() == want.GetReplicas()},
		{"addresses", slices.EqualFunc(have.GetAddresses(), want.GetAddresses(), func(a, b *skeinv1.EgressAddress) bool {
			return a.GetIpv4() == b.GetIpv4() && a.GetIpv6() == b.GetIpv6()
		})},
		{"fou_source_port_auto", have.GetFouSourcePortAuto() == want.GetFouSourcePortAuto()},
		{"lease_millis", want.GetLeaseMillis() == 0 || have.GetLeaseMillis() == want.GetLeaseMillis()},
		{"probes", sameSet(have.GetProbes(), want.GetProbes())},
	} {
		if !f.same {
			fields = append(fields, f.name)
		}
	}
	return fields
}
