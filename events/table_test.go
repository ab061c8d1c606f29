package events

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func encodeInt(b []byte, v int) []byte { return binary.BigEndian.AppendUint64(b, uint64(v)) }

// TestTableIsAMap holds the trie against Go's map through random changes and clones. The hashes are
// poor on purpose, so that deep tries and chains occur.
func TestTableIsAMap(t *testing.T) {
	hashes := map[string]func(string) uint64{
		"text":  textKey,
		"few":   func(k string) uint64 { return uint64(len(k)) },
		"deep":  func(k string) uint64 { return uint64(len(k) % 3) },
		"upper": func(k string) uint64 { return uint64(len(k)) << 60 },
	}
	for name, hash := range hashes {
		t.Run(name, func(t *testing.T) { rapid.Check(t, func(t *rapid.T) { checkTable(t, hash) }) })
	}
}

func checkTable(t *rapid.T, hash func(string) uint64) {
	type version struct {
		table table[int]
		want  map[string]int
	}
	keyOf := rapid.Custom(func(t *rapid.T) string {
		return fmt.Sprintf("%0*d", rapid.IntRange(1, 6).Draw(t, "length"), rapid.IntRange(0, 30).Draw(t, "number"))
	})
	now := version{want: map[string]int{}}
	var kept []version
	o := new(owner)
	for i := range rapid.IntRange(0, 80).Draw(t, "steps") {
		k := keyOf.Draw(t, "key")
		switch rapid.IntRange(0, 9).Draw(t, "what") {
		case 0: // a clone: both sides change from here on
			kept = append(kept, version{now.table, maps.Clone(now.want)})
			o = new(owner)
		case 1, 2, 3:
			now.table.del(o, hash(k), k)
			delete(now.want, k)
		case 4:
			now.table.sum(encodeInt)
		default:
			now.table.put(o, hash(k), k, i)
			now.want[k] = i
		}
	}
	for _, v := range append(kept, now) {
		if v.table.n != len(v.want) {
			t.Fatalf("the table counts %d keys, want %d", v.table.n, len(v.want))
		}
		var fresh table[int]
		for _, k := range slices.Backward(slices.Sorted(maps.Keys(v.want))) {
			if have, ok := v.table.get(hash(k), k); !ok || have != v.want[k] {
				t.Fatalf("key %q is %d, %v; want %d", k, have, ok, v.want[k])
			}
			fresh.put(new(owner), hash(k), k, v.want[k])
		}
		if have, want := slices.Sorted(v.table.all()), slices.Sorted(maps.Values(v.want)); !slices.Equal(have, want) {
			t.Fatalf("a walk gives %v, want %v", have, want)
		}
		if v.table.sum(encodeInt) != fresh.sum(encodeInt) {
			t.Fatal("the digest depends on the way the table was made")
		}
	}
}

func TestTableWalksIDsInOrder(t *testing.T) {
	var ids table[string]
	for i := range 500 {
		id := idOf(fmt.Sprint(i)).String()
		h, ok := hexKey(id)
		if !ok {
			t.Fatalf("%q is an ID", id)
		}
		ids.put(nil, h, id, id)
	}
	if !slices.IsSorted(slices.Collect(ids.all())) {
		t.Fatal("a walk is not sorted by ID")
	}
	for _, bad := range []string{"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF", "0123456789abcdeg"} {
		if _, ok := hexKey(bad); ok {
			t.Errorf("%q was taken for an ID", bad)
		}
	}
}

func TestQueueIsAList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type version struct {
			q    queue
			want []string
		}
		var now version
		var kept []version
		o := new(owner)
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0:
				kept = append(kept, version{now.q, slices.Clone(now.want)})
				o = new(owner)
			case 1:
				for range min(len(now.want), rapid.IntRange(1, 90).Draw(t, "pops")) {
					if have := now.q.pop(); have != (queued{now.want[0], len(now.want[0])}) {
						t.Fatalf("popped %v, want %q", have, now.want[0])
					}
					now.want = now.want[1:]
				}
			case 2:
				if len(kept) > 0 { // go on from an older version, as after a refused append
					v := kept[len(kept)-1]
					now, o = version{v.q, slices.Clone(v.want)}, new(owner)
				}
			default:
				for i := range rapid.IntRange(1, 90).Draw(t, "pushes") {
					id := fmt.Sprint(len(now.want), "/", i)
					now.q.push(o, queued{id, len(id)})
					now.want = append(now.want, id)
				}
			}
		}
		for _, v := range append(kept, now) {
			if have := slices.Collect(v.q.all); !slices.Equal(have, v.want) || v.q.n != len(v.want) {
				t.Fatalf("the queue holds %d %v, want %v", v.q.n, have, v.want)
			}
		}
	})
}
