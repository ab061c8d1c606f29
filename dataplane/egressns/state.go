package egressns

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nft"
)

// state is the content of the table in the namespace. Elements that come and go with leases, and what is on hold, are
// not in it.
type state struct {
	there    bool
	chains   map[string]chainState
	sets     map[string]setState
	counters map[string]bool
}

type chainState struct {
	kind string
	tags []string // of its rules
}

// setState is a set or a map: keys, in the kernel's form, to values. A range has two keys, its first address and what
// follows its last.
type setState struct {
	kind     string
	elements map[string]string
}

// shape says what a set is made of.
type shape struct {
	name     string
	key, val nftables.SetDatatype // val: of a map
	concat   bool
	interval bool
	timeout  bool
	counter  bool
	foreign  bool // its elements are not the Spec's
	exact    bool // what the plan does not have goes at once: plan.keep has what a former run left
}

var (
	typeTunnel4 = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	typeTunnel6 = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIP6Addr)
	mark        = nftables.TypeMark
)

// shapes are all sets and maps.
var shapes = []shape{
	{name: SetTickets, key: mark, timeout: true, foreign: true},
	{name: MapGranted, key: mark, val: mark, foreign: true},
	{name: SetHeld, key: mark, foreign: true},
	{name: MapSlot4, key: nftables.TypeIPAddr, val: mark},
	{name: MapSlot6, key: nftables.TypeIP6Addr, val: mark},
	{name: MapSource4, key: mark, val: nftables.TypeIPAddr},
	{name: MapSource6, key: mark, val: nftables.TypeIP6Addr},
	{name: MapEndpoint4, key: nftables.TypeIPAddr, val: mark},
	{name: MapEndpoint6, key: nftables.TypeIP6Addr, val: mark},
	{name: MapAddress4, key: nftables.TypeIPAddr, val: mark, exact: true},
	{name: MapAddress6, key: nftables.TypeIP6Addr, val: mark, exact: true},
	{name: MapWay4, key: typeTunnel4, val: mark, concat: true},
	{name: MapWay6, key: typeTunnel6, val: mark, concat: true},
	{name: SetTo4, key: nftables.TypeIPAddr, interval: true},
	{name: SetTo6, key: nftables.TypeIP6Addr, interval: true},
	{name: SetInside4, key: nftables.TypeIPAddr, interval: true},
	{name: SetInside6, key: nftables.TypeIP6Addr, interval: true},
	{name: SetPorts, key: nftables.TypeInetService},
	{name: SetSent, key: mark, counter: true},
	{name: SetReceived, key: mark, counter: true},
}

func shapeOf(name string) (shape, bool) {
	i := slices.IndexFunc(shapes, func(s shape) bool { return s.name == name })
	if i < 0 {
		return shape{}, false
	}
	return shapes[i], true
}

func (s shape) describe() string {
	k := s.key.Name
	if s.val.Bytes > 0 {
		k += " to " + s.val.Name
	}
	if s.interval {
		k += " interval"
	}
	if s.timeout {
		k += " timeout"
	}
	return k
}

// set is the kernel's form.
func (s shape) set(t *nftables.Table) *nftables.Set {
	id := uint32(1 + slices.IndexFunc(shapes, func(o shape) bool { return o.name == s.name }))
	out := &nftables.Set{Table: t, Name: s.name, ID: id, KeyType: s.key, Concatenation: s.concat, Interval: s.interval,
		HasTimeout: s.timeout, Counter: s.counter}
	if s.val.Bytes > 0 {
		out.IsMap, out.DataType = true, s.val
	}
	if s.key.Name == mark.Name {
		out.KeyByteOrder = binaryutil.NativeEndian
	}
	return out
}

// number is a mark as a key or value.
func number(n uint32) string { return string(binary.NativeEndian.AppendUint32(nil, n)) }

func toNumber(b string) (uint32, bool) {
	if len(b) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32([]byte(b)), true
}

// slotKey is a slot as a key or value.
func slotKey(slot int) string { return number(markSlots | uint32(slot)) }

func toSlot(b string) (int, bool) {
	n, ok := toNumber(b)
	return int(n &^ markSlots), ok && n >= markSlots && n <= markSlots|maxSlot
}

func bytesOf(a netip.Addr) string { return string(a.AsSlice()) }

// tunnelKey is a device with the source that may come out of it.
func tunnelKey(link string, a netip.Addr) string { return string(ifname(link)) + bytesOf(a) }

