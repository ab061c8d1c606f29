package coil

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Bounds of one file. The leader takes all of it over in one step, so it has to fit into one entry of the log.
const (
	MaxBytes  = 16 << 20
	MaxBlocks = 16384
	MaxPools  = 1024
)

// What Coil calls its things.
const (
	group         = "coil.cybozu.com"
	version       = group + "/v2"
	labelPool     = group + "/pool" // on a namespace an annotation of the same name
	labelNode     = group + "/node"
	labelReserved = group + "/reserved"
	defaultBits   = 5 // of blockSizeBits, where it is left out
)

// The reason of a block that Coil had reserved, and what stands before the node that it was reserved for.
const (
	reservedAs  = "as Coil did"
	reservedFor = ", for "
)

// WasReserved reports whether a reserved block's reason is the one that Parse gives to those that Coil had reserved.
func WasReserved(reason string) bool {
	return reason == reservedAs || strings.HasPrefix(reason, reservedAs+reservedFor)
}

// Import is what a file holds.
type Import struct {
	Pools *skeinv1.ImportPools
	// Egresses have no gateways until SetGateways says which nodes are.
	Egresses []*skeinv1.Egress
	// Notes say what was left out or is worth a look, a sentence each.
	Notes []string
}

// object is one Kubernetes object of the file.
type object struct {
	where, kind, name string
	fields            map[string]ast.Node
	meta              metadata
}

// errorf is an error about a field of the object; field may be empty.
func (o *object) errorf(field, format string, a ...any) error {
	text := fmt.Sprintf(format, a...)
	if field != "" {
		text = field + ": " + text
	}
	return fmt.Errorf("%s, %s %s: %s", o.where, o.kind, cmp.Or(o.name, "without a name"), text)
}

// block is an AddressBlock while the pools are not all known yet.
type block struct {
	*object
	out        *skeinv1.ImportBlock
	index      uint64
	ipv4, ipv6 netip.Prefix
}

// reading is the state of one Parse.
type reading struct {
	pools      []*skeinv1.Pool
	poolOf     map[string]*object // by name
	blocks     []block
	namespaces map[string]string   // to the pool their annotation names
	left       map[string][]string // by kind: what is not imported
	egresses   []egress
	deleted    []string // blocks that are being deleted in Coil
	notes      []string
}

// Parse reads a file: a List, several documents, or single objects, as YAML or JSON. Errors name the document, the
// object and the field.
func Parse(data []byte) (*Import, error) {
	if len(data) > MaxBytes {
		return nil, fmt.Errorf("the file has more than %d MiB: import it in parts, each pool with all of its blocks",
			MaxBytes>>20)
	}
	r := &reading{poolOf: map[string]*object{}, namespaces: map[string]string{}, left: map[string][]string{}}
	if err := walk(data, r.add); err != nil {
		return nil, err
	}
	if len(r.pools) == 0 && len(r.blocks) == 0 && len(r.egresses) == 0 {
		return nil, fmt.Errorf("there is no AddressPool and no AddressBlock of %s in it: write it with `kubectl get "+
			"addresspools,addressblocks -o yaml`", version)
	}
	if err := r.checkBlocks(); err != nil {
		return nil, err
	}
	r.assignNamespaces()
	if len(r.deleted) > 0 {
		r.notes = append(r.notes, fmt.Sprintf("Being deleted in Coil, and imported all the same, since pods may still use "+
			"them: %s.", some(r.deleted)))
	}
	slices.SortFunc(r.egresses, func(a, b egress) int {
		return cmp.Or(strings.Compare(a.out.GetNamespace(), b.out.GetNamespace()), strings.Compare(a.out.GetName(),
			b.out.GetName()))
	})
	out := &Import{Pools: r.result(), Notes: slices.Concat(r.notes, r.egressNotes(), leftOut(r.left))}
	for _, e := range r.egresses {
		out.Egresses = append(out.Egresses, e.out)
	}
	return out, nil
}

// add looks at one object.
func (r *reading) add(o *object, apiVersion string) error {
	g, v, grouped := strings.Cut(apiVersion, "/")
	ours := grouped && g == group
	switch {
	case ours && v != strings.TrimPrefix(version, group+"/"):
		return o.errorf("apiVersion", "%s is not understood; only %s is", apiVersion, version)
	case ours && o.kind == "AddressPool":
		return r.addPool(o)
	case ours && o.kind == "AddressBlock":
		return r.addBlock(o)
	case ours && o.kind == "Egress":
		return r.addEgress(o)
	case apiVersion == "v1" && o.kind == "Namespace":
		if pool := o.meta.annotations[labelPool]; pool != "" {
			r.namespaces[o.name] = pool
		}
		return nil
	}
	name := o.name
	if o.meta.namespace != "" {
		name = o.meta.namespace + "/" + name
	}
	kind := o.kind
	if !ours {
		kind = "other"
	}
	r.left[kind] = append(r.left[kind], name)
	return nil
}

