package events

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Diff says in lines for people what differs from a to b: + for what b has more, - for what it has
// less, ~ for what changed. Secrets appear as fingerprints only. Answers are left out: they are
// bookkeeping. Equal states give no lines.
func Diff(a, b *State) []string {
	var out []string
	out = append(out, diffOne("cluster", a.Cluster(), b.Cluster())...)
	out = append(out, diffOne("settings", a.settings.get(), b.settings.get())...)
	out = append(out, diffOne("gossip keys", a.GossipKeys(), b.GossipKeys())...)
	out = append(out, diffTable(&a.nodes, &b.nodes, func(n *skeinv1.Node) (string, string) {
		return n.GetId(), fmt.Sprintf("node %s (%s)", n.GetName(), n.GetId())
	})...)
	out = append(out, diffTable(&a.revoked, &b.revoked, func(r *skeinv1.RevokedNode) (string, string) {
		return r.GetNode().GetId(), fmt.Sprintf("revoked node %s (%s)", r.GetNode().GetName(), r.GetNode().GetId())
	})...)
	out = append(out, diffTable(&a.servers, &b.servers, func(v *skeinv1.Server) (string, string) {
		name := v.GetNodeId()
		for _, s := range []*State{b, a} {
			if n := find(&s.nodes, v.GetNodeId()); n != nil {
				name = n.GetName() + " (" + v.GetNodeId() + ")"
				break
			}
		}
		return v.GetNodeId(), "server " + name
	})...)
	out = append(out, diffTable(&a.tokens, &b.tokens, func(t *skeinv1.Token) (string, string) {
		return t.GetId(), "token " + t.GetId()
	})...)
	out = append(append(out, diffPools(a, b)...), diffEgresses(a, b)...)
	out = append(out, diffTable(&a.plain, &b.plain, func(p *skeinv1.PlainPeer) (string, string) {
		return p.GetName(), "plain peer " + p.GetName()
	})...)
	out = append(out, diffTable(&a.translations, &b.translations, func(t *skeinv1.SiteTranslation) (string, string) {
		return translationKey(t.GetSite(), t.GetPrefix()), fmt.Sprintf("translation of %s in %s", t.GetPrefix(),
			SiteText(t.GetSite()))
	})...)
	return append(out, diffTable(&a.rangeTable, &b.rangeTable, func(r *skeinv1.SiteRange) (string, string) {
		return fmt.Sprintf("%020d", r.GetIndex()), fmt.Sprintf("range of site %q", r.GetSite())
	})...)
}

// diffEgresses compares egresses and their slots.
func diffEgresses(a, b *State) []string {
	var out []string
	names := slices.Concat(a.egressNames, b.egressNames)
	slices.SortFunc(names, egressRef.compare)
	for _, ref := range slices.Compact(names) {
		out = append(out, diffOne("egress "+ref.String(), a.Egress(ref.namespace, ref.name),
			b.Egress(ref.namespace, ref.name))...)
		x, y := a.Slots(ref.namespace, ref.name), b.Slots(ref.namespace, ref.name)
		for i := range max(len(x), len(y)) {
			var old, now *skeinv1.EgressSlot
			if i < len(x) {
				old = x[i]
			}
			if i < len(y) {
				now = y[i]
			}
			out = append(out, diffOne("slot "+slotRef{ref, uint32(i)}.String(), old, now)...)
		}
	}
	return out
}

// diffPools compares pools and what is in them. That a block rests is bookkeeping, too.
func diffPools(a, b *State) []string {
	var out []string
	names := slices.Concat(a.poolNames, b.poolNames)
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		var x, y poolState
		if r := a.poolState(name); r != nil {
			x = *r
		}
		if r := b.poolState(name); r != nil {
			y = *r
		}
		out = append(out, diffOne("pool "+name, x.pool, y.pool)...)
		out = append(out, diffTable(&x.blocks, &y.blocks, func(v *skeinv1.Block) (string, string) {
			return fmt.Sprintf("%020d", v.GetNumber()), fmt.Sprintf("block %s of pool %s", blockName(v), name)
		})...)
		out = append(out, diffTable(&x.statics, &y.statics, func(v *skeinv1.StaticAddress) (string, string) {
			return staticAddr(v).StringExpanded(), fmt.Sprintf("static address %s of pool %s", staticAddr(v), name)
		})...)
		out = append(out, diffTable(&x.grants, &y.grants, func(v *skeinv1.Grant) (string, string) {
			return grantKey(v.GetNamespace(), v.GetNodeId()), fmt.Sprintf("grant of pool %s to namespace %s on node %s", name,
				v.GetNamespace(), v.GetNodeId())
		})...)
	}
	return out
}

// diffTable compares two tables of entities; name gives an entity's ID and what to call it.
func diffTable[M proto.Message](a, b *table[M], name func(M) (id, title string)) []string {
	if a.root == b.root {
		return nil
	}
	before, after := map[string]M{}, map[string]M{}
	for m := range a.all() {
		id, _ := name(m)
		before[id] = m
	}
	for m := range b.all() {
		id, _ := name(m)
		after[id] = m
	}
	all := maps.Clone(before)
	maps.Copy(all, after)
	var out []string
	for _, id := range slices.Sorted(maps.Keys(all)) {
		old, had := before[id]
		now, has := after[id]
		_, title := name(all[id])
		switch {
		case !had:
			out = append(out, "+ "+title+describe(now))
		case !has:
			out = append(out, "- "+title)
		default:
			out = append(out, diffFields("~ "+title, old, now)...)
		}
	}
	return out
}

