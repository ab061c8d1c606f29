package nft

import (
	"fmt"
	"maps"
	"slices"
	"strings"
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
	Verb   Verb
	Name   string // of the chain or set
	Kind   string
	Rules  []string
	Ranges []Range
	All    State // of Rebuild
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
			ops = append(ops, Op{Verb: AddSet, Name: n, Kind: w.Kind, Ranges: w.Ranges})
			continue
		}
		gone, added := compare(w.Ranges, a.Ranges)
		if len(gone) > 0 {
			ops = append(ops, Op{Verb: DelElements, Name: n, Kind: w.Kind, Ranges: gone})
		}
		if len(added) > 0 {
			ops = append(ops, Op{Verb: AddElements, Name: n, Kind: w.Kind, Ranges: added})
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
func rebuild(want State) Op {
	ours := Want(nil)
	all := State{Table: true, Chains: ours.Chains, Sets: ours.Sets}
	for n := range all.Sets {
		all.Sets[n] = want.Sets[n]
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
	u := State{Table: true, Chains: maps.Clone(want.Chains), Sets: maps.Clone(want.Sets)}
	for n, a := range actual.Chains {
		if _, ok := u.Chains[n]; !ok {
			u.Chains[n] = a
		}
	}
	for n, a := range actual.Sets {
		w, ok := u.Sets[n]
		if !ok {
			u.Sets[n] = a
		} else if w.Kind == a.Kind {
			w.Ranges = merge(w.Ranges, a.Ranges)
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

// compare walks two sorted lists.
func compare(want, actual []Range) (gone, added []Range) {
	i, j := 0, 0
	for i < len(want) || j < len(actual) {
		switch {
		case j == len(actual):
			added, i = append(added, want[i]), i+1
		case i == len(want):
			gone, j = append(gone, actual[j]), j+1
		case want[i] == actual[j]:
			i, j = i+1, j+1
		case want[i].From.Compare(actual[j].From) < 0:
			added, i = append(added, want[i]), i+1
		default:
			gone, j = append(gone, actual[j]), j+1
		}
	}
	return gone, added
}

// Apply is what the kernel does with the operations, as a pure function. It fails where the kernel would.
func (s State) Apply(ops []Op) (State, error) {
	s = State{Table: s.Table, Chains: maps.Clone(s.Chains), Sets: maps.Clone(s.Sets)}
	for _, o := range ops {
		if o.Verb == Rebuild {
			s = State{Table: true, Chains: maps.Clone(o.All.Chains), Sets: maps.Clone(o.All.Sets)}
			continue
		}
		if !s.Table {
			return s, fmt.Errorf("%s: no table", o)
		}
		switch o.Verb {
		case AddSet:
			s.Sets[o.Name] = Set{Kind: o.Kind, Ranges: o.Ranges}
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
			s.Sets[o.Name] = set
		}
	}
	return s, nil
}

func elements(have []Range, o Op) ([]Range, error) {
	gone, added := compare(o.Ranges, have)
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

// String tells the operation in one line.
func (o Op) String() string {
	switch o.Verb {
	case Rebuild:
		n := 0
		for _, s := range o.All.Sets {
			n += len(s.Ranges)
		}
		return fmt.Sprintf("rebuild table: %d chains, %d sets, %d elements", len(o.All.Chains), len(o.All.Sets), n)
	case AddSet:
		return "add set " + o.Name + " (" + o.Kind + ")" + list(o.Ranges)
	case AddChain:
		return "add chain " + o.Name + " (" + o.Kind + "): " + strings.Join(o.Rules, "; ")
	case SetRules:
		return "set rules of chain " + o.Name + ": " + strings.Join(o.Rules, "; ")
	case DelChain:
		return "delete chain " + o.Name
	case DelSet:
		return "delete set " + o.Name
	case DelElements:
		return "delete from " + o.Name + list(o.Ranges)
	case AddElements:
		return "add to " + o.Name + list(o.Ranges)
	}
	return "unknown operation"
}

func list(rs []Range) string {
	var b strings.Builder
	for _, r := range rs {
		b.WriteString(" " + r.String())
	}
	return b.String()
}
