package egressclient

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// The table "inet skein_client" of a client's network namespace. Its rules about flows are in flows.go.
//
// Whoever may send to the tunnels' port puts packets into the namespace that no firewall of its links has seen. So only
// the ends of the client's egresses may, by the link that leads to them: it drops the rest before sockets and devices
// see it.
const (
	filterChain = "skein_fou"
	setEnds4    = "skein_ends_ipv4"
	setEnds6    = "skein_ends_ipv6"
	setLinks    = "skein_links"
	setPorts    = "skein_ports" // of tunnels
)

// filterSets are the sets of the table.
var filterSets = []string{setEnds4, setEnds6, setLinks, setPorts}

// Filter is who may send to the tunnels' port, and which flows stay with their slot. The zero value is no table at all.
type Filter struct {
	Ends  []netip.Addr // sorted
	Links []string     // sorted
	Ports []uint16     // of tunnels, sorted
	Ways  []Way        // sorted
	Flows []int        // slots whose flows are recalled, sorted
	Host  bool         // a host's own namespace, which passes on what is others'
}

// wantFilter is the filter of a client: all slots' endpoints of its egresses, since what a former slot answers is still
// taken.
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
	slices.Sort(f.Flows)
	f.Flows = slices.Compact(f.Flows)
	f.Ends = distinct(f.Ends, nil)
	slices.Sort(f.Links)
	f.Links = slices.Compact(f.Links)
	return f
}

// with is a filter that lets in what either does, and treats flows as f does.
func (f Filter) with(o Filter) Filter {
	out := Filter{Ends: distinct(slices.Concat(f.Ends, o.Ends), nil), Links: slices.Concat(f.Links, o.Links),
		Ports: slices.Concat(f.Ports, o.Ports), Ways: f.Ways, Flows: f.Flows, Host: f.Host}
	slices.Sort(out.Links)
	slices.Sort(out.Ports)
	out.Links, out.Ports = slices.Compact(out.Links), slices.Compact(out.Ports)
	return out
}

func (f Filter) empty() bool { return len(f.Ends) == 0 }

// equal compares who is let in.
func (f Filter) equal(o Filter) bool {
	return slices.Equal(f.Ends, o.Ends) && slices.Equal(f.Links, o.Links) && slices.Equal(f.Ports, o.Ports)
}

// String is the filter in a plan's words.
func (f Filter) String() string {
	if f.empty() {
		return "anybody"
	}
	return fmt.Sprintf("only %v, by %v", f.Ends, f.Links)
}

// filter writes and reads the table of one network namespace. It holds no socket: there are as many clients as pods.
type filter struct {
	ns    netns.NsHandle
	table string // its name, family inet
}

// filterState is what the kernel has of the filter.
type filterState struct {
	Filter
	there bool
	whole bool                        // as this package makes it, whatever rules it has
	rules map[string][]*nftables.Rule // by chain; nil: those of ruled, which this process has written
	ruled Filter
}

// hasRules tells whether the rules are those of a filter.
func (s *filterState) hasRules(f Filter) bool {
	if s.rules == nil {
		return slices.EqualFunc(s.ruled.Ways, f.Ways, Way.equal) && slices.Equal(s.ruled.Flows, f.Flows) &&
			s.ruled.Host == f.Host
	}
	return !slices.ContainsFunc(f.chains(), func(c chain) bool { return !sameRules(s.rules[c.name], c.rules) })
}

// How many elements go into one message, since an attribute is at most 64 KiB, and what all messages of a transaction
// need in bytes: a client has up to 64 egresses of 64 slots each.
const (
	elementsPerMsg = 400
	socketBuffer   = 4 << 20
)

