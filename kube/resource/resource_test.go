package resource

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// log decides and folds, as a leader does.
type log struct {
	*testing.T
	st *events.State
	n  uint64
}

func newLog(t *testing.T) *log {
	l := &log{T: t, st: events.NewState()}
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "00112233445566778899aabbccddeeff", OverlayIpv4: "10.4.0.0/16", FirstNode: &skeinv1.NewNode{
			Name: "a", IdentityKey: []byte(strings.Repeat("i", 32)), WireguardKey: []byte(strings.Repeat("k", 32)), Labels: map[string]string{"gateway": "yes"}, MaxSchema: events.SchemaMax}}}}); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *log) give(c *skeinv1.Command) error {
	l.n++
	c.Time = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixNano() + int64(l.n)
	c.Entropy = make([]byte, 64)
	binary.BigEndian.PutUint64(c.Entropy, l.n)
	evs, _, err := events.Decide(l.st, c)
	for _, e := range evs {
		if err := l.st.Fold(e); err != nil {
			l.Fatal(err)
		}
	}
	return err
}

func ptr[T any](v T) *T { return &v }

// settle does what is decided until nothing is left to do, keeps what was observed, and returns the last decision.
func (l *log) settle(observed *int64, decide func() Decision) Decision {
	l.Helper()
	for range 5 {
		d := decide()
		*observed = d.Observed
		if d.Command == nil {
			return d
		}
		if err := l.give(d.Command); err != nil {
			d.Condition = Refused(Meta{}, err)
			return d
		}
	}
	l.Fatal("it never ends")
	return Decision{}
}

func (l *log) condition(what string, d Decision, reason, says string) {
	l.Helper()
	if d.Command != nil || d.Condition.Reason != reason || d.Condition.True != (reason == ReasonApplied) || !strings.Contains(d.Condition.Message, says) {
		l.Errorf("%s: %+v, want %s: …%s…", what, d, reason, says)
	}
}

func TestAPoolsLife(t *testing.T) {
	l := newLog(t)
	p := AddressPool{Meta: Meta{Name: "default", UID: "u1", Generation: 1}, Spec: AddressPoolSpec{Subnets: []Subnet{{IPv4: "10.64.0.0/24", IPv6: "FD64::/120"}}, BlockSizeBits: ptr[uint32](3)}}
	settle := func() Decision {
		t.Helper()
		return l.settle(&p.Observed, func() Decision { return Pool(l.st, p) })
	}
	if d := Pool(l.st, p); !d.Finalize || d.Command == nil || d.Condition.Reason != ReasonPending {
		t.Errorf("a new one: %+v", d)
	}
	p.Finalizers = []string{Finalizer}
	l.condition("made", settle(), ReasonApplied, "")
	if have := l.st.Pool("default"); have.GetBlockSizeBits() != 3 || p.Observed != 1 || len(have.GetSubnets()) != 1 {
		t.Errorf("%v, observed %d", have, p.Observed)
	}
	// A command changes it: its word is newer, and stays.
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: "default", AddSubnets: []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/24", Ipv6: "fd65::/120"}},
		Set: &skeinv1.Pool{CooldownSeconds: 60}, Fields: []string{"cooldown_seconds"}}}}); err != nil {
		t.Fatal(err)
	}
	d := settle()
	l.condition("a subnet more by a command", d, ReasonImmutable, "10.65.0.0/24")
	if l.st.Pool("default").GetCooldownSeconds() != 60 {
		t.Error("a field that the resource leaves out was put back")
	}
	p.Spec.Subnets = append(p.Spec.Subnets, Subnet{IPv4: "10.65.0.0/24", IPv6: "fd65::/120"})
	p.Spec.CooldownSeconds = ptr[uint32](5)
	p.Generation = 2
	l.condition("its own word again", settle(), ReasonApplied, "")
	if l.st.Pool("default").GetCooldownSeconds() != 5 || p.Observed != 2 {
		t.Errorf("%v, observed %d", l.st.Pool("default"), p.Observed)
	}
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: "default", Set: &skeinv1.Pool{CooldownSeconds: 7}, Fields: []string{"cooldown_seconds"}}}}); err != nil {
		t.Fatal(err)
	}
	l.condition("a command's word", settle(), ReasonCommand, "cooldown_seconds")
	if l.st.Pool("default").GetCooldownSeconds() != 7 {
		t.Error("the command's word was put back")
	}
	p.Spec.Namespaces = []string{"web"}
	p.Generation = 3
	l.condition("another word", settle(), ReasonApplied, "")
	if have := l.st.Pool("default"); have.GetCooldownSeconds() != 5 || len(have.GetNamespaces()) != 1 {
		t.Errorf("%v", have)
	}
	// It is removed by a command: it is not made again before the resource changes.
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: "default"}}}); err != nil {
		t.Fatal(err)
	}
	l.condition("removed by a command", settle(), ReasonRemoved, "removed")
	p.Generation = 4
	l.condition("made again", settle(), ReasonApplied, "")
	p.Deleting = true
	if d := Pool(l.st, p); d.Command.GetRemovePool().GetName() != "default" || d.Release {
		t.Errorf("being deleted: %+v", d)
	}
	if d := settle(); !d.Release || l.st.Pool("default") != nil {
		t.Errorf("deleted: %+v", d)
	}
}

