package events

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const (
	rangeSchema = 7 // brought ranges of sites
	sliceSchema = 8 // brought slices of them
)

// Slices is how many slices a site has. Each range that is sliced has that many equal parts, one of each slice, as
// far as it is large enough. Members of a slice are bound to the same leader. 128 are enough for sixteen leaders to
// have about the same.
const (
	Slices    = 1 << sliceBits
	sliceBits = 7
)

// Bounds of ranges. Fold rests on none of them.
const (
	MaxSiteRanges = 2048 // of the overlay and of all pools
	maxRangeBits  = 12   // the first range of a site has 2^12 addresses, or blocks, at most
	siteIPv6Bits  = 16   // of an IPv6 address, behind the overlay's prefix: which site
	// An overlay that is smaller has no ranges.
	smallestOverlay = 28
)

// SiteRange is a part of the overlay, or of a pool, from which the members of a site have their addresses.
type SiteRange struct {
	Site, Pool string // Pool is empty for the overlay
	IPv4, IPv6 netip.Prefix
	Sliced     bool // its slices are filled alike
}

// blockRange is a site's range of a pool in the numbers of its blocks.
type blockRange struct {
	site        string
	first, last uint64
	sliced      bool
}

func (b blockRange) has(n uint64) bool { return n >= b.first && n <= b.last }

// SiteRanges are all ranges of sites, in the order in which they were allotted. The caller does not change them.
func (s *State) SiteRanges() []SiteRange { return s.ranges }

// RangeAt is the range of the overlay that an address lies in.
func (s *State) RangeAt(a netip.Addr) (SiteRange, bool) {
	for _, r := range s.ranges {
		if r.Pool == "" && (r.IPv4.Contains(a) || r.IPv6.Contains(a)) {
			return r, true
		}
	}
	return SiteRange{}, false
}

// SiteRangesOf are the ranges of a pool, or with an empty name those of the overlay.
func (s *State) SiteRangesOf(pool string) (out []SiteRange) {
	for _, r := range s.ranges {
		if r.Pool == pool {
			out = append(out, r)
		}
	}
	return out
}

// allotRange folds a range, unless a part of it is another's or it lies where there are none. It reports whether it
// did.
func (s *State) allotRange(v *skeinv1.SiteRange) bool {
	r := SiteRange{Site: v.GetSite(), Pool: v.GetPool(), Sliced: v.GetSliced()}
	var ok4, ok6 bool
	r.IPv4, ok4 = readRange(v.GetIpv4(), false)
	r.IPv6, ok6 = readRange(v.GetIpv6(), true)
	if _, twice := s.rangeTable.get(v.GetIndex(), ""); twice || !ok4 || !ok6 || !r.IPv4.IsValid() && !r.IPv6.IsValid() ||
		CheckSite("range", r.Site) != nil || s.cluster == nil {
		return false
	}
	if r.Pool == "" {
		within := s.overlays()
		for _, p := range []netip.Prefix{r.IPv4, r.IPv6} {
			if p.IsValid() && !slices.ContainsFunc(within, func(o netip.Prefix) bool { return inside(o, p) }) {
				return false
			}
		}
		for _, o := range s.ranges {
			if o.Pool == "" && (o.IPv4.Overlaps(r.IPv4) || o.IPv6.Overlaps(r.IPv6)) {
				return false
			}
		}
	} else if !s.allotBlocks(r) {
		return false
	}
	s.ranges = append(slices.Clip(s.ranges), r)
	s.rangeTable.put(s.own(), v.GetIndex(), "", v)
	s.sizes.add(sectionRanges, v)
	return true
}

// readRange reads a prefix in its one form; none is fine.
func readRange(text string, six bool) (netip.Prefix, bool) {
	if text == "" {
		return netip.Prefix{}, true
	}
	p, err := netip.ParsePrefix(text)
	return p, err == nil && p == p.Masked() && p.String() == text && p.Addr().Is6() == six && !p.Addr().Is4In6()
}

// inside reports whether all of p lies in o.
func inside(o, p netip.Prefix) bool { return o.Bits() <= p.Bits() && o.Contains(p.Addr()) }