// pick is the wanted state of the slot in one family.
func pick[T any](a netip.Addr, four, six T) T {
	if a.Is4() {
		return four
	}
	return six
}

// want is the table that a checked plan asks for. link is the device of a tunnel.
func want(p plan, link func(local, remote netip.Addr) string, h hold.Form) state {
	s := state{there: true, chains: map[string]chainState{}, sets: map[string]setState{}, counters: map[string]bool{}}
	for _, c := range chains(h) {
		cs := chainState{kind: c.describe()}
		for _, r := range c.rules {
			cs.tags = append(cs.tags, r.tag())
		}
		s.chains[c.name] = cs
	}
	for _, c := range dropCounters {
		s.counters[c] = true
	}
	for _, sh := range shapes {
		s.sets[sh.name] = setState{kind: sh.describe(), elements: map[string]string{}}
	}
	put := func(set, key, val string) { s.sets[set].elements[key] = val }
	for _, sl := range p.slots {
		n := slotKey(sl.Number)
		put(SetSent, n, "")
		put(SetReceived, n, "")
		for _, e := range []netip.Addr{sl.Endpoint4, sl.Endpoint6} {
			if e.IsValid() {
				put(pick(e, MapEndpoint4, MapEndpoint6), bytesOf(e), n)
			}
		}
		for _, a := range []netip.Addr{sl.Source4, sl.Source6} {
			if a.IsValid() {
				put(pick(a, MapSource4, MapSource6), n, bytesOf(a))
				if a != p.local4 && a != p.local6 {
					put(pick(a, MapAddress4, MapAddress6), bytesOf(a), n)
				}
			}
		}
		for _, six := range []bool{false, true} {
			if a := ProbeSource(sl.Number, six); a.IsValid() {
				put(pick(a, MapSlot4, MapSlot6), bytesOf(a), n)
				put(pick(a, MapWay4, MapWay6), tunnelKey(Probe, a), n)
			}
		}
	}
	for _, port := range p.ports.Taken() {
		put(SetPorts, string(binary.BigEndian.AppendUint16(nil, port)), "")
	}
	for _, l := range []netip.Addr{p.local4, p.local6} {
		if !l.IsValid() {
			continue
		}
		put(pick(l, MapSource4, MapSource6), slotKey(nobody), bytesOf(l))
		put(pick(l, MapSlot4, MapSlot6), bytesOf(ProbeSource(-1, l.Is6())), slotKey(nobody))
	}
	for _, c := range p.clients {
		if !c.also {
			put(pick(c.addr, MapSlot4, MapSlot6), bytesOf(c.addr), slotKey(c.slot))
		}
		put(pick(c.addr, MapWay4, MapWay6), tunnelKey(link(c.end, c.addr), c.addr), slotKey(c.slot))
	}
	for _, d := range []struct {
		prefixes  []netip.Prefix
		four, six string
	}{{p.to, SetTo4, SetTo6}, {p.inside, SetInside4, SetInside6}} {
		four, six := nft.Intervals(d.prefixes)
		for set, es := range map[string][]nftables.SetElement{d.four: four, d.six: six} {
			for _, e := range es {
				put(set, intervalKey(e), "")
			}
		}
	}
	return s
}

// with is the state with the destinations, or all elements, of another where that has them.
func (s state) with(o state, all bool) state {
	for _, sh := range shapes {
		old, ok := o.sets[sh.name]
		if ok && !sh.foreign && (all || sh.interval) && old.kind == s.sets[sh.name].kind {
			s.sets[sh.name] = old
		}
	}
	return s
}

// intervalKey is an element of a set of ranges: whether it is an end, and the address.
func intervalKey(e nftables.SetElement) string {
	if e.IntervalEnd {
		return "e" + string(e.Key)
	}
	return "b" + string(e.Key)
}

// op is one step from one state to another.
type op struct {
	verb  verb
	name  string
	key   string
	val   string
	was   bool     // of setElement: there is one with another value
	whole []string // of fillSet: all its keys
}

type verb uint8

const (
	rebuild    verb = iota // delete the table if it is there; everything follows
	addCounter             //
	addSet                 //
	addChain               // without its rules
	fillChain              // replace all rules
	fillSet                // replace all elements
	setElement             //
	delElement             //
	delChain               //
	delSet                 //
)