func (f filter) dial() (*nlcount.Nft, error) {
	c, err := nlcount.NewNft(nftables.WithNetNSFd(int(f.ns)), nftables.WithSockOptions(func(c *netlink.Conn) error {
		// Without CAP_NET_ADMIN over the host's first namespace the kernel grants less, which suffices for some
		// thousand elements.
		_, _ = c.SetReadBuffer(socketBuffer), c.SetWriteBuffer(socketBuffer)
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("opening nftables in the network namespace: %w", err)
	}
	return c, nil
}

// read is what the kernel has.
func (f filter) read() (have filterState, err error) {
	c, err := f.dial()
	if err != nil {
		return have, err
	}
	fail := func(err error) (filterState, error) {
		return filterState{}, fmt.Errorf("reading the nft table inet %s: %w", f.table, err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail(err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == f.table })
	if i < 0 {
		return have, nil
	}
	t := f.ours()
	whole := tables[i].Flags == 0
	sets, err := c.GetSets(t)
	if err != nil {
		return fail(err)
	}
	seen := map[string]bool{}
	for _, s := range sets {
		w := ourSet(t, s.Name)
		whole = whole && w != nil && w.KeyType.Name == s.KeyType.Name && !s.Interval && !s.IsMap
		seen[s.Name] = true
		es, err := c.GetSetElements(s)
		if err != nil {
			return fail(err)
		}
		for _, e := range es {
			have.note(s.Name, e.Key)
		}
	}
	whole = whole && !slices.ContainsFunc(filterSets, func(name string) bool { return !seen[name] })
	out := filterState{Filter: have.with(Filter{}), there: true, whole: whole, rules: map[string][]*nftables.Rule{}}
	for _, want := range (Filter{}).chains() {
		if !out.whole {
			break
		}
		k, err := c.ListChain(t, want.name)
		out.whole = err == nil && want.is(k)
		if !out.whole {
			break
		}
		if out.rules[want.name], err = c.GetRules(t, k); err != nil {
			return fail(err)
		}
	}
	return out, nil
}

// let lets in what it shall, and leaves rules as they are where there are some.
func (f filter) let(want Filter, have *filterState) (writes int, err error) {
	return f.make(want, have, true)
}

// write makes the table what it shall be, in one transaction, and tells in how many steps. have is what it has, before
// and after.
func (f filter) write(want Filter, have *filterState) (writes int, err error) {
	return f.make(want, have, false)
}

func (f filter) make(want Filter, have *filterState, leaveRules bool) (writes int, err error) {
	rules := leaveRules || have.whole && have.hasRules(want)
	if want.empty() && !have.there || have.whole && have.equal(want) && rules {
		return 0, nil
	}
	c, err := f.dial()
	if err != nil {
		return 0, err
	}
	t := f.ours()
	switch {
	case want.empty():
		c.DelTable(t)
	case !have.whole || !rules: // in one transaction: nothing passes in between
		c.AddTable(t) // so that there is one to delete
		c.DelTable(t)
		c.AddTable(t)
		for _, name := range filterSets {
			set := ourSet(t, name)
			if err := c.AddSet(set, nil); err != nil {
				return 0, err
			}
			if err := inParts(c.SetAddElements, set, want.elements(name)); err != nil {
				return 0, err
			}
		}
		for _, k := range want.chains() {
			chain := c.AddChain(k.chain(t))
			for _, exprs := range k.rules {
				c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: exprs})
			}
		}
		have.rules, have.ruled = nil, want
	default:
		for _, name := range filterSets {
			if err := change(c, ourSet(t, name), have.elements(name), want.elements(name)); err != nil {
				return 0, err
			}
		}
	}
	if err := c.Flush(); err != nil {
		return 0, fmt.Errorf("writing the nft table inet %s, which keeps strangers out of tunnels: %w",
			f.table, err)
	}
	have.Filter, have.there, have.whole = want, !want.empty(), !want.empty()
	return 1, nil
}

// change turns a set's elements into others.
func change(c *nlcount.Nft, set *nftables.Set, have, want []nftables.SetElement) error {
	minus := func(a, b []nftables.SetElement) (out []nftables.SetElement) {
		for _, e := range a {
			if !slices.ContainsFunc(b, func(o nftables.SetElement) bool { return bytes.Equal(o.Key, e.Key) }) {
				out = append(out, e)
			}
		}
		return out
	}
	if err := inParts(c.SetDeleteElements, set, minus(have, want)); err != nil {
		return err
	}
	return inParts(c.SetAddElements, set, minus(want, have))
}

// inParts gives elements to do in several messages, or in none.
func inParts(do func(*nftables.Set, []nftables.SetElement) error, set *nftables.Set, all []nftables.SetElement) error {
	for part := range slices.Chunk(all, elementsPerMsg) {
		if err := do(set, part); err != nil {
			return err
		}
	}
	return nil
}

// note takes an element that the kernel has in one of the sets.
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

// elements are those of one of the sets.
func (f Filter) elements(set string) (out []nftables.SetElement) {
	switch set {
	case setLinks:
		for _, l := range f.Links {
			key := make([]byte, unix.IFNAMSIZ)
			copy(key, l)
			out = append(out, nftables.SetElement{Key: key})
		}
		return out
	case setPorts:
		for _, p := range f.Ports {
			out = append(out, nftables.SetElement{Key: binary.BigEndian.AppendUint16(nil, p)})
		}
		return out
	}
	for _, a := range f.Ends {
		if a.Is4() == (set == setEnds4) {
			out = append(out, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return out
}

func (f filter) ours() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: f.table}
}

// chain is one chain with its rules.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    [][]expr.Any
}

func (c chain) chain(t *nftables.Table) *nftables.Chain {
	return &nftables.Chain{Name: c.name, Table: t, Type: c.kind, Hooknum: c.hook, Priority: &c.priority}
}

// is tells whether a chain of the kernel's is at the same place.
func (c chain) is(k *nftables.Chain) bool {
	return k.Type == c.kind && k.Hooknum != nil && *k.Hooknum == *c.hook && k.Priority != nil && *k.Priority == c.priority
}

// chains are all chains of the table.
func (f Filter) chains() []chain {
	in := chain{filterChain, nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityRaw, filterRules()}
	return append([]chain{in}, f.flowChains()...)
}

// ourSet is one of the sets, or nil. The IDs are given here, or the library counts in a global.
func ourSet(t *nftables.Table, name string) *nftables.Set {
	switch name {
	case setEnds4:
		return &nftables.Set{Table: t, Name: name, ID: 1, KeyType: nftables.TypeIPAddr}
	case setEnds6:
		return &nftables.Set{Table: t, Name: name, ID: 2, KeyType: nftables.TypeIP6Addr}
	case setLinks:
		return &nftables.Set{Table: t, Name: name, ID: 3, KeyType: nftables.TypeIFName}
	case setPorts:
		return &nftables.Set{Table: t, Name: name, ID: 4, KeyType: nftables.TypeInetService}
	}
	return nil
}

// toFoU matches what is sent to the tunnels' ports.
func toFoU() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg, SetName: setPorts},
	}
}