// allotBlocks takes the blocks of a range into its pool.
func (s *State) allotBlocks(r SiteRange) bool {
	old := s.poolState(r.Pool)
	if old == nil {
		return false
	}
	b, ok := old.layout.rangeOf(r)
	if !ok {
		return false
	}
	if slices.ContainsFunc(old.ranges, func(o blockRange) bool { return o.first <= b.last && b.first <= o.last }) {
		return false
	}
	next := *old
	next.ranges = append(slices.Clone(old.ranges), b)
	slices.SortFunc(next.ranges, func(x, y blockRange) int { return cmp.Compare(x.first, y.first) })
	next.advance()
	s.setPoolState(&next)
	return true
}

// rangeOf is the blocks of a range; ok is false where it is none of the pool.
func (l *layout) rangeOf(r SiteRange) (b blockRange, ok bool) {
	for _, one := range l.runs {
		if one.ipv4.IsValid() != r.IPv4.IsValid() || one.ipv6.IsValid() != r.IPv6.IsValid() {
			return b, false // all runs are of one kind
		}
		p, of := r.IPv4, one.ipv4
		if !p.IsValid() {
			p, of = r.IPv6, one.ipv6
		}
		size := hostBits(p) - l.bits
		if size < 0 || !inside(of, p) {
			continue
		}
		first, _, _ := l.find(p.Addr())
		b = blockRange{r.Site, first, first + 1<<size - 1, r.Sliced}
		have := l.rangeAt(first, size)
		return b, have.IPv4 == r.IPv4 && have.IPv6 == r.IPv6
	}
	return b, false
}

// rangeAt are the prefixes of 2^size blocks from the one numbered first on, which is aligned to them in its subnet.
func (l *layout) rangeAt(first uint64, size int) (r SiteRange) {
	ipv4, ipv6, _ := l.block(first)
	wide := func(p netip.Prefix) netip.Prefix {
		if !p.IsValid() {
			return p
		}
		return netip.PrefixFrom(p.Addr(), p.Bits()-size)
	}
	r.IPv4, r.IPv6 = wide(ipv4), wide(ipv6)
	return r
}

// dropRanges forgets the ranges of a pool that is removed.
func (s *State) dropRanges(pool string) {
	var gone []*skeinv1.SiteRange
	for v := range s.rangeTable.all() {
		if v.GetPool() == pool {
			gone = append(gone, v)
		}
	}
	for _, v := range gone {
		s.rangeTable.del(s.own(), v.GetIndex(), "")
		s.sizes.drop(sectionRanges, v)
	}
	if len(gone) > 0 {
		s.ranges = slices.DeleteFunc(slices.Clone(s.ranges), func(r SiteRange) bool { return r.Pool == pool })
	}
}

// loadRanges takes a snapshot's ranges.
func (s *State) loadRanges(p *skeinv1.State) error {
	last := uint64(0)
	for _, v := range p.GetSiteRanges() {
		if v.GetIndex() <= last || !s.past(v.GetIndex(), p) || !s.allotRange(v) {
			return fmt.Errorf("range %s %s of site %q: it is malformed, overlaps another, or its index %d is out of order",
				v.GetIpv4(), v.GetIpv6(), v.GetSite(), v.GetIndex())
		}
		last = v.GetIndex()
	}
	return nil
}

// rangedSite is the site from whose ranges a node gets addresses. A cluster that does not speak through leaders has
// none.
func rangedSite(set *skeinv1.Settings, n *skeinv1.Node, site string, said bool) (string, bool) {
	if n.GetSettings().GetSiteSet() {
		site, said = n.GetSettings().GetSite(), true
	}
	_, named := set.GetSiteTopology()[site]
	return site, said && (set.GetTopology() == "site" || named)
}

// mayAllot reports whether another range may be decided: there are not too many, and no member is too old to know it.
// Nobody asked for ranges, so no member may fall behind for them.
func (d *decision) mayAllot() bool {
	if d.s.rangeTable.n+d.allotted >= MaxSiteRanges {
		return false
	}
	return d.allFold(rangeSchema)
}

