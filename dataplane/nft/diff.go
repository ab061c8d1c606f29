package nft

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/dataplane"
)

// Verb says what an Op does.
type Verb uint8

// The things that can happen to the table.
const (
	Rebuild     Verb = iota // delete the table if it is there, and make it anew with everything
	AddSet                  // with its elements
	AddChain                // with its rules
	SetRules                // replace all rules of a chain
	DelChain                //
	DelSet                  //
	DelElements             //
	AddElements             //
)

// Op is one change.
type Op struct {
	Verb     Verb
	Name     string // of the chain or set
	Kind     string
	Rules    []string
	Ranges   []Range
	Rewrites []dataplane.PortRewrite
	Links    []Link
	All      State // of Rebuild
}

// Diff returns what turns actual into want, as one transaction. Without prune no element, chain or set
// is removed that is not in the way.
func Diff(want, actual State, prune bool) []Op {
	if !prune {
		want = union(want, actual)
	}
	if !actual.Table || damaged(want, actual) {
		return []Op{rebuild(want)}
	}
	var ops []Op
	for _, n := range slices.Sorted(maps.Keys(want.Sets)) {
		w := want.Sets[n]
		a, ok := actual.Sets[n]
		if !ok {
			ops = append(ops, Op{Verb: AddSet, Name: n, Kind: w.Kind, Ranges: w.Ranges, Rewrites: w.Rewrites,
				Links: w.Links})
			continue
		}
		gone, added := compare(w.Ranges, a.Ranges, byStart)
		ended, begun := compare(w.Rewrites, a.Rewrites, dataplane.PortRewrite.Compare)
		lost, new := compare(w.Links, a.Links, cmp.Compare[Link])
		if len(gone)+len(ended)+len(lost) > 0 {
			ops = append(ops, Op{Verb: DelElements, Name: n, Kind: w.Kind, Ranges: gone, Rewrites: ended, Links: lost})
		}
		if len(added)+len(begun)+len(new) > 0 {
			ops = append(ops, Op{Verb: AddElements, Name: n, Kind: w.Kind, Ranges: added, Rewrites: begun, Links: new})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(want.Chains)) {
		w := want.Chains[n]
		a, ok := actual.Chains[n]
		if !ok {
			ops = append(ops, Op{Verb: AddChain, Name: n, Kind: w.Kind, Rules: w.Rules})
		} else if !slices.Equal(w.Rules, a.Rules) {
			ops = append(ops, Op{Verb: SetRules, Name: n, Kind: w.Kind, Rules: w.Rules})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(actual.Chains)) {
		if _, ok := want.Chains[n]; !ok {
			ops = append(ops, Op{Verb: DelChain, Name: n})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(actual.Sets)) {
		if _, ok := want.Sets[n]; !ok {
			ops = append(ops, Op{Verb: DelSet, Name: n})
		}
	}
	return ops
}

// rebuild makes everything anew, without what is not ours.
func rebuild(w State) Op {
	all := wantTargets(w.Numbers, nil)
	all.Port = w.Port
	all.setRewrites(w.Sets[dataplane.MapRewriteOut].Rewrites)
	if _, ok := w.Chains[dataplane.ChainSources]; ok {
		spec := dataplane.Spec{Link: dataplane.Link{Name: w.Link}, ControlPort: w.Control, Plain: w.Plain}
		if w.Hops {
			spec.Hops.Self = netip.IPv4Unspecified()
		}
		all.setSources(spec)
	}
	all.Link = w.Link
	all.setTranslations(w.Translations, nil)
	for n := range all.Sets {
		all.Sets[n] = w.Sets[n]
	}
	return Op{Verb: Rebuild, All: all}
}

// damaged says whether something has our name and a wrong nature, which cannot be changed in place.
func damaged(want, actual State) bool {
	for n, w := range want.Chains {
		if a, ok := actual.Chains[n]; ok && a.Kind != w.Kind {
			return true
		}
	}
	for n, w := range want.Sets {
		if a, ok := actual.Sets[n]; ok && a.Kind != w.Kind {
			return true
		}
	}
	return false
}

// union is want with everything of actual that does not contradict it.
func union(want, actual State) State {
	u := want
	u.Table, u.Chains, u.Sets = true, maps.Clone(want.Chains), maps.Clone(want.Sets)
	u.setRewrites(mergeRewrites(want.Sets[dataplane.MapRewriteOut].Rewrites,
		actual.Sets[dataplane.MapRewriteOut].Rewrites))
	for n, a := range actual.Chains {
		if _, ok := u.Chains[n]; !ok {
			u.Chains[n] = a
		}
	}
	for n, a := range actual.Sets {
		w, ok := u.Sets[n]
		if !ok {
			u.Sets[n] = a
		} else if w.Kind == a.Kind && len(w.Rewrites) == 0 {
			w.Ranges = merge(w.Ranges, a.Ranges)
			w.Links = slices.Compact(slices.Sorted(slices.Values(slices.Concat(w.Links, a.Links))))
			u.Sets[n] = w
		}
	}
	return u
}

// merge covers what either covers. Ranges that overlap become one; the others stay as they are.
func merge(a, b []Range) []Range {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(x, y Range) int {
		if c := x.From.Compare(y.From); c != 0 {
			return c
		}
		return y.To.Compare(x.To)
	})
	var out []Range
	for _, r := range all {
		if n := len(out); n > 0 && r.From.Compare(out[n-1].To) <= 0 {
			if r.To.Compare(out[n-1].To) > 0 {
				out[n-1].To = r.To
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// mergeRewrites is want with those of actual that are for other peers. Both are sorted.
func mergeRewrites(want, actual []dataplane.PortRewrite) []dataplane.PortRewrite {
	out := slices.Clone(want)
	for _, a := range actual {
		if !slices.ContainsFunc(want, func(w dataplane.PortRewrite) bool { return w.Remote == a.Remote }) {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, dataplane.PortRewrite.Compare)
	return out
}

func byStart(a, b Range) int { return a.From.Compare(b.From) }

// compare walks two lists that are sorted by order.
func compare[T comparable](want, actual []T, order func(a, b T) int) (gone, added []T) {
	i, j := 0, 0
	for i < len(want) || j < len(actual) {
		switch {
		case j == len(actual):
			added, i = append(added, want[i]), i+1
		case i == len(want):
			gone, j = append(gone, actual[j]), j+1
		case want[i] == actual[j]:
			i, j = i+1, j+1
		case order(want[i], actual[j]) < 0:
			added, i = append(added, want[i]), i+1
		default:
			gone, j = append(gone, actual[j]), j+1
		}
	}
	return gone, added
}

// Apply is what the kernel does with the operations, as a pure function. It fails where the kernel would.
func (s State) Apply(ops []Op) (State, error) {
	s = State{Table: s.Table, Numbers: s.Numbers, Chains: maps.Clone(s.Chains), Sets: maps.Clone(s.Sets)}
	for _, o := range ops {
		if o.Verb == Rebuild {
			s = State{Table: true, Numbers: o.All.Numbers, Chains: maps.Clone(o.All.Chains), Sets: maps.Clone(o.All.Sets)}
			continue
		}
		if !s.Table {
			return s, fmt.Errorf("%s: no table", o)
		}
		switch o.Verb {
		case AddSet:
			s.Sets[o.Name] = Set{Kind: o.Kind, Ranges: o.Ranges, Rewrites: o.Rewrites, Links: o.Links}
		case AddChain, SetRules:
			s.Chains[o.Name] = Chain{Kind: o.Kind, Rules: o.Rules}
		case DelChain:
			delete(s.Chains, o.Name)
		case DelSet:
			delete(s.Sets, o.Name)
		case DelElements, AddElements:
			set := s.Sets[o.Name]
			r, err := elements(set.Ranges, o)
			if err != nil {
				return s, err
			}
			set.Ranges = r
			if set.Rewrites, err = rewrites(set.Rewrites, o); err != nil {
				return s, err
			}
			set.Links = links(set.Links, o)
			s.Sets[o.Name] = set
		}
	}
	return s, nil
}

func elements(have []Range, o Op) ([]Range, error) {
	gone, added := compare(o.Ranges, have, byStart)
	if o.Verb == DelElements {
		if len(added) > 0 {
			return nil, fmt.Errorf("%s: no such element", o)
		}
		return gone, nil // those of have that are not in o.Ranges
	}
	all := slices.Concat(have, o.Ranges)
	slices.SortFunc(all, func(a, b Range) int { return a.From.Compare(b.From) })
	for i := 1; i < len(all); i++ {
		if all[i].From.Compare(all[i-1].To) <= 0 {
			return nil, fmt.Errorf("%s: %s overlaps %s", o, all[i], all[i-1])
		}
	}
	return all, nil
}

func rewrites(have []dataplane.PortRewrite, o Op) ([]dataplane.PortRewrite, error) {
	gone, added := compare(o.Rewrites, have, dataplane.PortRewrite.Compare)
	if o.Verb == DelElements {
		if len(added) > 0 {
			return nil, fmt.Errorf("%s: no such element", o)
		}
		return gone, nil
	}
	all := slices.Concat(have, o.Rewrites)
	slices.SortFunc(all, dataplane.PortRewrite.Compare)
	for i := 1; i < len(all); i++ {
		if all[i].Remote == all[i-1].Remote {
			return nil, fmt.Errorf("%s: there is %s", o, all[i-1])
		}
	}
	return all, nil
}

// links are those of a set after an operation. The kernel lets one be added twice.
func links(have []Link, o Op) []Link {
	gone, _ := compare(o.Links, have, cmp.Compare[Link])
	if o.Verb == DelElements {
		return gone
	}
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(have, o.Links))))
}

// String tells the operation in one line.
func (o Op) String() string {
	switch o.Verb {
	case Rebuild:
		n := 0
		for _, s := range o.All.Sets {
			n += len(s.Ranges) + len(s.Rewrites) + len(s.Links)
		}
		return fmt.Sprintf("rebuild table: %d chains, %d sets, %d elements", len(o.All.Chains), len(o.All.Sets), n)
	case AddSet:
		return "add set " + o.Name + " (" + o.Kind + ")" + list(o.Ranges) + list(o.Rewrites) + list(o.Links)
	case AddChain:
		return "add chain " + o.Name + " (" + o.Kind + "): " + strings.Join(o.Rules, "; ")
	case SetRules:
		return "set rules of chain " + o.Name + ": " + strings.Join(o.Rules, "; ")
	case DelChain:
		return "delete chain " + o.Name
	case DelSet:
		return "delete set " + o.Name
	case DelElements:
		return "delete from " + o.Name + list(o.Ranges) + list(o.Rewrites) + list(o.Links)
	case AddElements:
		return "add to " + o.Name + list(o.Ranges) + list(o.Rewrites) + list(o.Links)
	}
	return "unknown operation"
}

func list[T fmt.Stringer](rs []T) string {
	var b strings.Builder
	for _, r := range rs {
		b.WriteString(" " + r.String())
	}
	return b.String()
}
