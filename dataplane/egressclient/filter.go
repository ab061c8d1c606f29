package egressclient

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// The table "inet skein_client" of a client's network namespace. Its rules about flows are in flows.go.
//
// A packet sent to the tunnels' port enters the namespace without passing the firewalls of its links. So only the
// ends of the client's egresses may send there, and only over the links that lead to them. All other packets to the
// port are dropped before they reach sockets and devices.
const (
	filterChain = "skein_fou"
	setEnds4    = "skein_ends_ipv4"
	setEnds6    = "skein_ends_ipv6"
	setLinks    = "skein_links"
	setPorts    = "skein_ports" // of tunnels
)

// filterSets are the names of the sets that filter who may send to the port.
var filterSets = []string{setEnds4, setEnds6, setLinks, setPorts}

// Filter says who may send to the tunnels' port, and which flows keep their slot. The zero value means no table.
type Filter struct {
	Ends  []netip.Addr // sorted
	Links []string     // sorted
	Ports []uint16     // of tunnels, sorted
	Ways  []Way        // sorted
	Flows []int        // slots whose flows are recalled, sorted
	Host  bool         // a host's own namespace, which also forwards packets of others
}

// wantFilter is the filter for a client. It admits the endpoints of all slots of its egresses, since former slots
// still send answers.
func wantFilter(s dataplane.ClientSpec) Filter {
	if len(s.Tunnels) == 0 {
		return Filter{}
	}
	f := Filter{Ends: slices.Clone(s.Ends), Links: append(slices.Clone(s.Links), s.Uplink)}
	f.Host, f.Ports = s.Host, slices.Sorted(slices.Values(s.Ports.Taken()))
	for _, t := range s.Tunnels {
		f.Ends = append(f.Ends, t.Remote)
		if t.Slot >= 0 && t.Slot < dataplane.ClientFlowSlots {
			f.Ways = append(f.Ways, Way{dataplane.FoULink(t.Remote), t.Slot, t.Spread})
		}
	}
	slices.SortFunc(f.Ways, compareWays)
	f.Ways = slices.CompactFunc(f.Ways, Way.equal)
	for _, one := range s.Flows {
		if one.Slot >= 0 && one.Slot < dataplane.ClientFlowSlots {
			f.Flows = append(f.Flows, one.Slot)
		}
	}
	f.Flows, f.Ends, f.Links = set(f.Flows), distinct(f.Ends, nil), set(f.Links)
	return f
}

// with admits what either filter admits, and treats flows like f.
func (f Filter) with(o Filter) Filter {
	return Filter{Ends: distinct(slices.Concat(f.Ends, o.Ends), nil), Links: set(slices.Concat(f.Links, o.Links)),
		Ports: set(slices.Concat(f.Ports, o.Ports)), Ways: f.Ways, Flows: f.Flows, Host: f.Host}
}

func (f Filter) empty() bool { return len(f.Ends) == 0 }

// String describes the filter in a plan.
func (f Filter) String() string {
	if f.empty() {
		return "anybody"
	}
	return fmt.Sprintf("only %v, by %v", f.Ends, f.Links)
}

// filter writes and reads the table of one network namespace. It holds no open socket, as there are as many clients
// as pods.
type filter struct {
	ns    netns.NsHandle
	table string // its name, family inet
}

// filterState is the kernel's state. Of the embedded Filter only the admitted ends, links and ports are set.
type filterState struct {
	Filter
	nftable.State
}

// lets reports whether the kernel has exactly the table of a filter.
func (s filterState) lets(f filter, want Filter) bool { return len(f.steps(want, s)) == 0 }

// steps are the operations that turn the kernel's table into that of a filter.
func (f filter) steps(want Filter, have filterState) []nftable.Op {
	if want.empty() && !have.There && len(have.Chains) == 0 {
		return nil
	}
	return nftable.Diff(f.of(want), have.State, true)
}

// read reads the table from the kernel.
func (f filter) read() (have filterState, err error) {
	c, err := nftable.Open(int(f.ns))
	if err != nil {
		return have, err
	}
	defer c.Close()
	if have.State, err = c.Read(nftable.Table{Name: f.table}); err != nil {
		return have, err
	}
	for _, set := range filterSets {
		for key := range have.Sets[set].Elements {
			have.note(set, []byte(key))
		}
	}
	have.Filter = have.with(Filter{})
	return have, nil
}

