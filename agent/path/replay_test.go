package path

import (
	"encoding/json"
	"fmt"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// replayed is one decision of the journal and the same decision made again.
type replayed struct {
	At              time.Time
	Recorded, Again *skeinv1.PathDecision // Again is nil when the fold decided nothing
	Trace           Trace
}

// same reports whether both decisions agree.
func (r replayed) same() bool {
	a, b := r.Recorded, r.Again
	return b != nil && a.GetPeer() == b.GetPeer() && a.GetFrom() == b.GetFrom() && a.GetTo() == b.GetTo() &&
		a.GetRule() == b.GetRule() && a.GetReason() == b.GetReason()
}

// replay folds the traces of a journal through Step and pairs each recorded decision with the new one.
func replay(entries []*skeinv1.JournalEntry) ([]replayed, error) {
	var out []replayed
	traces := map[string]Trace{} // by peer, waiting for the decision that follows
	for _, e := range entries {
		if in := e.GetPathInput(); in.GetKind() == kindTrace {
			var t Trace
			if err := json.Unmarshal([]byte(in.GetDetail()), &t); err != nil {
				return out, fmt.Errorf("journal entry %d, trace of peer %s: %w", e.GetSeq(), in.GetPeer(), err)
			}
			traces[in.GetPeer()] = t
		}
		d := e.GetPathDecision()
		t, ok := traces[d.GetPeer()]
		if d == nil || !ok {
			continue
		}
		delete(traces, d.GetPeer())
		out = append(out, replayed{At: time.Unix(0, e.GetTime()), Recorded: d, Again: t.fold(), Trace: t})
	}
	return out, nil
}

// fold returns the last decision of a trace.
func (t Trace) fold() *skeinv1.PathDecision {
	var last *skeinv1.PathDecision
	m := t.Machine
	for _, in := range t.Inputs {
		before := m.Path
		var actions []Action
		m, actions = Step(m, in.At, in.Input)
		for _, a := range actions {
			if a.Kind == ActionUse {
				last = decision(m.Peer, before, a.Path)
			}
		}
	}
	return last
}

// String is the action in one word and its value.
func (a Action) String() string {
	switch a.Kind {
	case ActionPing:
		if a.Size > 0 {
			return fmt.Sprintf("ping %s size=%d", a.Endpoint, a.Size)
		}
		return "ping " + a.Endpoint.String()
	case ActionPunch:
		if a.Unheard {
			return "punch: unheard"
		}
		return fmt.Sprintf("punch reply=%t", a.Reply)
	case ActionUse:
		return fmt.Sprintf("use %s alive=%t (%s)", a.Path, a.Path.Alive, a.Path.Rule)
	case ActionCheck:
		return "check"
	case ActionPredict:
		return "predict " + a.Predict.Kind.String()
	case ActionReserve:
		return "reserve at relay " + a.Relay.String()
	case ActionPortDeaf:
		return "nothing comes through the port of relay " + a.Relay.String()
	case ActionGiveBack:
		return "give back the port of relay " + a.Relay.String()
	case ActionBurst:
		return "burst"
	case ActionWake:
		return "wake " + a.At.Format("15:04:05.000")
	}
	return fmt.Sprintf("action %d", a.Kind)
}
