package events

import (
	"fmt"
	"maps"
	"runtime"
	"testing"

	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// An index is the map that it stands for, and so is each copy that was made on the way, whatever became of the others.
func TestIndexIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type version struct {
			index index
			want  map[string]string
		}
		// Some keys share a part of their hash, and with crowded set all of it.
		crowded := rapid.Bool().Draw(t, "crowded")
		hash := func(k string) uint64 {
			if crowded {
				return 5
			}
			return textKey(k)
		}
		now := version{want: map[string]string{}}
		var kept []version
		o := new(owner)
		most := 15
		if !crowded { // a split hashes the keys itself
			most = 400
		}
		for i := range rapid.IntRange(0, 500).Draw(t, "steps") {
			k := fmt.Sprint("key", rapid.IntRange(0, most).Draw(t, "key"))
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				kept = append(kept, version{now.index, maps.Clone(now.want)})
				o = new(owner)
			case 1, 2:
				now.index.del(o, hash(k), k)
				delete(now.want, k)
			default:
				now.index.put(o, hash(k), k, fmt.Sprint(i))
				now.want[k] = fmt.Sprint(i)
			}
		}
		for _, v := range append(kept, now) {
			if v.index.n != len(v.want) {
				t.Fatalf("the index counts %d keys, want %d", v.index.n, len(v.want))
			}
			for i := range most + 1 {
				k := fmt.Sprint("key", i)
				have, ok := v.index.get(hash(k), k)
				if want, there := v.want[k]; have != want || ok != there {
					t.Fatalf("key %q is %q, %t; want %q, %t", k, have, ok, want, there)
				}
			}
		}
	})
}

// Keys whose hashes are all equal share one leaf, of any size.
func TestIndexOfEqualHashes(t *testing.T) {
	var x index
	o := new(owner)
	root := &x.root
	for shift := rootShift; shift >= 0; shift -= 2 { // as splits would have left it
		*root = &bucket{owner: o, kids: new([4]*bucket)}
		root = &(*root).kids[0]
	}
	for i := range 3 * bucketSize {
		x.put(o, 0, fmt.Sprint(i), fmt.Sprint(-i))
	}
	for i := range 3 * bucketSize {
		if v, ok := x.get(0, fmt.Sprint(i)); !ok || v != fmt.Sprint(-i) {
			t.Fatalf("key %d is %q, %t", i, v, ok)
		}
	}
}

// BenchmarkMembers loads a state of 10,000 members from its snapshot and hashes it, as an agent does at its start, and
// tells what memory each member takes then.
func BenchmarkMembers(b *testing.B) {
	const members = 10_000
	p := &skeinv1.State{Index: members + 1, Time: 1}
	for i := range members {
		key := make([]byte, 32)
		copy(key, fmt.Sprint("key ", i))
		id := identity.IDOf(key)
		p.Nodes = append(p.Nodes, &skeinv1.Node{
			Id: id.String(), Name: fmt.Sprint("node", i), IdentityKey: key, WireguardKey: key, AdmittedAt: 1,
			AdmittedIndex: uint64(i + 1),
			Ipv4:          fmt.Sprintf("10.4.%d.%d", i/256, i%256), Ipv6: fmt.Sprintf("fd00::%x", i), MinSchema: SchemaMin,
			MaxSchema: SchemaMax,
		})
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	b.ReportAllocs()
	var s *State
	before := heap()
	for b.Loop() {
		var err error
		if s, err = FromProto(p); err != nil {
			b.Fatal(err)
		}
		s.Hash()
	}
	b.ReportMetric(float64(heap()-before)/members, "B/member") // without the members' own messages
	runtime.KeepAlive(s)
}
