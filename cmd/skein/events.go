package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// eventLine is an event in one line that fits: index, time, what happened, the facts, and whose command it was. Keys
// and hashes are for -o json.
func eventLine(e *skeinv1.Event, names *strings.Replacer) string {
	m := e.ProtoReflect()
	start := fmt.Sprintf("%6d  %s  ", e.GetIndex(), time.Unix(0, e.GetTime()).Format("2006-01-02 15:04:05"))
	by := ""
	if e.GetIssuer() != "" {
		by = "  by " + names.Replace(e.GetIssuer())
	}
	field := m.WhichOneof(m.Descriptor().Oneofs().ByName("body"))
	switch {
	case field == nil:
		return start + "(unknown to this version)" + by
	case e.GetCommandAnswered() != nil:
		return start + fmt.Sprintf("%-17s request %.8s", field.Name(),
			cmp.Or(e.GetRequestId(), e.GetCommandAnswered().GetAnswer().GetRequestId())) + by
	}
	what := egressNews(e)
	if what == "" {
		what = strings.Join(facts(m.Get(field).Message(), nil), " ")
	}
	if e.GetNodeAdmitted() == nil { // there the ID itself is the news
		what = names.Replace(what)
	}
	return cut(strings.TrimRight(start+fmt.Sprintf("%-17s %s", field.Name(), what), " "), tableWidth-len(by)) + by
}

// egressNews tells what an event did to an egress or its slots, "" if nothing.
func egressNews(e *skeinv1.Event) string {
	slot := func(s *skeinv1.EgressSlot, how string) string {
		planned := ""
		if s.GetPlanned() {
			planned = ", as planned"
		}
		return fmt.Sprintf("%s/%s slot %d %s%s: %s", s.GetNamespace(), s.GetName(), s.GetNumber(), how, planned,
			cmp.Or(s.GetReason(), "no reason given"))
	}
	egress := func(x *skeinv1.Egress) string {
		return fmt.Sprintf("%s by %s, gateways %s", strings.Join(x.GetDestinations(), " "),
			plural(int(x.GetReplicas()), "slot"), labelsText(x.GetGateways()))
	}
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_EgressDefined:
		x := b.EgressDefined.GetEgress()
		return egressName(x) + ": " + egress(x)
	case *skeinv1.Event_EgressChanged:
		x := b.EgressChanged.GetEgress()
		return fmt.Sprintf("%s (%s): %s", egressName(x), b.EgressChanged.GetChange(), egress(x))
	case *skeinv1.Event_EgressRemoved:
		return b.EgressRemoved.GetNamespace() + "/" + b.EgressRemoved.GetName()
	case *skeinv1.Event_SlotAssigned:
		s := b.SlotAssigned.GetSlot()
		return slot(s, "to "+s.GetNodeId())
	case *skeinv1.Event_SlotMoved:
		s := b.SlotMoved.GetSlot()
		return slot(s, s.GetFromNodeId()+" -> "+s.GetNodeId())
	case *skeinv1.Event_SlotReleased:
		s := b.SlotReleased.GetSlot()
		return slot(s, "taken from "+s.GetFromNodeId())
	}
	return ""
}

// newsFirst is, by message, which facts come first: a line is cut where it does not fit. The others follow as declared.
var newsFirst = map[protoreflect.Name][]protoreflect.Name{
	"Node":           {"id", "name", "draining"},
	"Pool":           {"name", "subnets"},
	"PoolChanged":    {"change"},
	"Block":          {"node_id", "ipv4", "reason", "pool", "number"},
	"BlockReleased":  {"node_id", "pool", "number"},
	"StaticAddress":  {"ipv4", "namespace", "pod"},
	"AddressClaimed": {"address", "node_id"},
	"Grant":          {"namespace", "addresses", "node_id"},
}

// zeroSays are the fields whose zero value says something.
var zeroSays = map[protoreflect.FullName]string{
	"skein.v1.Block.number": "0", "skein.v1.BlockReleased.number": "0", "skein.v1.Grant.addresses": "0",
	"skein.v1.AddressClaimed.node_id": "-", "skein.v1.SiteRange.site": "-", "skein.v1.Pool.block_size_bits": "0",
}

