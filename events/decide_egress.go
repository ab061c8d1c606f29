package events

import (
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// dispatchEgress takes the commands about egresses.
func (d *decision) dispatchEgress() error {
	switch b := d.c.GetBody().(type) {
	case *skeinv1.Command_DefineEgress:
		return d.defineEgress(b.DefineEgress)
	case *skeinv1.Command_ChangeEgress:
		return d.changeEgress(b.ChangeEgress)
	case *skeinv1.Command_RemoveEgress:
		return d.removeEgress(b.RemoveEgress)
	case *skeinv1.Command_AssignSlot:
		return d.assignSlot(b.AssignSlot)
	case *skeinv1.Command_ReleaseSlot:
		return d.releaseSlot(b.ReleaseSlot)
	case *skeinv1.Command_DrainNode:
		return d.drainNode(b.DrainNode)
	}
	return refuse(InvalidArgument, "the leader does not know this command: it runs an older skein than the sender")
}

// outlet is the egress of that name with its slots.
func (d *decision) outlet(namespace, name string) (*outlet, error) {
	if o := d.s.outlet(egressRef{namespace, name}); o != nil {
		return o, nil
	}
	const limit = 10
	var shown []string
	for _, r := range d.s.egressNames[:min(len(d.s.egressNames), limit)] {
		shown = append(shown, r.String())
	}
	if len(shown) == 0 {
		return nil, refuse(NotFound, "egress %.80s/%.80s does not exist, nor does any other: make one with skein "+
			"egress create", namespace, name)
	}
	return nil, refuse(NotFound, "egress %.80s/%.80s does not exist: there are %s%s", namespace, name,
		strings.Join(shown, ", "), more(len(d.s.egressNames)-len(shown)))
}

// stepper decides in steps, each on the state that the ones before it made. What it emits becomes the decision's with
// keep.
type stepper struct {
	*decision
	of     *decision
	folded int
}

func (d *decision) steps() *stepper {
	w := *d
	w.s = d.s.Clone()
	return &stepper{decision: &w, of: d, folded: len(d.events)}
}

// foldPending folds what was emitted since the last time.
func (w *stepper) foldPending() error {
	for _, e := range w.events[w.folded:] {
		if err := w.s.Fold(e); err != nil {
			return err // unreachable: the events follow one another
		}
	}
	w.folded = len(w.events)
	return nil
}

func (w *stepper) keep() { w.of.events = w.events }

// sameEgress reports whether two egresses ask for the same.
func sameEgress(a, b *skeinv1.Egress) bool {
	plain := func(e *skeinv1.Egress) *skeinv1.Egress {
		e = Lasting(e)
		e.Endpoints, e.CreatedAt, e.CreatedIndex, e.ChangedIndex = nil, 0, 0, 0
		return e
	}
	return proto.Equal(plain(a), plain(b))
}

// defineEgress makes an egress, whose slots get owners later: nodes come and go, so it does not matter whether any
// could be one now.
func (d *decision) defineEgress(c *skeinv1.DefineEgress) error {
	e, destinations, err := readEgress(c.GetEgress())
	if err != nil {
		return err
	}
	ref := refOf(e)
	if old := d.s.Egress(ref.namespace, ref.name); old != nil {
		if !sameEgress(old, e) {
			return refuse(AlreadyExists, "egress %s exists with other properties: change it with skein egress update, or "+
				"take another name", ref)
		}
		d.answer.Egress = old
		return nil
	}
	if n := len(d.s.egressNames); n >= MaxEgresses {
		return refuse(ResourceExhausted, "there are %d egresses already, the most that are allowed: remove some with "+
			"skein egress remove", n)
	}
	if err := d.checkEgress(nil, e, destinations); err != nil {
		return err
	}
	w := d.steps()
	if err := w.reserveSources(e); err != nil {
		return err
	}
	if err := w.allocateEndpoints(e); err != nil {
		return err
	}
	e.CreatedAt, e.CreatedIndex, e.ChangedIndex = d.c.GetTime(), w.nextIndex(), w.nextIndex()
	w.emit(&skeinv1.Event{Body: &skeinv1.Event_EgressDefined{EgressDefined: &skeinv1.EgressDefined{Egress: e}}})
	w.keep()
	d.answer.Egress = e
	return nil
}

// checkEgress holds an egress against the state; old is the one that it replaces.
func (d *decision) checkEgress(old *outlet, e *skeinv1.Egress, destinations []netip.Prefix) error {
	ref := refOf(e)
	slots, count := d.s.slotCount, d.s.destinationCount
	if old != nil {
		slots, count = slots-len(old.slots), count-len(old.destinations)
	}
	if slots+int(e.GetReplicas()) > MaxSlots {
		return refuse(ResourceExhausted, "egress %s: with %d replicas all egresses would have %d, and %d are allowed; use "+
			"fewer", ref, e.GetReplicas(), slots+int(e.GetReplicas()), MaxSlots)
	}
	if count+len(destinations) > MaxAllDestinations {
		return refuse(ResourceExhausted, "egress %s: with its %d destinations all egresses would have %d, and %d are "+
			"allowed; use larger prefixes", ref, len(destinations), count+len(destinations), MaxAllDestinations)
	}
	if err := d.s.checkOutside(e, destinations); err != nil {
		return err
	}
	r, err := d.pool(e.GetPool())
	if err != nil {
		return err
	}
	run := r.layout.runs[0] // all are of one kind
	four, six := families(destinations)
	if four && !run.ipv4.IsValid() || six && !run.ipv6.IsValid() {
		family := map[bool]string{true: "IPv4", false: "IPv6"}[four && !run.ipv4.IsValid()]
		return refuse(FailedPrecondition, "egress %s has %s destinations, and its tunnel endpoints are taken from pool "+
			"%s, which is %s; name a pool with %s, or leave those destinations out",
			ref, family, r.pool.GetName(), run.kind(), family)
	}
	return nil
}

// reserveSources reserves the blocks around source addresses that the egress has not yet.
func (w *stepper) reserveSources(e *skeinv1.Egress) error {
	for _, v := range e.GetAddresses() {
		for _, text := range []string{v.GetIpv4(), v.GetIpv6()} {
			if text == "" {
				continue
			}
			if err := w.reserveSource(refOf(e), netip.MustParseAddr(text)); err != nil {
				return err
			}
			if err := w.foldPending(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *stepper) reserveSource(ref egressRef, a netip.Addr) error {
	if use, taken := w.s.EgressAddressAt(a); taken {
		if use.ref() == ref && use.Source {
			return nil
		}
		return refuse(AlreadyExists, "egress %s: address %s is %s; take another", ref, a, use)
	}
	r := w.s.poolAt(a)
	if r == nil {
		return refuse(FailedPrecondition, "egress %s: address %s lies in no pool; make one that holds it with skein "+
			"pool create: pods get no block in which an egress has an address", ref, a)
	}
	if v := r.static(a); v != nil {
		return refuse(AlreadyExists, "egress %s: address %s is kept for pod %s/%s; take another, or release it first", ref, a,
			v.GetNamespace(), v.GetPod())
	}
	if r.pool.GetDraining() {
		return refuse(FailedPrecondition, "egress %s: address %s: %s", ref, a, refuseDraining(r.pool))
	}
	number, _, _ := r.layout.find(a)
	b, err := w.reserve(r, number, egressReason+ref.String())
	if err != nil {
		return refuse(CodeOf(err), "egress %s: address %s: %s", ref, a, err)
	}
	if node, ok := importedFor(b); ok {
		return refuse(FailedPrecondition, "egress %s: address %s: block %s of pool %s is kept for node %s, whose pods may "+
			"have its addresses; take an address of another block",
			ref, a, blockName(b), b.GetPool(), node)
	}
	return nil
}

// String says it for messages.
func (u EgressUse) String() string {
	what := "the tunnel endpoint"
	if u.Source {
		what = "the source address"
	}
	return what + " of slot " + slotRef{u.ref(), u.Slot}.String()
}

// allocateEndpoints fills up an egress's endpoints to one for each replica: first what is free in the blocks where it
// has some, then new blocks in the pool's own order. Within a block they are given in order.
func (w *stepper) allocateEndpoints(e *skeinv1.Egress) error {
	r, err := w.pool(e.GetPool())
	if err != nil {
		return err
	}
	claimed := map[netip.Addr]bool{} // what the egress will have
	for _, v := range e.GetAddresses() {
		for _, text := range []string{v.GetIpv4(), v.GetIpv6()} {
			if a, err := netip.ParseAddr(text); err == nil {
				claimed[a] = true
			}
		}
	}
	var blocks []uint64
	for _, v := range e.GetEndpoints() {
		number, _, _ := r.layout.find(endpointAddr(v))
		blocks = append(blocks, number)
	}
	replicas := int(e.GetReplicas())
	for _, number := range slices.Compact(blocks) {
		w.fillEndpoints(e, r, number, claimed)
	}
	missing := replicas - len(e.GetEndpoints())
	if missing <= 0 {
		return nil
	}
	if r.pool.GetDraining() {
		return refuseDraining(r.pool)
	}
	size := 1 << r.layout.bits
	want := (missing + size - 1) / size
	numbers := w.nextBlocks(r, want)
	switch {
	case len(numbers) == 0:
		return w.refuseExhausted(r)
	case len(numbers) < want:
		return refuse(ResourceExhausted, "egress %s needs %d blocks of pool %s for its tunnel endpoints, and there are %d "+
			"to give now; ask for fewer replicas, or add a subnet with skein pool extend %s",
			refOf(e), want, r.pool.GetName(), len(numbers), r.pool.GetName())
	}
	for _, number := range numbers {
		w.emitBlock(r, number, "", egressReason+refOf(e).String())
		w.fillEndpoints(e, r, number, claimed)
	}
	return w.foldPending()
}

// endpointAddr is the address that names an endpoint.
func endpointAddr(v *skeinv1.EgressAddress) netip.Addr {
	text := v.GetIpv4()
	if text == "" {
		text = v.GetIpv6()
	}
	a, _ := netip.ParseAddr(text) // Fold took it
	return a
}

// fillEndpoints adds the free addresses of a block to an egress's endpoints, as many as it lacks, and claims them.
func (w *stepper) fillEndpoints(e *skeinv1.Egress, r *poolState, number uint64, claimed map[netip.Addr]bool) {
	free := func(a netip.Addr) bool {
		_, taken := w.s.EgressAddressAt(a)
		return !a.IsValid() || !taken && !claimed[a] && r.static(a) == nil
	}
	for offset := range uint64(1) << r.layout.bits {
		if len(e.GetEndpoints()) >= int(e.GetReplicas()) {
			return
		}
		if ipv4, ipv6 := r.layout.pair(number, offset); free(ipv4) && free(ipv6) {
			e.Endpoints = append(e.Endpoints, &skeinv1.EgressAddress{Ipv4: text(ipv4), Ipv6: text(ipv6)})
			claimed[ipv4], claimed[ipv6] = true, true
		}
	}
}

// changeableEgress are the fields of an egress that ChangeEgress sets.
var changeableEgress = []string{"addresses", "destinations", "drain_millis", "fou_source_port_auto", "gateways",
	"lease_millis", "probes", "replicas", "spread"}

// changeEgress sets fields of an egress. Slots that stay keep their endpoints, owners and epochs; those that end, or
// get other source addresses, are released first: a gateway that has not heard of the change must not go on with the
// old address, which another slot may get.
func (d *decision) changeEgress(c *skeinv1.ChangeEgress) error {
	o, err := d.outlet(c.GetNamespace(), c.GetName())
	if err != nil {
		return err
	}
	old := o.egress.get()
	if at := c.GetAtChangedIndex(); at != 0 && at != old.GetChangedIndex() {
		return refuse(FailedPrecondition, "egress %s was changed at event %d, and this command was decided as of event "+
			"%d; decide again on the present state",
			refOf(old), old.GetChangedIndex(), at)
	}
	if n := c.GetEndDraining(); n > old.GetDraining() {
		return refuse(FailedPrecondition, "egress %s: the command ends the drain of %d slots, and only %d are draining",
			refOf(old), n, old.GetDraining())
	}
	asked := Lasting(old)
	set := &skeinv1.Egress{}
	if c.GetSet() != nil {
		set = proto.CloneOf(c.GetSet())
	}
	for _, name := range c.GetFields() {
		if !slices.Contains(changeableEgress, name) {
			return refuse(InvalidArgument, "egress %s: field %.80q cannot be set; those that can are %s, and for others make "+
				"another egress", refOf(old), name, strings.Join(changeableEgress, ", "))
		}
		f := asked.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
		asked.ProtoReflect().Clear(f)
		if set.ProtoReflect().Has(f) {
			asked.ProtoReflect().Set(f, set.ProtoReflect().Get(f))
		}
	}
	next, destinations, err := readEgress(asked)
	if err != nil {
		return err
	}
	next.CreatedAt, next.CreatedIndex = old.GetCreatedAt(), old.GetCreatedIndex()
	d.drainSlots(old, next, c.GetEndDraining())
	if sameEgress(old, next) && old.GetDraining() == next.GetDraining() {
		d.answer.Egress = old
		return nil
	}
	if err := d.checkEgress(o, next, destinations); err != nil {
		return err
	}
	w := d.steps()
	stay := min(len(o.slots), int(next.GetReplicas()))
	next.Endpoints = slices.Clone(old.GetEndpoints()[:stay])
	for i, v := range o.slots {
		if i >= stay {
			w.emitSlotReleased(v, "its egress has fewer replicas")
		} else if !proto.Equal(sourceOf(old, i), sourceOf(next, i)) {
			w.emitSlotReleased(v, "it gets another source address")
		}
	}
	if err := w.reserveSources(next); err != nil {
		return err
	}
	if err := w.allocateEndpoints(next); err != nil {
		return err
	}
	next.ChangedIndex = w.nextIndex()
	w.emit(&skeinv1.Event{Body: &skeinv1.Event_EgressChanged{EgressChanged: &skeinv1.EgressChanged{Egress: next,
		Change: changeOfEgress(old, next)}}})
	if err := w.releaseUnused(old); err != nil {
		return err
	}
	w.keep()
	d.answer.Egress = next
	return nil
}

// sourceOf is the source address of a slot; nil: its gateway's own.
func sourceOf(e *skeinv1.Egress, slot int) *skeinv1.EgressAddress {
	if slot < len(e.GetAddresses()) {
		return e.GetAddresses()[slot]
	}
	return nil
}

// changeOfEgress names the fields that differ.
func changeOfEgress(old, next *skeinv1.Egress) string {
	var names []string
	a, b := Lasting(old).ProtoReflect(), Lasting(next).ProtoReflect()
	for _, name := range changeableEgress {
		if f := a.Descriptor().Fields().ByName(protoreflect.Name(name)); !a.Get(f).Equal(b.Get(f)) {
			names = append(names, name)
		}
	}
	if old.GetDraining() != next.GetDraining() {
		names = append(names, "draining")
	}
	return strings.Join(names, ", ")
}

// removeEgress takes an egress out; its owners stop before, and its blocks go back after.
func (d *decision) removeEgress(c *skeinv1.RemoveEgress) error {
	o, err := d.outlet(c.GetNamespace(), c.GetName())
	if err != nil {
		return err
	}
	w := d.steps()
	for _, v := range o.slots {
		w.emitSlotReleased(v, "its egress was removed")
	}
	w.emit(&skeinv1.Event{Body: &skeinv1.Event_EgressRemoved{EgressRemoved: &skeinv1.EgressRemoved{
		Namespace: c.GetNamespace(), Name: c.GetName()}}})
	if err := w.releaseUnused(o.egress.get()); err != nil {
		return err
	}
	w.keep()
	gone := o.egress.get()
	d.answer.Egress = &skeinv1.Egress{Namespace: gone.GetNamespace(), Name: gone.GetName(),
		CreatedIndex: gone.GetCreatedIndex()}
	return nil
}

// releaseUnused gives back the blocks in which an egress had addresses and nobody has any more.
func (w *stepper) releaseUnused(old *skeinv1.Egress) error {
	if err := w.foldPending(); err != nil {
		return err
	}
	uses, _ := usesOf(old)
	for _, u := range uses {
		r := w.s.poolAt(u.addr)
		number, _, _ := r.layout.find(u.addr)
		if b := r.block(number); b != nil && w.s.mayEnd(r, b) {
			w.emitReleased(b, "its egress has no address in it any more")
			if err := w.foldPending(); err != nil {
				return err
			}
		}
	}
	return nil
}

// mayEnd reports whether a reserved block was reserved for what is not there any more: static addresses or those of an
// egress.
func (s *State) mayEnd(r *poolState, b *skeinv1.Block) bool {
	_, statics := r.staticsIn.get(b.GetNumber(), "")
	return b.GetNodeId() == "" && !statics && s.egressesIn(b.GetPool(), b.GetNumber()) == 0 && madeFor(b)
}

// madeFor reports whether a block was reserved for static addresses or for an egress, and not by a user for its own
// sake.
func madeFor(b *skeinv1.Block) bool {
	return b.GetReason() == StaticReason || strings.HasPrefix(b.GetReason(), egressReason)
}

// egressesOf names the egresses that have addresses in a pool, or in one block of it.
func (s *State) egressesOf(r *poolState, in func(number uint64) bool) string {
	const limit = 5
	var names []string
	for _, ref := range s.egressNames {
		uses, _ := usesOf(s.outlet(ref).egress.get())
		if slices.ContainsFunc(uses, func(u addressUse) bool {
			number, _, ok := r.layout.find(u.addr)
			return ok && in(number)
		}) {
			names = append(names, ref.String())
		}
	}
	shown := names[:min(len(names), limit)]
	return strings.Join(shown, ", ") + more(len(names)-len(shown))
}
