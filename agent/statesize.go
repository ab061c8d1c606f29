package agent

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// noteState tells the user of an agreed state that becomes too large, and of servers that hold newer events back.
func (a *Agent) noteState(st *events.State) {
	severity, message, advice := sizeProblem(st, a.replica.Problem())
	a.report("size of the agreed state", severity, message, advice)
	a.report("versions of the servers", warning, holdbackText(st), "install this version on them; until then commands "+
		"that need newer events are refused")
}

// sizeProblem is what is too large in a state, or nearly; unwritten is why it cannot be written.
func sizeProblem(st *events.State, unwritten error) (severity, message, advice string) {
	const recovery = "see docs/recovery.md, \"The agreed state is too large\""
	if unwritten != nil {
		return failure, unwritten.Error(), recovery
	}
	if err := consensus.CheckSent(st); err != nil {
		return failure, err.Error() + "; nodes that are far behind cannot follow, and none can join", recovery
	}
	all := st.Crowded()
	if len(all) == 0 {
		return "", "", ""
	}
	fullest := slices.MaxFunc(all, func(a, b events.Crowded) int {
		return cmp.Compare(a.Bytes*(b.Limit>>10), b.Bytes*(a.Limit>>10))
	})
	return warning, fmt.Sprintf("%s take %.1f of %d MiB of the agreed state; above that they are refused", fullest.What,
		float64(fullest.Bytes)/(1<<20), fullest.Limit>>20), fullest.Next
}

// holdbackText names the servers that fold less than this version does.
func holdbackText(st *events.State) string {
	behind := st.Holdbacks(events.SchemaMax)
	if len(behind) == 0 {
		return ""
	}
	n := behind[0]
	text := fmt.Sprintf("server %s folds event schemas up to %d, this version up to %d", n.GetName(), n.GetMaxSchema(),
		events.SchemaMax)
	if more := len(behind) - 1; more > 0 {
		text += fmt.Sprintf("; so do %d more servers", more)
	}
	return text
}

// joinSlack is what a join's answer holds besides the state and records.
const joinSlack = 64 << 10

// fitting are records for the answer to a joiner, as many as fit into so many bytes: this node's own first, then the
// servers'. Gossip brings the others once the joiner is in.
func fitting(self identity.ID, st *events.State, records map[identity.ID]gossip.Entry,
	most int) (out []*skeinv1.SignedRecord) {
	place := func(id identity.ID) int {
		switch {
		case id == self:
			return 0
		case st.Server(id) != nil:
			return 1
		}
		return 2
	}
	ids := slices.SortedFunc(maps.Keys(records), func(a, b identity.ID) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), a.Compare(b))
	})
	for _, id := range ids {
		r := records[id].Signed
		if most -= 8 + proto.Size(r); most < 0 {
			break
		}
		out = append(out, r)
	}
	return out
}
