package events

import (
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// gated is a world with web/out, whose slot 0 is a's, slot 1 nobody's, and db/out, whose slot is b's. Block 3 of
// default is reserved and free of egresses, and 10.64.0.13 in it is kept for a pod; block 4 is c's.
func gated(t *testing.T) *world {
	w := newEgresses(t)
	w.must(define(egress("web/out", "192.0.2.0/24", 2, "203.0.113.4", "203.0.113.5")))
	w.must(define(egress("db/out", "192.0.2.0/24", 1)))
	w.must(reserve("default", "10.64.0.8/30", ""))
	w.must(keep("", "10.64.0.13", "web", "x-0"))
	w.must(allocate("c", "default", 1))
	w.assign("web/out", 0, "a")
	w.assign("db/out", 0, "b")
	return w
}

// Facts about egresses that Decide never makes: whatever a leader of another version appends, no address and no slot
// has two owners.
func TestContradictionsAboutEgresses(t *testing.T) {
	w := gated(t)
	next := w.s.Index() + 1
	fresh := func(change func(*skeinv1.Egress)) *skeinv1.Event {
		e := egress("web/new", "192.0.2.0/24", 1)
		e.Pool, e.Endpoints = "default", []*skeinv1.EgressAddress{{Ipv4: "10.64.0.8", Ipv6: "fd02::8"}}
		e.CreatedIndex, e.ChangedIndex = next, next
		change(e)
		return &skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: e}}}
	}
	ends := func(v ...*skeinv1.EgressAddress) func(*skeinv1.Egress) {
		return func(e *skeinv1.Egress) { e.Endpoints, e.Replicas = v, uint32(len(v)) }
	}
	end := func(ipv4, ipv6 string) *skeinv1.EgressAddress { return &skeinv1.EgressAddress{Ipv4: ipv4, Ipv6: ipv6} }
	changed := func(change func(*skeinv1.Egress)) *skeinv1.Event {
		e := proto.CloneOf(w.s.Egress("web", "out"))
		e.ChangedIndex = next
		change(e)
		return &skeinv1.Event{Body: &skeinv1.Event_EgressChanged{EgressChanged: &skeinv1.EgressChanged{Egress: e}}}
	}
	slot := func(name string, number uint32, from, to string) *skeinv1.EgressSlot {
		v := &skeinv1.EgressSlot{Namespace: "web", Name: name, Number: number, Epoch: next}
		if from != "" {
			v.FromNodeId = id(from)
		}
		if to != "" {
			v.NodeId = id(to)
		}
		return v
	}
	assigned := func(v *skeinv1.EgressSlot) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_SlotAssigned{SlotAssigned: &skeinv1.SlotAssigned{Slot: v}}}
	}
	moved := func(v *skeinv1.EgressSlot) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_SlotMoved{SlotMoved: &skeinv1.SlotMoved{Slot: v}}}
	}
	freed := func(v *skeinv1.EgressSlot) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_SlotReleased{SlotReleased: &skeinv1.SlotReleased{Slot: v}}}
	}
	block := func(n uint64, prefix, ipv6, node string) *skeinv1.Event {
		b := &skeinv1.Block{Pool: "default", Number: n, Ipv4: prefix, Ipv6: ipv6, NodeId: node, Index: next}
		return &skeinv1.Event{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: b}}}
	}
	backwards := func(v *skeinv1.EgressSlot) *skeinv1.EgressSlot {
		v.Epoch = 3
		return v
	}
	for name, e := range map[string]*skeinv1.Event{ // the same in order, or the rest would show nothing
		"an egress": fresh(func(*skeinv1.Egress) {}),
		"a source in a reserved one": fresh(func(e *skeinv1.Egress) {
			e.Addresses = []*skeinv1.EgressAddress{end("10.64.0.9", "")}
		}),
		"more slots": changed(func(e *skeinv1.Egress) {
			e.Replicas, e.Endpoints, e.Addresses = 3, append(e.Endpoints, end("10.64.0.8", "fd02::8")), nil
		}),
		"fewer slots, one of them a's": changed(func(e *skeinv1.Egress) {
			e.Replicas, e.Endpoints, e.Addresses = 1,
				e.Endpoints[:1], e.Addresses[1:]
		}),
		"the end of an egress": {Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{
			Namespace: "web", Name: "out"}}},
		"a slot that nobody has":      assigned(slot("out", 1, "", "c")),
		"a slot that moves":           moved(slot("out", 0, "a", "c")),
		"a slot given back":           freed(slot("out", 0, "a", "")),
		"a reserved block given away": block(2, "10.64.0.8/30", "fd02::8/126", id("a")),
	} {
		s, same := w.foldNext(e)
		if same {
			t.Errorf("%s changes nothing", name)
		}
		checkEgresses(t, s)
		checkSame(t, name, s, mustFromProto(t, s))
	}
	for name, e := range map[string]*skeinv1.Event{
		"an egress of the same name": fresh(func(e *skeinv1.Egress) { e.Name = "out" }),
		"an egress without a name":   fresh(func(e *skeinv1.Egress) { e.Name = "" }),
		"an egress without slots":    fresh(ends()),
		"more slots than endpoints":  fresh(func(e *skeinv1.Egress) { e.Replicas = 2 }),
		"more sources than slots": fresh(func(e *skeinv1.Egress) {
			e.Addresses = []*skeinv1.EgressAddress{end("10.64.0.9", ""), end("10.64.0.10", "")}
		}),
		"an empty endpoint":               fresh(ends(end("", ""))),
		"an endpoint of another egress":   fresh(ends(end("10.64.0.0", ""))),
		"an endpoint twice":               fresh(ends(end("10.64.0.8", ""), end("10.64.0.8", ""))),
		"an endpoint that is the source":  fresh(func(e *skeinv1.Egress) { e.Addresses = e.Endpoints }),
		"an endpoint of another pool":     fresh(ends(end("203.0.113.6", ""))),
		"an endpoint in no pool":          fresh(ends(end("10.99.0.1", ""))),
		"an endpoint in a node's block":   fresh(ends(end("10.64.0.16", ""))),
		"an endpoint in a free block":     fresh(ends(end("10.64.0.20", ""))),
		"an endpoint kept for a pod":      fresh(ends(end("10.64.0.13", ""))),
		"an endpoint whose IPv6 is":       fresh(ends(end("10.64.0.12", "fd02::d"))),
		"an endpoint of the wrong family": fresh(ends(end("fd02::8", ""))),
		"an endpoint in another form":     fresh(ends(end("", "fd02:0::8"))),
		"another's source": fresh(func(e *skeinv1.Egress) {
			e.Addresses = []*skeinv1.EgressAddress{end("203.0.113.4", "")}
		}),
		"a destination that is none":      fresh(func(e *skeinv1.Egress) { e.Destinations = []string{"x"} }),
		"a destination with host bits":    fresh(func(e *skeinv1.Egress) { e.Destinations = []string{"192.0.2.1/24"} }),
		"an egress made at another index": fresh(func(e *skeinv1.Egress) { e.CreatedIndex-- }),
		"a change at another index":       changed(func(e *skeinv1.Egress) { e.ChangedIndex-- }),
		"a change of no egress":           changed(func(e *skeinv1.Egress) { e.Name = "no" }),
		"a change of the pool":            changed(func(e *skeinv1.Egress) { e.Pool = "four" }),
		"a change of the beginning":       changed(func(e *skeinv1.Egress) { e.CreatedIndex-- }),
		"a change of a kept endpoint": changed(func(e *skeinv1.Egress) {
			e.Endpoints = []*skeinv1.EgressAddress{e.Endpoints[0], end("10.64.0.8", "fd02::8")}
		}),
		"an exchange of kept endpoints": changed(func(e *skeinv1.Egress) {
			e.Endpoints = []*skeinv1.EgressAddress{e.Endpoints[1], e.Endpoints[0]}
		}),
		"the end of no egress": {Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{
			Namespace: "web", Name: "no"}}},
		"a slot that another has":        assigned(slot("out", 0, "", "b")),
		"a slot for a stranger":          assigned(slot("out", 1, "", "no")),
		"a slot for nobody":              assigned(slot("out", 1, "", "")),
		"a slot that none is":            assigned(slot("out", 2, "", "c")),
		"a slot of no egress":            assigned(slot("no", 0, "", "c")),
		"a slot at an old epoch":         assigned(backwards(slot("out", 1, "", "c"))),
		"a slot taken from who lacks it": assigned(slot("out", 1, "a", "c")),
		"a move from another":            moved(slot("out", 0, "b", "c")),
		"a move from nobody":             moved(slot("out", 1, "", "c")),
		"a move to itself":               moved(slot("out", 0, "a", "a")),
		"a move to a stranger":           moved(slot("out", 0, "a", "no")),
		"a move at an old epoch":         moved(backwards(slot("out", 0, "a", "c"))),
		"a release by another":           freed(slot("out", 0, "b", "")),
		"a release of what nobody has":   freed(slot("out", 1, "", "")),
		"a release to somebody":          freed(slot("out", 0, "a", "b")),
		"a release at an old epoch":      freed(backwards(slot("out", 0, "a", ""))),
		"nothing":                        assigned(nil),
		"no egress":                      {Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{}}},
		"an egress's block for a node":   block(0, "10.64.0.0/30", "fd02::/126", id("c")),
		"an egress's block given back": {Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{
			Pool: "default", Number: 0}}},
		"the end of a pool with an egress": {Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{
			Name: "public"}}},
		"an egress's address for a pod": {Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{
			Address: &skeinv1.StaticAddress{
				Pool: "default", Ipv4: "10.64.0.1", Ipv6: "fd02::1", Namespace: "web", Pod: "y", Index: next}}}},
		"half an egress's address for a pod": {Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{
			Address: &skeinv1.StaticAddress{
				Pool: "public", Ipv4: "203.0.113.5", Ipv6: "3fff:1::5", Namespace: "web", Pod: "y", Index: next}}}},
	} {
		if s, same := w.foldNext(e); !same {
			t.Errorf("%s changes the state:\n%s", name, strings.Join(Diff(w.s, s), "\n"))
		}
	}
}

