package events

import (
	"crypto/sha256"
	"encoding/binary"
	"iter"
	"sync/atomic"
)

// table is a persistent map from string keys to values: a 16-way trie over a 64-bit hash of the key.
// Copying the struct copies the map. Its shape depends on the keys alone and not on the order in
// which they came, so that the digests kept in its nodes form a canonical Merkle tree.
//
// The zero table is empty.
type table[V any] struct {
	root *trie[V]
	n    int
}

// owner marks the trie nodes that one State made and nobody else has seen; it changes them in place.
type owner struct{ _ byte }

// trie is a leaf (kids == nil) or an inner node. An inner node has at least two keys below it.
type trie[V any] struct {
	digest atomic.Pointer[[32]byte] // nil: not computed since the last change
	kids   *[16]*trie[V]
	owner  *owner

	hash  uint64
	key   string
	value V
	next  *trie[V] // leaves whose hashes are equal, ascending by key
}

const topShift = 60

func slot(hash uint64, shift int) int { return int(hash>>shift) & 15 }

func (t *table[V]) get(hash uint64, key string) (V, bool) {
	n := t.root
	for shift := topShift; n != nil && n.kids != nil; shift -= 4 {
		n = n.kids[slot(hash, shift)]
	}
	for ; n != nil; n = n.next {
		if n.hash == hash && n.key == key {
			return n.value, true
		}
	}
	var zero V
	return zero, false
}

func (t *table[V]) put(o *owner, hash uint64, key string, v V) {
	leaf := &trie[V]{hash: hash, key: key, value: v}
	if insert(&t.root, o, leaf, topShift) {
		t.n++
	}
}

// insert reports whether the key is new.
func insert[V any](at **trie[V], o *owner, leaf *trie[V], shift int) bool {
	for {
		n := *at
		if n == nil {
			*at = leaf
			return true
		}
		if n.kids == nil {
			if n.hash == leaf.hash {
				var added bool
				*at, added = n.chain(leaf)
				return added
			}
			inner := &trie[V]{owner: o, kids: new([16]*trie[V])}
			inner.kids[slot(n.hash, shift)] = n
			*at = inner
		} else {
			*at = n.own(o)
		}
		at = &(*at).kids[slot(leaf.hash, shift)]
		shift -= 4
	}
}

// own is n itself if o may change it, else a copy that o may change.
func (n *trie[V]) own(o *owner) *trie[V] {
	if n.owner == o {
		n.digest.Store(nil)
		return n
	}
	kids := *n.kids
	return &trie[V]{owner: o, kids: &kids}
}

// chain is the list of n's leaves with leaf put in its place.
func (n *trie[V]) chain(leaf *trie[V]) (*trie[V], bool) {
	if n == nil || leaf.key < n.key {
		leaf.next = n
		return leaf, true
	}
	if leaf.key == n.key {
		leaf.next = n.next
		return leaf, false
	}
	rest, added := n.next.chain(leaf)
	return &trie[V]{hash: n.hash, key: n.key, value: n.value, next: rest}, added
}

func (n *trie[V]) unchain(key string) *trie[V] {
	if n == nil {
		return nil
	}
	if n.key == key {
		return n.next
	}
	return &trie[V]{hash: n.hash, key: n.key, value: n.value, next: n.next.unchain(key)}
}

func (t *table[V]) del(o *owner, hash uint64, key string) {
	if _, ok := t.get(hash, key); ok {
		t.remove(o, hash, key)
	}
}

// remove is del of a key that is there.
func (t *table[V]) remove(o *owner, hash uint64, key string) {
	t.root = remove(t.root, o, hash, key, topShift)
	t.n--
}

// remove takes out a key that is there.
func remove[V any](n *trie[V], o *owner, hash uint64, key string, shift int) *trie[V] {
	if n.kids == nil {
		return n.unchain(key)
	}
	n = n.own(o)
	i := slot(hash, shift)
	n.kids[i] = remove(n.kids[i], o, hash, key, shift-4)
	var only *trie[V]
	for _, k := range n.kids {
		switch {
		case k == nil:
		case only != nil, k.kids != nil:
			return n
		default:
			only = k
		}
	}
	return only
}

// all walks the values in ascending order of their keys' hashes.
func (t *table[V]) all() iter.Seq[V] {
	return func(yield func(V) bool) { t.root.walk(yield) }
}

func (n *trie[V]) walk(yield func(V) bool) bool {
	if n == nil {
		return true
	}
	if n.kids == nil {
		for ; n != nil; n = n.next {
			if !yield(n.value) {
				return false
			}
		}
		return true
	}
	for _, k := range n.kids {
		if !k.walk(yield) {
			return false
		}
	}
	return true
}

// Prefixes that keep the digests of leaves, inner nodes and chains apart.
const (
	leafDigest  = 0
	innerDigest = 1
	chainDigest = 2
)

// sum is the table's digest; zero for an empty one. encode appends a value's canonical encoding.
// Digests are kept, so it costs only what changed since the last call.
func (t *table[V]) sum(encode func([]byte, V) []byte) [32]byte {
	if t.root == nil {
		return [32]byte{}
	}
	var buf []byte
	return *t.root.sum(&buf, encode)
}

func (n *trie[V]) sum(buf *[]byte, encode func([]byte, V) []byte) *[32]byte {
	if d := n.digest.Load(); d != nil {
		return d
	}
	var d [32]byte
	switch {
	case n.kids != nil:
		var b [3 + 16*32]byte
		b[0] = innerDigest
		used, set := 3, uint16(0)
		for i, k := range n.kids {
			if k != nil {
				set |= 1 << i
				used += copy(b[used:], k.sum(buf, encode)[:])
			}
		}
		binary.BigEndian.PutUint16(b[1:], set)
		d = sha256.Sum256(b[:used])
	case n.next != nil:
		b := []byte{chainDigest}
		for l := n; l != nil; l = l.next {
			one := leafSum(buf, l.value, encode)
			b = append(b, one[:]...)
		}
		d = sha256.Sum256(b)
	default:
		d = leafSum(buf, n.value, encode)
	}
	n.digest.Store(&d)
	return &d
}

func leafSum[V any](buf *[]byte, v V, encode func([]byte, V) []byte) [32]byte {
	*buf = encode(append((*buf)[:0], leafDigest), v)
	return sha256.Sum256(*buf)
}

// hexKey is the hash of an ID of 16 lower-case hex digits: its own 64 bits, so that a walk is sorted
// by ID. Anything else is not an ID.
func hexKey(id string) (uint64, bool) {
	if len(id) != 16 {
		return 0, false
	}
	var v uint64
	for i := 0; i < len(id); i++ {
		switch c := id[i]; {
		case '0' <= c && c <= '9':
			v = v<<4 | uint64(c-'0')
		case 'a' <= c && c <= 'f':
			v = v<<4 | uint64(c-'a'+10)
		default:
			return 0, false
		}
	}
	return v, true
}

// textKey is the hash of any other key: FNV-1a with 64 bits, then a finisher so that the upper bits,
// which choose the upper slots, depend on all of the key.
func textKey(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := 0; i < len(s); i++ {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	h ^= h >> 32
	h *= 0x9e3779b97f4a7c15
	return h ^ h>>29
}
