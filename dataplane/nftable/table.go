package nftable

import (
	"fmt"
	"maps"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
)

// Table is what is wanted.
type Table struct {
	Name     string
	Chains   []Chain
	Sets     []Set
	Counters []string
}

// Rule is one rule in nft's words, for people, and in the kernel's form.
type Rule struct {
	Text  string
	Exprs []expr.Any
}

// Chain is one chain with its rules.
type Chain struct {
	Name     string
	Type     nftables.ChainType
	Hook     *nftables.ChainHook // nil: other chains go to it, and the fields around have no meaning
	Priority int32
	Drop     bool // is the policy; else packets are accepted
	Rules    []Rule
}

// Set is a set or a map with the elements that are wanted.
type Set struct {
	Name     string
	Key, Val nftables.SetDatatype // Val: of a map
	Concat   bool                 // a key has several parts
	Interval bool                 // a key is a range
	Timeout  bool
	Counter  bool
	// External says that others write the elements, which are neither read nor written here.
	External bool
	// Exact says that elements go at once that are not wanted, also where nothing else is removed.
	Exact bool

	// Elements are keys and values in the kernel's form; the value is empty in a set. In one that is both Concat and
	// Interval the key is the first and the last one behind each other.
	Elements map[string]string
	Ranges   []Range // of one that is Interval and not Concat: sorted, without overlaps
	// Text is an element in words; nil: its bytes.
	Text func(key, val string) string

	constant, dynamic bool // as somebody else may have made one of the name
}

// State is what the kernel has of a table.
type State struct {
	There    bool
	Chains   map[string]ChainState
	Sets     map[string]SetState
	Counters map[string]bool
}

// ChainState is a chain: its nature in nft's words, and the tags of its rules.
type ChainState struct {
	Kind  string
	Rules []string
}

// SetState is a set: its nature in nft's words, and its elements. Those of an external set are not in it.
type SetState struct {
	Kind     string
	Elements map[string]string
	Ranges   []Range
}

// State is what the kernel has when it has the table.
func (t Table) State() State {
	s := State{There: true, Chains: map[string]ChainState{}, Sets: map[string]SetState{}, Counters: map[string]bool{}}
	for _, c := range t.Chains {
		s.Chains[c.Name] = c.state()
	}
	for _, x := range t.Sets {
		s.Sets[x.Name] = SetState{Kind: x.Kind(), Elements: maps.Clone(x.Elements), Ranges: slices.Clone(x.Ranges)}
	}
	for _, c := range t.Counters {
		s.Counters[c] = true
	}
	return s
}

// Set is the set of a name; nil: there is none.
func (t Table) Set(name string) *Set {
	i := slices.IndexFunc(t.Sets, func(s Set) bool { return s.Name == name })
	if i < 0 {
		return nil
	}
	return &t.Sets[i]
}

// Put adds an element to a set.
func (t Table) Put(set, key, val string) {
	s := t.Set(set)
	if s.Elements == nil {
		s.Elements = map[string]string{}
	}
	s.Elements[key] = val
}

func (c Chain) state() ChainState {
	s := ChainState{Kind: c.kind()}
	for _, r := range c.Rules {
		s.Rules = append(s.Rules, r.tag())
	}
	return s
}

// hooks are the names of hooks.
var hooks = map[nftables.ChainHook]string{*nftables.ChainHookPrerouting: "prerouting",
	*nftables.ChainHookForward: "forward", *nftables.ChainHookInput: "input", *nftables.ChainHookOutput: "output",
	*nftables.ChainHookPostrouting: "postrouting"}

// HookName is nft's word for a hook.
func HookName(h *nftables.ChainHook) string { return hooks[*h] }

func (c Chain) kind() string {
	if c.Hook == nil {
		return "regular"
	}
	policy := "accept"
	if c.Drop {
		policy = "drop"
	}
	return fmt.Sprintf("type %s hook %s priority %d policy %s", c.Type, hooks[*c.Hook], c.Priority, policy)
}

// fromChain is a chain of the kernel's, without its rules.
func fromChain(k *nftables.Chain) Chain {
	c := Chain{Name: k.Name, Type: k.Type, Hook: k.Hooknum, Drop: k.Policy != nil && *k.Policy == nftables.ChainPolicyDrop}
	if k.Priority != nil {
		c.Priority = int32(*k.Priority)
	}
	return c
}

// kernel is a chain in the kernel's form.
func (c Chain) kernel(t *nftables.Table) *nftables.Chain {
	k := &nftables.Chain{Table: t, Name: c.Name}
	if c.Hook != nil {
		policy, priority := nftables.ChainPolicyAccept, nftables.ChainPriority(c.Priority)
		if c.Drop {
			policy = nftables.ChainPolicyDrop
		}
		k.Type, k.Hooknum, k.Priority, k.Policy = c.Type, c.Hook, &priority, &policy
	}
	return k
}

// Kind is the nature of a set in nft's words.
func (s Set) Kind() string {
	k := s.Key.Name
	if s.Val.Bytes > 0 {
		k += " to " + s.Val.Name
	}
	for _, f := range []struct {
		on   bool
		name string
	}{{s.Interval, " interval"}, {s.Timeout, " timeout"}, {s.constant, " constant"}, {s.dynamic, " dynamic"}} {
		if f.on {
			k += f.name
		}
	}
	return k
}

// fromSet is a set of the kernel's, without its elements.
func fromSet(k *nftables.Set) Set {
	s := Set{Name: k.Name, Key: k.KeyType, Concat: k.Concatenation, Interval: k.Interval, Timeout: k.HasTimeout,
		constant: k.Constant, dynamic: k.Dynamic}
	if k.IsMap {
		s.Val = k.DataType
	}
	return s
}

// Kernel is a set in the library's form. id is one that no other set of the table has.
func (t Table) Kernel(set string) *nftables.Set {
	i := slices.IndexFunc(t.Sets, func(s Set) bool { return s.Name == set })
	s := t.Sets[i]
	out := &nftables.Set{Table: t.kernel(), Name: s.Name, ID: uint32(1 + i), KeyType: s.Key, Concatenation: s.Concat,
		Interval: s.Interval, HasTimeout: s.Timeout, Counter: s.Counter}
	if s.Val.Bytes > 0 {
		out.IsMap, out.DataType = true, s.Val
	}
	if s.Key.Name == nftables.TypeMark.Name {
		out.KeyByteOrder = binaryutil.NativeEndian
	}
	return out
}

func (t Table) kernel() *nftables.Table {
	return &nftables.Table{Name: t.Name, Family: nftables.TableFamilyINet}
}

// ranged says that the elements are ranges of addresses.
func (s Set) ranged() bool { return s.Interval && !s.Concat }
