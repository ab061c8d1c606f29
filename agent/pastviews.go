package agent

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/planlog"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/printable"
)

// plansInMemory is how many plans an agent keeps that cannot write them to its disk.
const plansInMemory = 1000

// plans is the plan that this agent follows, and those that it followed.
type plans struct {
	journal *journal.Journal
	log     *planlog.Log
	now     atomic.Pointer[planNow]
}

// planNow is the newest plan, and the names that its text has.
type planNow struct {
	spec  dataplane.Spec
	state *events.State
	names map[dataplane.Key]string
}

func (p *plans) open(a *Agent) {
	var err error
	file := filepath.Join(a.cfg.StateDir, "plans.db")
	p.journal, err = journal.Open(file, planlog.MaxPlans, journal.MaxBytes(planlog.MaxBytes))
	if err != nil {
		a.report("plans", warning, err.Error(), "the plans of this run are kept in memory only")
		p.journal = journal.Memory(plansInMemory)
	}
	p.log = planlog.New(p.journal)
}

func (p *plans) close() error { return p.journal.Close() }

// notePlan keeps the plan that the loop has just made, if it is another one or names its peers otherwise.
func (a *Agent) notePlan(spec dataplane.Spec) {
	last := a.plans.now.Load()
	same := last != nil && spec.Equal(last.spec)
	if same && last.state == a.loop.state {
		return
	}
	names := a.peerNames(spec)
	if same && maps.Equal(names, last.names) {
		a.plans.now.Store(&planNow{spec: spec, state: a.loop.state, names: names})
		return
	}
	a.plans.log.Append(a.loop.state.Index(), planText(spec, names))
	a.plans.now.Store(&planNow{spec: spec, state: a.loop.state, names: names})
}

// peerNames names the owners of the WireGuard keys of a Spec that this node's peers have.
func (a *Agent) peerNames(spec dataplane.Spec) map[dataplane.Key]string {
	names := make(map[dataplane.Key]string, len(spec.WireGuard.Peers))
	add := func(id identity.ID, wg identity.WireGuardKey, what string) {
		k := dataplane.Key(wg)
		if _, ok := spec.WireGuard.Peers[k]; ok {
			names[k] = a.loop.state.Node(id).GetName() + what
		}
	}
	for id, k := range a.rekeys.Next() {
		add(id, k, " (next key)")
	}
	for id, wg := range a.loop.members {
		add(id, wg, "")
	}
	return names
}

func planText(spec dataplane.Spec, names map[dataplane.Key]string) string {
	return projection.Text(spec, keyName(names))
}

// keyName names a WireGuard key's owner, or the key where that is not known.
func keyName(names map[dataplane.Key]string) func(dataplane.Key) string {
	return func(k dataplane.Key) string {
		if n := names[k]; n != "" {
			return n
		}
		return hex.EncodeToString(k[:4])
	}
}

// moment is the index of a moment that is asked for, which is an index, a time, or now.
func (a *Agent) moment(ctx context.Context, index uint64, at int64) (uint64, error) {
	switch {
	case index > 0 && at != 0:
		return 0, connect.NewError(connect.CodeInvalidArgument, errors.New("an index and a time are given: want one of them"))
	case at == 0:
		return index, nil
	}
	if t := time.Unix(0, at); t.After(time.Now()) {
		return 0, notYet(t)
	}
	return a.indexAt(ctx, at)
}

func notYet(t time.Time) error {
	return connect.NewError(connect.CodeInvalidArgument,
		fmt.Errorf("%s is still to come: ask for a moment of the past", t.Format(time.RFC3339)))
}

