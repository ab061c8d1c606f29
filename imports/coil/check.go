package coil

import (
	"fmt"
	"maps"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// checkPoolName wants a name that the leader takes, too: Kubernetes allows dots and 253 characters.
func checkPoolName(o *object, field, name string) error {
	if name == "" || len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" ||
		name[0] == '-' || name[len(name)-1] == '-' {
		return o.errorf(field, "%.70q cannot be a pool's name here: lower-case letters, digits and hyphens, at most 63: "+
			"rename the pool and its label %s in the file", name, labelPool)
	}
	return nil
}

// checkBlocks compares the blocks with one another and with the pools of the file.
func (r *reading) checkBlocks() error {
	pools := map[string]*skeinv1.Pool{}
	for _, p := range r.pools {
		pools[p.GetName()] = p
	}
	seen, unknown := map[netip.Prefix]*object{}, map[string]int{}
	for _, b := range r.blocks {
		for _, p := range []netip.Prefix{b.ipv4, b.ipv6} {
			if !p.IsValid() {
				continue
			}
			if before := seen[p]; before != nil {
				return b.errorf("", "%s is also that of AddressBlock %s (%s)", p, before.name, before.where)
			}
			seen[p] = b.object
		}
		pool := pools[b.out.GetPool()]
		if pool == nil {
			unknown[b.out.GetPool()]++
			continue
		}
		if err := b.check(pool); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		r.notes = append(r.notes, fmt.Sprintf("The pool %s of %d blocks is not in the file, so it has to be there already.",
			name, unknown[name]))
	}
	return nil
}

// check holds a block against what its index says: Coil counts blocks through all subnets in their order.
func (b *block) check(pool *skeinv1.Pool) error {
	at := b.index
	for _, s := range pool.GetSubnets() {
		v4, v6 := parsed(s.GetIpv4()), parsed(s.GetIpv6())
		one := v4
		if !one.IsValid() {
			one = v6
		}
		bits := one.Addr().BitLen() - one.Bits() - int(pool.GetBlockSizeBits())
		if bits < 63 && at >= 1<<bits {
			at -= 1 << bits
			continue
		}
		for _, c := range []struct {
			field        string
			subnet, have netip.Prefix
		}{{"ipv4", v4, b.ipv4}, {"ipv6", v6, b.ipv6}} {
			if want := carve(c.subnet, at, pool.GetBlockSizeBits()); want != c.have {
				return b.errorf(c.field, "it is %s, but block %d of pool %s is %s", text(c.have), b.index,
					pool.GetName(), text(want))
			}
		}
		return nil
	}
	return b.errorf("index", "%d is beyond the last block of pool %s", b.index, pool.GetName())
}

// carve is a subnet's block by its number in it; invalid for an invalid subnet.
func carve(subnet netip.Prefix, number uint64, bits uint32) netip.Prefix {
	if !subnet.IsValid() {
		return netip.Prefix{}
	}
	n := new(big.Int).SetBytes(subnet.Addr().AsSlice())
	n.Add(n, new(big.Int).Lsh(new(big.Int).SetUint64(number), uint(bits)))
	b := make([]byte, subnet.Addr().BitLen()/8)
	a, _ := netip.AddrFromSlice(n.FillBytes(b)) // it fits: number is below the count of blocks
	return netip.PrefixFrom(a, a.BitLen()-int(bits))
}

// parsed reads what subnet has written.
func parsed(s string) netip.Prefix {
	p, _ := netip.ParsePrefix(s)
	return p
}

func text(p netip.Prefix) string {
	if !p.IsValid() {
		return "none"
	}
	return p.String()
}

// assignNamespaces gives each pool the namespaces whose annotation names it.
func (r *reading) assignNamespaces() {
	for _, ns := range slices.Sorted(maps.Keys(r.namespaces)) {
		name := r.namespaces[ns]
		i := slices.IndexFunc(r.pools, func(p *skeinv1.Pool) bool { return p.GetName() == name })
		switch {
		case i < 0:
			r.notes = append(r.notes, fmt.Sprintf("The namespace %s uses the pool %s, which is not in the file; give it to "+
				"the pool with `skein pool set %s --namespace %s`.", ns, name, name, ns))
		case name != "default": // which serves it anyway
			r.pools[i].Namespaces = append(r.pools[i].Namespaces, ns)
		}
	}
}

// leftOut names the objects that were not imported.
func leftOut(left map[string][]string) []string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(left)) {
		names := left[kind]
		why := "nothing of it is needed here"
		switch kind {
		case "BlockRequest":
			why = "nodes ask anew"
		case "other":
			out = append(out, fmt.Sprintf("Objects of other kinds were left out: %s.", some(names)))
			continue
		}
		out = append(out, fmt.Sprintf("%s left out: %s (%s).", kind, some(names), why))
	}
	return out
}

// some lists a few names and counts the rest.
func some(names []string) string {
	const most = 5
	slices.Sort(names)
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