// maySlice reports whether ranges may be sliced from now on, when somebody joins who folds a schema: all members bind
// to leaders by slices as soon as there is one.
func (d *decision) maySlice(joins uint32) bool {
	return joins >= sliceSchema && d.allFold(sliceSchema)
}

// allFold reports whether all members fold a schema.
func (d *decision) allFold(schema uint32) bool {
	for n := range d.s.nodes.all() {
		if n.GetMaxSchema() < schema {
			return false
		}
	}
	return true
}

// allot emits a range.
func (d *decision) allot(r SiteRange) {
	d.allotted++
	v := &skeinv1.SiteRange{Site: r.Site, Pool: r.Pool, Ipv4: text(r.IPv4), Ipv6: text(r.IPv6), Index: d.nextIndex(),
		Sliced: r.Sliced}
	e := &skeinv1.Event{Body: &skeinv1.Event_SiteRangeAllotted{SiteRangeAllotted: &skeinv1.SiteRangeAllotted{Range: v}}}
	if r.Sliced {
		e.Body = &skeinv1.Event_SlicedRangeAllotted{SlicedRangeAllotted: &skeinv1.SlicedRangeAllotted{Range: v}}
	}
	d.emit(e)
}

// rangeBits are the least and the best size of a site's next range, as powers of two, when it has some already: the
// first is the square root of all there is, and each is twice as large as the one before, up to a quarter of all.
func rangeBits(all, have int) (least, best int) {
	least = min(all/2, maxRangeBits)
	return least, max(least, min(least+have, all-2))
}

// overlay is the addresses that a joining node gets: from its site's ranges where it has any, or may have.
func (d *decision) overlay(want *skeinv1.NewNode, cluster identity.ClusterID,
	id identity.ID) (netip.Addr, netip.Addr, error) {
	ipv6 := identity.OverlayIPv6(cluster, id)
	site, ranged := rangedSite(d.s.settings.get(), nil, want.GetSite(), want.GetSiteSaid())
	if ranged {
		if ipv4, in, six, ok := d.inRange(site, want.GetMaxSchema()); ok {
			if a := siteIPv6(six, id, in.slice(ipv4, id)); a.IsValid() && !d.s.taken(&d.s.addresses, a.String(), "") {
				ipv6 = a
			}
			return ipv4, ipv6, nil
		}
	}
	ipv4, err := d.s.nextIPv4()
	return ipv4, ipv6, err
}

// firstRange allots the range of the first node's site, in which it has the first address, if there is to be one. It
// returns the node's IPv6 address.
func (d *decision) firstRange(n *skeinv1.NewNode, set *skeinv1.Settings, cluster identity.ClusterID,
	overlay netip.Prefix) netip.Addr {
	id := identity.IDOf(n.GetIdentityKey())
	site, ranged := rangedSite(set, nil, n.GetSite(), n.GetSiteSaid())
	if !ranged || n.GetMaxSchema() < rangeSchema || overlay.Bits() > smallestOverlay {
		return identity.OverlayIPv6(cluster, id)
	}
	r, ok := d.s.nextRange(overlay, identity.OverlayPrefix(cluster), site, 0)
	if !ok {
		return identity.OverlayIPv6(cluster, id)
	}
	r.Sliced = n.GetMaxSchema() >= sliceSchema
	d.allot(r)
	return siteIPv6(r, id, r.slice(overlay.Masked().Addr().Next(), id)) // the first node has the first address
}

