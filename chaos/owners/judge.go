package owners

import (
	"fmt"
	"time"
)

// Grant is one line of a slot's history by the event log.
type Grant struct {
	Epoch uint64    // index of the event
	Node  string    // "": released
	Since time.Time // the leader's clock; zero: not told
}

// Spell is a row of packets of one slot that one node sent, with none of another node's in between.
type Spell struct {
	Node        string
	First, Last time.Time // of its packets
	Packets     int
	Gap         time.Duration // the longest between two of them
}

// Spells keeps the runs of one slot. It is not safe for concurrent use.
type Spells struct{ list []Spell }

// Add notes a packet. Packets come in the order in which they were seen.
func (r *Spells) Add(node string, at time.Time) {
	if n := len(r.list); n > 0 && r.list[n-1].Node == node {
		last := &r.list[n-1]
		last.Gap = max(last.Gap, at.Sub(last.Last))
		last.Last = at
		last.Packets++
		return
	}
	r.list = append(r.list, Spell{Node: node, First: at, Last: at, Packets: 1})
}

// List is a copy of the runs, in order of time.
func (r *Spells) List() []Spell { return append([]Spell(nil), r.list...) }

// Violation is a run of packets that the log does not allow.
type Violation struct {
	Slot string    `json:"slot"`
	At   time.Time `json:"at"`
	Node string    `json:"node"` // who sent
	Text string    `json:"text"`
}

// Judge holds the runs of a slot against its grants, in order of epoch. The nodes that were seen have to be a
// subsequence of the nodes that were given the slot: a node that was not given it never sends; one whose successor has
// sent is not seen again unless it was given the slot anew. And nobody is seen before it was given.
func Judge(slot string, grants []Grant, runs []Spell) (out []Violation) {
	next := 0 // the first grant that may still be seen
	for i, run := range runs {
		at := find(grants, next, run.Node)
		switch {
		case at < 0:
			out = append(out, Violation{slot, run.First, run.Node, explain(grants, runs, i)})
			continue // what follows is judged as if it had not been
		case grants[at].Since.After(run.First):
			out = append(out, Violation{slot, run.First, run.Node,
				fmt.Sprintf("%s sent %s before it was given the slot with epoch %d", run.Node, grants[at].Since.Sub(run.First),
					grants[at].Epoch)})
		}
		next = at
	}
	return out
}

// find looks for a node's grant from a place on.
func find(grants []Grant, from int, node string) int {
	for i := from; i < len(grants); i++ {
		if grants[i].Node == node {
			return i
		}
	}
	return -1
}

func explain(grants []Grant, runs []Spell, i int) string {
	node := runs[i].Node
	if find(grants, 0, node) < 0 {
		return node + " was never given the slot"
	}
	if i == 0 {
		return node + " sent, and only others were given the slot since"
	}
	before := runs[i-1]
	return fmt.Sprintf("%s sent %d packets after %s had sent, %s after its last one: two owners", node, runs[i].Packets,
		before.Node, runs[i].First.Sub(before.Last))
}

// Change is a slot's way from one node to another, as seen from outside.
type Change struct {
	Slot     string
	From, To string
	At       time.Time     // first packet of the new owner
	Dark     time.Duration // since the former owner's last one
}

// Changes lists a slot's changes after a moment.
func Changes(slot string, runs []Spell, after time.Time) (out []Change) {
	for i := 1; i < len(runs); i++ {
		if r := runs[i]; r.First.After(after) {
			out = append(out, Change{slot, runs[i-1].Node, r.Node, r.First, r.First.Sub(runs[i-1].Last)})
		}
	}
	return out
}
