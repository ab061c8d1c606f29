package birthday

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	memoryFile  = "birthday.json"
	memoryMax   = 128 // outcomes kept
	memoryFor   = 7 * 24 * time.Hour
	briefMax    = 8 // outcomes in the record
	memoryBytes = 1 << 20
	// between attempts of a pair of NATs after a failure: twice as long after each, up to pauseLast
	pauseFirst   = 30 * time.Second
	pauseLast    = time.Hour
	countMax     = 255
	distrustWhen = 2 // predictions lost in a row, after which random ports go first
)

// Outcome is the history of one method of port prediction between two public addresses.
type Outcome struct {
	Mine, Theirs netip.Addr
	Rule         skeinv1.PairOutcome_Rule
	Won          int
	Lost         int // since the last win
	At           time.Time
}

func (o Outcome) same(p Outcome) bool {
	return o.Mine == p.Mine && o.Theirs == p.Theirs && o.Rule == p.Rule
}

// pausedUntil is when this pair of NATs may try this method again.
func (o Outcome) pausedUntil() time.Time {
	if o.Lost == 0 {
		return time.Time{}
	}
	return o.At.Add(min(pauseFirst<<min(o.Lost-1, 10), pauseLast))
}

// Memory keeps the outcomes of port prediction for each pair of NATs. It is not safe for concurrent use.
type Memory struct {
	file     string    // "": not on disk
	outcomes []Outcome // the newest last
}

// OpenMemory reads the outcomes of earlier runs from the state directory. If the file cannot be read, it returns the
// error and an empty memory, whose next Save replaces the file.
func OpenMemory(dir string, now time.Time) (*Memory, error) {
	m := &Memory{file: filepath.Join(dir, memoryFile)}
	f, err := os.Open(m.file)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, fmt.Errorf("outcomes of port prediction: %w", err)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > memoryBytes {
		return m, fmt.Errorf("outcomes of port prediction: %s has %d bytes, at most %d are read", m.file,
			st.Size(), memoryBytes)
	}
	var all []Outcome
	if err := json.NewDecoder(f).Decode(&all); err != nil {
		return m, fmt.Errorf("outcomes of port prediction: %s: %w", m.file, err)
	}
	for _, o := range all {
		if o.At.After(now) {
			o.At = now // the clock has been set back since
		}
		if o.Mine.IsValid() && o.Theirs.IsValid() && o.Won >= 0 && o.Lost >= 0 {
			m.outcomes = append(m.outcomes, o)
		}
	}
	m.outcomes = m.outcomes[max(0, len(m.outcomes)-memoryMax):]
	return m, nil
}

// Note adds an outcome. It does not write the file: pass Snapshot's result to Save.
func (m *Memory) Note(mine, theirs netip.Addr, rule skeinv1.PairOutcome_Rule, won bool, now time.Time) {
	next := Outcome{Mine: mine, Theirs: theirs, Rule: rule, At: now}
	if i := slices.IndexFunc(m.outcomes, next.same); i >= 0 {
		next.Won, next.Lost = m.outcomes[i].Won, m.outcomes[i].Lost
		m.outcomes = slices.Delete(m.outcomes, i, i+1)
	}
	if won {
		next.Won, next.Lost = min(next.Won+1, countMax), 0
	} else {
		next.Lost = min(next.Lost+1, countMax)
	}
	m.outcomes = append(m.outcomes, next)
	m.outcomes = slices.DeleteFunc(m.outcomes, func(o Outcome) bool { return now.Sub(o.At) > memoryFor })
	m.outcomes = m.outcomes[max(0, len(m.outcomes)-memoryMax):]
}

// Snapshot is a copy of all outcomes, the newest last.
func (m *Memory) Snapshot() []Outcome { return slices.Clone(m.outcomes) }

// Save writes a snapshot to the file, if the memory has one. It does not touch the outcomes, so it needs no lock
// against Note.
func (m *Memory) Save(all []Outcome) error {
	if m.file == "" {
		return nil
	}
	b, err := json.Marshal(all)
	if err == nil {
		next := m.file + ".new"
		if err = os.WriteFile(next, b, 0o600); err == nil {
			err = os.Rename(next, m.file)
		}
	}
	if err != nil {
		return fmt.Errorf("outcomes of port prediction: %w", err)
	}
	return nil
}

// Brief returns the outcomes of this public address for the node's record, the newest first.
func (m *Memory) Brief(mine netip.Addr) []*skeinv1.PairOutcome {
	var out []*skeinv1.PairOutcome
	for _, o := range slices.Backward(m.outcomes) {
		if o.Mine == mine && len(out) < briefMax {
			out = append(out, &skeinv1.PairOutcome{Address: o.Theirs.AsSlice(), Rule: o.Rule, Won: uint32(o.Won),
				Lost: uint32(o.Lost), At: o.At.Unix()})
		}
	}
	return out
}

// Told reads the outcomes in another node's record; address is that node's public address.
func Told(address netip.Addr, told []*skeinv1.PairOutcome, now time.Time) []Outcome {
	var out []Outcome
	for _, o := range told {
		theirs, ok := netip.AddrFromSlice(o.GetAddress())
		at := time.Unix(o.GetAt(), 0)
		if at.After(now) {
			at = now // clocks differ
		}
		if ok && now.Sub(at) < memoryFor {
			out = append(out, Outcome{Mine: address, Theirs: theirs.Unmap(), Rule: o.GetRule(),
				Won: min(int(o.GetWon()), countMax), Lost: min(int(o.GetLost()), countMax), At: at})
		}
	}
	return out
}

// Advice is the conclusion from earlier outcomes of a pair of NATs.
type Advice struct {
	SkipPrediction bool      // predictions failed repeatedly: begin with random ports
	NotBefore      time.Time // zero: at once
}

// Advise derives advice for a pair of NATs from this node's outcomes and those in other records. A win by any node
// later than a loss ends the pause.
func (m *Memory) Advise(mine, theirs netip.Addr, rule skeinv1.PairOutcome_Rule, told []Outcome) Advice {
	var a Advice
	var won time.Time
	about := func(o Outcome) bool {
		return o.Mine == mine && o.Theirs == theirs || o.Mine == theirs && o.Theirs == mine
	}
	all := slices.DeleteFunc(slices.Concat(m.outcomes, told), func(o Outcome) bool { return !about(o) })
	for _, o := range all {
		if o.Lost == 0 && o.At.After(won) {
			won = o.At
		}
	}
	for _, o := range all {
		if o.Rule == skeinv1.PairOutcome_PREDICTION && o.Lost >= distrustWhen {
			a.SkipPrediction = true
		}
		if o.Rule == rule && o.At.After(won) && o.pausedUntil().After(a.NotBefore) {
			a.NotBefore = o.pausedUntil()
		}
	}
	return a
}