func (r *reading) addPool(o *object) error {
	if err := o.only("", o.fields, "apiVersion", "kind", "metadata", "spec", "status"); err != nil {
		return err
	}
	if err := checkPoolName(o, "metadata.name", o.name); err != nil {
		return err
	}
	if before := r.poolOf[o.name]; before != nil {
		return o.errorf("", "it is there twice, first in %s", before.where)
	}
	if len(r.pools) == MaxPools {
		return o.errorf("", "there are more than %d pools", MaxPools)
	}
	spec, err := o.mapping("spec", o.fields["spec"])
	if err != nil {
		return err
	}
	if err := o.only("spec.", spec, "blockSizeBits", "subnets"); err != nil {
		return err
	}
	bits := uint64(defaultBits)
	if n := spec["blockSizeBits"]; !absent(n) {
		if bits, err = o.number("spec.blockSizeBits", n, 127); err != nil {
			return err
		}
	}
	pool := &skeinv1.Pool{Name: o.name, BlockSizeBits: uint32(bits)}
	list, err := o.list("spec.subnets", spec["subnets"])
	if err != nil {
		return err
	}
	for i, n := range list {
		s, err := r.subnet(o, fmt.Sprintf("spec.subnets[%d]", i), n, bits)
		if err != nil {
			return err
		}
		pool.Subnets = append(pool.Subnets, s)
	}
	if len(pool.Subnets) == 0 {
		return o.errorf("spec.subnets", "there is no subnet")
	}
	if o.meta.deleted {
		r.notes = append(r.notes, fmt.Sprintf("AddressPool %s is being deleted in Coil: after the import, `skein pool "+
			"drain %s` goes on with that.", o.name, o.name))
	}
	r.pools, r.poolOf[o.name] = append(r.pools, pool), o
	return nil
}

// subnet reads one entry of a pool's subnets. Coil takes "10.2.3.0/16" for 10.2.0.0/16, so that is what its blocks were
// carved from.
func (r *reading) subnet(o *object, field string, n ast.Node, bits uint64) (*skeinv1.PoolSubnet, error) {
	m, err := o.mapping(field, n)
	if err != nil {
		return nil, err
	}
	if err := o.only(field+".", m, "ipv4", "ipv6"); err != nil {
		return nil, err
	}
	out := &skeinv1.PoolSubnet{}
	var host []int // bits of host addresses
	for _, family := range []string{"ipv4", "ipv6"} {
		p, ok, err := o.prefix(field+"."+family, family, m[family])
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if p != p.Masked() {
			r.notes = append(r.notes, fmt.Sprintf("AddressPool %s: %s.%s %s has host bits set; Coil takes it for %s, and so "+
				"does this import.", o.name, field, family, p, p.Masked()))
			p = p.Masked()
		}
		if host = append(host, p.Addr().BitLen()-p.Bits()); uint64(host[0]) < bits {
			return nil, o.errorf(field+"."+family, "%s is smaller than one block of 2^%d addresses", p, bits)
		}
		if family == "ipv4" {
			out.Ipv4 = p.String()
		} else {
			out.Ipv6 = p.String()
		}
	}
	switch {
	case len(host) == 0:
		return nil, o.errorf(field, "it has neither ipv4 nor ipv6")
	case len(host) == 2 && host[0] != host[1]:
		return nil, o.errorf(field, "%s and %s have different sizes: 2^%d and 2^%d addresses", out.Ipv4, out.Ipv6,
			host[0], host[1])
	}
	return out, nil
}

func (r *reading) addBlock(o *object) error {
	if err := o.only("", o.fields, "apiVersion", "kind", "metadata", "index", "ipv4", "ipv6", "status"); err != nil {
		return err
	}
	if len(r.blocks) == MaxBlocks {
		return o.errorf("", "there are more than %d blocks: import them in parts, each pool with all of its blocks",
			MaxBlocks)
	}
	b := block{object: o, out: &skeinv1.ImportBlock{Pool: o.meta.labels[labelPool]}}
	if b.out.Pool == "" {
		return o.errorf("metadata.labels", "%s is missing: it names the block's pool", labelPool)
	}
	if err := checkPoolName(o, "metadata.labels", b.out.Pool); err != nil {
		return err
	}
	var err error
	if b.index, err = o.number("index", o.fields["index"], math.MaxInt32); err != nil {
		return err
	}
	if b.ipv4, b.out.Ipv4, err = o.blockPrefix("ipv4"); err != nil {
		return err
	}
	if b.ipv6, b.out.Ipv6, err = o.blockPrefix("ipv6"); err != nil {
		return err
	}
	if b.out.Ipv4 == "" && b.out.Ipv6 == "" {
		return o.errorf("", "it has neither ipv4 nor ipv6")
	}
	node := o.meta.labels[labelNode]
	switch reserved, marked := o.meta.labels[labelReserved]; {
	case marked && reserved != "true":
		return o.errorf("metadata.labels", "%s is %q; only \"true\" is understood", labelReserved, reserved)
	case marked:
		b.out.Reason = reservedAs
		if node != "" {
			b.out.Reason += reservedFor + node
		}
	case node == "":
		return o.errorf("metadata.labels", "it has neither %s nor %s: delete the block in Coil if nothing uses it, or mark "+
			"it as reserved", labelNode, labelReserved)
	default:
		b.out.Node = node
	}
	if o.meta.deleted {
		r.deleted = append(r.deleted, o.name)
	}
	r.blocks = append(r.blocks, b)
	return nil
}

// result sorts what was read, so that the order in the file makes no difference.
func (r *reading) result() *skeinv1.ImportPools {
	out := &skeinv1.ImportPools{Pools: r.pools}
	slices.SortFunc(out.Pools, func(a, b *skeinv1.Pool) int { return strings.Compare(a.GetName(), b.GetName()) })
	slices.SortFunc(r.blocks, func(a, b block) int {
		return cmp.Or(strings.Compare(a.out.GetPool(), b.out.GetPool()), cmp.Compare(a.index, b.index),
			strings.Compare(a.name, b.name))
	})
	for _, b := range r.blocks {
		out.Blocks = append(out.Blocks, b.out)
	}
	return out
}
