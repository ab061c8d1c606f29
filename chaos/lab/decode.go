package lab

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
)

// decoder walks a YAML tree and collects every mistake with its file, line and key, so that a file
// can be put right in one go.
type decoder struct {
	file string
	errs []error
}

// value is one place in the tree.
type value struct {
	d    *decoder
	node ast.Node
	path string // like sites.home.nat
}

// field is a key that a mapping may have.
type field struct {
	key  string
	read func(value)
}

func (d *decoder) failAt(line int, path, format string, args ...any) {
	where := fmt.Sprintf("%s:%d: ", d.file, line)
	if path != "" {
		where += path + ": "
	}
	d.errs = append(d.errs, errors.New(where+fmt.Sprintf(format, args...)))
}

func (v value) fail(format string, args ...any) { v.d.failAt(v.line(), v.path, format, args...) }

func (v value) line() int {
	if v.node == nil || v.node.GetToken() == nil || v.node.GetToken().Position == nil {
		return 1
	}
	if m, ok := v.node.(*ast.MappingNode); ok && len(m.Values) > 0 && !m.IsFlowStyle {
		return m.Values[0].Key.GetToken().Position.Line
	}
	return v.node.GetToken().Position.Line
}

func (v value) at(key string, n ast.Node) value {
	path := key
	if v.path != "" {
		path = v.path + "." + key
	}
	return value{v.d, n, path}
}

// pairs lists the entries of a mapping; anything else is reported as wrong.
func (v value) pairs(what string) []*ast.MappingValueNode {
	switch n := v.node.(type) {
	case *ast.MappingNode:
		return n.Values
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		v.fail("anchors, aliases and tags are not understood in a lab file: write it out")
		return nil
	}
	v.fail("is %s; allowed: %s", kindOf(v.node), what)
	return nil
}

// size counts the entries of a mapping; of anything else there are none.
func (v value) size() int {
	switch n := v.node.(type) {
	case *ast.MappingNode:
		return len(n.Values)
	case *ast.MappingValueNode:
		return 1
	}
	return 0
}

// mapping reads the entries that fields know and reports the others.
func (v value) mapping(fields ...field) {
	names := make([]string, 0, len(fields))
	for _, f := range fields {
		names = append(names, f.key)
	}
	for _, pair := range v.pairs("a mapping with the keys " + strings.Join(names, ", ")) {
		key := v.key(pair)
		i := slices.Index(names, key)
		if i < 0 {
			hint := ""
			if near := nearest(key, names); near != "" {
				hint = fmt.Sprintf(" (did you mean %q?)", near)
			}
			v.d.failAt(pair.Key.GetToken().Position.Line, v.path, "unknown key %q%s; allowed: %s", key, hint,
				strings.Join(names, ", "))
			continue
		}
		fields[i].read(v.at(key, pair.Value))
	}
}

// entries reads a mapping whose keys are the user's own names, in order.
func (v value) entries(what string, read func(name string, v value)) {
	for _, pair := range v.pairs(what) {
		key := v.key(pair)
		read(key, v.at(key, pair.Value))
	}
}

func (v value) key(pair *ast.MappingValueNode) string {
	if s, ok := pair.Key.(*ast.StringNode); ok {
		return s.Value
	}
	return pair.Key.GetToken().Value
}

// each reads the elements of a list.
func (v value) each(what string, read func(i int, v value)) {
	seq, ok := v.node.(*ast.SequenceNode)
	if !ok {
		v.fail("is %s; allowed: a list of %s", kindOf(v.node), what)
		return
	}
	for i, n := range seq.Values {
		read(i, value{v.d, n, fmt.Sprintf("%s[%d]", v.path, i+1)})
	}
}

func (v value) isList() bool    { _, ok := v.node.(*ast.SequenceNode); return ok }
func (v value) isMapping() bool { _, ok := v.node.(ast.MapNode); return ok }