// filterRules let the ends in by the links, and nobody else to the tunnels' port.
func filterRules() [][]expr.Any {
	port := toFoU()
	end := func(proto byte, offset, length uint32, set string) []expr.Any {
		return slices.Concat(port, []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
			&expr.Lookup{SourceRegister: reg, SetName: setLinks},
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: reg, SetName: set},
			&expr.Verdict{Kind: expr.VerdictAccept},
		})
	}
	return [][]expr.Any{
		end(unix.NFPROTO_IPV4, 12, 4, setEnds4),
		end(unix.NFPROTO_IPV6, 8, 16, setEnds6),
		slices.Concat(port, []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}),
	}
}

// sameRules compares rules in the kernel's own form, but for what they have counted.
func sameRules(have []*nftables.Rule, want [][]expr.Any) bool {
	return slices.EqualFunc(have, want, func(rule *nftables.Rule, exprs []expr.Any) bool {
		return slices.EqualFunc(rule.Exprs, exprs, func(x, y expr.Any) bool {
			if _, counts := x.(*expr.Counter); counts {
				_, both := y.(*expr.Counter)
				return both
			}
			if set, ok := y.(*expr.Ct); ok && set.SourceRegister { // the library does not read the register of one that sets
				have, both := x.(*expr.Ct)
				return both && have.Key == set.Key && (have.Register == 0 || have.Register == set.Register)
			}
			a, errA := expr.Marshal(unix.NFPROTO_INET, x)
			b, errB := expr.Marshal(unix.NFPROTO_INET, y)
			return errA == nil && errB == nil && bytes.Equal(a, b)
		})
	})
}