// indexAt is the last event that was decided at a time or before, as far as archives go.
func (a *Agent) indexAt(ctx context.Context, at int64) (uint64, error) {
	index := uint64(0)
	oldest := int64(0)
	err := a.eachEvent(ctx, a.replica.State().Index(), func(e *skeinv1.Event) {
		if oldest == 0 {
			oldest = e.GetTime()
		}
		if e.GetTime() <= at {
			index = e.GetIndex()
		}
	})
	if err != nil {
		return 0, api.Error(err)
	}
	if index == 0 {
		return 0, connect.NewError(connect.CodeOutOfRange, fmt.Errorf("the events that are kept, here or by a server that "+
			"answers, begin at %s; ask for a later time", time.Unix(0, oldest).Format(time.RFC3339)))
	}
	return index, nil
}

// archivePatience bounds how long a user waits for a server that has older events.
const archivePatience = 3 * time.Second

// eachEvent walks the archived events up to an index: a server's, where it has older ones than this node and answers.
func (a *Agent) eachEvent(ctx context.Context, last uint64, f func(*skeinv1.Event)) error {
	ctx, cancel := context.WithTimeout(ctx, archivePatience)
	defer cancel()
	for after := uint64(0); ; {
		page, _, _, err := a.client.ReadEvents(ctx, after, eventsPage)
		if err != nil && !errors.Is(err, consensus.ErrUnanswered) { // what is here has to do
			return err
		}
		for _, e := range page {
			if e.GetIndex() > last {
				return nil
			}
			f(e)
			after = e.GetIndex()
		}
		if len(page) == 0 {
			return nil
		}
	}
}

// stateThen is the agreed state at a moment.
func (a *Agent) stateThen(ctx context.Context, index uint64, at int64) (*events.State, error) {
	index, err := a.moment(ctx, index, at)
	if err != nil {
		return nil, err
	}
	st, err := a.stateAt(ctx, index)
	return st, api.Error(err)
}

func (s services) State(ctx context.Context, r *skeinv1.StateRequest) (*skeinv1.StateResponse, error) {
	st, err := s.a.stateThen(ctx, r.GetAt(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	h := st.Hash()
	return &skeinv1.StateResponse{State: redactState(st.Proto()), Hash: hex.EncodeToString(h[:])}, nil
}

func (s services) Diff(ctx context.Context, r *skeinv1.DiffRequest) (*skeinv1.DiffResponse, error) {
	from, err := s.a.stateThen(ctx, r.GetFrom(), r.GetFromTime())
	if err != nil {
		return nil, err
	}
	to, err := s.a.stateThen(ctx, r.GetTo(), r.GetToTime())
	if err != nil {
		return nil, err
	}
	return &skeinv1.DiffResponse{Lines: events.Diff(from, to)}, nil
}

func (s services) Plan(ctx context.Context, r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	a := s.a
	past := r.GetAt() > 0 || r.GetAtTime() != 0
	if r.GetNode() != "" {
		n, id, err := a.find(r.GetNode())
		if err != nil {
			return nil, err
		}
		if id != a.id {
			if r.GetDiff() {
				return nil, connect.NewError(connect.CodeInvalidArgument,
					errors.New("--diff compares with this host's kernel; ask the other node itself for its own"))
			}
			out, err := consensus.Patiently(ctx, peersPatience,
				func(ctx context.Context) (*skeinv1.PlanResponse, error) {
					return a.conns.Cluster(id).Plan(ctx, &skeinv1.PlanRequest{At: r.GetAt(), AtTime: r.GetAtTime()})
				})
			if err != nil {
				return nil, toldNothing(n.GetName(), "its plan", "plan", err)
			}
			return &skeinv1.PlanResponse{Text: printable.Lines(out.GetText()), Time: out.GetTime(), Index: out.GetIndex()}, nil
		}
	}
	if past && r.GetDiff() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New(
			"--diff compares with the kernel as it is now; leave --at away, "+
				"or compare two moments with `skein diff A B --plan`"))
	}
	out, err := a.planForOthers(r)
	if err != nil || past {
		return out, err
	}
	now := a.plans.now.Load()
	if now == nil {
		return out, nil
	}
	if r.GetDiff() {
		if out.Changes, err = a.plane.Diff(ctx, now.spec); err != nil {
			return nil, api.Error(err)
		}
	}
	out.SpecJson, err = json.Marshal(publicSpec(now.spec, keyName(now.names)))
	return out, err
}

