package kube

import (
	"crypto/sha256"
	"sync"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/identity"
)

// Whatever is done to a member on its Node's word, or to a Node on its member's, needs two proofs: the member's record
// names the Node, and the Node holds a record that this member has signed, which only who may write to that Node can
// have put there. Else a member could claim another's Node, or a Node's writer another member.

// holders are the members whose records Nodes hold, by the Node's name. It is safe for concurrent use.
type holders struct {
	mu  sync.Mutex
	all map[string]holder
}

type holder struct {
	uid string
	sum [sha256.Size]byte // of the annotation that was verified
	id  identity.ID
}

// set notes whose record a Node holds, after it was verified.
func (h *holders) set(n *Node, id identity.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil {
		h.all = map[string]holder{}
	}
	h.all[n.Name] = holder{uid: n.UID, sum: n.recordSum, id: id}
}

// keep forgets what is not among these Nodes.
func (h *holders) keep(nodes map[string]*Node) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.all {
		if nodes[name] == nil {
			delete(h.all, name)
		}
	}
}

// of is the member whose record a Node holds now.
func (h *holders) of(n *Node) (id identity.ID, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	have, known := h.all[n.Name]
	ok = known && n.hasRecord && have.uid == n.UID && have.sum == n.recordSum
	return have.id, ok
}

// proven are the members that are Nodes, by both proofs.
func proven(s *part.Snapshot, nodes map[string]*Node, of func(*Node) (identity.ID, bool)) map[identity.ID]*Node {
	out := map[identity.ID]*Node{}
	for id, e := range s.Records {
		n := nodes[e.Record.GetKubernetesNode()]
		if n == nil || s.State.Node(id) == nil {
			continue
		}
		if held, ok := of(n); ok && held == id {
			out[id] = n
		}
	}
	return out
}