// saidAlready are fields that repeat the event's own time and index, at the front of its line.
var saidAlready = map[protoreflect.FullName]bool{
	"skein.v1.Block.since": true, "skein.v1.Block.index": true, "skein.v1.StaticAddress.since": true,
	"skein.v1.StaticAddress.index": true,
	"skein.v1.Pool.created_index":  true, "skein.v1.SiteRange.index": true,
}

// inOrder are a message's fields, the news first.
func inOrder(m protoreflect.Message) []protoreflect.FieldDescriptor {
	all := m.Descriptor().Fields()
	var out []protoreflect.FieldDescriptor
	for _, name := range newsFirst[m.Descriptor().Name()] {
		if f := all.ByName(name); f != nil {
			out = append(out, f)
		}
	}
	for i := range all.Len() {
		if !slices.Contains(out, all.Get(i)) {
			out = append(out, all.Get(i))
		}
	}
	return out
}

// facts lists the fields of a message that a person reads, and those of the messages in it.
func facts(m protoreflect.Message, out []string) []string {
	for _, f := range inOrder(m) {
		name, v := string(f.Name()), m.Get(f)
		if !m.Has(f) {
			if zero := zeroSays[f.FullName()]; zero != "" {
				out = append(out, name+"="+zero)
			}
			continue
		}
		switch {
		case saidAlready[f.FullName()], f.Kind() == protoreflect.BytesKind, name == "created_at", name == "admitted_at",
			name == "admitted_index": // as the event says
		case f.IsMap():
			at := len(out)
			v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				out = append(out, fmt.Sprintf("%s.%s=%s", name, k, v))
				return true
			})
			slices.Sort(out[at:]) // else every look shows them in another order
		case f.IsList() && (f.Kind() == protoreflect.StringKind || f.Message() != nil && f.Message().Name() == "PoolSubnet"):
			out = append(out, name+"="+listText(v.List()))
		case f.IsList():
			out = append(out, fmt.Sprintf("%s=%d", name, v.List().Len()))
		case f.Message() != nil:
			out = facts(v.Message(), out)
		case strings.HasSuffix(name, "_at"):
			out = append(out, name+"="+time.Unix(0, v.Int()).Format("2006-01-02T15:04:05"))
		case f.Enum() != nil:
			out = append(out, fmt.Sprintf("%s=%s", name, f.Enum().Values().ByNumber(v.Enum()).Name()))
		default:
			out = append(out, fmt.Sprintf("%s=%s", name, v))
		}
	}
	return out
}

// listText joins words, and the subnets of a pool as --subnet has them.
func listText(l protoreflect.List) string {
	var out []string
	for i := range l.Len() {
		if m, ok := l.Get(i).Interface().(protoreflect.Message); ok {
			s, _ := m.Interface().(*skeinv1.PoolSubnet)
			out = append(out, strings.Trim(s.GetIpv4()+","+s.GetIpv6(), ","))
			continue
		}
		out = append(out, l.Get(i).String())
	}
	return strings.Join(out, " ")
}

func printState(w io.Writer, r *skeinv1.StateResponse) {
	s := r.GetState()
	fmt.Fprintf(w, "index %d, hash %s\ncluster %s, overlay %s %s\n", s.GetIndex(), r.GetHash(), s.GetCluster().GetId(),
		s.GetCluster().GetOverlayIpv4(), s.GetCluster().GetOverlayIpv6())
	servers := map[string]string{}
	for _, v := range s.GetServers() {
		servers[v.GetNodeId()] = "server"
		if v.GetVoter() {
			servers[v.GetNodeId()] = "voter"
		}
	}
	t := table{head: []string{"NAME", "ID", "IPV4", "ROLE", "ADMITTED BY", "LABELS"}}
	slices.SortFunc(s.Nodes, func(a, b *skeinv1.Node) int { return strings.Compare(a.GetName(), b.GetName()) })
	for _, n := range s.GetNodes() {
		role := servers[n.GetId()]
		if role == "" {
			role = "agent"
		}
		t.add(n.GetName(), n.GetId(), n.GetIpv4(), role, fmt.Sprintf("event %d", n.GetAdmittedIndex()),
			labelsText(n.GetLabels()))
	}
	for _, n := range s.GetRevoked() {
		t.add(n.GetNode().GetName(), n.GetNode().GetId(), n.GetNode().GetIpv4(), "revoked", "-", n.GetReason())
	}
	t.print(w)
	printAddressState(w, s)
	printEgressState(w, s)
}

