package events

import (
	"fmt"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// egress is one with tunnels' ends of pool default and gateways that are labelled site=dc, as all nodes are that
// newNode makes. The destinations are separated by spaces.
func egress(name, destinations string, replicas uint32, addresses ...string) *skeinv1.Egress {
	namespace, name, _ := strings.Cut(name, "/")
	e := &skeinv1.Egress{
		Namespace: namespace, Name: name, Destinations: strings.Fields(destinations), Replicas: replicas,
		Gateways: map[string]string{"site": "dc"},
	}
	for _, v := range subnetsOf(addresses...) {
		e.Addresses = append(e.Addresses, &skeinv1.EgressAddress{Ipv4: v.GetIpv4(), Ipv6: v.GetIpv6()})
	}
	return e
}

func define(e *skeinv1.Egress) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: e}}}
}

// setEgress changes fields of an egress, which set names.
func setEgress(set *skeinv1.Egress, fields ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: &skeinv1.ChangeEgress{
		Namespace: set.GetNamespace(), Name: set.GetName(), Set: set, Fields: fields,
	}}}
}

func removeEgress(name string) *skeinv1.Command {
	namespace, name, _ := strings.Cut(name, "/")
	return &skeinv1.Command{Body: &skeinv1.Command_RemoveEgress{RemoveEgress: &skeinv1.RemoveEgress{Namespace: namespace,
		Name: name}}}
}

// assign gives a slot of namespace/name to a node.
func assign(name string, number uint32, node string, epoch uint64) *skeinv1.Command {
	namespace, name, _ := strings.Cut(name, "/")
	return &skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{
		Namespace: namespace, Name: name, Number: number, NodeId: id(node), Epoch: epoch, Reason: "chosen", Planned: true,
	}}}
}

func releaseSlot(name string, number uint32, epoch uint64) *skeinv1.Command {
	namespace, name, _ := strings.Cut(name, "/")
	return &skeinv1.Command{Body: &skeinv1.Command_ReleaseSlot{ReleaseSlot: &skeinv1.ReleaseSlot{
		Namespace: namespace, Name: name, Number: number, Epoch: epoch, Reason: "not chosen",
	}}}
}

func drainNode(name string, draining bool) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_DrainNode{DrainNode: &skeinv1.DrainNode{NodeId: id(name),
		Draining: draining}}}
}

// epoch is the present one of a slot.
func (w *world) epoch(name string, number uint32) uint64 {
	w.t.Helper()
	namespace, name, _ := strings.Cut(name, "/")
	v := w.s.Slot(namespace, name, number)
	if v == nil {
		w.t.Fatalf("no slot %d of %s", number, name)
	}
	return v.GetEpoch()
}

// assign gives a slot to a node.
func (w *world) assign(name string, number uint32, node string) *skeinv1.EgressSlot {
	w.t.Helper()
	return w.must(assign(name, number, node, w.epoch(name, number))).GetSlot()
}

// owners are the names of the nodes that have the slots of an egress; - for none.
func owners(s *State, name string) string {
	namespace, name, _ := strings.Cut(name, "/")
	var out []string
	for _, v := range s.Slots(namespace, name) {
		if v.GetNodeId() == "" {
			out = append(out, "-")
		} else {
			out = append(out, s.nameOf(v.GetNodeId()))
		}
	}
	return strings.Join(out, " ")
}

// addressesOf are an egress's addresses of slots, each IPV4,IPV6.
func addressesOf(all []*skeinv1.EgressAddress) string {
	var out []string
	for _, v := range all {
		out = append(out, strings.Trim(v.GetIpv4()+","+v.GetIpv6(), ","))
	}
	return strings.Join(out, " ")
}

// reserved are the reserved blocks, each PREFIX (REASON).
func reserved(s *State) string {
	var out []string
	for _, b := range s.Blocks() {
		if b.GetNodeId() == "" {
			out = append(out, fmt.Sprintf("%s (%s)", blockName(b), b.GetReason()))
		}
	}
	return strings.Join(out, " ")
}

// newEgresses is a world with the nodes a, b and c, and the pools default (dual stack, blocks of 4), four (IPv4, blocks
// of 2) and public (blocks of 2, for source addresses).
func newEgresses(t testing.TB) *world {
	w := newPools(t)
	w.must(createPool(pool("default", 2, "10.64.0.0/26,fd02::/122")))
	w.must(createPool(pool("four", 1, "10.65.0.0/28")))
	w.must(createPool(pool("public", 1, "203.0.113.0/28,3fff:1::/124")))
	return w
}

// egressHistory is a fixed sequence of commands that makes an event of every kind of schema 3. Its nodes fold schema 3.
func egressHistory(t testing.TB) *world {
	w := newPoolsOf(t, 3)
	w.must(createPool(pool("default", 2, "10.64.0.0/26,fd02::/122")))
	w.must(createPool(pool("public", 1, "203.0.113.0/28,3fff:1::/124")))
	w.must(allocate("a", "default", 1))
	e := egress("web/out", "0.0.0.0/0 ::/0 10.20.0.0/16", 2, "203.0.113.4,3fff:1::4", "203.0.113.5,3fff:1::5")
	e.Probes, e.LeaseMillis, e.FouSourcePortAuto = []string{"icmp:192.0.2.1", "tcp:[2001:db8::1]:443"}, 2000, true
	w.must(withID("define", define(e)))
	w.must(define(egress("db/out", "192.0.2.0/24", 1)))
	w.assign("web/out", 0, "a")
	w.must(withID("assign", assign("web/out", 1, "b", 0)))
	w.assign("db/out", 0, "b")
	w.assign("web/out", 0, "c")
	w.must(withID("drain", drainNode("a", true)))
	w.must(setEgress(egress("db/out", "192.0.2.0/25 198.51.100.0/24", 5), "destinations", "replicas"))
	w.assign("db/out", 4, "c")
	w.must(releaseSlot("web/out", 0, w.epoch("web/out", 0)))
	w.must(withID("change", setEgress(egress("web/out", "", 1, "203.0.113.5,3fff:1::5"), "replicas", "addresses",
		"lease_millis")))
	w.assign("web/out", 0, "b")
	w.must(revoke(id("b")))
	w.must(define(egress("a/gone", "::/0", 1)))
	w.assign("a/gone", 0, "c")
	w.must(removeEgress("a/gone"))
	return w
}

// briefSlot is a slot in a few words: which, from whom, to whom.
func briefSlot(v *skeinv1.EgressSlot) string {
	return fmt.Sprintf("%s %q -> %q", slotRef{egressRef{v.GetNamespace(), v.GetName()}, v.GetNumber()},
		v.GetFromNodeId(), v.GetNodeId())
}