func TestAPoolThatCannotBe(t *testing.T) {
	l := newLog(t)
	p := AddressPool{Meta: Meta{Name: "p", UID: "u1", Generation: 1, Finalizers: []string{Finalizer}}, Spec: AddressPoolSpec{Subnets: []Subnet{{IPv4: "10.4.0.0/24"}}}}
	d := Pool(l.st, p)
	if err := l.give(d.Command); err == nil {
		t.Error("a pool inside the overlay is made")
	} else if c := Refused(p.Meta, err); c.Reason != ReasonRefused || c.True || !strings.Contains(c.Message, "10.4.0.0/") {
		t.Errorf("%+v", c)
	}
	if again := Pool(l.st, p); again.Command.GetRequestId() != d.Command.GetRequestId() {
		t.Error("one intent has two names")
	}
	p.Deleting = true
	if d := Pool(l.st, p); !d.Release || d.Command != nil {
		t.Errorf("one that was never made is deleted: %+v", d)
	}
	if c := Refused(p.Meta, &events.Error{Message: "in use"}); c.Reason != ReasonInUse {
		t.Errorf("%+v", c)
	}
}

func TestAnEgresssLife(t *testing.T) {
	l := newLog(t)
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{Name: "default", BlockSizeBits: 3, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/24"}}}}}}); err != nil {
		t.Fatal(err)
	}
	e := Egress{Meta: Meta{Namespace: "out", Name: "nat", UID: "u1", Generation: 1, Finalizers: []string{Finalizer}},
		Spec: EgressSpec{Destinations: []string{"192.0.2.0/24", "192.0.2.128/25", "198.51.100.0/24"}, Gateways: map[string]string{"gateway": "yes"}}}
	settle := func() Decision {
		t.Helper()
		return l.settle(&e.Observed, func() Decision { return ForEgress(l.st, e) })
	}
	l.condition("made", settle(), ReasonApplied, "")
	have := l.st.Egress("out", "nat")
	if len(have.GetDestinations()) != 2 || have.GetReplicas() != 1 {
		t.Errorf("%v", have)
	}
	e.Spec.Replicas, e.Generation = ptr[uint32](3), 2 // as an HPA would
	l.condition("scaled", settle(), ReasonApplied, "")
	if n := len(l.st.Slots("out", "nat")); n != 3 {
		t.Errorf("%d slots", n)
	}
	if err := l.give(&skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: &skeinv1.ChangeEgress{Namespace: "out", Name: "nat", Set: &skeinv1.Egress{Replicas: 2}, Fields: []string{"replicas"}}}}); err != nil {
		t.Fatal(err)
	}
	l.condition("a command's word", settle(), ReasonCommand, "replicas")
	e.Deleting = true
	if d := settle(); !d.Release || l.st.Egress("out", "nat") != nil {
		t.Errorf("deleted: %+v", d)
	}
}