// A log in which a node is revoked and its slots are not: they stay with it, with one owner, until they are given to
// another.
func TestRevokedSlotOwner(t *testing.T) {
	w := gated(t)
	e := &skeinv1.Event{Index: w.s.Index() + 1, Time: w.s.Time(), Schema: 1,
		Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: id("b")}}}
	if err := w.s.Fold(e); err != nil {
		t.Fatal(err)
	}
	checkInvariants(t, w.s)
	w.s = throughBytes(t, w.s)
	if v := w.assign("db/out", 0, "c"); v.GetFromNodeId() != id("b") {
		t.Fatalf("have %v", v)
	}
	checkInvariants(t, w.s)
}

func TestFromProtoRefusesEgresses(t *testing.T) {
	w := gated(t)
	for what, spoil := range map[string]func(*skeinv1.State){
		`egress "db"/"out": it is malformed or listed twice`: func(p *skeinv1.State) {
			p.Egresses = append(p.Egresses,
				p.Egresses[0])
		},
		"egress":               func(p *skeinv1.State) { p.Egresses[0].Endpoints[0].Ipv4 = "10.64.0.0" },
		"egress ":              func(p *skeinv1.State) { p.Egresses[0].CreatedIndex = 0 },
		"egress  ":             func(p *skeinv1.State) { p.Egresses[0].CreatedIndex = p.Egresses[0].ChangedIndex + 1 },
		"egress   ":            func(p *skeinv1.State) { p.Egresses[0].ChangedIndex = 1 << 40 },
		"in no reserved block": func(p *skeinv1.State) { p.Blocks = p.Blocks[1:] },
		"it holds 2 slots, and its egresses have 3":       func(p *skeinv1.State) { p.Slots = p.Slots[1:] },
		`slot 0 of egress "db"/"out": it is listed twice`: func(p *skeinv1.State) { p.Slots = append(p.Slots, p.Slots[0]) },
		"not of the egress":                               func(p *skeinv1.State) { p.Slots[0].Number = 7 },
		"not of the egress ":                              func(p *skeinv1.State) { p.Slots[0].Name = "no" },
		"is impossible, or":                               func(p *skeinv1.State) { p.Slots[0].Epoch = 1 << 40 },
		"is impossible, or ": func(p *skeinv1.State) {
			p.Slots[0].Epoch = p.Egresses[0].CreatedIndex
		},
		"is impossible, or  ":   func(p *skeinv1.State) { p.Slots[0].Epoch = 0 },
		"is impossible, or   ":  func(p *skeinv1.State) { p.Slots[0].Epoch = p.Slots[1].Epoch },
		"is impossible, or    ": func(p *skeinv1.State) { p.Slots[0].NodeId = "" },
		"never was a member":    func(p *skeinv1.State) { p.Slots[0].NodeId = id("x") },
		"never was a member ":   func(p *skeinv1.State) { p.Slots[0].FromNodeId = id("x") },
	} {
		p := proto.CloneOf(w.s.Proto())
		spoil(p)
		if _, err := FromProto(p); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(what)) ||
			!strings.Contains(err.Error(), "snapshot at") {
			t.Errorf("%q: %v", what, err)
		}
	}
}

