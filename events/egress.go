package events

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// DefaultEgressLease is the lease of an egress that says nothing else, in milliseconds. Slots carry it, so it is part
// of what was agreed: another default counts for slots that are assigned from then on.
const DefaultEgressLease = 1200

// outlet is an egress with its slots. Like an entity it is replaced and never changed.
type outlet struct {
	egress *cell[*skeinv1.Egress]
	slots  []*skeinv1.EgressSlot // by number; one for each endpoint

	destinations []netip.Prefix // derived from the egress
}

// egressRef names an egress, slotRef one of its slots.
type (
	egressRef struct{ namespace, name string }
	slotRef   struct {
		egressRef
		number uint32
	}
)

func refOf(e *skeinv1.Egress) egressRef { return egressRef{e.GetNamespace(), e.GetName()} }

// String is namespace/name, as users write it.
func (r egressRef) String() string { return r.namespace + "/" + r.name }

// String is namespace/name#number.
func (r slotRef) String() string { return r.egressRef.String() + "#" + strconv.Itoa(int(r.number)) }

func (r egressRef) compare(o egressRef) int {
	return cmp.Or(cmp.Compare(r.namespace, o.namespace), cmp.Compare(r.name, o.name))
}

func (r egressRef) key() string { return podKey(r.namespace, r.name) }

func (r slotRef) key() string { return strconv.Itoa(int(r.number)) + " " + r.egressRef.key() }

// EgressUse says what an address is to an egress.
type EgressUse struct {
	Namespace, Name string // of the egress
	Slot            uint32
	Source          bool // what leaves has it as its source; false: the tunnels of the slot lead to it
}

func (u EgressUse) ref() egressRef { return egressRef{u.Namespace, u.Name} }

// addressUse is an address with its use.
type addressUse struct {
	addr netip.Addr
	EgressUse
}

// usesOf are all addresses of an egress; ok is false if one of them is not written in its one form, is of the wrong
// family, is there twice, or if a slot has none.
func usesOf(e *skeinv1.Egress) (out []addressUse, ok bool) {
	seen := map[netip.Addr]bool{}
	add := func(all []*skeinv1.EgressAddress, source bool) bool {
		for i, v := range all {
			for j, text := range []string{v.GetIpv4(), v.GetIpv6()} {
				if text == "" {
					continue
				}
				a, err := netip.ParseAddr(text)
				if err != nil || a.Is6() != (j == 1) || a.Is4In6() || a.Zone() != "" || a.String() != text || seen[a] {
					return false
				}
				seen[a] = true
				out = append(out, addressUse{a, EgressUse{e.GetNamespace(), e.GetName(), uint32(i), source}})
			}
			if v.GetIpv4() == "" && v.GetIpv6() == "" {
				return false
			}
		}
		return true
	}
	return out, add(e.GetEndpoints(), false) && add(e.GetAddresses(), true)
}

// encodeOutlet is what an egress adds to the state's hash: its own digest, and its slots.
func encodeOutlet(b []byte, o *outlet) []byte {
	d := o.egress.sum()
	b = append(b, d[:]...)
	for _, v := range o.slots {
		b = protowire.AppendBytes(b, appendMessage(nil, v))
	}
	return b
}

func (s *State) outlet(r egressRef) *outlet {
	o, _ := s.outlets.get(textKey(r.key()), r.key())
	return o
}

// Egresses are all egresses, by namespace and name.
func (s *State) Egresses() []*skeinv1.Egress {
	out := make([]*skeinv1.Egress, 0, len(s.egressNames))
	for _, r := range s.egressNames {
		out = append(out, s.outlet(r).egress.get())
	}
	return out
}

// Egress is the egress of that name, or nil.
func (s *State) Egress(namespace, name string) *skeinv1.Egress {
	if o := s.outlet(egressRef{namespace, name}); o != nil {
		return o.egress.get()
	}
	return nil
}

// Slots are the slots of an egress, by number: as many as it has replicas, whether they have an owner or not. The
// caller may keep the list and not change it. Without such an egress there are none.
func (s *State) Slots(namespace, name string) []*skeinv1.EgressSlot {
	if o := s.outlet(egressRef{namespace, name}); o != nil {
		return o.slots
	}
	return nil
}

// Slot is one slot of an egress, or nil.
func (s *State) Slot(namespace, name string, number uint32) *skeinv1.EgressSlot {
	if all := s.Slots(namespace, name); uint64(number) < uint64(len(all)) {
		return all[number]
	}
	return nil
}

// SlotsOf are the slots that a node owns, by namespace, name and number. It costs what it returns.
func (s *State) SlotsOf(nodeID string) []*skeinv1.EgressSlot {
	h, ok := hexKey(nodeID)
	if !ok {
		return nil
	}
	held, _ := s.slotOwners.get(h, nodeID)
	refs := list(&held)
	slices.SortFunc(refs, func(x, y slotRef) int {
		return cmp.Or(x.compare(y.egressRef), cmp.Compare(x.number, y.number))
	})
	var out []*skeinv1.EgressSlot
	for _, r := range refs {
		out = append(out, s.Slot(r.namespace, r.name, r.number))
	}
	return out
}

// EgressAddressAt says what an address is to which egress; ok is false if it belongs to none.
func (s *State) EgressAddressAt(a netip.Addr) (use EgressUse, ok bool) {
	text := a.Unmap().String()
	return s.egressAddrs.get(textKey(text), text)
}

// egressBlock is the key of the index of blocks in which egresses have addresses.
func egressBlock(pool string, number uint64) string {
	return strconv.FormatUint(number, 10) + " " + pool
}

// egressesIn is how many addresses of egresses lie in a block.
func (s *State) egressesIn(pool string, number uint64) uint32 {
	key := egressBlock(pool, number)
	n, _ := s.egressIn.get(textKey(key), key)
	return n
}

// Eligible reports whether a node may be a gateway of an egress: it has all the labels, and is not being drained. An
// egress that asks for no label has no gateways.
func Eligible(e *skeinv1.Egress, n *skeinv1.Node) bool {
	if n == nil || n.GetDraining() || len(e.GetGateways()) == 0 {
		return false
	}
	for k, want := range e.GetGateways() {
		if have, ok := n.GetLabels()[k]; !ok || have != want {
			return false
		}
	}
	return true
}

// SlotFor is the slot that a client falls on, of so many; key is "namespace/pod", or the client's address where it has
// no name. It is rendezvous hashing: with one slot more only clients of the new one move. Every node must come to the
// same slot at all times, so this never changes; a test pins values. Without replicas it is 0.
//
// The weight of a slot is FNV-1a of the key, moved on by the slot's number and mixed as SplitMix64 does.
func SlotFor(key string, replicas uint32) uint32 {
	const golden = 0x9e3779b97f4a7c15
	h := uint64(14695981039346656037)
	for i := 0; i < len(key); i++ {
		h = (h ^ uint64(key[i])) * 1099511628211
	}
	best, most := uint32(0), uint64(0)
	for i := range replicas {
		h += golden
		w := h
		w = (w ^ w>>30) * 0xbf58476d1ce4e5b9
		w = (w ^ w>>27) * 0x94d049bb133111eb
		if w ^= w >> 31; w > most {
			best, most = i, w
		}
	}
	return best
}
