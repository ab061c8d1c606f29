package history

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/planlog"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/printable"
)

// HistoryService answers what was agreed, planned and decided. Journal and Plans are nil where a node only relays.
type HistoryService struct {
	Agent   api.Agent
	Archive func() Archive
	Journal *journal.Journal
	Plans   *planlog.Log
	// Newest is the plan that this node follows, with what names its peers' keys; false: there is none yet.
	Newest func() (spec dataplane.Spec, name func(dataplane.Key) string, ok bool)
	// Changes are what applying a plan would change in the kernel, a line each.
	Changes func(context.Context, dataplane.Spec) ([]string, error)
	// Cluster is the ClusterService of another node.
	Cluster func(identity.ID) skeinv1connect.ClusterServiceClient
	// Elsewhere is the site of a member whose record this node does not keep.
	Elsewhere func(identity.ID) (site string, ok bool)
}

// State is the agreed state at a moment, without secrets.
func (s HistoryService) State(ctx context.Context, r *skeinv1.StateRequest) (*skeinv1.StateResponse, error) {
	st, err := s.Agent.StateThen(ctx, r.GetAt(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	h := st.Hash()
	return &skeinv1.StateResponse{State: redactState(st.Proto()), Hash: hex.EncodeToString(h[:])}, nil
}

// Diff is how the agreed state changed between two moments.
func (s HistoryService) Diff(ctx context.Context, r *skeinv1.DiffRequest) (*skeinv1.DiffResponse, error) {
	from, err := s.Agent.StateThen(ctx, r.GetFrom(), r.GetFromTime())
	if err != nil {
		return nil, err
	}
	to, err := s.Agent.StateThen(ctx, r.GetTo(), r.GetToTime())
	if err != nil {
		return nil, err
	}
	return &skeinv1.DiffResponse{Lines: events.Diff(from, to)}, nil
}

// Events streams the log, and goes on with what is decided from now on if that is asked for.
func (s HistoryService) Events(ctx context.Context, r *skeinv1.EventsRequest,
	stream *connect.ServerStream[skeinv1.EventsResponse]) error {
	after := r.GetSince()
	if after > 0 {
		after--
	}
	read := func(after uint64) ([]*skeinv1.Event, uint64, uint64, error) {
		return s.Archive().Replica.Events(after, eventsPage)
	}
	if r.GetSince() > 0 { // what was asked for by its index may be asked of a server, too
		read = func(after uint64) ([]*skeinv1.Event, uint64, uint64, error) {
			return s.Archive().Client.ReadEvents(ctx, after, eventsPage)
		}
	}
	sent := uint32(0)
	for {
		page, first, _, err := read(after)
		missing := r.GetSince() > 0 && r.GetSince() < first && sent == 0
		switch unanswered := errors.Is(err, consensus.ErrUnanswered); {
		case err != nil && !unanswered:
			return api.Error(err)
		case missing && unanswered:
			return connect.NewError(connect.CodeUnavailable, fmt.Errorf("event %d is no longer kept here, where the oldest is "+
				"%d, but a server that did not answer may have it; try again later: %w", r.GetSince(), first, err))
		case missing:
			return connect.NewError(connect.CodeOutOfRange, fmt.Errorf("event %d is no longer kept, here or by a server; "+
				"the oldest is %d", r.GetSince(), first))
		}
		for _, e := range page {
			if err := stream.Send(&skeinv1.EventsResponse{Event: redact(e)}); err != nil {
				return err
			}
			after = e.GetIndex()
			if sent++; sent == r.GetLimit() {
				return nil
			}
		}
		switch {
		case len(page) > 0:
		case !r.GetFollow():
			return nil
		default:
			if err := s.Archive().Replica.Wait(ctx, after); err != nil {
				return nil // the client went away
			}
		}
	}
}

// Plan is what a node's kernel should hold, now or then.
func (s HistoryService) Plan(ctx context.Context, r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	past := r.GetAt() > 0 || r.GetAtTime() != 0
	if r.GetNode() != "" {
		n, id, err := api.Find(s.Agent.State(), r.GetNode())
		if err != nil {
			return nil, err
		}
		if id != s.Agent.Self() {
			if r.GetDiff() {
				return nil, connect.NewError(connect.CodeInvalidArgument,
					errors.New("--diff compares with this host's kernel; run `skein plan --diff` on the other node"))
			}
			out, err := consensus.Patiently(ctx, api.PeerPatience,
				func(ctx context.Context) (*skeinv1.PlanResponse, error) {
					return s.Cluster(id).Plan(ctx, &skeinv1.PlanRequest{At: r.GetAt(), AtTime: r.GetAtTime()})
				})
			if err != nil {
				return nil, api.ToldNothing(n.GetName(), "its plan", "plan", err)
			}
			return &skeinv1.PlanResponse{Text: printable.Lines(out.GetText()), Time: out.GetTime(), Index: out.GetIndex()}, nil
		}
	}
	if past && r.GetDiff() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New(
			"--diff compares with the kernel as it is now; leave --at out, "+
				"or compare two moments with `skein diff A B --plan`"))
	}
	out, err := s.PlanForOthers(r)
	if err != nil || past {
		return out, err
	}
	spec, name, ok := s.Newest()
	if !ok {
		return out, nil
	}
	if r.GetDiff() {
		if out.Changes, err = s.Changes(ctx, spec); err != nil {
			return nil, api.Error(err)
		}
	}
	out.SpecJson, err = json.Marshal(publicSpec(spec, name))
	return out, err
}