func TestEgressDiff(t *testing.T) {
	w := newPoolsOf(t, 3)
	before := w.s.Clone()
	w = egressHistory(t)
	if lines := Diff(w.s, throughBytes(t, w.s)); len(lines) != 0 {
		t.Fatalf("a state differs from itself: %q", lines)
	}
	middle := w.s.Clone()
	w.assign("web/out", 0, "c")
	w.must(setEgress(egress("web/out", "192.0.2.0/24 ::/0", 2), "replicas", "addresses", "probes", "destinations"))
	w.must(removeEgress("db/out"))
	golden(t, "egress_diff.golden", strings.Join(append(append(Diff(before, middle), "--- and on"),
		Diff(middle, w.s)...), "\n")+"\n")
}

// TestManyReadersOfEgresses: one published state with egresses is read, hashed and cloned by many at once (run with
// -race).
func TestManyReadersOfEgresses(t *testing.T) {
	w := gated(t)
	published := throughBytes(t, w.s) // with no digest computed yet
	next, _, err := Decide(published, withTime(w, assign("web/out", 0, "b", w.epoch("web/out", 0))))
	if err != nil {
		t.Fatal(err)
	}
	want := w.s.Hash()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 30 {
				c := published.Clone()
				for _, e := range next {
					if err := c.Fold(e); err != nil {
						t.Error(err)
					}
				}
				if c.Hash() == want || published.Hash() != want || len(published.SlotsOf(id("b"))) != 1 ||
					len(c.SlotsOf(id("b"))) != 2 || owners(published, "web/out") != "a -" {
					t.Error("a clone and its origin are mixed up")
				}
				published.Proto()
			}
		})
	}
	all.Wait()
}
