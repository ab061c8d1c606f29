package nftable

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Verb says what an Op does.
type Verb uint8

// The things that can happen to a table.
const (
	Rebuild     Verb = iota // delete the table if it is there, and make it anew with everything
	AddCounter              //
	AddSet                  // with its elements
	AddChain                // with its rules
	SetRules                // replace all rules of a chain
	DelElements             //
	SetElements             // add them, or give those that are there another value
	DelChain                //
	DelSet                  //
)

// Op is one step.
type Op struct {
	Verb     Verb
	Name     string // of the chain, set or counter
	Chain    Chain
	Set      Set // what it is made of
	Elements []Element
	Ranges   []Range
	All      Table // of Rebuild
}

// Element is one of a set or map.
type Element struct {
	Key, Val string
	Was      bool // there is one of this key with another value
}

// Diff returns what turns have into want. Without prune nothing is removed that is not in the way.
func Diff(want Table, have State, prune bool) (ops []Op) {
	if !prune {
		want = want.covering(have)
	}
	if !have.There || damaged(want, have) {
		return []Op{{Verb: Rebuild, All: want}}
	}
	for _, c := range want.Counters {
		if !have.Counters[c] {
			ops = append(ops, Op{Verb: AddCounter, Name: c})
		}
	}
	for _, s := range byName(want.Sets, func(s Set) string { return s.Name }) {
		h, there := have.Sets[s.Name]
		if !there {
			ops = append(ops, Op{Verb: AddSet, Name: s.Name, Set: s, Elements: elementsOf(s), Ranges: s.Ranges})
		} else if !s.External {
			ops = append(ops, s.diff(h, prune)...)
		}
	}
	for _, c := range byName(want.Chains, func(c Chain) string { return c.Name }) {
		h, there := have.Chains[c.Name]
		if !there {
			ops = append(ops, Op{Verb: AddChain, Name: c.Name, Chain: c})
		} else if !slices.Equal(h.Rules, c.state().Rules) {
			ops = append(ops, Op{Verb: SetRules, Name: c.Name, Chain: c})
		}
	}
	if !prune {
		return ops
	}
	for _, n := range slices.Sorted(maps.Keys(have.Chains)) {
		if !slices.ContainsFunc(want.Chains, func(c Chain) bool { return c.Name == n }) {
			ops = append(ops, Op{Verb: DelChain, Name: n})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(have.Sets)) {
		if want.Set(n) == nil {
			ops = append(ops, Op{Verb: DelSet, Name: n})
		}
	}
	return ops
}

func byName[T any](all []T, name func(T) string) []T {
	return slices.SortedFunc(slices.Values(all), func(a, b T) int { return strings.Compare(name(a), name(b)) })
}

// covering is the table with what the kernel has besides and is not in the way.
func (t Table) covering(have State) Table {
	t.Sets = slices.Clone(t.Sets)
	for i := range t.Sets {
		s := &t.Sets[i]
		h := have.Sets[s.Name]
		if s.External || s.Exact || h.Kind != s.Kind() {
			continue
		}
		s.Ranges = merge(s.Ranges, h.Ranges)
		all := maps.Clone(h.Elements)
		if all == nil {
			all = map[string]string{}
		}
		maps.Copy(all, s.Elements)
		s.Elements = all
	}
	return t
}

// diff is about the elements of a set.
func (s Set) diff(have SetState, prune bool) (ops []Op) {
	del, set := Op{Verb: DelElements, Name: s.Name, Set: s}, Op{Verb: SetElements, Name: s.Name, Set: s}
	del.Ranges, set.Ranges = compareRanges(s.Ranges, have.Ranges)
	for _, k := range slices.Sorted(maps.Keys(have.Elements)) {
		if _, wanted := s.Elements[k]; !wanted && (prune || s.Exact) {
			del.Elements = append(del.Elements, Element{Key: k, Val: have.Elements[k]})
		}
	}
	for _, k := range slices.Sorted(maps.Keys(s.Elements)) {
		if old, there := have.Elements[k]; !there || old != s.Elements[k] {
			set.Elements = append(set.Elements, Element{Key: k, Val: s.Elements[k], Was: there})
		}
	}
	for _, o := range []Op{del, set} {
		if len(o.Elements)+len(o.Ranges) > 0 {
			ops = append(ops, o)
		}
	}
	return ops
}

func elementsOf(s Set) (out []Element) {
	for _, k := range slices.Sorted(maps.Keys(s.Elements)) {
		out = append(out, Element{Key: k, Val: s.Elements[k]})
	}
	return out
}

// compareRanges walks two lists that are sorted.
func compareRanges(want, have []Range) (gone, added []Range) {
	i, j := 0, 0
	for i < len(want) || j < len(have) {
		switch {
		case j == len(have):
			added, i = append(added, want[i]), i+1
		case i == len(want):
			gone, j = append(gone, have[j]), j+1
		case want[i] == have[j]:
			i, j = i+1, j+1
		case want[i].From.Compare(have[j].From) < 0:
			added, i = append(added, want[i]), i+1
		default:
			gone, j = append(gone, have[j]), j+1
		}
	}
	return gone, added
}

// damaged says whether something has our name and a wrong nature, which cannot be changed in place.
func damaged(want Table, have State) bool {
	for _, c := range want.Chains {
		if h, there := have.Chains[c.Name]; there && h.Kind != c.kind() {
			return true
		}
	}
	for _, s := range want.Sets {
		if h, there := have.Sets[s.Name]; there && h.Kind != s.Kind() {
			return true
		}
	}
	return false
}

// Apply is what the kernel has after the steps. It fails where the kernel would.
func (s State) Apply(ops []Op) (State, error) {
	s.Chains, s.Sets, s.Counters = maps.Clone(s.Chains), maps.Clone(s.Sets), maps.Clone(s.Counters)
	for _, o := range ops {
		if o.Verb == Rebuild {
			s = o.All.State()
			continue
		}
		if !s.There {
			return s, fmt.Errorf("%s: no table", o)
		}
		switch o.Verb {
		case AddCounter:
			s.Counters[o.Name] = true
		case AddSet:
			s.Sets[o.Name] = SetState{Kind: o.Set.Kind()}
			if err := s.change(o); err != nil {
				return s, err
			}
		case AddChain, SetRules:
			s.Chains[o.Name] = o.Chain.state()
		case DelElements, SetElements:
			if err := s.change(o); err != nil {
				return s, err
			}
		case DelChain:
			delete(s.Chains, o.Name)
		case DelSet:
			delete(s.Sets, o.Name)
		}
	}
	return s, nil
}

// change is what becomes of a set's elements.
func (s State) change(o Op) (err error) {
	x := s.Sets[o.Name]
	if x.Elements = maps.Clone(x.Elements); x.Elements == nil {
		x.Elements = map[string]string{}
	}
	for _, e := range o.Elements {
		_, there := x.Elements[e.Key]
		switch {
		case o.Verb == DelElements && !there, e.Was && !there:
			return fmt.Errorf("%s: no such element", o)
		case o.Verb == DelElements:
			delete(x.Elements, e.Key)
		case there && !e.Was && x.Elements[e.Key] != e.Val:
			return fmt.Errorf("%s: there is one with another value", o)
		default:
			x.Elements[e.Key] = e.Val
		}
	}
	if x.Ranges, err = changeRanges(x.Ranges, o); err != nil {
		return err
	}
	s.Sets[o.Name] = x
	return nil
}

func changeRanges(have []Range, o Op) ([]Range, error) {
	if o.Verb == DelElements {
		left, missing := compareRanges(o.Ranges, have)
		if len(missing) > 0 {
			return nil, fmt.Errorf("%s: no such element", o)
		}
		return left, nil
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

// String tells the step in one line.
func (o Op) String() string {
	switch o.Verb {
	case Rebuild:
		n := 0
		for _, s := range o.All.Sets {
			n += len(s.Ranges) + len(s.Elements)
		}
		return fmt.Sprintf("rebuild table: %d chains, %d sets, %d elements", len(o.All.Chains), len(o.All.Sets), n)
	case AddCounter:
		return "add counter " + o.Name
	case AddSet:
		return "add set " + o.Name + " (" + o.Set.Kind() + ")" + o.list()
	case AddChain:
		return "add chain " + o.Name + " (" + o.Chain.kind() + "): " + o.rules()
	case SetRules:
		return "set rules of chain " + o.Name + ": " + o.rules()
	case DelElements:
		return "delete from " + o.Name + o.list()
	case SetElements:
		if slices.ContainsFunc(o.Elements, func(e Element) bool { return e.Was }) {
			return "set in " + o.Name + o.list()
		}
		return "add to " + o.Name + o.list()
	case DelChain:
		return "delete chain " + o.Name
	case DelSet:
		return "delete set " + o.Name
	}
	return "unknown operation"
}

func (o Op) rules() string {
	var texts []string
	for _, r := range o.Chain.Rules {
		texts = append(texts, r.Text)
	}
	return strings.Join(texts, "; ")
}

func (o Op) list() string {
	var b strings.Builder
	for _, r := range o.Ranges {
		b.WriteString(" " + r.String())
	}
	for _, e := range o.Elements {
		if o.Set.Text != nil {
			b.WriteString(" " + o.Set.Text(e.Key, e.Val))
			continue
		}
		fmt.Fprintf(&b, " %x", e.Key)
		if e.Val != "" {
			fmt.Fprintf(&b, ":%x", e.Val)
		}
	}
	return b.String()
}
