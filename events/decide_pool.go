package events

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// dispatchPool takes the commands about pods' addresses.
func (d *decision) dispatchPool() error {
	switch b := d.c.GetBody().(type) {
	case *skeinv1.Command_CreatePool:
		return d.createPool(b.CreatePool)
	case *skeinv1.Command_ChangePool:
		return d.changePool(b.ChangePool)
	case *skeinv1.Command_RemovePool:
		return d.removePool(b.RemovePool)
	case *skeinv1.Command_AllocateBlocks:
		return d.allocateBlocks(b.AllocateBlocks)
	case *skeinv1.Command_ReserveBlock:
		return d.reserveBlock(b.ReserveBlock)
	case *skeinv1.Command_ReleaseBlocks:
		return d.releaseBlocks(b.ReleaseBlocks)
	case *skeinv1.Command_ReserveAddress:
		return d.reserveAddress(b.ReserveAddress)
	case *skeinv1.Command_ClaimAddress:
		return d.claimAddress(b.ClaimAddress)
	case *skeinv1.Command_ReleaseAddress:
		return d.releaseAddress(b.ReleaseAddress)
	case *skeinv1.Command_SetGrant:
		return d.setGrant(b.SetGrant)
	case *skeinv1.Command_ImportPools:
		return d.importPools(b.ImportPools)
	}
	return d.dispatchEgress()
}

func (d *decision) createPool(c *skeinv1.CreatePool) error {
	p, l, err := readPool(c.GetPool())
	if err != nil {
		return err
	}
	if old := d.s.Pool(p.GetName()); old != nil {
		same := proto.CloneOf(old)
		same.CreatedAt, same.CreatedIndex = 0, 0
		if !proto.Equal(same, p) {
			return refuse(AlreadyExists, "pool %s exists with other properties: skein pool show %s shows it, skein pool "+
				"extend %s adds subnets", p.GetName(), p.GetName(), p.GetName())
		}
		d.answer.Pool = old
		return nil
	}
	if len(d.s.poolNames) >= MaxPools {
		return refuse(ResourceExhausted, "there are %d pools already: remove some with skein pool remove NAME",
			len(d.s.poolNames))
	}
	if err := d.s.checkPoolFree(p, l.prefixes()); err != nil {
		return err
	}
	d.emitPoolCreated(p)
	return nil
}

func (d *decision) emitPoolCreated(p *skeinv1.Pool) {
	p.CreatedAt, p.CreatedIndex = d.c.GetTime(), d.nextIndex()
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: p}}})
	d.answer.Pool = p
}

// pool is the pool of that name with everything in it.
func (d *decision) pool(name string) (*poolState, error) {
	if r := d.s.poolState(name); r != nil {
		return r, nil
	}
	if len(d.s.poolNames) == 0 {
		return nil, refuse(NotFound, "pool %.80q does not exist, nor does any other: make one with skein pool create NAME "+
			"--subnet PREFIX", name)
	}
	shown := d.s.poolNames[:min(len(d.s.poolNames), 10)]
	return nil, refuse(NotFound, "pool %.80q does not exist: skein pool list shows those that do (%s%s)", name,
		strings.Join(shown, ", "), more(len(d.s.poolNames)-len(shown)))
}

// more says that a list goes on.
func more(n int) string {
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf(" and %d more", n)
}

// changeable are the fields of a pool that ChangePool sets.
var changeable = []string{"allowed", "cooldown_seconds", "draining", "max_blocks_per_node", "namespaces", "quotas",
	"sticky_seconds"}

func (d *decision) changePool(c *skeinv1.ChangePool) error {
	old, err := d.pool(c.GetName())
	if err != nil {
		return err
	}
	next := proto.CloneOf(old.pool)
	for _, name := range c.GetFields() {
		if !slices.Contains(changeable, name) {
			return refuse(InvalidArgument, "pool %s: field %.80q cannot be set; those that can are %s, and for another block "+
				"size make another pool", c.GetName(), name, strings.Join(changeable, ", "))
		}
		f := next.ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
		next.ProtoReflect().Clear(f)
		if set := proto.CloneOf(c.GetSet()); set.ProtoReflect().Has(f) {
			next.ProtoReflect().Set(f, set.ProtoReflect().Get(f))
		}
	}
	next.Namespaces, next.Allowed = plainNames(next.Namespaces), plainNames(next.Allowed)
	for _, s := range plainSubnets(c.GetAddSubnets()) {
		if !slices.ContainsFunc(next.Subnets, func(o *skeinv1.PoolSubnet) bool { return proto.Equal(o, s) }) {
			next.Subnets = append(next.Subnets, s)
		}
	}
	return d.emitPoolChanged(old, next)
}

