// Package strictyaml reads YAML files that people write: every complaint names the file, the line,
// the key, and what is allowed there.
package strictyaml

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"sort"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Unmarshal decodes one YAML document into the struct out points to. Unknown and repeated keys and
// values of the wrong type are errors. An empty document leaves out as it is.
func Unmarshal(file string, data []byte, out any) error {
	f, err := parser.ParseBytes(data, 0)
	if err != nil {
		return describe(file, err)
	}
	docs := 0
	for _, d := range f.Docs {
		if d.Body == nil || d.Body.Type() == ast.NullType || d.Body.Type() == ast.CommentType {
			continue
		}
		if docs++; docs > 1 {
			return fmt.Errorf("%s:%d: a second YAML document; only one is allowed", file, d.Body.GetToken().Position.Line)
		}
		if err := check(file, "", d.Body, reflect.TypeOf(out).Elem()); err != nil {
			return err
		}
	}
	if docs == 0 {
		return nil
	}
	if err := yaml.UnmarshalWithOptions(data, out, yaml.Strict()); err != nil {
		return describe(file, err)
	}
	return nil
}

func describe(file string, err error) error {
	var e yaml.Error
	if errors.As(err, &e) && e.GetToken() != nil && e.GetToken().Position != nil {
		return fmt.Errorf("%s:%d: %s", file, e.GetToken().Position.Line, e.GetMessage())
	}
	return fmt.Errorf("%s: %w", file, err)
}

// check compares a node with the type it will be decoded into.
func check(file, path string, n ast.Node, t reflect.Type) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if n.Type() == ast.NullType || t.Kind() == reflect.Interface || decodesItself(t) {
		return nil
	}
	switch t.Kind() {
	case reflect.Struct:
		return checkStruct(file, path, n, t)
	case reflect.Map:
		values, err := mapping(file, path, n)
		if err != nil {
			return err
		}
		for _, v := range values {
			if err := check(file, join(path, v.Key.String()), v.Value, t.Elem()); err != nil {
				return err
			}
		}
	case reflect.Slice:
		s, ok := n.(*ast.SequenceNode)
		if !ok {
			return wrong(file, path, n, "a list")
		}
		for i, v := range s.Values {
			if err := check(file, fmt.Sprintf("%s[%d]", path, i), v, t.Elem()); err != nil {
				return err
			}
		}
	case reflect.Bool:
		if n.Type() != ast.BoolType {
			return wrong(file, path, n, "true or false")
		}
	case reflect.Int, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return checkNumber(file, path, n, t)
	case reflect.String:
		switch n.Type() {
		case ast.MappingType, ast.MappingValueType, ast.SequenceType:
			return wrong(file, path, n, "a text")
		}
	}
	return nil
}

func checkNumber(file, path string, n ast.Node, t reflect.Type) error {
	i, ok := n.(*ast.IntegerNode)
	if !ok {
		return wrong(file, path, n, "a whole number")
	}
	v := reflect.New(t).Elem()
	if v.CanInt() {
		low, high := int64(math.MinInt64)>>(64-t.Bits()), int64(math.MaxInt64)>>(64-t.Bits())
		x, ok := i.Value.(int64)
		if u, isU := i.Value.(uint64); isU && u <= math.MaxInt64 {
			x, ok = int64(u), true
		}
		if !ok || x < low || x > high {
			return wrong(file, path, n, fmt.Sprintf("a whole number from %d to %d", low, high))
		}
		return nil
	}
	high := uint64(math.MaxUint64) >> (64 - t.Bits())
	if u, ok := i.Value.(uint64); !ok || u > high {
		return wrong(file, path, n, fmt.Sprintf("a whole number from 0 to %d", high))
	}
	return nil
}

// Line finds the line of a key, written with dots as in this package's errors. 0: it is not there.
func Line(data []byte, key string) int {
	f, err := parser.ParseBytes(data, 0)
	if err != nil {
		return 0
	}
	for _, d := range f.Docs {
		if line := lineIn(d.Body, "", key); line > 0 {
			return line
		}
	}
	return 0
}

func lineIn(n ast.Node, path, key string) int {
	if n == nil {
		return 0
	}
	values, err := mapping("", path, n)
	if err != nil {
		return 0
	}
	for _, v := range values {
		at := join(path, v.Key.GetToken().Value)
		if at == key {
			return v.Key.GetToken().Position.Line
		}
		if strings.HasPrefix(key, at+".") {
			return lineIn(v.Value, at, key)
		}
	}
	return 0
}

func decodesItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[yaml.BytesUnmarshaler]()) ||
		p.Implements(reflect.TypeFor[yaml.InterfaceUnmarshaler]())
}

func checkStruct(file, path string, n ast.Node, t reflect.Type) error {
	values, err := mapping(file, path, n)
	if err != nil {
		return err
	}
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		if name != "" && name != "-" {
			fields[name] = t.Field(i).Type
		}
	}
	for _, v := range values {
		key := v.Key.GetToken().Value
		ft, ok := fields[key]
		if !ok {
			return fmt.Errorf("%s:%d: unknown key %q; allowed here: %s", file, v.Key.GetToken().Position.Line,
				join(path, key), names(fields))
		}
		if err := check(file, join(path, key), v.Value, ft); err != nil {
			return err
		}
	}
	return nil
}

func mapping(file, path string, n ast.Node) ([]*ast.MappingValueNode, error) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return n.Values, nil
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, nil
	}
	return nil, wrong(file, path, n, "a mapping (key: value)")
}

func wrong(file, path string, n ast.Node, want string) error {
	if path == "" {
		path = "the document"
	}
	return fmt.Errorf("%s:%d: %s: want %s, have %q", file, n.GetToken().Position.Line, path, want, n.GetToken().Value)
}

func names(fields map[string]reflect.Type) string {
	var all []string
	for k := range fields {
		all = append(all, k)
	}
	sort.Strings(all)
	return strings.Join(all, ", ")
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