// PlanForOthers is this node's plan, now or at a moment of the past, as it was made then.
func (s HistoryService) PlanForOthers(r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	v, err := s.planThen(r.GetAt(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	return &skeinv1.PlanResponse{Text: v.Text, Time: v.Time.UnixNano(), Index: v.Index}, nil
}

// planThen is the plan that held at a moment.
func (s HistoryService) planThen(index uint64, at int64) (v planlog.Version, err error) {
	newest := s.Agent.State().Index()
	switch {
	case s.Plans == nil:
		return v, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no data plane"))
	case index > 0 && at != 0:
		return v, connect.NewError(connect.CodeInvalidArgument,
			errors.New("both an index and a time are given: give one of them"))
	case index > newest:
		return v, connect.NewError(connect.CodeOutOfRange,
			fmt.Errorf("event %d is not known here; the newest is %d", index, newest))
	case index > 0:
		v, err = s.Plans.AtIndex(index)
	case at != 0 && time.Unix(0, at).After(time.Now()):
		return v, notYet(time.Unix(0, at))
	case at != 0:
		v, err = s.Plans.AtTime(time.Unix(0, at))
	default:
		v, err = s.Plans.Newest()
	}
	if errors.Is(err, planlog.ErrNotKept) {
		err = connect.NewError(connect.CodeOutOfRange, err)
	}
	return v, api.Error(err)
}

// PlanSteps is how a node's plan changed between two moments, and what it decided meanwhile.
func (s HistoryService) PlanSteps(ctx context.Context,
	r *skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error) {
	if r.GetNode() == "" {
		return s.StepsForOthers(r)
	}
	n, id, err := api.Find(s.Agent.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	if id == s.Agent.Self() {
		return s.StepsForOthers(r)
	}
	q := &skeinv1.PlanStepsRequest{From: r.GetFrom(), To: r.GetTo(), FromTime: r.GetFromTime(), ToTime: r.GetToTime()}
	out, err := consensus.Patiently(ctx, api.PeerPatience,
		func(ctx context.Context) (*skeinv1.PlanStepsResponse, error) {
			return s.Cluster(id).PlanSteps(ctx, q)
		})
	if err != nil {
		return nil, api.ToldNothing(n.GetName(), "its plans", "diff --plan", err)
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

// StepsForOthers is how this node's plan changed between two moments, and what the node decided meanwhile.
func (s HistoryService) StepsForOthers(r *skeinv1.PlanStepsRequest) (*skeinv1.PlanStepsResponse, error) {
	from, err := s.planThen(r.GetFrom(), r.GetFromTime())
	if err != nil {
		return nil, err
	}
	to, err := s.planThen(r.GetTo(), r.GetToTime())
	if err != nil {
		return nil, err
	}
	if to.Time.Before(from.Time) {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New("the second moment is before the first: give the earlier one first"))
	}
	steps, err := s.Plans.Steps(from, to)
	if err != nil {
		return nil, api.Error(err)
	}
	decisions, err := s.Journal.Read(from.Time, to.Time, func(e *skeinv1.JournalEntry) bool {
		return e.GetPathDecision() != nil || e.GetAgentStarted() != nil
	})
	if err != nil {
		return nil, api.Error(err)
	}
	return &skeinv1.PlanStepsResponse{Steps: stepViews(steps, decisions, s.Agent.Name),
		NodeId: s.Agent.Self().String()}, nil
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

type specView struct {
	Link      dataplane.Link      `json:"link"`
	Port      int                 `json:"port"`
	Mark      string              `json:"mark"`
	Peers     map[string]specPeer `json:"peers"`
	Targets   []netip.Prefix      `json:"targets"`
	Pods      dataplane.Pods      `json:"pods"`
	Completed bool                `json:"complete"`
}

type specPeer struct {
	Endpoint   string         `json:"endpoint"`
	Keepalive  string         `json:"keepalive"`
	AllowedIPs []netip.Prefix `json:"allowedIPs"`
}

// publicSpec is a Spec without its secrets.
func publicSpec(s dataplane.Spec, name func(dataplane.Key) string) specView {
	v := specView{Link: s.Link, Port: s.WireGuard.Port, Mark: "0x" + strconv.FormatUint(uint64(s.WireGuard.Mark), 16),
		Peers: map[string]specPeer{}, Targets: s.Targets, Pods: s.Pods, Completed: s.Complete}
	for k, p := range s.WireGuard.Peers {
		e := ""
		if p.Endpoint.IsValid() {
			e = p.Endpoint.String()
		}
		keepalive := ""
		if p.Keepalive != dataplane.KeepaliveAsItIs {
			keepalive = p.Keepalive.String()
		}
		v.Peers[name(k)] = specPeer{Endpoint: e, Keepalive: keepalive, AllowedIPs: p.AllowedIPs}
	}
	return v
}

// mostOfJournal limits the entries in one answer.
const mostOfJournal = 10_000

// ReadJournal returns the newest entries of the journal. The agent answers since its process holds the file.
func (s HistoryService) ReadJournal(r *skeinv1.JournalRequest) (*skeinv1.JournalResponse, error) {
	most := mostOfJournal
	if n := r.GetMost(); n > 0 {
		most = int(min(n, mostOfJournal))
	}
	out := &skeinv1.JournalResponse{}
	err := s.Journal.Back(func(e *skeinv1.JournalEntry) bool {
		out.Entries = append(out.Entries, e)
		return len(out.Entries) < most
	})
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	slices.Reverse(out.Entries)
	return out, nil
}
