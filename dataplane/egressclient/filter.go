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
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Whoever may send to the tunnels' port puts packets into the namespace that no firewall of its links has seen. So only
// the ends of the client's egresses may, by the link that leads to them: the table "inet skein_client" drops the rest
// before sockets and devices see it.
const (
	filterTable = "skein_client"
	filterChain = "skein_fou"
	setEnds4    = "skein_ends_ipv4"
	setEnds6    = "skein_ends_ipv6"
	setLinks    = "skein_links"
)

// Filter is who may send to the tunnels' port. The zero value is no table at all.
type Filter struct {
	Ends  []netip.Addr // sorted
	Links []string     // sorted
}

// wantFilter is the filter of a client: all slots' endpoints of its egresses, since what a former slot answers is still
// taken.
func wantFilter(s dataplane.ClientSpec) Filter {
	if len(s.Tunnels) == 0 {
		return Filter{}
	}
	f := Filter{Ends: slices.Clone(s.Ends), Links: append(slices.Clone(s.Links), s.Uplink)}
	for _, t := range s.Tunnels {
		f.Ends = append(f.Ends, t.Remote)
	}
	f.Ends = distinct(f.Ends, nil)
	slices.Sort(f.Links)
	f.Links = slices.Compact(f.Links)
	return f
}

// with is a filter that lets in what either does.
func (f Filter) with(o Filter) Filter {
	out := Filter{Ends: distinct(slices.Concat(f.Ends, o.Ends), nil), Links: slices.Concat(f.Links, o.Links)}
	slices.Sort(out.Links)
	out.Links = slices.Compact(out.Links)
	return out
}

func (f Filter) empty() bool { return len(f.Ends) == 0 }

func (f Filter) equal(o Filter) bool {
	return slices.Equal(f.Ends, o.Ends) && slices.Equal(f.Links, o.Links)
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
	ns netns.NsHandle
}

// listen hears of changes of nftables in the namespace.
func (f filter) listen() (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(f.ns)})
	if err != nil {
		return nil, err
	}
	if err := c.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// ofFilter says whether a notification is about the filter's table.
func ofFilter(m netlink.Message) bool {
	family, table, ok := nft.ForeignTable(m.Data)
	return ok && family == unix.NFPROTO_INET && table == filterTable
}

// filterState is what the kernel has of the filter.
type filterState struct {
	Filter
	there bool
	whole bool // as this package makes it
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
		return filterState{}, fmt.Errorf("reading the nft table inet %s: %w", filterTable, err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail(err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == filterTable })
	if i < 0 {
		return have, nil
	}
	t, chain := ourTable()
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
			if s.Name == setLinks {
				have.Links = append(have.Links, string(bytes.TrimRight(e.Key, "\x00")))
			} else if a, ok := netip.AddrFromSlice(e.Key); ok {
				have.Ends = append(have.Ends, a)
			}
		}
	}
	whole = whole && seen[setEnds4] && seen[setEnds6] && seen[setLinks]
	if whole {
		k, err := c.ListChain(t, chain.Name)
		whole = err == nil && k.Hooknum != nil && *k.Hooknum == *chain.Hooknum && k.Priority != nil &&
			*k.Priority == *chain.Priority
	}
	if whole {
		rules, err := c.GetRules(t, chain)
		if err != nil {
			return fail(err)
		}
		whole = sameRules(rules, filterRules())
	}
	return filterState{have.with(Filter{}), true, whole}, nil
}

// write makes the table what it shall be, in one transaction, and tells in how many steps. have is what it has, before
// and after.
func (f filter) write(want Filter, have *filterState) (writes int, err error) {
	if want.empty() && !have.there || have.whole && have.equal(want) {
		return 0, nil
	}
	c, err := f.dial()
	if err != nil {
		return 0, err
	}
	t, chain := ourTable()
	switch {
	case want.empty():
		c.DelTable(t)
	case !have.whole:
		c.AddTable(t) // so that there is one to delete
		c.DelTable(t)
		c.AddTable(t)
		for _, name := range []string{setEnds4, setEnds6, setLinks} {
			set := ourSet(t, name)
			if err := c.AddSet(set, nil); err != nil {
				return 0, err
			}
			if err := inParts(c.SetAddElements, set, want.elements(name)); err != nil {
				return 0, err
			}
		}
		c.AddChain(chain)
		for _, exprs := range filterRules() {
			c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: exprs})
		}
	default:
		for _, name := range []string{setEnds4, setEnds6, setLinks} {
			if err := change(c, ourSet(t, name), have.elements(name), want.elements(name)); err != nil {
				return 0, err
			}
		}
	}
	if err := c.Flush(); err != nil {
		return 0, fmt.Errorf("writing the nft table inet %s, which keeps strangers out of tunnels: %w",
			filterTable, err)
	}
	*have = filterState{want, !want.empty(), !want.empty()}
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

// elements are those of one of the sets.
func (f Filter) elements(set string) (out []nftables.SetElement) {
	if set == setLinks {
		for _, l := range f.Links {
			key := make([]byte, unix.IFNAMSIZ)
			copy(key, l)
			out = append(out, nftables.SetElement{Key: key})
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

func ourTable() (*nftables.Table, *nftables.Chain) {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: filterTable}
	return t, &nftables.Chain{Name: filterChain, Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityRaw}
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
	}
	return nil
}

// filterRules let the ends in by the links, and nobody else to the tunnels' port.
func filterRules() [][]expr.Any {
	const reg = 1
	port := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, dataplane.FoUPort)},
	}
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
			a, errA := expr.Marshal(unix.NFPROTO_INET, x)
			b, errB := expr.Marshal(unix.NFPROTO_INET, y)
			return errA == nil && errB == nil && bytes.Equal(a, b)
		})
	})
}
