package gossip

import (
	"crypto/sha256"
	"maps"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Entry is the newest known record of a node. It is immutable.
type Entry struct {
	Record     *skeinv1.Record
	Signed     *skeinv1.SignedRecord
	ReceivedAt time.Time // when this version came, by this node's clock
}

type outcome int

const (
	outcomeNew   outcome = iota // the first, or newer than the held one; kept
	outcomeSame                 // exactly the held one
	outcomeOld                  // older than the held one
	outcomeTaken                // equivocation: same number, the new content won and is kept
	outcomeKept                 // equivocation: same number, the held content stays
)

type row struct {
	Entry
	mark mark
}

// tableKind says which table a record belongs to.
type tableKind int

const (
	meshTable tableKind = iota // records for everybody
	siteTable                  // records for the nodes of one site
)

// tableOf returns the table of a record. A scope that only later versions know counts as for everybody, as versions do
// that know of no scopes.
func tableOf(r *skeinv1.Record) tableKind {
	if r.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_SITE {
		return siteTable
	}
	return meshTable
}

// Wide reports whether a record is for everybody and is not only a PLACE, which says where its owner is. The owner of
// such a record is in the mesh pool.
func Wide(r *skeinv1.Record) bool {
	return r != nil && tableOf(r) == meshTable && r.GetScope() != skeinv1.RecordScope_RECORD_SCOPE_PLACE
}

// table holds the newest record of each node. Derived values are made on request and kept until the next change.
type table struct {
	mu       sync.Mutex
	rows     map[identity.ID]row
	marks    []mark // sorted by ID; nil: make again
	snapshot map[identity.ID]Entry
	shown    map[identity.ID]Entry  // without the records of scope PLACE
	told     map[identity.ID]string // the sites in records of scope PLACE; nil: there are none
	voices   map[string][]voice     // the nodes that speak for each site
	version  uint64                 // grows with each change
	sum      [sha256.Size]byte
	hashed   bool
}

// voice is a node that speaks for its site: its record says which nodes are away.
type voice struct {
	id     identity.ID
	record *skeinv1.Record
}

func newTable() *table { return &table{rows: make(map[identity.ID]row)} }

// put merges one verified record.
func (t *table) put(e Entry, m mark) outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, ok := t.rows[m.ID]
	result := compare(old.mark, ok, m)
	if result == outcomeNew || result == outcomeTaken {
		t.rows[m.ID] = row{e, m}
		t.changed()
	}
	return result
}

// check returns what put would return, so that signatures of known records are not verified again.
func (t *table) check(m mark) outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	old, ok := t.rows[m.ID]
	return compare(old.mark, ok, m)
}

func compare(old mark, have bool, m mark) outcome {
	switch {
	case !have:
		return outcomeNew
	case old == m:
		return outcomeSame
	case old.sameNumber(m) && m.newer(old):
		return outcomeTaken
	case old.sameNumber(m):
		return outcomeKept
	case m.newer(old):
		return outcomeNew
	}
	return outcomeOld
}

func (t *table) changed() {
	t.marks, t.snapshot, t.shown, t.voices, t.hashed = nil, nil, nil, nil, false
	t.version++
}

func (t *table) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.rows)
}

func (t *table) get(id identity.ID) (row, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r, ok := t.rows[id]
	return r, ok
}

// keep drops every record whose owner is not kept and returns how many went.
func (t *table) keep(kept func(identity.ID) bool) int {
	return t.drop(func(id identity.ID, _ row) bool { return !kept(id) })
}

// entries returns all entries as an immutable snapshot.
func (t *table) entries() map[identity.ID]Entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.entriesLocked()
}

func (t *table) entriesLocked() map[identity.ID]Entry {
	if t.snapshot == nil {
		t.snapshot = make(map[identity.ID]Entry, len(t.rows))
		for id, r := range t.rows {
			t.snapshot[id] = r.Entry
		}
	}
	return t.snapshot
}

