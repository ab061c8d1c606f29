package events

import (
	"encoding/binary"
	"math/bits"
	"net/netip"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Bounds of pools. Fold rests on those of the layout, so that they may grow and never shrink.
const (
	MaxPools        = 1024
	MaxSubnets      = 64 // of a pool
	MaxBlockBits    = 16 // a block has 2^16 addresses at most
	maxSubnetBlocks = 60 // a subnet has 2^60 blocks at most, so that it can be counted
	maxBlocks       = 1 << 62
)

// layout says which addresses the blocks of a pool have. It is made once and never changed.
type layout struct {
	bits   int
	runs   []run
	blocks uint64 // in all
}

// run is a subnet: its blocks are numbered in a row.
type run struct {
	ipv4, ipv6 netip.Prefix // one may be missing
	first      uint64       // number of its first block
	blocks     uint64
}

// newLayout reads a pool's subnets and refuses those that cannot be. Fold takes no pool that it refuses: so it
// may take more one day, and never less.
func newLayout(p *skeinv1.Pool) (*layout, error) {
	name := p.GetName()
	if p.GetBlockSizeBits() > MaxBlockBits {
		return nil, refuse(InvalidArgument, "pool %s: blocks of 2^%d addresses are too large; use 0 to %d bits", name,
			p.GetBlockSizeBits(), MaxBlockBits)
	}
	switch n := len(p.GetSubnets()); {
	case n == 0:
		return nil, refuse(InvalidArgument, "pool %s has no subnet: name one with --subnet IPV4[,IPV6]", name)
	case n > MaxSubnets:
		return nil, refuse(InvalidArgument, "pool %s: %d subnets are too many; use up to %d, or another pool",
			name, n, MaxSubnets)
	}
	l := &layout{bits: int(p.GetBlockSizeBits())}
	for _, s := range p.GetSubnets() {
		r, err := l.newRun(name, s)
		if err != nil {
			return nil, err
		}
		if err := l.checkApart(name, r); err != nil {
			return nil, err
		}
		if r.blocks > maxBlocks-l.blocks {
			return nil, refuse(InvalidArgument, "pool %s: with the subnet %s it has more than 2^62 blocks; use larger blocks, "+
				"or another pool", name, r)
		}
		r.first = l.blocks
		l.blocks += r.blocks
		l.runs = append(l.runs, r)
	}
	return l, nil
}

func (l *layout) newRun(pool string, s *skeinv1.PoolSubnet) (r run, err error) {
	if r.ipv4, err = parseSubnet(pool, s.GetIpv4(), false); err != nil {
		return r, err
	}
	if r.ipv6, err = parseSubnet(pool, s.GetIpv6(), true); err != nil {
		return r, err
	}
	size := hostBits(r.ipv4)
	switch {
	case !r.ipv4.IsValid() && !r.ipv6.IsValid():
		return r, refuse(InvalidArgument, "pool %s: a subnet is empty; write an IPv4 prefix, an IPv6 prefix, or both", pool)
	case !r.ipv4.IsValid():
		size = hostBits(r.ipv6)
	case r.ipv6.IsValid() && size != hostBits(r.ipv6):
		return r, refuse(InvalidArgument, "pool %s: %s has 2^%d addresses and %s has 2^%d; both families need as many, so "+
			"write %s/%d with that IPv4 prefix",
			pool, r.ipv4, size, r.ipv6, hostBits(r.ipv6), r.ipv6.Addr(), 128-size)
	}
	switch blocks := size - l.bits; {
	case blocks < 0:
		return r, refuse(InvalidArgument, "pool %s: a block of 2^%d addresses is larger than the subnet %s with 2^%d; use "+
			"%d bits or fewer, or a larger subnet",
			pool, l.bits, r, size, size)
	case blocks > maxSubnetBlocks:
		return r, refuse(InvalidArgument, "pool %s: the subnet %s has 2^%d blocks, at most 2^%d are allowed; use a /%d, or "+
			"larger blocks",
			pool, r, blocks, maxSubnetBlocks, 128-maxSubnetBlocks-l.bits)
	default:
		r.blocks = 1 << blocks
	}
	return r, nil
}

// String is the subnet as users write it.
func (r run) String() string {
	switch {
	case !r.ipv4.IsValid():
		return r.ipv6.String()
	case !r.ipv6.IsValid():
		return r.ipv4.String()
	}
	return r.ipv4.String() + "," + r.ipv6.String()
}

func parseSubnet(pool, s string, six bool) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	family, like := "IPv4", "10.64.0.0/16"
	if six {
		family, like = "IPv6", "fd02::/112"
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is6() != six || p.Addr().Is4In6() || p.Addr().Zone() != "" {
		return p, refuse(InvalidArgument, "pool %s: subnet %.80q is not an %s prefix; write one like %s", pool, s,
			family, like)
	}
	if p != p.Masked() {
		return p, refuse(InvalidArgument, "pool %s: subnet %s has host bits set; write %s", pool, s, p.Masked())
	}
	if p.String() != s {
		return p, refuse(InvalidArgument, "pool %s: write subnet %s as %s", pool, s, p)
	}
	return p, nil
}

// hostBits is the binary logarithm of how many addresses a prefix has; 0 for none.
func hostBits(p netip.Prefix) int {
	if !p.IsValid() {
		return 0
	}
	return p.Addr().BitLen() - p.Bits()
}

// checkApart refuses a subnet of another kind than those before it, or one that overlaps them.
func (l *layout) checkApart(pool string, r run) error {
	for _, o := range l.runs {
		if o.ipv4.IsValid() != r.ipv4.IsValid() || o.ipv6.IsValid() != r.ipv6.IsValid() {
			return refuse(InvalidArgument, "pool %s: %s is %s and %s is %s; all subnets of a pool are of one kind, so use "+
				"another pool", pool, o, o.kind(), r, r.kind())
		}
		if r.ipv4.Overlaps(o.ipv4) || r.ipv6.Overlaps(o.ipv6) {
			return refuse(InvalidArgument, "pool %s: its subnets %s and %s overlap; write each address once", pool, o, r)
		}
	}
	return nil
}

func (r run) kind() string {
	switch {
	case !r.ipv4.IsValid():
		return "IPv6"
	case !r.ipv6.IsValid():
		return "IPv4"
	}
	return "dual stack"
}

// prefixes are those of all subnets.
func (l *layout) prefixes() []netip.Prefix {
	var out []netip.Prefix
	for _, r := range l.runs {
		for _, p := range []netip.Prefix{r.ipv4, r.ipv6} {
			if p.IsValid() {
				out = append(out, p)
			}
		}
	}
	return out
}

// block is the prefixes of a block; ok is false for a number that the pool does not have.
func (l *layout) block(n uint64) (ipv4, ipv6 netip.Prefix, ok bool) {
	for _, r := range l.runs {
		if n >= r.first && n-r.first < r.blocks {
			hi, lo := shiftLeft(n-r.first, l.bits)
			return part(r.ipv4, hi, lo, l.bits), part(r.ipv6, hi, lo, l.bits), true
		}
	}
	return ipv4, ipv6, false
}

// part is the block of 2^size addresses that starts hi:lo addresses after the subnet's first.
func part(subnet netip.Prefix, hi, lo uint64, size int) netip.Prefix {
	if !subnet.IsValid() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(advance(subnet.Addr(), hi, lo), subnet.Addr().BitLen()-size)
}

// find is the block that an address lies in, and which of the block's addresses it is.
func (l *layout) find(a netip.Addr) (n, offset uint64, ok bool) {
	for _, r := range l.runs {
		p := r.ipv4
		if a.Is6() {
			p = r.ipv6
		}
		if p.IsValid() && p.Contains(a) {
			hi, lo := distance(p.Addr(), a)
			return r.first + shiftRight(hi, lo, l.bits), lo & (1<<l.bits - 1), true
		}
	}
	return 0, 0, false
}

// pair is the addresses of both families at one offset of a block.
func (l *layout) pair(n, offset uint64) (ipv4, ipv6 netip.Addr) {
	p4, p6, _ := l.block(n)
	if p4.IsValid() {
		ipv4 = advance(p4.Addr(), 0, offset)
	}
	if p6.IsValid() {
		ipv6 = advance(p6.Addr(), 0, offset)
	}
	return ipv4, ipv6
}

func shiftLeft(n uint64, by int) (hi, lo uint64) { return n >> (64 - by), n << by }

func shiftRight(hi, lo uint64, by int) uint64 { return hi<<(64-by) | lo>>by }

// advance is the address hi:lo after a.
func advance(a netip.Addr, hi, lo uint64) netip.Addr {
	if a.Is4() {
		return address(number(a) + uint32(lo))
	}
	b := a.As16()
	l, carry := bits.Add64(binary.BigEndian.Uint64(b[8:]), lo, 0)
	h, _ := bits.Add64(binary.BigEndian.Uint64(b[:8]), hi, carry)
	binary.BigEndian.PutUint64(b[:8], h)
	binary.BigEndian.PutUint64(b[8:], l)
	return netip.AddrFrom16(b)
}

// distance is how many addresses b is after a; both are of one family.
func distance(a, b netip.Addr) (hi, lo uint64) {
	x, y := a.As16(), b.As16()
	lo, borrow := bits.Sub64(binary.BigEndian.Uint64(y[8:]), binary.BigEndian.Uint64(x[8:]), 0)
	hi, _ = bits.Sub64(binary.BigEndian.Uint64(y[:8]), binary.BigEndian.Uint64(x[:8]), borrow)
	return hi, lo
}

// text is a prefix or an address, or nothing where there is none.
func text[T interface {
	IsValid() bool
	String() string
}](v T) string {
	if !v.IsValid() {
		return ""
	}
	return v.String()
}
