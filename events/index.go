package events

// index is a persistent map from text to text, for what is derived from the state and part of no hash. Copying the
// struct copies the map. A table has a node for every key, with its digest; an index has none, and takes a third of the
// memory.
//
// The zero index is empty.
type index struct {
	root *bucket
	n    int
}

// bucket is a leaf with some pairs (kids == nil), or an inner node. A leaf that has lost all its pairs stays.
type bucket struct {
	owner *owner // who may change it in place
	kids  *[4]*bucket
	pairs []pair // in no order
}

type pair struct{ key, value string }

const (
	bucketSize  = 16 // pairs of a leaf, unless the hashes of all are equal
	bucketGrows = 4  // by so many
	rootShift   = 62
)

func (x *index) get(hash uint64, key string) (string, bool) {
	n := x.root
	for shift := rootShift; n != nil && n.kids != nil; shift -= 2 {
		n = n.kids[hash>>shift&3]
	}
	if i := n.find(key); i >= 0 {
		return n.pairs[i].value, true
	}
	return "", false
}

// find is where a leaf has a key; -1: nowhere.
func (n *bucket) find(key string) int {
	if n != nil {
		for i := range n.pairs {
			if n.pairs[i].key == key {
				return i
			}
		}
	}
	return -1
}

// put takes a key in; hash is its textKey.
func (x *index) put(o *owner, hash uint64, key, value string) {
	at := &x.root
	for shift := rootShift; ; shift -= 2 {
		n := (*at).own(o)
		*at = n
		if n.kids == nil {
			if i := n.find(key); i >= 0 {
				n.pairs[i].value = value
				return
			}
			if len(n.pairs) < bucketSize || shift < 0 {
				n.add(pair{key, value})
				x.n++
				return
			}
			n.split(o, shift)
		}
		at = &n.kids[hash>>shift&3]
	}
}

// own is n itself if o may change it, else a copy that o may change.
func (n *bucket) own(o *owner) *bucket {
	switch {
	case n == nil:
		return &bucket{owner: o}
	case n.owner == o:
		return n
	case n.kids != nil:
		kids := *n.kids
		return &bucket{owner: o, kids: &kids}
	}
	own := &bucket{owner: o, pairs: make([]pair, 0, len(n.pairs)+1)}
	own.pairs = append(own.pairs, n.pairs...)
	return own
}

// add appends a pair. A leaf is seldom full, so it grows by little.
func (n *bucket) add(p pair) {
	if len(n.pairs) == cap(n.pairs) {
		n.pairs = append(make([]pair, 0, len(n.pairs)+bucketGrows), n.pairs...)
	}
	n.pairs = append(n.pairs, p)
}

// split makes an inner node of a leaf.
func (n *bucket) split(o *owner, shift int) {
	pairs := n.pairs
	n.kids, n.pairs = new([4]*bucket), nil
	for _, p := range pairs {
		at := &n.kids[textKey(p.key)>>shift&3]
		if *at == nil {
			*at = &bucket{owner: o}
		}
		(*at).add(p)
	}
}

func (x *index) del(o *owner, hash uint64, key string) {
	if _, ok := x.get(hash, key); !ok {
		return
	}
	at := &x.root
	for shift := rootShift; ; shift -= 2 {
		n := (*at).own(o)
		*at = n
		if n.kids != nil {
			at = &n.kids[hash>>shift&3]
			continue
		}
		i, last := n.find(key), len(n.pairs)-1
		n.pairs[i], n.pairs[last] = n.pairs[last], pair{}
		n.pairs = n.pairs[:last]
		x.n--
		return
	}
}
