package resource

import (
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/kube/kubetest"
)

// log is a cluster's, of one node.
type log struct {
	*testing.T
	*kubetest.Log
}

func newLog(t *testing.T) log { return log{T: t, Log: kubetest.New(t)} }

func (l log) must(c *skeinv1.Command) {
	l.T.Helper()
	if err := l.Give(c); err != nil {
		l.T.Fatal(err)
	}
}

// changePool has a command change the pool "default".
func (l log) changePool(c *skeinv1.ChangePool) {
	l.T.Helper()
	c.Name = "default"
	l.must(&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: c}})
}

func ptr[T any](v T) *T { return &v }

// settle does what is decided until nothing is left to do, keeps what was observed, and returns the last decision.
func (l log) settle(observed *int64, decide func() Decision) Decision {
	l.T.Helper()
	for range 5 {
		d := decide()
		*observed = d.Observed
		if d.Command == nil {
			return d
		}
		if err := l.Give(d.Command); err != nil {
			d.Condition = Refused(Meta{}, err)
			return d
		}
	}
	l.T.Fatal("it never ends")
	return Decision{}
}

func (l log) condition(what string, d Decision, reason, says string) {
	l.T.Helper()
	if d.Command != nil || d.Condition.Reason != reason || d.Condition.True != (reason == ReasonApplied) ||
		!strings.Contains(d.Condition.Message, says) {
		l.T.Errorf("%s: %+v, want %s: …%s…", what, d, reason, says)
	}
}

func TestAPoolsLife(t *testing.T) {
	l := newLog(t)
	p := AddressPool{
		Meta: Meta{Name: "default", UID: "u1", Generation: 1},
		Spec: AddressPoolSpec{
			Subnets:       []Subnet{{IPv4: "10.64.0.0/24", IPv6: "FD64::/120"}},
			BlockSizeBits: ptr[uint32](3),
		},
	}
	settle := func() Decision {
		t.Helper()
		return l.settle(&p.Observed, func() Decision { return Pool(l.State, p) })
	}
	if d := Pool(l.State, p); !d.Finalize || d.Command == nil || d.Condition.Reason != ReasonPending {
		t.Errorf("a new one: %+v", d)
	}
	p.Finalizers = []string{Finalizer}
	l.condition("made", settle(), ReasonApplied, "")
	if have := l.State.Pool("default"); have.GetBlockSizeBits() != 3 || p.Observed != 1 || len(have.GetSubnets()) != 1 {
		t.Errorf("%v, observed %d", have, p.Observed)
	}
	// A command changes it: its word is newer, and stays.
	l.changePool(&skeinv1.ChangePool{
		AddSubnets: []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/24", Ipv6: "fd65::/120"}},
		Set:        &skeinv1.Pool{CooldownSeconds: 60}, Fields: []string{"cooldown_seconds"},
	})
	d := settle()
	l.condition("a subnet more by a command", d, ReasonImmutable, "10.65.0.0/24")
	if l.State.Pool("default").GetCooldownSeconds() != 60 {
		t.Error("a field that the resource leaves out was put back")
	}
	p.Spec.Subnets = append(p.Spec.Subnets, Subnet{IPv4: "10.65.0.0/24", IPv6: "fd65::/120"})
	p.Spec.CooldownSeconds = ptr[uint32](5)
	p.Generation = 2
	l.condition("its own word again", settle(), ReasonApplied, "")
	if l.State.Pool("default").GetCooldownSeconds() != 5 || p.Observed != 2 {
		t.Errorf("%v, observed %d", l.State.Pool("default"), p.Observed)
	}
	l.changePool(&skeinv1.ChangePool{Set: &skeinv1.Pool{CooldownSeconds: 7}, Fields: []string{"cooldown_seconds"}})
	l.condition("a command's word", settle(), ReasonCommand, "cooldown_seconds")
	if l.State.Pool("default").GetCooldownSeconds() != 7 {
		t.Error("the command's word was put back")
	}
	p.Spec.Namespaces = []string{"web"}
	p.Generation = 3
	l.condition("another word", settle(), ReasonApplied, "")
	if have := l.State.Pool("default"); have.GetCooldownSeconds() != 5 || len(have.GetNamespaces()) != 1 {
		t.Errorf("%v", have)
	}
	// It is removed by a command: it is not made again before the resource changes.
	l.must(&skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: "default"}}})
	l.condition("removed by a command", settle(), ReasonRemoved, "removed")
	p.Generation = 4
	l.condition("made again", settle(), ReasonApplied, "")
	p.Deleting = true
	if d := Pool(l.State, p); d.Command.GetRemovePool().GetName() != "default" || d.Release {
		t.Errorf("being deleted: %+v", d)
	}
	if d := settle(); !d.Release || l.State.Pool("default") != nil {
		t.Errorf("deleted: %+v", d)
	}
}