// emitPoolChanged makes a pool the next one, if that is another.
func (d *decision) emitPoolChanged(old *poolState, next *skeinv1.Pool) error {
	d.answer.Pool = old.pool
	if proto.Equal(next, old.pool) {
		return nil
	}
	l, err := newLayout(next)
	if err != nil {
		return err
	}
	added := (&layout{runs: l.runs[len(old.layout.runs):]}).prefixes()
	if err := checkUsable(next.GetName(), added); err != nil {
		return err
	}
	if err := checkPool(next); err != nil {
		return err
	}
	if err := d.s.checkPoolFree(next, added); err != nil {
		return err
	}
	if err := d.checkQuotas(old, next); err != nil {
		return err
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PoolChanged{PoolChanged: &skeinv1.PoolChanged{Pool: next,
		Change: changeOf(old.pool, next)}}})
	d.answer.Pool = next
	return nil
}

// changeOf says in a word what becomes of a pool; several words are joined by commas.
func changeOf(old, next *skeinv1.Pool) string {
	var words []string
	if len(next.GetSubnets()) > len(old.GetSubnets()) {
		words = append(words, "extended")
	}
	if next.GetDraining() != old.GetDraining() {
		words = append(words, map[bool]string{true: "drained", false: "resumed"}[next.GetDraining()])
	}
	rest := proto.CloneOf(next)
	rest.Subnets, rest.Draining = old.GetSubnets(), old.GetDraining()
	if !proto.Equal(rest, old) {
		words = append(words, "set")
	}
	return strings.Join(words, ", ")
}

// checkQuotas refuses a quota below what is granted, and ends the grants of a namespace that has none any more.
func (d *decision) checkQuotas(old *poolState, next *skeinv1.Pool) error {
	for _, ns := range slices.Sorted(maps.Keys(old.pool.GetQuotas())) {
		sum, _ := old.granted.get(textKey(ns), ns)
		quota, limited := next.GetQuotas()[ns]
		switch {
		case !limited && sum > 0:
			d.endGrants(old, func(g *skeinv1.Grant) bool { return g.GetNamespace() == ns })
		case limited && sum > uint64(quota):
			return refuse(FailedPrecondition, "pool %s: a quota of %d for namespace %s is below the %d addresses that nodes "+
				"hold for it (%s); stop pods first",
				next.GetName(), quota, ns, sum, d.s.grantees(old, ns))
		}
	}
	return nil
}

func (d *decision) endGrants(r *poolState, which func(*skeinv1.Grant) bool) {
	for g := range r.grants.all() {
		if which(g) {
			end := proto.CloneOf(g)
			end.Addresses = 0
			d.emit(&skeinv1.Event{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: end}}})
		}
	}
}

// removePool takes out a pool in which no block is anybody's.
func (d *decision) removePool(c *skeinv1.RemovePool) error {
	r, err := d.pool(c.GetName())
	if err != nil {
		return err
	}
	if names := d.s.egressesOf(r, func(uint64) bool { return true }); names != "" {
		return refuse(FailedPrecondition, "pool %s is used: egresses have addresses in it (%s); remove those, or change "+
			"their addresses, first", c.GetName(), names)
	}
	if n := r.blocks.n; n > 0 {
		return refuse(FailedPrecondition, "pool %s is used: %d of its blocks belong to %s; stop new use with skein pool "+
			"drain %s, remove the pods, and release what is reserved with skein block release",
			c.GetName(), n, d.s.holdersOf(r), c.GetName())
	}
	d.endGrants(r, func(*skeinv1.Grant) bool { return true })
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{Name: c.GetName()}}})
	d.answer.Pool = &skeinv1.Pool{Name: c.GetName(), CreatedIndex: r.pool.GetCreatedIndex()}
	return nil
}