// planForOthers is this node's plan, now or at a moment of the past, as it was made then.
func (a *Agent) planForOthers(r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	v, err := a.planThen(r.GetAt(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	return &skeinv1.PlanResponse{Text: v.Text, Time: v.Time.UnixNano(), Index: v.Index}, nil
}

// planThen is the plan that held at a moment.
func (a *Agent) planThen(index uint64, at int64) (v planlog.Version, err error) {
	newest := a.replica.State().Index()
	switch {
	case a.plans.log == nil:
		return v, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no data plane"))
	case index > 0 && at != 0:
		return v, connect.NewError(connect.CodeInvalidArgument, errors.New("an index and a time are given: want one of them"))
	case index > newest:
		return v, connect.NewError(connect.CodeOutOfRange,
			fmt.Errorf("event %d is not known here; the newest is %d", index, newest))
	case index > 0:
		v, err = a.plans.log.AtIndex(index)
	case at != 0 && time.Unix(0, at).After(time.Now()):
		return v, notYet(time.Unix(0, at))
	case at != 0:
		v, err = a.plans.log.AtTime(time.Unix(0, at))
	default:
		v, err = a.plans.log.Newest()
	}
	if errors.Is(err, planlog.ErrNotKept) {
		err = connect.NewError(connect.CodeOutOfRange, err)
	}
	return v, api.Error(err)
}

func (s services) PlanSteps(ctx context.Context, r *skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error) {
	a := s.a
	if r.GetNode() == "" {
		return a.planSteps(r)
	}
	n, id, err := a.find(r.GetNode())
	if err != nil {
		return nil, err
	}
	if id == a.id {
		return a.planSteps(r)
	}
	q := &skeinv1.PlanStepsRequest{From: r.GetFrom(), To: r.GetTo(), FromTime: r.GetFromTime(), ToTime: r.GetToTime()}
	out, err := consensus.Patiently(ctx, peersPatience,
		func(ctx context.Context) (*skeinv1.PlanStepsResponse, error) {
			return a.conns.Cluster(id).PlanSteps(ctx, q)
		})
	if err != nil {
		return nil, toldNothing(n.GetName(), "its plans", "diff --plan", err)
	}
	out.NodeId = id.String()
	for _, s := range out.GetSteps() {
		for _, lines := range [][]string{s.GetRemoved(), s.GetAdded(), s.GetBecause()} {
			for i := range lines {
				lines[i] = printable.Lines(lines[i])
			}
		}
	}
	return out, nil
}

// toldNothing words why another node did not tell of something.
func toldNothing(name, what, command string, err error) error {
	var c *connect.Error
	if errors.As(err, &c) {
		switch c.Code() {
		case connect.CodeUnimplemented:
			return connect.NewError(connect.CodeUnimplemented, fmt.Errorf(
				"node %s runs an older version, which does not tell of %s: upgrade it, or run `skein %s` there",
				name, what, command))
		case connect.CodePermissionDenied, connect.CodeFailedPrecondition, connect.CodeResourceExhausted,
			connect.CodeOutOfRange, connect.CodeInvalidArgument:
			return connect.NewError(c.Code(), fmt.Errorf("node %s: %s", name, c.Message()))
		}
	}
	return connect.NewError(connect.CodeUnavailable, fmt.Errorf(
		"node %s does not answer: %w; `skein nodes` says whether it is alive", name, err))
}

// planSteps is how this node's plan changed between two moments, and what the node decided meanwhile.
func (a *Agent) planSteps(r *skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error) {
	from, err := a.planThen(r.GetFrom(), r.GetFromTime())
	if err != nil {
		return nil, err
	}
	to, err := a.planThen(r.GetTo(), r.GetToTime())
	if err != nil {
		return nil, err
	}
	if to.Time.Before(from.Time) {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New("the second moment is before the first: give the earlier one first"))
	}
	steps, err := a.plans.log.Steps(from, to)
	if err != nil {
		return nil, api.Error(err)
	}
	decisions, err := a.journal.Read(from.Time, to.Time, func(e *skeinv1.JournalEntry) bool {
		return e.GetPathDecision() != nil || e.GetAgentStarted() != nil
	})
	if err != nil {
		return nil, api.Error(err)
	}
	return &skeinv1.PlanStepsResponse{Steps: stepViews(steps, decisions, a.roster.Name), NodeId: a.id.String()}, nil
}

// stepViews joins the changes of a plan with what the journal says that the node decided before each.
func stepViews(
	steps []planlog.Step, decisions []*skeinv1.JournalEntry, name func(identity.ID) string,
) (out []*skeinv1.PlanStep) {
	for _, s := range steps {
		v := &skeinv1.PlanStep{
			Time: s.Time.UnixNano(), FromIndex: s.Before.Index, Index: s.Index,
			Removed: trimmed(s.Removed), Added: trimmed(s.Added),
		}
		for len(decisions) > 0 && decisions[0].GetTime() <= v.Time {
			if why := becauseOf(decisions[0], v, name); why != "" && !slices.Contains(v.Because, why) {
				v.Because = append(v.Because, why)
			}
			decisions = decisions[1:]
		}
		out = append(out, v)
	}
	return out
}

// becauseOf says what a decision has to do with a change; "" if it has not.
func becauseOf(e *skeinv1.JournalEntry, v *skeinv1.PlanStep, name func(identity.ID) string) string {
	if s := e.GetAgentStarted(); s != nil {
		return "the agent started"
	}
	d := e.GetPathDecision()
	id, err := identity.ParseID(d.GetPeer())
	if err != nil {
		return ""
	}
	of := "peer " + name(id) + " "
	about := func(line string) bool { return strings.HasPrefix(line, of) }
	if !slices.ContainsFunc(v.GetRemoved(), about) && !slices.ContainsFunc(v.GetAdded(), about) {
		return ""
	}
	return fmt.Sprintf("%s: %s: %s", name(id), d.GetRule(), d.GetReason())
}

func trimmed(lines []string) []string {
	out := make([]string, len(lines))
	for i, l := range lines {
		out[i] = strings.TrimSuffix(l, "\n")
	}
	return out
}

// pastPeers is how this node reached its peers at a moment: the log tells of the members, the journal of the paths, and
// the plan of then what each was allowed.
func (a *Agent) pastPeers(ctx context.Context, index uint64, at int64) (*skeinv1.PeersResponse, error) {
	st, err := a.stateThen(ctx, index, at)
	if err != nil {
		return nil, err
	}
	plan, err := a.planThen(index, at)
	if err != nil {
		return nil, err
	}
	moment := time.Unix(0, cmp.Or(at, st.Time()))
	then, err := path.ThenAt(a.journal, moment)
	if err != nil {
		return nil, api.Error(err)
	}
	return peersThen(st, a.id, &then, plan.Text), nil
}

// peersThen is pastPeers, of what was read.
func peersThen(st *events.State, self identity.ID, then *path.Then, plan string) *skeinv1.PeersResponse {
	allowed := map[string][]string{}
	for line := range strings.Lines(plan) {
		words := strings.Fields(line)
		if i := slices.Index(words, "allowed"); len(words) > 1 && words[0] == "peer" && i > 0 {
			allowed[words[1]] = words[i+1:]
		}
	}
	name := func(id identity.ID) string { return api.NodeName(st, id.String()) }
	r := &skeinv1.PeersResponse{PeerTransports: map[string]string{}}
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || id == self {
			continue
		}
		v := pastPath(n, id, then, name)
		v.AllowedIps = allowed[n.GetName()]
		r.Peers = append(r.Peers, v)
		r.PeerTransports[v.GetName()] = pathWord(v)
	}
	slices.SortFunc(r.Peers, func(x, y *skeinv1.PeerView) int { return strings.Compare(x.GetName(), y.GetName()) })
	return r
}