// inRange is a free address of a site's ranges, the range that it is in, and the one that has IPv6. It allots the
// range if need be, and may be. The node that asks for it folds a schema.
func (d *decision) inRange(site string, folds uint32) (ipv4 netip.Addr, in, six SiteRange, ok bool) {
	pool, err := netip.ParsePrefix(d.s.Cluster().GetOverlayIpv4())
	if err != nil || !pool.Addr().Is4() || pool.Bits() > smallestOverlay {
		return ipv4, in, six, false
	}
	have := 0
	for _, r := range d.s.ranges {
		if r.Pool != "" || r.Site != site {
			continue
		}
		have++
		if r.IPv6.IsValid() {
			six = r
		}
		if !ipv4.IsValid() {
			ipv4, in = d.s.firstFree(pool, r), r
		}
	}
	if ipv4.IsValid() {
		return ipv4, in, six, true
	}
	if folds < rangeSchema || !d.mayAllot() {
		return ipv4, in, six, false
	}
	overlay6 := netip.Prefix{}
	if !six.IPv6.IsValid() {
		overlay6, _ = netip.ParsePrefix(d.s.Cluster().GetOverlayIpv6())
	}
	r, ok := d.s.nextRange(pool, overlay6, site, have)
	if !ok {
		return ipv4, in, six, false
	}
	r.Sliced = d.maySlice(folds)
	if r.IPv6.IsValid() {
		six = r
	}
	d.allot(r)
	return d.s.firstFree(pool, r), r, six, true
}

// firstFree is the first address of a range that nobody has, which is neither the overlay's first nor its last. Of
// one that is sliced each half gets as many in turn, and so does each half of these: their order is that of their
// numbers read backwards, bit by bit.
func (s *State) firstFree(pool netip.Prefix, of SiteRange) netip.Addr {
	in := of.IPv4
	if !in.IsValid() {
		return netip.Addr{}
	}
	size := 32 - in.Bits()
	network, first := number(pool.Masked().Addr()), number(in.Addr())
	broadcast := network + (uint32(1)<<(32-pool.Bits()) - 1)
	for i := range uint32(1) << size {
		if of.Sliced {
			i = bits.Reverse32(i) >> (32 - size)
		}
		a := address(first + i)
		if first+i != network && first+i != broadcast && !s.taken(&s.addresses, a.String(), "") {
			return a
		}
	}
	return netip.Addr{}
}

// nextRange is the next range of the overlay for a site: the first where nobody has an address, and no other range is.
// It is of both families where the IPv6 overlay is named.
func (s *State) nextRange(pool, overlay6 netip.Prefix, site string, have int) (SiteRange, bool) {
	r := SiteRange{Site: site}
	all := 32 - pool.Bits()
	least, best := rangeBits(all, have)
	network := number(pool.Masked().Addr())
	used := map[uint64]bool{} // pieces of 2^least addresses that are somebody's
	sites := map[uint16]bool{}
	use := func(ipv4, ipv6 string) {
		if a, err := netip.ParseAddr(ipv4); err == nil && pool.Contains(a) {
			used[uint64(number(a)-network)>>least] = true
		}
		if a, err := netip.ParseAddr(ipv6); err == nil && overlay6.IsValid() && overlay6.Contains(a) {
			sites[siteNumber(overlay6, a)] = true
		}
	}
	for n := range s.nodes.all() {
		use(n.GetIpv4(), n.GetIpv6())
	}
	for v := range s.revoked.all() {
		use(v.GetNode().GetIpv4(), v.GetNode().GetIpv6())
	}
	for p := range s.plain.all() {
		use(p.GetIpv4(), p.GetIpv6())
	}
	for _, o := range s.ranges {
		if o.Pool != "" {
			continue
		}
		if o.IPv6.IsValid() && overlay6.IsValid() {
			sites[siteNumber(overlay6, o.IPv6.Addr())] = true
		}
		for i := range pieces(o.IPv4, least) {
			used[uint64(number(o.IPv4.Addr())-network)>>least+i] = true
		}
	}
	at, size, ok := firstPiece(uint64(1)<<(all-least), least, best, func(n uint64) bool { return used[n] })
	if !ok {
		return r, false
	}
	r.IPv4 = netip.PrefixFrom(address(network+uint32(at<<least)), 32-size)
	if overlay6.IsValid() && overlay6.Bits() == 64 {
		for n := uint16(1); n != 0; n++ {
			if !sites[n] {
				b := overlay6.Addr().As16()
				b[8], b[9] = byte(n>>8), byte(n)
				r.IPv6 = netip.PrefixFrom(netip.AddrFrom16(b), overlay6.Bits()+siteIPv6Bits)
				break
			}
		}
	}
	return r, true
}