func TestAPoolThatCannotBe(t *testing.T) {
	l := newLog(t)
	p := AddressPool{
		Meta: Meta{Name: "p", UID: "u1", Generation: 1, Finalizers: []string{Finalizer}},
		Spec: AddressPoolSpec{Subnets: []Subnet{{IPv4: "10.4.0.0/24"}}},
	}
	d := Pool(l.State, p)
	if err := l.Give(d.Command); err == nil {
		t.Error("a pool inside the overlay is made")
	} else if c := Refused(p.Meta, err); c.Reason != ReasonRefused || c.True || !strings.Contains(c.Message, "10.4.0.0/") {
		t.Errorf("%+v", c)
	}
	if again := Pool(l.State, p); again.Command.GetRequestId() != d.Command.GetRequestId() {
		t.Error("one intent has two names")
	}
	p.Deleting = true
	if d := Pool(l.State, p); !d.Release || d.Command != nil {
		t.Errorf("one that was never made is deleted: %+v", d)
	}
	if c := Refused(p.Meta, &events.Error{Message: "in use"}); c.Reason != ReasonInUse {
		t.Errorf("%+v", c)
	}
}

func TestAnEgresssLife(t *testing.T) {
	l := newLog(t)
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{
		Pool: &skeinv1.Pool{Name: "default", BlockSizeBits: 3, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/24"}}},
	}}})
	e := Egress{Meta: Meta{Namespace: "out", Name: "nat", UID: "u1", Generation: 1, Finalizers: []string{Finalizer}},
		Spec: EgressSpec{
			Destinations: []string{"192.0.2.0/24", "192.0.2.128/25", "198.51.100.0/24"},
			Gateways:     map[string]string{"gateway": "yes"},
		}}
	settle := func() Decision {
		t.Helper()
		return l.settle(&e.Observed, func() Decision { return ForEgress(l.State, e) })
	}
	l.condition("made", settle(), ReasonApplied, "")
	have := l.State.Egress("out", "nat")
	if len(have.GetDestinations()) != 2 || have.GetReplicas() != 1 {
		t.Errorf("%v", have)
	}
	e.Spec.Replicas, e.Generation = ptr[uint32](3), 2 // as an HPA would
	l.condition("scaled", settle(), ReasonApplied, "")
	if n := len(l.State.Slots("out", "nat")); n != 3 {
		t.Errorf("%d slots", n)
	}
	l.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: &skeinv1.ChangeEgress{
		Namespace: "out", Name: "nat", Set: &skeinv1.Egress{Replicas: 2}, Fields: []string{"replicas"},
	}}})
	if e := l.State.Egress("out", "nat"); e.GetDraining() != 1 {
		t.Errorf("no slot drains: %v", e)
	}
	l.condition("a command's word", settle(), ReasonCommand, "replicas")
	e.Spec.Replicas, e.Generation = ptr[uint32](2), 3
	l.condition("its own word, which is the same", settle(), ReasonApplied, "")
	e.Deleting = true
	if d := settle(); !d.Release || l.State.Egress("out", "nat") != nil {
		t.Errorf("deleted: %+v", d)
	}
}
