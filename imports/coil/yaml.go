package coil

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// maxNesting is how deep brackets and one-line lists may go: the parser calls itself for each, and kubectl's objects
// have some ten levels.
const maxNesting = 256

// metadata is what is read of an object's metadata.
type metadata struct {
	namespace           string
	labels, annotations map[string]string
	deleted             bool // a deletion is under way
}

// walk calls take for each object of the file, in order; those of a List one by one.
func walk(data []byte, take func(o *object, apiVersion string) error) error {
	if n := nesting(data); n > maxNesting {
		return fmt.Errorf("brackets are nested %d deep; at most %d are read", n, maxNesting)
	}
	f, err := parser.ParseBytes(data, 0)
	if err != nil {
		var e yaml.Error
		if errors.As(err, &e) && e.GetToken() != nil && e.GetToken().Position != nil {
			return fmt.Errorf("line %d: %s", e.GetToken().Position.Line, e.GetMessage())
		}
		return fmt.Errorf("this is not YAML: %w", err)
	}
	docs := 0
	for _, d := range f.Docs {
		if d.Body == nil || d.Body.Type() == ast.NullType || d.Body.Type() == ast.CommentType {
			continue
		}
		docs++
		if err := walkOne(fmt.Sprintf("document %d", docs), d.Body, take, true); err != nil {
			return err
		}
	}
	return nil
}

func walkOne(where string, n ast.Node, take func(*object, string) error, listAllowed bool) error {
	o := &object{where: where, kind: "object"}
	if t := n.GetToken(); t != nil && t.Position != nil {
		o.where = fmt.Sprintf("%s (line %d)", where, t.Position.Line)
	}
	var err error
	if o.fields, err = o.mapping("", n); err != nil {
		return err
	}
	apiVersion, err := o.text("apiVersion", o.fields["apiVersion"])
	if err != nil {
		return err
	}
	kind, err := o.text("kind", o.fields["kind"])
	if err != nil {
		return err
	}
	if apiVersion == "" || kind == "" {
		return o.errorf("", "apiVersion or kind is missing: it is not a Kubernetes object")
	}
	o.kind = kind
	if strings.HasSuffix(kind, "List") && o.fields["items"] != nil {
		if !listAllowed {
			return o.errorf("", "a list within a list")
		}
		items, err := o.list("items", o.fields["items"])
		if err != nil {
			return err
		}
		for i, item := range items {
			if err := walkOne(fmt.Sprintf("%s, item %d", where, i+1), item, take, false); err != nil {
				return err
			}
		}
		return nil
	}
	if err := o.readMetadata(); err != nil {
		return err
	}
	return take(o, apiVersion)
}

func (o *object) readMetadata() error {
	if absent(o.fields["metadata"]) {
		return o.errorf("metadata", "it is missing")
	}
	m, err := o.mapping("metadata", o.fields["metadata"])
	if err != nil {
		return err
	}
	if o.name, err = o.text("metadata.name", m["name"]); err != nil {
		return err
	}
	if o.name == "" {
		return o.errorf("metadata.name", "it is missing")
	}
	if o.meta.namespace, err = o.text("metadata.namespace", m["namespace"]); err != nil {
		return err
	}
	if o.meta.labels, err = o.coilTexts("metadata.labels", m["labels"]); err != nil {
		return err
	}
	if o.meta.annotations, err = o.coilTexts("metadata.annotations", m["annotations"]); err != nil {
		return err
	}
	o.meta.deleted = !absent(m["deletionTimestamp"])
	return nil
}

