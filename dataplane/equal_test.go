package dataplane

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
)

// Each field of a Spec, however deep, makes a difference: none is forgotten when one is added.
func TestSpecEqualSeesEachField(t *testing.T) {
	fill := func() Spec {
		var s Spec
		fillIn(reflect.ValueOf(&s).Elem())
		return s
	}
	if !fill().Equal(fill()) {
		t.Fatal("two Specs with the same content differ")
	}
	changes := 0
	for i := 0; ; i++ {
		s, left := fill(), i
		where, ok := change(reflect.ValueOf(&s).Elem(), "Spec", &left)
		if !ok {
			break
		}
		changes++
		if s.Equal(fill()) {
			t.Errorf("%s makes no difference", where)
		}
	}
	if changes < 30 {
		t.Errorf("only %d places were changed", changes)
	}
}

// fillIn gives a value, and all that it consists of, some content.
func fillIn(v reflect.Value) {
	switch x := v.Addr().Interface().(type) {
	case *netip.Addr:
		*x = netip.MustParseAddr("192.0.2.1")
		return
	case *netip.AddrPort:
		*x = netip.MustParseAddrPort("192.0.2.1:7")
		return
	case *netip.Prefix:
		*x = netip.MustParsePrefix("192.0.2.0/24")
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fillIn(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillIn(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fillIn(key)
		fillIn(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Array:
		for i := range v.Len() {
			fillIn(v.Index(i))
		}
	case reflect.String:
		v.SetString("a")
	case reflect.Bool:
		v.SetBool(true)
	default:
		v.Set(reflect.ValueOf(1).Convert(v.Type()))
	}
}

// change makes the n-th thing that can be changed another, and tells which it was.
func change(v reflect.Value, name string, n *int) (string, bool) {
	hit := func() bool { *n--; return *n < 0 }
	switch x := v.Addr().Interface().(type) {
	case *netip.Addr:
		*x = x.Next()
		return name, hit()
	case *netip.AddrPort:
		*x = netip.AddrPortFrom(x.Addr(), x.Port()+1)
		return name, hit()
	case *netip.Prefix:
		*x = netip.PrefixFrom(x.Addr(), x.Bits()-1)
		return name, hit()
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			before := reflect.New(v.Field(i).Type()).Elem()
			fillIn(before)
			if where, ok := change(v.Field(i), name+"."+v.Type().Field(i).Name, n); ok {
				return where, true
			}
			v.Field(i).Set(before)
		}
	case reflect.Slice:
		if hit() {
			v.Set(reflect.Zero(v.Type()))
			return name + " is empty", true
		}
		return change(v.Index(0), name+"[0]", n)
	case reflect.Map:
		if hit() {
			v.Set(reflect.Zero(v.Type()))
			return name + " is empty", true
		}
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fillIn(key)
		fillIn(value)
		where, ok := change(value, fmt.Sprintf("%s[%v]", name, key.Type()), n)
		v.SetMapIndex(key, value)
		return where, ok
	case reflect.Array:
		v.Index(0).Set(reflect.ValueOf(9).Convert(v.Index(0).Type()))
		return name, hit()
	case reflect.String:
		v.SetString("b")
		return name, hit()
	case reflect.Bool:
		v.SetBool(false)
		return name, hit()
	default:
		v.Set(reflect.ValueOf(2).Convert(v.Type()))
		return name, hit()
	}
	return "", false
}
