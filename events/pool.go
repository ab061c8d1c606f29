package events

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// poolState is a pool and everything in it. Like an entity it is replaced and never changed.
type poolState struct {
	pool    *skeinv1.Pool
	blocks  table[*skeinv1.Block]         // by number
	freed   table[*skeinv1.FreedBlock]    // by number
	statics table[*skeinv1.StaticAddress] // by staticKey
	grants  table[*skeinv1.Grant]         // by grantKey

	// What follows is derived and not part of the hash.
	layout    *layout
	order     table[uint64]                // numbers of the freed blocks, by the index of the event that freed them
	holders   table[table[*skeinv1.Block]] // blocks by number, by node ID
	cursor    uint64                       // the lowest number that was never given; layout.blocks: none
	ranges    []blockRange                 // of sites, by number; replaced and never changed
	outer     uint64                       // the lowest number that never was given and lies in no range
	staticsIn table[uint32]                // static addresses in a block, by number
	granted   table[uint64]                // addresses in all grants, by namespace
	resting   int                          // bytes of the freed blocks
}

// span is one prefix of a pool.
type span struct {
	prefix netip.Prefix
	pool   string
}

// staticRef names a static address.
type staticRef struct{ pool, address string }

func (s *State) poolState(name string) *poolState {
	r, _ := s.pools.get(textKey(name), name)
	return r
}

func (s *State) setPoolState(r *poolState) {
	name := r.pool.GetName()
	s.pools.put(s.own(), textKey(name), name, r)
}

// block is who has a number, or nil.
func (r *poolState) block(n uint64) *skeinv1.Block {
	b, _ := r.blocks.get(n, "")
	return b
}