// pieces is how many pieces of 2^bits addresses a prefix of IPv4 has, one at least.
func pieces(p netip.Prefix, bits int) uint64 {
	if !p.IsValid() {
		return 0
	}
	return uint64(1) << max(0, 32-p.Bits()-bits)
}

// firstPiece is the first of some pieces from which on as many as a range has are free, and how large that is: the best
// size where there is one, else the next one below.
func firstPiece(count uint64, least, best int, used func(uint64) bool) (at uint64, size int, ok bool) {
	for size := best; size >= least; size-- {
		width := uint64(1) << (size - least)
	next:
		for at := uint64(0); at+width <= count; at += width {
			for n := at; n < at+width; n++ {
				if used(n) {
					continue next
				}
			}
			return at, size, true
		}
	}
	return 0, 0, false
}

// siteNumber is which site's an address of the IPv6 overlay may be.
func siteNumber(overlay netip.Prefix, a netip.Addr) uint16 {
	b := a.As16()
	at := overlay.Bits() / 8
	return uint16(b[at])<<8 | uint16(b[at+1])
}

// siteIPv6 is a node's address in its site's IPv6 range: it ends as the node's ID does, and begins with its slice
// where the range is sliced.
func siteIPv6(r SiteRange, id identity.ID, slice int) netip.Addr {
	if !r.IPv6.IsValid() {
		return netip.Addr{}
	}
	b := r.IPv6.Addr().As16()
	copy(b[10:], id[2:])
	if r.Sliced {
		b[10] = byte(slice)<<(8-sliceBits) | b[10]&(1<<(8-sliceBits)-1)
	}
	return netip.AddrFrom16(b)
}

// slicer finds members' slices.
type slicer []SiteRange // sliced ones of the overlay, by address

func (s *State) slicer() (out slicer) {
	for _, r := range s.ranges {
		if r.Pool == "" && r.Sliced && r.IPv4.IsValid() {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b SiteRange) int { return a.IPv4.Addr().Compare(b.IPv4.Addr()) })
	return out
}

// of is the slice of a member of a site: that part of the site's range in which it has its address, else one by its ID.
func (sl slicer) of(a netip.Addr, id identity.ID, site string) int {
	n, found := slices.BinarySearchFunc(sl, a, func(r SiteRange, a netip.Addr) int { return r.IPv4.Addr().Compare(a) })
	if !found {
		n--
	}
	if n < 0 || sl[n].Site != site {
		return SiteRange{}.slice(a, id)
	}
	return sl[n].slice(a, id)
}

// slice is the slice of a node that has an address: by the part of the range in which that is, or where it lies
// elsewhere, or the range is not sliced, by the node's ID.
func (r SiteRange) slice(a netip.Addr, id identity.ID) int {
	if !r.Sliced || !r.IPv4.Contains(a) {
		return int(id[0] >> (8 - sliceBits))
	}
	offset, size := int(number(a)-number(r.IPv4.Addr())), 32-r.IPv4.Bits()
	if size < sliceBits {
		return offset << (sliceBits - size)
	}
	return offset >> (size - sliceBits)
}

// Slices tells in which slice a member of a site is; nil while no range is sliced: members are then bound to leaders
// one by one.
func (s *State) Slices() func(n *skeinv1.Node, id identity.ID, site string) int {
	if !slices.ContainsFunc(s.ranges, func(r SiteRange) bool { return r.Sliced }) {
		return nil
	}
	sl := s.slicer()
	return func(n *skeinv1.Node, id identity.ID, site string) int {
		a, _ := netip.ParseAddr(n.GetIpv4())
		return sl.of(a, id, site)
	}
}

