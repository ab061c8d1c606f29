package flows

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane/conntrack"
)

// Match selects the flows of a slot. Source4 and Source6 are its translated source addresses; a flow of that family
// must have the same. If Clients is not empty, a flow must begin at one of them. An empty Match selects nothing, and
// a family without a source nothing unless Clients is set.
type Match struct {
	Source4, Source6 netip.Addr
	Clients          []netip.Addr
}

// has returns an error if the entry is not of the slot.
func (m Match) has(e *entry) error {
	source := m.Source4
	if e.src.Is6() {
		source = m.Source6
	}
	switch {
	case source.IsValid() && e.nat != source:
		return fmt.Errorf("%w: the flow from %s has the source address %s, the slot has %s", ErrEntry, e.src, e.nat, source)
	case !source.IsValid() && len(m.Clients) == 0:
		return fmt.Errorf("%w: the slot has no flows of the family of %s", ErrEntry, e.src)
	case len(m.Clients) > 0 && !slices.Contains(m.Clients, e.src):
		return fmt.Errorf("%w: %s is not a client of the slot", ErrEntry, e.src)
	}
	return nil
}

// sorted prepares the Match for many calls.
func (m Match) sorted() sortedMatch {
	m.Clients = slices.Clone(m.Clients)
	slices.SortFunc(m.Clients, netip.Addr.Compare)
	return sortedMatch(m)
}

type sortedMatch Match

func (m sortedMatch) has(e *entry) error {
	one := Match{Source4: m.Source4, Source6: m.Source6}
	if len(m.Clients) > 0 {
		if i, ok := slices.BinarySearchFunc(m.Clients, e.src, netip.Addr.Compare); ok {
			one.Clients = m.Clients[i : i+1]
		} else {
			one.Clients = m.Clients[:1]
		}
	}
	return one.has(e)
}

// MaxEntries limits the result of one Dump and the input of one Load.
const MaxEntries = 1 << 20

// Dump reads the slot's flows from the connection table of the network namespace at path; "" is the calling thread's
// own. It skips flows that cannot be moved: other protocols, destination translation, flows about to end.
func Dump(path string, match Match) ([][]byte, error) {
	t, err := conntrack.OpenPath(path)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	m := match.sorted()
	var out [][]byte
	var room []byte // entries share blocks of memory
	err = t.Dump(func(f *conntrack.Flow) error {
		e := entryOf(f)
		if e.invalid != nil || e.check() != nil || m.has(&e) != nil {
			return nil
		}
		if len(out) == MaxEntries {
			return fmt.Errorf("the connection table has more than %d flows of the slot", MaxEntries)
		}
		if cap(room)-len(room) < MaxEntryBytes {
			room = make([]byte, 0, 1024*MaxEntryBytes)
		}
		at := len(room)
		room = e.append(room)
		out = append(out, room[at:len(room):len(room)])
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the connection table of %q: %w", path, err)
	}
	return out, nil
}

// Load writes entries into the connection table of the network namespace at path; "" is the calling thread's own. It
// replaces existing flows. A malformed entry, or one that does not fit match, is refused with ErrEntry and counts as
// failed; err is the first failure, and the other entries are still loaded.
func Load(path string, match Match, entries [][]byte) (loaded, failed int, err error) {
	if len(entries) > MaxEntries {
		return 0, len(entries), fmt.Errorf("loading flows: %d entries, more than %d", len(entries), MaxEntries)
	}
	m := match.sorted()
	good := make([]entry, 0, len(entries))
	var first error
	for _, b := range entries {
		e, err := parse(b)
		if err == nil {
			err = m.has(&e)
		}
		if err != nil {
			failed++
			if first == nil {
				first = err
			}
			continue
		}
		good = append(good, e)
	}
	if len(good) == 0 {
		return 0, failed, first
	}
	t, err := conntrack.OpenPath(path)
	if err != nil {
		return 0, len(entries), errors.Join(err, first)
	}
	defer t.Close()
	loaded, err = load(t, good)
	return loaded, len(entries) - loaded, errors.Join(err, first)
}