// text reads a scalar as text: a string, or a bare word that YAML takes for something else.
func (v value) text(what string) string {
	switch n := v.node.(type) {
	case *ast.StringNode:
		return n.Value
	case *ast.LiteralNode:
		return n.Value.Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value
	}
	v.fail("is %s; allowed: %s", kindOf(v.node), what)
	return ""
}

// texts reads one text or a list of them.
func (v value) texts(what string) []string {
	if !v.isList() {
		return []string{v.text(what + ", or a list")}
	}
	var all []string
	v.each(what, func(_ int, v value) { all = append(all, v.text(what)) })
	return all
}

func (v value) oneOf(allowed ...string) string {
	s := v.text(strings.Join(allowed, ", "))
	if s != "" && !slices.Contains(allowed, s) {
		hint := ""
		if near := nearest(s, allowed); near != "" {
			hint = fmt.Sprintf(" (did you mean %q?)", near)
		}
		v.fail("%q is not known%s; allowed: %s", s, hint, strings.Join(allowed, ", "))
	}
	return s
}

func (v value) boolean() bool {
	if n, ok := v.node.(*ast.BoolNode); ok {
		return n.Value
	}
	v.fail("is %s; allowed: true or false", kindOf(v.node))
	return false
}

func (v value) integer(min, max int) int {
	if n, ok := v.node.(*ast.IntegerNode); ok {
		switch i := n.Value.(type) {
		case uint64:
			if i <= math.MaxInt32 && int(i) >= min && int(i) <= max {
				return int(i)
			}
		case int64:
			if int(i) >= min && int(i) <= max {
				return int(i)
			}
		}
	}
	v.fail("is %s; allowed: a whole number from %d to %d", kindOf(v.node), min, max)
	return min
}

func (v value) duration() time.Duration {
	const what = "a duration such as 500ms, 30s or 2m"
	s := v.text(what)
	if s == "" {
		return 0
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		v.fail("%q is not a duration; allowed: %s", s, what)
		return 0
	}
	return d
}

// network reads a private IPv4 /24.
func (v value) network() netip.Prefix {
	const what = "a private network such as 192.168.1.0/24"
	s := v.text(what)
	if s == "" {
		return netip.Prefix{}
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is4() || p.Bits() != 24 || p != p.Masked() || !p.Addr().IsPrivate() {
		v.fail("%q is not a network that hosts can be in; allowed: %s", s, what)
		return netip.Prefix{}
	}
	return p
}

// words reads a mapping from texts to texts.
func (v value) words(what string) map[string]string {
	out := map[string]string{}
	v.entries("a mapping of "+what, func(key string, v value) { out[key] = v.text("a text") })
	return out
}

// free reads a mapping without looking into it.
func (v value) free() map[string]any {
	if !v.isMapping() {
		v.fail("is %s; allowed: a mapping of the agent's config keys", kindOf(v.node))
		return nil
	}
	out := map[string]any{}
	if err := yaml.NodeToValue(v.node, &out); err != nil {
		v.fail("cannot be read: %v", err)
	}
	return out
}

func kindOf(n ast.Node) string {
	switch n := n.(type) {
	case nil, *ast.NullNode:
		return "empty"
	case ast.MapNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.BoolNode, *ast.IntegerNode, *ast.FloatNode, *ast.StringNode:
		return fmt.Sprintf("%q", n.GetToken().Value)
	case *ast.AliasNode, *ast.AnchorNode, *ast.TagNode:
		return "an anchor, alias or tag"
	}
	return "something else"
}

// nearest finds the allowed word that differs from s in at most two letters.
func nearest(s string, allowed []string) string {
	best, bestDistance := "", 3
	for _, a := range allowed {
		if d := distance(s, a); d < bestDistance && d < len(a) {
			best, bestDistance = a, d
		}
	}
	return best
}

// distance is Levenshtein's, for short words.
func distance(a, b string) int {
	if len(a) > 40 || len(b) > 40 {
		return max(len(a), len(b))
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