// blocksFor is up to want blocks of a pool for a node: from its site's ranges where there are any, or may be.
func (d *decision) blocksFor(r *poolState, want int, n *skeinv1.Node, site string, ranged bool) (out []uint64) {
	if ranged {
		a, _ := netip.ParseAddr(n.GetIpv4())
		id, _ := identity.ParseID(n.GetId())
		slice := d.s.slicer().of(a, id, site)
		var own []blockRange
		for _, b := range r.ranges {
			if b.site == site {
				own = append(own, b)
			}
		}
		out = d.blocksIn(r, want, own, slice)
		sliced := d.maySlice(SchemaMax)
		all := slices.Clone(r.ranges)
		for len(out) < want && d.mayAllot() {
			b, ok := d.nextBlockRange(r, all, len(own))
			if !ok {
				break
			}
			b.site, b.sliced = site, sliced
			got := d.blocksIn(r, want-len(out), []blockRange{b}, slice)
			if len(got) == 0 {
				break
			}
			v := r.layout.rangeAt(b.first, bits.Len64(b.last-b.first))
			v.Site, v.Pool, v.Sliced = site, r.pool.GetName(), sliced
			d.allot(v)
			own, all, out = append(own, b), append(all, b), append(out, got...)
		}
	}
	if len(out) < want {
		out = append(out, d.nextBlocks(r, want-len(out), out...)...)
	}
	return out
}

// near are the blocks of a range, without the last one named, that are as near to a slice as a level says: 0 are
// those of the slice, 1 those of the other half of the part that is twice as large, and so on. A range without slices
// has all of them at level 0.
func (b blockRange) near(slice, level int) (first, last uint64) {
	size := bits.Len64(b.last - b.first)
	if !b.sliced {
		if level > 0 {
			return 0, 0
		}
		return b.first, b.last + 1
	}
	if size < sliceBits { // a block has several slices
		if slice, level = slice>>(sliceBits-size), level-(sliceBits-size); level < 0 {
			return 0, 0
		}
	} else {
		size = sliceBits
	}
	width := (b.last - b.first + 1) >> size << max(0, level-1)
	part := slice >> max(0, level-1)
	if level > 0 {
		part ^= 1
	}
	return b.first + uint64(part)*width, b.first + uint64(part+1)*width
}

// blocksIn is up to want blocks of some ranges, in the order of nextBlocks: of those that are sliced the nearest to a
// slice first.
func (d *decision) blocksIn(r *poolState, want int, in []blockRange, slice int) []uint64 {
	fresh := func(want int) (out []uint64) {
		want = min(want, MaxNumbers-d.s.numbers)
		for level := 0; level <= sliceBits; level++ {
			for _, b := range in {
				first, last := b.near(slice, level)
				for n := first; len(out) < want && n < last; n++ {
					if !r.given(n) {
						out = append(out, n)
					}
				}
			}
		}
		return out
	}
	rested := func(want int) []uint64 {
		return r.rested(want, d.c.GetTime(), func(n uint64) bool {
			return slices.ContainsFunc(in, func(b blockRange) bool { return b.has(n) })
		})
	}
	if len(in) == 0 {
		return nil
	}
	if r.freed.n >= MaxFreed {
		out := rested(want)
		return append(out, fresh(want-len(out))...)
	}
	out := fresh(want)
	return append(out, rested(want-len(out))...)
}

// nextBlockRange is the next range of a pool for a site that has some there: the first of which nobody has a block.
func (d *decision) nextBlockRange(r *poolState, taken []blockRange, have int) (blockRange, bool) {
	least, best := rangeBits(bits.Len64(r.layout.blocks)-1, have)
	used := map[uint64]bool{} // first numbers of pieces of 2^least blocks
	use := func(n uint64) {
		for _, run := range r.layout.runs {
			if n >= run.first && n-run.first < run.blocks {
				used[n-(n-run.first)&(1<<least-1)] = true
			}
		}
	}
	for b := range r.blocks.all() {
		use(b.GetNumber())
	}
	for f := range r.freed.all() {
		if resting(f.GetAt(), cooldown(r.pool), d.c.GetTime()) {
			use(f.GetNumber())
		}
	}
	for _, run := range r.layout.runs {
		at, size, ok := firstPiece(run.blocks>>least, least, best, func(piece uint64) bool {
			first := run.first + piece<<least
			return used[first] || slices.ContainsFunc(taken, func(b blockRange) bool {
				return b.first <= first+(1<<least-1) && b.last >= first
			})
		})
		if ok {
			first := run.first + at<<least
			return blockRange{first: first, last: first + 1<<size - 1}, true
		}
	}
	return blockRange{}, false
}