// show returns the entries without the records of scope PLACE, and the table's version.
func (t *table) show() (map[identity.ID]Entry, uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partLocked()
	return t.shown, t.version
}

// placed returns the sites in the records of scope PLACE, by owner. The caller must not change the map.
func (t *table) placed() map[identity.ID]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partLocked()
	return t.told
}

// partLocked separates the records of scope PLACE from all others.
func (t *table) partLocked() {
	if t.shown != nil {
		return
	}
	t.shown, t.told = t.entriesLocked(), nil
	for id, e := range t.shown {
		if e.Record.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_PLACE { // rarely
			if t.told == nil {
				t.told = map[identity.ID]string{}
			}
			t.told[id] = e.Record.GetSite()
		}
	}
	if t.told != nil { // the snapshot itself must not change
		t.shown = maps.Clone(t.shown)
		maps.DeleteFunc(t.shown, func(id identity.ID, _ Entry) bool { _, placed := t.told[id]; return placed })
	}
}

// speaking returns the nodes that speak for each site. The caller must not change the map.
func (t *table) speaking() map[string][]voice {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.voices == nil {
		t.voices = make(map[string][]voice)
		for id, r := range t.rows {
			if r.Record.GetScope() == skeinv1.RecordScope_RECORD_SCOPE_BOTH {
				t.voices[r.Record.GetSite()] = append(t.voices[r.Record.GetSite()], voice{id, r.Record})
			}
		}
	}
	return t.voices
}

// drop removes the rows for which out is true and returns how many went.
func (t *table) drop(out func(identity.ID, row) bool) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for id, r := range t.rows {
		if out(id, r) {
			delete(t.rows, id)
			n++
		}
	}
	if n > 0 {
		t.changed()
	}
	return n
}

// digest returns every mark, sorted by ID. The caller must not change it.
func (t *table) digest() []mark {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.digestLocked()
}

func (t *table) digestLocked() []mark {
	if t.marks == nil {
		t.marks = make([]mark, 0, len(t.rows))
		for _, r := range t.rows {
			t.marks = append(t.marks, r.mark)
		}
		slices.SortFunc(t.marks, func(a, b mark) int { return a.ID.Compare(b.ID) })
	}
	return t.marks
}

// hash covers the sorted marks: equal hashes mean equal records.
func (t *table) hash() [sha256.Size]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.hashed {
		b := make([]byte, 0, len(t.rows)*markSize)
		for _, m := range t.digestLocked() {
			b = m.append(b)
		}
		t.sum, t.hashed = sha256.Sum256(b), true
	}
	return t.sum
}

// diff compares the table with what another node has: it returns the records to send, and the marks to ask for.
func (t *table) diff(theirs []mark, wanted func(identity.ID) bool) (send []*skeinv1.SignedRecord, want []mark) {
	t.mu.Lock()
	defer t.mu.Unlock()
	have := make(map[identity.ID]mark, len(theirs))
	for _, m := range theirs {
		have[m.ID] = m
		if old, ok := t.rows[m.ID]; (!ok || m.newer(old.mark)) && wanted(m.ID) {
			want = append(want, m)
		}
	}
	for _, m := range t.digestLocked() {
		if their, ok := have[m.ID]; !ok || m.newer(their) {
			send = append(send, t.rows[m.ID].Signed)
		}
	}
	return send, want
}

// newerThan returns those of the named records that are at least as new as asked for.
func (t *table) newerThan(asked []mark) (send []*skeinv1.SignedRecord) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range asked {
		if r, ok := t.rows[m.ID]; ok && !m.newer(r.mark) {
			send = append(send, r.Signed)
		}
	}
	return send
}

// signed returns every record as its owner signed it, sorted by ID.
func (t *table) signed() []*skeinv1.SignedRecord {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]*skeinv1.SignedRecord, 0, len(t.rows))
	for _, m := range t.digestLocked() {
		out = append(out, t.rows[m.ID].Signed)
	}
	return out
}