// coilTexts are the entries of labels or annotations that are Coil's.
func (o *object) coilTexts(field string, n ast.Node) (map[string]string, error) {
	if absent(n) {
		return nil, nil
	}
	m, err := o.mapping(field, n)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for k, v := range m {
		if !strings.HasPrefix(k, group+"/") {
			continue
		}
		if out[k], err = o.text(field+"."+k, v); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func absent(n ast.Node) bool { return n == nil || n.Type() == ast.NullType }

// mapping is a node's keys and values. Anchors, aliases and tags are not followed: kubectl writes none.
func (o *object) mapping(field string, n ast.Node) (map[string]ast.Node, error) {
	var values []*ast.MappingValueNode
	switch n := n.(type) {
	case *ast.MappingNode:
		values = n.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{n}
	default:
		return nil, o.errorf(field, "want a mapping (key: value), have %s", kindOf(n))
	}
	out := make(map[string]ast.Node, len(values))
	for _, v := range values {
		if v.Key == nil || v.Key.GetToken() == nil {
			return nil, o.errorf(field, "a key is missing")
		}
		key := v.Key.GetToken().Value
		if _, twice := out[key]; twice {
			return nil, o.errorf(field, "%q is there twice", key)
		}
		out[key] = v.Value
	}
	return out, nil
}

func (o *object) list(field string, n ast.Node) ([]ast.Node, error) {
	if absent(n) {
		return nil, nil
	}
	s, ok := n.(*ast.SequenceNode)
	if !ok {
		return nil, o.errorf(field, "want a list, have %s", kindOf(n))
	}
	return s.Values, nil
}

// text is a string, "" where there is none.
func (o *object) text(field string, n ast.Node) (string, error) {
	if absent(n) {
		return "", nil
	}
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.LiteralNode:
		return n.Value.Value, nil
	}
	return "", o.errorf(field, "want a text, have %s", kindOf(n))
}

func (o *object) number(field string, n ast.Node, most uint64) (uint64, error) {
	if absent(n) {
		return 0, o.errorf(field, "it is missing")
	}
	i, ok := n.(*ast.IntegerNode)
	if !ok {
		return 0, o.errorf(field, "want a whole number, have %s", kindOf(n))
	}
	if v, ok := i.Value.(uint64); ok && v <= most {
		return v, nil
	}
	return 0, o.errorf(field, "want a whole number from 0 to %d, have %s", most, n.GetToken().Value)
}

// prefix reads a CIDR of a family; ok is false where there is none.
func (o *object) prefix(field, family string, n ast.Node) (p netip.Prefix, ok bool, err error) {
	s, err := o.text(field, n)
	if err != nil || s == "" {
		return netip.Prefix{}, false, err
	}
	if p, err = netip.ParsePrefix(s); err != nil {
		return p, false, o.errorf(field, "%q is not a prefix such as 10.2.2.0/27", s)
	}
	if p.Addr().Is4() != (family == "ipv4") || p.Addr().Is4In6() {
		return p, false, o.errorf(field, "%s is of the other family", s)
	}
	return p, true, nil
}

// blockPrefix is one of a block's prefixes, and its canonical text.
func (o *object) blockPrefix(family string) (netip.Prefix, string, error) {
	p, ok, err := o.prefix(family, family, o.fields[family])
	switch {
	case err != nil || !ok:
		return netip.Prefix{}, "", err
	case p != p.Masked():
		return p, "", o.errorf(family, "%s has host bits set", p)
	}
	return p, p.String(), nil
}

// only refuses fields that are not known: what they mean might change what a block is.
func (o *object) only(path string, m map[string]ast.Node, known ...string) error {
	var unknown []string
	for k := range m {
		if !slices.Contains(known, k) {
			unknown = append(unknown, path+k)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	slices.Sort(unknown)
	return o.errorf(unknown[0], "this field is not known here")
}

func kindOf(n ast.Node) string {
	if n == nil {
		return "nothing"
	}
	switch n.Type() {
	case ast.NullType:
		return "nothing"
	case ast.AnchorType, ast.AliasType, ast.TagType, ast.MergeKeyType:
		return "an anchor, alias or tag, which kubectl does not write"
	case ast.MappingType, ast.MappingValueType:
		return "a mapping"
	case ast.SequenceType:
		return "a list"
	}
	if t := n.GetToken(); t != nil {
		return fmt.Sprintf("%.60q", t.Value)
	}
	return n.Type().YAMLName()
}

// nesting is an upper bound of how deep flow collections and lists that begin in one line are nested.
func nesting(data []byte) int {
	deepest, open, line := 0, 0, 0
	start := true // of a line, dashes and question marks so far
	for i, c := range data {
		switch c {
		case '[', '{':
			open++
		case ']', '}':
			open = max(0, open-1)
		case '\n':
			start, line = true, 0
			continue
		case '-', '?':
			if start && i+1 < len(data) && (data[i+1] == ' ' || data[i+1] == '\t') {
				line++
			}
		}
		start = start && (c == ' ' || c == '\t' || c == '-' || c == '?')
		deepest = max(deepest, open, line)
	}
	return deepest
}