// let writes the table except for existing rules, so that all wanted ends are admitted.
func (f filter) let(want Filter, have *filterState) (writes int, err error) {
	return f.make(want, have, func(o nftable.Op) bool { return o.Verb != nftable.SetRules })
}

// write writes the complete table in one transaction, and returns the number of writes. It updates have to the new
// state.
func (f filter) write(want Filter, have *filterState) (writes int, err error) {
	return f.make(want, have, func(nftable.Op) bool { return true })
}

func (f filter) make(want Filter, have *filterState, wanted func(nftable.Op) bool) (writes int, err error) {
	ops := slices.DeleteFunc(f.steps(want, *have), func(o nftable.Op) bool { return !wanted(o) })
	if len(ops) == 0 {
		return 0, nil
	}
	c, err := nftable.Open(int(f.ns))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	next := nftable.State{}
	if want.empty() {
		_, err = c.Delete(f.table)
	} else if next, err = have.Apply(ops); err == nil {
		_, err = c.Write(f.of(want), ops)
	}
	if err != nil {
		return 0, fmt.Errorf("keeping strangers out of tunnels: %w", err)
	}
	have.Filter, have.State = want, next
	return 1, nil
}

// of is the table of a filter.
func (f filter) of(want Filter) nftable.Table {
	t := nftable.Table{Name: f.table, Chains: want.chains()}
	keys := map[string]nftables.SetDatatype{setEnds4: nftables.TypeIPAddr, setEnds6: nftables.TypeIP6Addr,
		setLinks: nftables.TypeIFName, setPorts: nftables.TypeInetService}
	for _, name := range filterSets {
		t.Sets = append(t.Sets, nftable.Set{Name: name, Key: keys[name], Elements: want.elements(name)})
	}
	return t
}

// note adds an element that the kernel has in one of the sets.
func (f *Filter) note(set string, key []byte) {
	switch {
	case set == setLinks:
		f.Links = append(f.Links, string(bytes.TrimRight(key, "\x00")))
	case set == setPorts && len(key) >= 2:
		f.Ports = append(f.Ports, binary.BigEndian.Uint16(key))
	default:
		if a, ok := netip.AddrFromSlice(key); ok {
			f.Ends = append(f.Ends, a)
		}
	}
}

// elements are the elements of one of the sets.
func (f Filter) elements(set string) map[string]string {
	out := map[string]string{}
	switch set {
	case setLinks:
		for _, l := range f.Links {
			out[string(nftable.LinkName(l))] = ""
		}
	case setPorts:
		for _, p := range f.Ports {
			out[string(binary.BigEndian.AppendUint16(nil, p))] = ""
		}
	default:
		for _, a := range f.Ends {
			if a.Is4() == (set == setEnds4) {
				out[string(a.AsSlice())] = ""
			}
		}
	}
	return out
}

// chains are all chains of the table.
func (f Filter) chains() []nftable.Chain {
	in := chain(filterChain, nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityRaw)
	for _, exprs := range filterRules() {
		in.Rules = append(in.Rules, nftable.Rule{Exprs: exprs})
	}
	return append([]nftable.Chain{in}, f.flowChains()...)
}

func chain(name string, kind nftables.ChainType, hook *nftables.ChainHook,
	priority *nftables.ChainPriority) nftable.Chain {
	return nftable.Chain{Name: name, Type: kind, Hook: hook, Priority: int32(*priority)}
}

// toFoU matches packets to the tunnels' ports.
func toFoU() []expr.Any {
	return append(nftable.L4(unix.IPPROTO_UDP), nftable.DestPort(), nftable.In(setPorts))
}

// filterRules admit the ends over the links, and drop all other packets to the tunnels' port.
func filterRules() [][]expr.Any {
	end := func(f nftable.IP, set string) []expr.Any {
		return slices.Concat(toFoU(), []expr.Any{nftable.Meta(expr.MetaKeyIIFNAME), nftable.In(setLinks)}, f.Source(),
			[]expr.Any{nftable.In(set), nftable.Accept})
	}
	return [][]expr.Any{end(nftable.IPv4, setEnds4), end(nftable.IPv6, setEnds6),
		append(toFoU(), nftable.CountedDrop()...)}
}
