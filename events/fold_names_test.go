package events

import (
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Names in facts that no command can have made, as a forged log has them: a node takes them for file names and prints
// them, so they change nothing, and a snapshot with one is refused.
func TestForgedNamesChangeNothing(t *testing.T) {
	w := gated(t)
	next := w.s.Index() + 1
	outlet := func(namespace, name, pool string, labels map[string]string) *skeinv1.Egress {
		e := egress("web/new", "192.0.2.0/24", 1)
		e.Namespace, e.Name, e.Pool, e.Gateways = namespace, name, pool, labels
		e.Endpoints = []*skeinv1.EgressAddress{{Ipv4: "10.64.0.8", Ipv6: "fd02::8"}}
		e.CreatedIndex, e.ChangedIndex = next, next
		return e
	}
	defined := func(e *skeinv1.Egress) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: e}}}
	}
	pool := func(change func(*skeinv1.Pool)) *skeinv1.Event {
		p := &skeinv1.Pool{Name: "more", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.200.0.0/24"}}, BlockSizeBits: 2,
			Namespaces: []string{"more"}, CreatedIndex: next}
		change(p)
		return &skeinv1.Event{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: p}}}
	}
	renamed := func(name string) *skeinv1.Event {
		n := proto.CloneOf(w.s.Nodes()[0])
		n.Name = name
		return &skeinv1.Event{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: n}}}
	}
	admitted := func(name string) *skeinv1.Event {
		n := &skeinv1.Node{Id: id("z"), Name: name, IdentityKey: key("identity", "z"), WireguardKey: key("wireguard", "z"),
			Ipv4: "10.4.200.1", Ipv6: "fd00:ffff::1"}
		return &skeinv1.Event{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: n}}}
	}
	kept := func(namespace, pod string) *skeinv1.Event {
		v := &skeinv1.StaticAddress{Pool: "default", Ipv4: "10.64.0.14", Ipv6: "fd02::e", Namespace: namespace,
			Pod: pod, Index: next}
		return &skeinv1.Event{Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{Address: v}}}
	}
	labels := map[string]string{"gateway": "yes"}
	for name, e := range map[string]*skeinv1.Event{ // the same in order, or the rest would show nothing
		"an egress": defined(outlet("web", "new", "default", labels)), "a pool": pool(func(*skeinv1.Pool) {}),
		"a node's new name": renamed("new-name"), "a node": admitted("z"), "a pod": kept("web", "x-1"),
	} {
		if _, same := w.foldNext(e); same {
			t.Errorf("%s changes nothing", name)
		}
	}
	for _, bad := range []string{"", ".", "..", "a/../../../root/.ssh/authorized_keys", "../x", "a/b", "A", "a b",
		"a\x00b", "a\nb", "\x1b[2J", "-a", "a-", "ä"} {
		for what, e := range map[string]*skeinv1.Event{
			"an egress's namespace": defined(outlet(bad, "new", "default", labels)),
			"an egress's name":      defined(outlet("web", bad, "default", labels)),
			"an egress's pool":      defined(outlet("web", "new", bad, labels)),
			"a pool's name":         pool(func(p *skeinv1.Pool) { p.Name = bad }),
			"a node's name":         admitted(bad), "a node's new name": renamed(bad),
		} {
			if _, same := w.foldNext(e); !same {
				t.Errorf("%s %q is folded", what, bad)
			}
		}
		if bad == "A" { // namespaces and pods are named by others, too
			continue
		}
		for what, e := range map[string]*skeinv1.Event{
			"a pod's namespace": kept(bad, "x-1"), "a pod's name": kept("web", bad),
			"a pool's namespace":  pool(func(p *skeinv1.Pool) { p.Namespaces = []string{bad} }),
			"a quota's namespace": pool(func(p *skeinv1.Pool) { p.Quotas = map[string]uint32{bad: 1} }),
		} {
			if _, same := w.foldNext(e); !same {
				t.Errorf("%s %q is folded", what, bad)
			}
		}
	}
	if _, same := w.foldNext(defined(outlet("web", "new", "default", nil))); !same {
		t.Error("an egress whose gateways need no label is folded: every node would be one")
	}
	for what, change := range map[string]func(*skeinv1.State){
		"node":   func(p *skeinv1.State) { p.Nodes[0].Name = "../x" },
		"pool":   func(p *skeinv1.State) { p.Pools[0].Namespaces = []string{"a/b"} },
		"egress": func(p *skeinv1.State) { p.Egresses[0].Gateways = nil },
	} {
		p := proto.CloneOf(w.s.Proto())
		change(p)
		if _, err := FromProto(p); err == nil {
			t.Errorf("a snapshot with a forged %s is taken", what)
		}
	}
}