// diff returns what turns have into want. Without prune nothing is removed that is not in the way.
func diff(want, have state, prune bool) []op {
	var ops []op
	if !have.there || damaged(want, have) {
		ops = append(ops, op{verb: rebuild})
		have = state{}
	}
	for _, n := range slices.Sorted(maps.Keys(want.counters)) {
		if !have.counters[n] {
			ops = append(ops, op{verb: addCounter, name: n})
		}
	}
	for _, sh := range shapes {
		if _, ok := have.sets[sh.name]; !ok {
			ops = append(ops, op{verb: addSet, name: sh.name})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(want.chains)) {
		if _, ok := have.chains[n]; !ok {
			ops = append(ops, op{verb: addChain, name: n})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(want.chains)) {
		if !slices.Equal(want.chains[n].tags, have.chains[n].tags) {
			ops = append(ops, op{verb: fillChain, name: n})
		}
	}
	for _, sh := range shapes {
		if !sh.foreign {
			w, h := want.sets[sh.name].elements, have.sets[sh.name].elements
			ops = append(ops, diffElements(sh, w, h, prune || sh.exact)...)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(have.chains)) {
		if _, ok := want.chains[n]; !ok {
			ops = append(ops, op{verb: delChain, name: n})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(have.sets)) {
		if _, ok := want.sets[n]; !ok {
			ops = append(ops, op{verb: delSet, name: n})
		}
	}
	return ops
}

func diffElements(sh shape, want, have map[string]string, prune bool) (ops []op) {
	if sh.interval {
		if !maps.Equal(want, have) {
			ops = append(ops, op{verb: fillSet, name: sh.name, whole: slices.Sorted(maps.Keys(want))})
		}
		return ops
	}
	for k := range have {
		if _, ok := want[k]; !ok && prune {
			ops = append(ops, op{verb: delElement, name: sh.name, key: k})
		}
	}
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			ops = append(ops, op{verb: setElement, name: sh.name, key: k, val: v, was: ok})
		}
	}
	slices.SortFunc(ops, func(a, b op) int { // deletions first
		if a.verb != b.verb {
			return int(b.verb) - int(a.verb)
		}
		return compareStrings(a.key, b.key)
	})
	return ops
}

func compareStrings(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// damaged says whether something has our name and a wrong nature, which cannot be changed in place.
func damaged(want, have state) bool {
	for n, w := range want.chains {
		if h, ok := have.chains[n]; ok && h.kind != w.kind {
			return true
		}
	}
	for n, w := range want.sets {
		if h, ok := have.sets[n]; ok && h.kind != w.kind {
			return true
		}
	}
	return false
}

// apply is what the kernel has after the steps.
func (s state) apply(ops []op, want state) state {
	if len(ops) == 0 {
		return s
	}
	if ops[0].verb == rebuild {
		s = state{}
	}
	out := state{there: true, chains: maps.Clone(want.chains), counters: maps.Clone(want.counters),
		sets: map[string]setState{}}
	for n, w := range want.sets {
		es := s.sets[n].elements
		if es == nil {
			es = map[string]string{}
		}
		out.sets[n] = setState{kind: w.kind, elements: es}
	}
	for _, o := range ops {
		switch o.verb {
		case fillSet:
			es := map[string]string{}
			for _, k := range o.whole {
				es[k] = ""
			}
			out.sets[o.name] = setState{kind: want.sets[o.name].kind, elements: es}
		case setElement:
			out.sets[o.name].elements[o.key] = o.val
		case delElement:
			delete(out.sets[o.name].elements, o.key)
		}
	}
	return out
}

// String is the step as a log has it.
func (o op) String() string {
	names := map[verb]string{rebuild: "make the table anew", addCounter: "add counter", addSet: "add set",
		addChain: "add chain", fillChain: "replace rules of",
		fillSet: "replace elements of", setElement: "set an element of", delElement: "delete an element of",
		delChain: "delete chain", delSet: "delete set"}
	return fmt.Sprintf("%s %s", names[o.verb], o.name)
}

// plan is a Spec that was checked and, where it is not complete, has what the kernel has besides.
type plan struct {
	local4, local6 netip.Addr
	mtu            int
	auto           bool
	ports          dataplane.FoUPorts
	slots          []dataplane.GatewaySlot // sources filled in
	clients        []client                // by address; of those of one address all but the first are also ones
	to, inside     []netip.Prefix
	complete       bool
}

// client is one address of a client.
type client struct {
	addr netip.Addr
	slot int
	end  netip.Addr // our end of its tunnel
	also bool       // it has flows by this slot, and new ones take another
}

// table is where the route to the client is.
func (c client) table() int {
	if c.also {
		return dataplane.GatewaySlotTable + c.slot
	}
	return dataplane.GatewayTable
}