func diffOne[M interface {
	comparable
	proto.Message
}](title string, a, b M) []string {
	var none M
	switch {
	case a == b:
		return nil
	case a == none:
		return []string{"+ " + title + describe(b)}
	case b == none:
		return []string{"- " + title}
	}
	return diffFields("~ "+title, a, b)
}

// diffFields is one line for each field that differs.
func diffFields(title string, a, b proto.Message) []string {
	if proto.Equal(a, b) {
		return nil
	}
	var out []string
	x, y := a.ProtoReflect(), b.ProtoReflect()
	for _, f := range sortedFields(x.Descriptor()) {
		if vx, vy := x.Get(f), y.Get(f); !vx.Equal(vy) {
			out = append(out, fmt.Sprintf("%s: %s %s → %s", title, f.Name(), show(f, vx), show(f, vy)))
		}
	}
	return out
}

// describe lists what is set in a new entity, apart from keys and what its title says already.
func describe(m proto.Message) string {
	var parts []string
	r := m.ProtoReflect()
	for _, f := range sortedFields(r.Descriptor()) {
		switch f.Name() {
		case "id", "name", "node", "number":
			continue
		case "pool":
			switch m.(type) {
			case *skeinv1.Egress, *skeinv1.SiteRange:
			default:
				continue
			}
		case "site", "prefix":
			switch m.(type) {
			case *skeinv1.SiteRange, *skeinv1.SiteTranslation:
				continue
			}
		case "namespace":
			switch m.(type) {
			case *skeinv1.Egress, *skeinv1.EgressSlot:
				continue
			}
		case "node_id":
			if _, server := m.(*skeinv1.Server); server {
				continue
			}
		}
		if r.Has(f) && f.Kind() != protoreflect.BytesKind {
			parts = append(parts, fmt.Sprintf("%s %s", f.Name(), show(f, r.Get(f))))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return ": " + strings.Join(parts, ", ")
}

func sortedFields(d protoreflect.MessageDescriptor) []protoreflect.FieldDescriptor {
	out := make([]protoreflect.FieldDescriptor, d.Fields().Len())
	for i := range out {
		out[i] = d.Fields().Get(i)
	}
	slices.SortFunc(out, func(x, y protoreflect.FieldDescriptor) int { return int(x.Number() - y.Number()) })
	return out
}

// show is a value for people: times as times, public keys whole, secrets as fingerprints.
func show(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch {
	case f.IsMap():
		parts := []string{}
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			parts = append(parts, k.String()+"="+v.String())
			return true
		})
		slices.Sort(parts)
		return "{" + strings.Join(parts, " ") + "}"
	case f.IsList():
		parts := []string{}
		for i := range v.List().Len() {
			parts = append(parts, showOne(f, v.List().Get(i)))
		}
		return "[" + strings.Join(parts, " ") + "]"
	}
	return showOne(f, v)
}

func showOne(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch {
	case f.Kind() == protoreflect.BytesKind && len(v.Bytes()) == 0:
		return "(none)"
	case f.Kind() == protoreflect.BytesKind && public(f):
		return base64.StdEncoding.EncodeToString(v.Bytes())
	case f.Kind() == protoreflect.BytesKind:
		h := sha256.Sum256(append([]byte("skein fingerprint v1\x00"), v.Bytes()...))
		return "secret:" + hex.EncodeToString(h[:4])
	case f.Kind() == protoreflect.Int64Kind && v.Int() != 0:
		return time.Unix(0, v.Int()).UTC().Format(time.RFC3339) // every int64 of the state is a time
	case f.Kind() == protoreflect.StringKind:
		return fmt.Sprintf("%q", v.String())
	case f.Kind() == protoreflect.MessageKind &&
		f.Name() == "carriers": // their secrets are sealed, and of no use to a reader
		return v.Message().Interface().(*skeinv1.PlainCarrier).GetNodeId()
	// a pool's subnet or an egress's addresses, which alone are lists of messages
	case f.Kind() == protoreflect.MessageKind:
		return describeOne(v.Message().Interface())
	}
	return v.String()
}

// describeOne joins the values of a message that has only texts, and lists of texts.
func describeOne(m proto.Message) string {
	var parts []string
	r := m.ProtoReflect()
	for _, f := range sortedFields(r.Descriptor()) {
		switch {
		case !r.Has(f):
		case f.IsList():
			for i := range r.Get(f).List().Len() {
				parts = append(parts, r.Get(f).List().Get(i).String())
			}
		default:
			parts = append(parts, r.Get(f).String())
		}
	}
	return cmp.Or(strings.Join(parts, ","), "(none)")
}

func public(f protoreflect.FieldDescriptor) bool {
	return f.Name() == "identity_key" || f.Name() == "wireguard_key" || f.Name() == "public_key" ||
		f.Name() == "carrier_key"
}