// mostBlocks is how many blocks a state shows: -o json has the rest.
const mostBlocks = 40

// printAddressState shows pools, blocks, kept addresses and grants, where there are any.
func printAddressState(w io.Writer, s *skeinv1.State) {
	names := map[string]string{}
	for _, n := range s.GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	if len(s.GetPools()) > 0 {
		printStatePools(w, s)
	}
	if all := s.GetBlocks(); len(all) > 0 {
		fmt.Fprintln(w)
		t := blockTable(slices.ContainsFunc(all, dual))
		for _, b := range all[:min(mostBlocks, len(all))] {
			t.block(b, cmp.Or(names[b.GetNodeId()], b.GetNodeId()))
		}
		t.print(w)
		if n := len(all) - mostBlocks; n > 0 {
			fmt.Fprintf(w, "… and %s; -o json has all\n", plural(n, "block"))
		}
	}
	if len(s.GetStatics()) > 0 {
		fmt.Fprintln(w)
		printStatics(w, s.GetStatics(), replacer(names))
	}
	if len(s.GetGrants()) > 0 {
		fmt.Fprintln(w)
		t := table{head: []string{"NAMESPACE", "POOL", "NODE", "GRANTED"}}
		for _, k := range s.GetGrants() {
			t.add(k.GetNamespace(), k.GetPool(), cmp.Or(names[k.GetNodeId()], k.GetNodeId()), fmt.Sprint(k.GetAddresses()))
		}
		t.print(w)
	}
}

// printEgressState shows egresses and who owns their slots, where there are any.
func printEgressState(w io.Writer, s *skeinv1.State) {
	if len(s.GetEgresses()) == 0 {
		return
	}
	names := map[string]string{}
	for _, n := range s.GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	fmt.Fprintln(w)
	t := table{head: []string{"EGRESS", "SLOTS", "POOL", "CREATED BY", "CHANGED BY", "GATEWAYS", "DESTINATIONS", "SOURCE"}}
	for _, e := range s.GetEgresses() {
		t.add(egressName(e), fmt.Sprint(e.GetReplicas()), e.GetPool(), fmt.Sprintf("event %d", e.GetCreatedIndex()),
			fmt.Sprintf("event %d", e.GetChangedIndex()),
			labelsText(e.GetGateways()), strings.Join(e.GetDestinations(), " "), sourcesText(e))
	}
	t.print(w)
	fmt.Fprintln(w)
	t = table{head: []string{"EGRESS", "SLOT", "OWNER", "EPOCH", "SINCE", "FROM", "WHY"}}
	for _, k := range s.GetSlots() {
		t.add(k.GetNamespace()+"/"+k.GetName(), fmt.Sprint(k.GetNumber()), dash(cmp.Or(names[k.GetNodeId()], k.GetNodeId())),
			fmt.Sprint(k.GetEpoch()), since(k.GetSince()),
			dash(cmp.Or(names[k.GetFromNodeId()], k.GetFromNodeId())), dash(k.GetReason()))
	}
	t.print(w)
}

func printStatePools(w io.Writer, s *skeinv1.State) {
	owned, reserved, freed := map[string]int{}, map[string]int{}, map[string]int{}
	for _, b := range s.GetBlocks() {
		if b.GetNodeId() == "" {
			reserved[b.GetPool()]++
		} else {
			owned[b.GetPool()]++
		}
	}
	for _, f := range s.GetFreed() {
		freed[f.GetPool()]++
	}
	fmt.Fprintln(w)
	t := table{head: []string{"POOL", "BLOCK", "OWNED", "RESERVED", "RETURNED", "STATE", "CREATED BY", "SUBNETS"}}
	for _, p := range s.GetPools() {
		state := "ready"
		if p.GetDraining() {
			state = "draining"
		}
		t.add(p.GetName(), addresses(p.GetBlockSizeBits()), fmt.Sprint(owned[p.GetName()]), fmt.Sprint(reserved[p.GetName()]),
			fmt.Sprint(freed[p.GetName()]),
			state, fmt.Sprintf("event %d", p.GetCreatedIndex()), subnetsText(p.GetSubnets(), ", "))
	}
	t.print(w)
}

// replacer turns node IDs into names.
func replacer(names map[string]string) *strings.Replacer {
	var pairs []string
	for id, name := range names {
		pairs = append(pairs, id, name)
	}
	return strings.NewReplacer(pairs...)
}
