package config_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
)

// leaves are the keys of a type, with dots.
func leaves(t reflect.Type, prefix string) (all []string) {
	for _, f := range reflect.VisibleFields(t) {
		name := prefix + f.Tag.Get("yaml")
		if f.Type.Kind() == reflect.Struct {
			all = append(all, leaves(f.Type, name+".")...)
			continue
		}
		all = append(all, name)
	}
	return all
}

// Each key of the file has a class, and each that is not live says why and, where it is agreed, what changes it.
func TestKeys(t *testing.T) {
	var have []string
	for _, k := range config.Keys {
		have = append(have, k.Name)
		if (k.Class == config.Live) != (k.Why == "") {
			t.Errorf("%s is %s, and its reason is %q: every other key than a live one has a reason", k.Name, k.Class, k.Why)
		}
		if !slices.Contains([]config.Class{config.Live, config.Restart, config.Agreed}, k.Class) {
			t.Errorf("%s has class %q", k.Name, k.Class)
		}
	}
	want := leaves(reflect.TypeFor[config.Config](), "")
	if len(want) < 40 {
		t.Fatalf("only %d keys were found in the type", len(want))
	}
	for _, name := range want {
		if !slices.Contains(have, name) {
			t.Errorf("%s has no class: say in config.Keys whether a change takes effect while the agent runs", name)
		}
	}
	for i, name := range have {
		if !slices.Contains(want, name) || slices.Contains(have[:i], name) {
			t.Errorf("config.Keys has %s, which is not a key of the file, or there twice", name)
		}
	}
}

// differing is a configuration in which each key differs from the defaults.
func differing(t *testing.T) config.Config {
	t.Helper()
	c := config.Default()
	var set func(v reflect.Value)
	set = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				set(v.Field(i))
			}
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			set(v.Elem())
		case reflect.Bool:
			v.SetBool(!v.Bool())
		case reflect.String:
			v.SetString(v.String() + "x")
		case reflect.Uint8, reflect.Uint16, reflect.Uint32:
			v.SetUint(v.Uint() + 1)
		case reflect.Int:
			v.SetInt(v.Int() + 1)
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		case reflect.Map:
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(reflect.ValueOf("x"), reflect.Zero(v.Type().Elem()))
		default:
			t.Fatalf("a value of kind %s: teach this test", v.Kind())
		}
	}
	set(reflect.ValueOf(&c).Elem())
	return c
}

// A change of any key is seen. The live ones are adopted, and after that no live one differs any more; and back again.
func TestAdopt(t *testing.T) {
	old, read := config.Default(), differing(t)
	if n := len(config.Changes(old, read)); n != len(config.Keys) {
		t.Errorf("%d of %d changed keys were seen", n, len(config.Keys))
	}
	running := config.Adopt(old, read)
	taken, left := config.Changes(old, running), config.Changes(running, read)
	for _, c := range taken {
		if c.Class != config.Live {
			t.Errorf("%s is %s, and was adopted", c.Name, c.Class)
		}
	}
	for _, c := range left {
		if c.Class == config.Live {
			t.Errorf("%s is live, and was not adopted", c.Name)
		}
	}
	if len(taken)+len(left) != len(config.Keys) || len(taken) == 0 || len(left) == 0 {
		t.Errorf("%d adopted and %d left, of %d", len(taken), len(left), len(config.Keys))
	}
	if back := config.Changes(old, config.Adopt(running, old)); len(back) > 0 {
		t.Errorf("keys taken out of the file did not go back to their defaults: %+v", back)
	}
}

func TestChanges(t *testing.T) {
	for _, c := range []struct{ name, from, to, want string }{
		{"nothing", "name: a\nsite: b\n", "site: b\nname: a\n", ""},
		{"set", "name: a\n", "name: a\nsite: b\n", "site:  -> b"},
		{"taken out", "name: a\nlabels: {x: y, a: b}\n", "name: a\n", "labels: {a: b, x: y} -> "},
		{"pointer", "name: a\n", "name: a\nrouteNodeAddresses: false\n", "routeNodeAddresses:  -> false"},
		{"list", "name: a\nnodeAddresses: [10.0.0.0/8]\n", "name: a\nnodeAddresses: [10.0.0.0/8, 192.168.0.0/16]\n",
			"nodeAddresses: [10.0.0.0/8] -> [10.0.0.0/8, 192.168.0.0/16]"},
		{"an empty list that is none", "name: a\nnodeAddresses: []\n", "name: a\n", ""},
		{"an empty list that says none", "name: a\n", "name: a\nnatTraversal: {portMapping: []}\n",
			"natTraversal.portMapping:  -> []"},
		{"client", "name: a\n", "name: a\negress: {clients: [{egresses: [dc/nat]}]}\n",
			"egress.clients:  -> [{egresses: [dc/nat]}]"},
		{"peer", "name: a\npeers: {b: {birthdayAttack: enabled}}\n", "name: a\npeers: {b: {birthdayAttack: disabled}}\n",
			"peers: {b: {birthdayAttack: enabled}} -> {b: {birthdayAttack: disabled}}"},
		{"two", "name: a\n", "name: a\nports: {wireguard: 51999}\nleader: true\n",
			"leader: false -> true; ports.wireguard: 51820 -> 51999"},
	} {
		from, err1 := load(t, c.from)
		to, err2 := load(t, c.to)
		if err1 != nil || err2 != nil {
			t.Fatal(c.name, err1, err2)
		}
		var parts []string
		for _, x := range config.Changes(from, to) {
			parts = append(parts, x.Name+": "+x.Old+" -> "+x.New)
		}
		if have := strings.Join(parts, "; "); have != c.want {
			t.Errorf("%s: %q, want %q", c.name, have, c.want)
		}
	}
}