// rangeAt is the range that a number lies in, or nil.
func (r *poolState) rangeAt(n uint64) *blockRange {
	at, ok := slices.BinarySearchFunc(r.ranges, n, func(b blockRange, n uint64) int {
		switch {
		case b.last < n:
			return -1
		case b.first > n:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &r.ranges[at]
}

// given reports whether the number ever belonged to anybody.
func (r *poolState) given(n uint64) bool {
	if r.block(n) != nil {
		return true
	}
	_, freed := r.freed.get(n, "")
	return freed
}

// static is the reservation of an address, or nil; the address may be of either family.
func (r *poolState) static(a netip.Addr) *skeinv1.StaticAddress {
	n, offset, ok := r.layout.find(a)
	if !ok {
		return nil
	}
	key := staticKey(r.layout.pair(n, offset))
	v, _ := r.statics.get(textKey(key), key)
	return v
}

// staticKey is the name of a pair of addresses: the IPv4 one, or the IPv6 one where there is none.
func staticKey(ipv4, ipv6 netip.Addr) string {
	if ipv4.IsValid() {
		return ipv4.String()
	}
	return text(ipv6)
}

func grantKey(namespace, nodeID string) string { return nodeID + " " + namespace }

// podKey has the length in it, so that no two pods share a key whatever their names are.
func podKey(namespace, pod string) string {
	return strconv.Itoa(len(namespace)) + " " + namespace + "/" + pod
}

// encodePoolState is what a pool adds to the state's hash: itself and the digests of what is in it.
func encodePoolState(b []byte, r *poolState) []byte {
	b = protowire.AppendBytes(b, appendMessage(nil, r.pool))
	for _, d := range [...][32]byte{r.blocks.sum(encode), r.freed.sum(encode), r.statics.sum(encode),
		r.grants.sum(encode)} {
		b = append(b, d[:]...)
	}
	return b
}

// Pool is the pool of that name, or nil.
func (s *State) Pool(name string) *skeinv1.Pool {
	if r := s.poolState(name); r != nil {
		return r.pool
	}
	return nil
}

// Pools are all pools, sorted by name.
func (s *State) Pools() []*skeinv1.Pool {
	out := make([]*skeinv1.Pool, 0, len(s.poolNames))
	for _, name := range s.poolNames {
		out = append(out, s.poolState(name).pool)
	}
	return out
}

// Block is a pool's block if it belongs to a node or is reserved, else nil.
func (s *State) Block(pool string, number uint64) *skeinv1.Block {
	if r := s.poolState(pool); r != nil {
		return r.block(number)
	}
	return nil
}

// Blocks are all blocks that belong to a node or are reserved, by pool and number.
func (s *State) Blocks() []*skeinv1.Block {
	out := []*skeinv1.Block{}
	for _, name := range s.poolNames {
		for b := range s.poolState(name).blocks.all() {
			out = append(out, b)
		}
	}
	return out
}

// ForOthers reports whether a block is reserved for addresses that are not the mesh's: a user or an import did that.
func ForOthers(b *skeinv1.Block) bool { return b != nil && b.GetNodeId() == "" && !madeFor(b) }

// BlocksForOthers are the blocks that are reserved for other software's addresses, by pool and number. Those for static
// addresses and for egresses are the mesh's own.
func (s *State) BlocksForOthers() []*skeinv1.Block {
	var out []*skeinv1.Block
	for _, name := range s.poolNames {
		for b := range s.poolState(name).blocks.all() {
			if ForOthers(b) {
				out = append(out, b)
			}
		}
	}
	return out
}

// BlocksOf are a node's blocks, by pool and number. It costs what it returns, and a little for each pool.
func (s *State) BlocksOf(nodeID string) []*skeinv1.Block {
	h, ok := hexKey(nodeID)
	if !ok {
		return nil
	}
	var out []*skeinv1.Block
	for _, name := range s.poolNames {
		held, _ := s.poolState(name).holders.get(h, nodeID)
		for b := range held.all() {
			out = append(out, b)
		}
	}
	return out
}

// BlockAt is the pool and the number of the block that an address lies in, and the block if it belongs to a
// node or is reserved. Without a pool the address lies in none.
func (s *State) BlockAt(a netip.Addr) (*skeinv1.Pool, uint64, *skeinv1.Block) {
	r := s.poolAt(a)
	if r == nil {
		return nil, 0, nil
	}
	n, _, _ := r.layout.find(a.Unmap())
	return r.pool, n, r.block(n)
}

// poolAt is the pool that an address lies in, or nil.
func (s *State) poolAt(a netip.Addr) *poolState {
	a = a.Unmap()
	i := sort.Search(len(s.spans), func(i int) bool { return a.Less(s.spans[i].prefix.Addr()) })
	if i == 0 || !s.spans[i-1].prefix.Contains(a) {
		return nil
	}
	return s.poolState(s.spans[i-1].pool)
}

// overlap is the prefix of a pool that overlaps p.
func (s *State) overlap(p netip.Prefix) (span, bool) {
	i := sort.Search(len(s.spans), func(i int) bool { return p.Addr().Less(s.spans[i].prefix.Addr()) })
	for _, j := range []int{i - 1, i} {
		if j >= 0 && j < len(s.spans) && s.spans[j].prefix.Overlaps(p) {
			return s.spans[j], true
		}
	}
	return span{}, false
}

// BlockPrefixes are the prefixes of a pool's block, one of which may be invalid; ok is false if the pool has no
// such block.
func (s *State) BlockPrefixes(pool string, number uint64) (ipv4, ipv6 netip.Prefix, ok bool) {
	if r := s.poolState(pool); r != nil {
		return r.layout.block(number)
	}
	return ipv4, ipv6, false
}

// DefaultPool serves the namespaces that no other pool serves.
const DefaultPool = "default"

// PoolOfNamespace is the pool that the namespace's pods get addresses from when nothing else is said: its own,
// else the default pool, else nil.
func (s *State) PoolOfNamespace(namespace string) *skeinv1.Pool {
	if name, ok := s.namespaces.get(textKey(namespace), namespace); ok {
		return s.Pool(name)
	}
	return s.Pool(DefaultPool)
}

// MayUse reports whether pods of a namespace may name the pool.
func (s *State) MayUse(namespace, pool string) bool {
	p := s.Pool(pool)
	return p != nil && (s.PoolOfNamespace(namespace) == p || slices.Contains(p.GetAllowed(), "*") ||
		slices.Contains(p.GetAllowed(), namespace))
}

// PoolUse is how much of a pool is used, in blocks.
type PoolUse struct {
	Blocks   uint64 // in all
	Owned    uint64 // by nodes
	Reserved uint64
	Freed    uint64 // given back, whether they rest or not
	Never    uint64 // never given
	Nodes    int    // that own some

	cooldown time.Duration
	at       []int64
}

// Free is how many blocks belong to nobody, whether they rest or not.
func (u PoolUse) Free() uint64 { return u.Freed + u.Never }

// Resting is how many of the freed blocks may not be given again yet.
func (u PoolUse) Resting(now time.Time) (n uint64) {
	for _, at := range u.at {
		if resting(at, u.cooldown, now.UnixNano()) {
			n++
		}
	}
	return n
}

// resting reports whether what was given back at one time rests at another. When the clock has stepped back, so
// that it was given back in the future, it rests.
func resting(at int64, cooldown time.Duration, now int64) bool {
	return cooldown > 0 && now-int64(cooldown) < at
}

func cooldown(p *skeinv1.Pool) time.Duration {
	return time.Duration(p.GetCooldownSeconds()) * time.Second
}

// PoolUse is how much of a pool is used. It costs a walk over the freed blocks; all is zero for a pool that is not.
func (s *State) PoolUse(name string) PoolUse {
	r := s.poolState(name)
	if r == nil {
		return PoolUse{}
	}
	u := PoolUse{Blocks: r.layout.blocks, Freed: uint64(r.freed.n), Nodes: r.holders.n, cooldown: cooldown(r.pool)}
	u.Never = u.Blocks - uint64(r.blocks.n) - u.Freed
	for h := range r.holders.all() {
		u.Owned += uint64(h.n)
	}
	u.Reserved = uint64(r.blocks.n) - u.Owned
	for f := range r.freed.all() {
		u.at = append(u.at, f.GetAt())
	}
	return u
}

// PoolHolder is a node and how many blocks of a pool it has.
type PoolHolder struct {
	NodeID string
	Blocks uint64
}

// PoolHolders are the nodes that have blocks of a pool: those with the most first, then by ID.
func (s *State) PoolHolders(name string) []PoolHolder {
	r := s.poolState(name)
	if r == nil {
		return nil
	}
	out := make([]PoolHolder, 0, r.holders.n)
	for h := range r.holders.all() {
		for b := range h.all() {
			out = append(out, PoolHolder{NodeID: b.GetNodeId(), Blocks: uint64(h.n)})
			break
		}
	}
	slices.SortFunc(out, func(x, y PoolHolder) int {
		return cmp.Or(cmp.Compare(y.Blocks, x.Blocks), cmp.Compare(x.NodeID, y.NodeID))
	})
	return out
}

// Freed are the blocks of a pool that were given back and belong to nobody: those that are free for the
// longest first.
func (s *State) Freed(pool string) []*skeinv1.FreedBlock {
	r := s.poolState(pool)
	if r == nil {
		return nil
	}
	out := make([]*skeinv1.FreedBlock, 0, r.freed.n)
	for n := range r.order.all() {
		f, _ := r.freed.get(n, "")
		out = append(out, f)
	}
	return out
}

// Static is what keeps an address of a pool for one pod, or nil. The address may be of either family.
func (s *State) Static(pool string, a netip.Addr) *skeinv1.StaticAddress {
	if r := s.poolState(pool); r != nil {
		return r.static(a.Unmap())
	}
	return nil
}

// Statics are all static addresses, by pool and address.
func (s *State) Statics() []*skeinv1.StaticAddress {
	return s.someStatics(func(*skeinv1.StaticAddress) bool { return true })
}

// StaticsOf are the static addresses that a node holds, by pool and address.
func (s *State) StaticsOf(nodeID string) []*skeinv1.StaticAddress {
	return s.someStatics(func(v *skeinv1.StaticAddress) bool { return nodeID != "" && v.GetNodeId() == nodeID })
}

func (s *State) someStatics(want func(*skeinv1.StaticAddress) bool) []*skeinv1.StaticAddress {
	out := []*skeinv1.StaticAddress{}
	for _, name := range s.poolNames {
		for v := range s.poolState(name).statics.all() {
			if want(v) {
				out = append(out, v)
			}
		}
	}
	slices.SortFunc(out, compareStatics)
	return out
}

func compareStatics(x, y *skeinv1.StaticAddress) int {
	return cmp.Or(cmp.Compare(x.GetPool(), y.GetPool()), staticAddr(x).Compare(staticAddr(y)))
}

// staticAddr is the address that names the reservation.
func staticAddr(v *skeinv1.StaticAddress) netip.Addr {
	a, _ := netip.ParseAddr(cmp.Or(v.GetIpv4(), v.GetIpv6())) // Fold took it
	return a
}

// StaticOf are the static addresses of one pod, by pool and address.
func (s *State) StaticOf(namespace, pod string) []*skeinv1.StaticAddress {
	key := podKey(namespace, pod)
	refs, _ := s.pods.get(textKey(key), key)
	var out []*skeinv1.StaticAddress
	for _, ref := range refs {
		v, _ := s.poolState(ref.pool).statics.get(textKey(ref.address), ref.address)
		out = append(out, v)
	}
	slices.SortFunc(out, compareStatics)
	return out
}

// Grants are all grants, by pool, namespace and node.
func (s *State) Grants() []*skeinv1.Grant {
	return s.someGrants(func(*skeinv1.Grant) bool { return true })
}

// GrantsOf are a node's grants, by pool and namespace.
func (s *State) GrantsOf(nodeID string) []*skeinv1.Grant {
	return s.someGrants(func(g *skeinv1.Grant) bool { return g.GetNodeId() == nodeID })
}

func (s *State) someGrants(want func(*skeinv1.Grant) bool) []*skeinv1.Grant {
	out := []*skeinv1.Grant{}
	for _, name := range s.poolNames {
		for g := range s.poolState(name).grants.all() {
			if want(g) {
				out = append(out, g)
			}
		}
	}
	slices.SortFunc(out, func(x, y *skeinv1.Grant) int {
		return cmp.Or(cmp.Compare(x.GetPool(), y.GetPool()), cmp.Compare(x.GetNamespace(), y.GetNamespace()),
			cmp.Compare(x.GetNodeId(), y.GetNodeId()))
	})
	return out
}

// Grant is how many addresses of a pool a node may have for a namespace with a quota, or nil: none.
func (s *State) Grant(pool, namespace, nodeID string) *skeinv1.Grant {
	r := s.poolState(pool)
	if r == nil {
		return nil
	}
	key := grantKey(namespace, nodeID)
	g, _ := r.grants.get(textKey(key), key)
	return g
}
