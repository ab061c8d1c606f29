// Package egresses answers the commands about egresses: it defines and changes them, warns of what a change does, and
// explains in sentences why one is as it is. What a node does for an egress is asked of that node. Sentences are made
// by pure functions of a picture.
package egresses

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

const (
	// Patience is for one node's report.
	Patience = 1500 * time.Millisecond
	atOnce   = 16 // nodes that are asked at a time
	// askedAll is up to how many members all are asked for their clients; above, only gateways and this node are.
	askedAll = 256
)

// EgressService is that part of the API.
type EgressService struct {
	Agent api.Agent
	// Host are this node's egresses; nil: it only relays.
	Host Host
	// Journal is this node's.
	Journal api.Journal
	Log     *slog.Logger
}

// Host is what the agent's egresses do for the local API.
type Host interface {
	// Report is what a node does for egresses, as it says; the node may be this one.
	Report(ctx context.Context, node identity.ID, r *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error)
	// Attach changes which egresses a pod of this host uses.
	Attach(ctx context.Context, r *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error)
}

// CreateEgress defines an egress, and warns where it has no gateways or too few.
func (s EgressService) CreateEgress(ctx context.Context,
	r *skeinv1.CreateEgressRequest) (*skeinv1.EgressResponse, error) {
	nodes := s.nodes(ctx, s.Agent.State())
	if what := check(r.GetEgress(), nodes); what != "" {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("egress %s: %s", nameOf(r.GetEgress()), what))
	}
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: r.GetEgress()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.EgressResponse{Egress: answer.GetEgress(), Index: answer.GetIndex(),
		Warnings: warnings(answer.GetEgress(), nodes)}, nil
}

// ChangeEgress changes an egress, and tells which slots and clients move.
func (s EgressService) ChangeEgress(ctx context.Context,
	r *skeinv1.ChangeEgressRequest) (*skeinv1.EgressResponse, error) {
	c, before := r.GetChange(), s.Agent.State()
	nodes := s.nodes(ctx, before)
	old := before.Egress(c.GetNamespace(), c.GetName())
	// Only what is new is looked at: a node that came later than the egress must not keep it from being changed.
	news := &skeinv1.Egress{}
	if slices.Contains(c.GetFields(), "destinations") {
		news.Destinations = without(c.GetSet().GetDestinations(), old.GetDestinations())
	}
	if slices.Contains(c.GetFields(), "addresses") {
		news.Addresses = slices.DeleteFunc(slices.Clone(c.GetSet().GetAddresses()), func(x *skeinv1.EgressAddress) bool {
			return slices.ContainsFunc(old.GetAddresses(), func(y *skeinv1.EgressAddress) bool { return proto.Equal(x, y) })
		})
	}
	if what := check(news, nodes); what != "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("egress %s/%s: %s", c.GetNamespace(),
			c.GetName(), what))
	}
	answer, err := s.Agent.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: c}})
	if err != nil {
		return nil, err
	}
	out := &skeinv1.EgressResponse{Egress: answer.GetEgress(), Index: answer.GetIndex(),
		Warnings: warnings(answer.GetEgress(), nodes)}
	if old != nil {
		out.Moves = moves(old, answer.GetEgress(), s.Agent.State().Slots(c.GetNamespace(), c.GetName()), nodes)
	}
	return out, nil
}

// RemoveEgress removes an egress.
func (s EgressService) RemoveEgress(ctx context.Context,
	r *skeinv1.RemoveEgressRequest) (*skeinv1.RemoveEgressResponse, error) {
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RemoveEgress{RemoveEgress: &skeinv1.RemoveEgress{Namespace: r.GetNamespace(),
			Name: r.GetName()}}})
	return &skeinv1.RemoveEgressResponse{Index: answer.GetIndex()}, err
}

func nameOf(e *skeinv1.Egress) string { return fullName(e.GetNamespace(), e.GetName()) }

// nodes are all members, by name.
func (s EgressService) nodes(ctx context.Context, st *events.State) []member {
	records := s.Agent.RecordsAsked(ctx)
	var out []member
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		site, _ := s.Agent.SiteOf(n, records[id])
		out = append(out, member{node: n, site: site, record: records[id],
			alive: id == s.Agent.Self() || s.Agent.Alive(id)})
	}
	slices.SortFunc(out, func(x, y member) int { return strings.Compare(x.name(), y.name()) })
	return out
}

// find is the egress of that name; without a namespace the only one that is called so.
func find(st *events.State, namespace, name string) (*skeinv1.Egress, error) {
	var found []*skeinv1.Egress
	if namespace != "" {
		if e := st.Egress(namespace, name); e != nil {
			return e, nil
		}
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no egress %s/%s; `skein egress list` shows "+
			"those there are", namespace, name))
	}
	var names []string
	for _, e := range st.Egresses() {
		if e.GetName() == name {
			found, names = append(found, e), append(names, nameOf(e))
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no egress %s in any namespace; `skein "+
			"egress list` shows those there are", name))
	}
	return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%d egresses are called %s: name one of %s",
		len(found), name, strings.Join(names, ", ")))
}

// Egresses lists the egresses with their slots and who may have them.
func (s EgressService) Egresses(ctx context.Context, _ *skeinv1.EgressesRequest) (*skeinv1.EgressesResponse, error) {
	st := s.Agent.State()
	nodes := s.nodes(ctx, st)
	out := &skeinv1.EgressesResponse{}
	for _, e := range st.Egresses() {
		out.Egresses = append(out.Egresses, summarize(e, st.Slots(e.GetNamespace(), e.GetName()), nodes))
	}
	return out, nil
}

// summarize is an egress with its slots and who may have them.
func summarize(e *skeinv1.Egress, slots []*skeinv1.EgressSlot, nodes []member) *skeinv1.EgressSummary {
	out := &skeinv1.EgressSummary{Egress: e}
	for _, s := range slots {
		out.Slots = append(out.Slots, slotView(s, nodes))
	}
	for _, n := range eligible(e, nodes) {
		out.Eligible = append(out.Eligible, n.name())
	}
	return out
}

func slotView(s *skeinv1.EgressSlot, nodes []member) *skeinv1.SlotView {
	v := &skeinv1.SlotView{Slot: s}
	for _, n := range nodes {
		if n.node.GetId() == s.GetNodeId() {
			v.Owner, v.Site, v.Alive = n.name(), n.site, n.alive
		}
	}
	return v
}

// ShowEgress tells of one egress what its gateways and its clients' hosts say.
func (s EgressService) ShowEgress(ctx context.Context,
	r *skeinv1.ShowEgressRequest) (*skeinv1.ShowEgressResponse, error) {
	p, err := s.picture(ctx, r.GetNamespace(), r.GetName())
	if err != nil {
		return nil, err
	}
	return p.shown(), nil
}

// shown is the picture as the API gives it.
func (p picture) shown() *skeinv1.ShowEgressResponse {
	out := &skeinv1.ShowEgressResponse{Summary: summarize(p.egress, p.slots, p.nodes), FouPort: p.fouPort}
	for _, n := range p.nodes {
		id := n.node.GetId()
		if why, silent := p.silent[id]; silent {
			out.Silent = append(out.Silent, &skeinv1.EgressNodeError{Node: n.name(), Error: why})
			continue
		}
		if g := p.gateway(id); g != nil {
			out.Gateways = append(out.Gateways, g)
		}
		host := &skeinv1.EgressHostClients{Node: n.name()}
		for _, c := range p.reports[id].GetClients() {
			if p.ours(c) != nil {
				host.Clients = append(host.Clients, c)
			}
		}
		if len(host.Clients) > 0 {
			out.Clients = append(out.Clients, host)
		}
	}
	if why, some := p.silent[""]; some {
		out.Silent = append(out.Silent, &skeinv1.EgressNodeError{Error: why})
	}
	return out
}

// picture asks everybody whom an egress concerns.
func (s EgressService) picture(ctx context.Context, namespace, name string) (picture, error) {
	st := s.Agent.State()
	e, err := find(st, namespace, name)
	if connect.CodeOf(err) == connect.CodeNotFound && s.Host != nil {
		ask, _ := whomToAsk(nil, nil, s.nodes(ctx, st), s.Agent.Self().String())
		reports, _ := s.ask(ctx, ask, &skeinv1.EgressReportRequest{})
		err = stillMissing(err, namespace, name, reports)
	}
	if err != nil {
		return picture{}, err
	}
	p := picture{egress: e, slots: st.Slots(e.GetNamespace(), e.GetName()), nodes: s.nodes(ctx, st),
		fouPort: st.Settings().GetFouPort()}
	if id, ok := s.Agent.Leader(); ok {
		p.leader = s.Agent.Name(id)
	}
	ask, silent := whomToAsk(e, p.slots, p.nodes, s.Agent.Self().String())
	p.reports, p.silent = s.ask(ctx, ask, &skeinv1.EgressReportRequest{Namespace: e.GetNamespace(),
		Name: e.GetName()})
	for id, why := range silent {
		p.silent[id] = why
	}
	return p, nil
}

// stillMissing adds who waits for an egress that does not exist.
func stillMissing(err error, namespace, name string, reports map[string]*skeinv1.EgressReportResponse) error {
	var who []string
	for _, r := range reports {
		for _, c := range r.GetClients() {
			for _, e := range c.GetEgresses() {
				if e.GetName() == name && (namespace == "" || e.GetNamespace() == namespace) {
					who = append(who, fmt.Sprintf("%s for %s", c.GetKey(), fullName(e.GetNamespace(), e.GetName())))
				}
			}
		}
	}
	if len(who) == 0 {
		return err
	}
	slices.Sort(who)
	more := ""
	if n := len(who) - mostWaiting; n > 0 {
		who, more = who[:mostWaiting], fmt.Sprintf(" and %d more", n)
	}
	var c *connect.Error
	errors.As(err, &c)
	return connect.NewError(c.Code(), fmt.Errorf("%s; waiting: %s%s, which will use it when it is defined", c.Message(),
		strings.Join(who, ", "), more))
}

// whomToAsk are the IDs of the nodes that know of an egress, as gateway or because they may have clients of it; silent
// are those that need not be asked, with the reason, under "" for many.
func whomToAsk(e *skeinv1.Egress, slots []*skeinv1.EgressSlot, nodes []member,
	self string) (ask []string, silent map[string]string) {
	silent = map[string]string{}
	few := len(nodes) <= askedAll
	for _, n := range nodes {
		id := n.node.GetId()
		why, _ := obstacles(e, n) // without an egress nobody is a gateway
		gateway := len(why) == 0 || slices.ContainsFunc(slots, func(s *skeinv1.EgressSlot) bool {
			return s.GetNodeId() == id
		})
		switch {
		case n.record.GetRole() == gossip.RoleRelay:
		case n.alive && (gateway || few || id == self):
			ask = append(ask, id)
		case gateway:
			silent[id] = "it has not been heard from lately"
		case n.alive:
			silent[""] = fmt.Sprintf("of %d members only gateways and this node were asked: the clients of others are missing "+
				"here", len(nodes))
		}
	}
	return ask, silent
}

// ask gets reports of nodes, some at a time.
func (s EgressService) ask(ctx context.Context, nodes []string,
	r *skeinv1.EgressReportRequest) (map[string]*skeinv1.EgressReportResponse, map[string]string) {
	reports, silent := map[string]*skeinv1.EgressReportResponse{}, map[string]string{}
	if s.Host == nil {
		for _, id := range nodes {
			silent[id] = egress.ErrNone.Error()
		}
		return reports, silent
	}
	var mu sync.Mutex
	var all sync.WaitGroup
	gate := make(chan struct{}, atOnce)
	for _, text := range nodes {
		id, err := identity.ParseID(text)
		if err != nil {
			continue
		}
		all.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			ctx, cancel := context.WithTimeout(ctx, Patience)
			defer cancel()
			answer, err := s.Host.Report(ctx, id, r)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent[text] = plainly(err)
				return
			}
			reports[text] = answer
		})
	}
	all.Wait()
	return reports, silent
}

// plainly is what an error of another node's says, without codes.
func plainly(err error) string {
	var c *connect.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), connect.CodeOf(err) == connect.CodeDeadlineExceeded:
		return fmt.Sprintf("it did not answer within %s", Patience)
	case connect.CodeOf(err) == connect.CodeUnimplemented:
		return "its version of skein does not support egresses"
	case errors.As(err, &c):
		return c.Message()
	}
	return err.Error()
}

// ExplainEgress says in sentences why an egress is as it is, or was at a moment.
func (s EgressService) ExplainEgress(ctx context.Context,
	r *skeinv1.ExplainEgressRequest) (*skeinv1.ExplainEgressResponse, error) {
	if a, err := netip.ParseAddr(r.GetClient()); err == nil {
		r = proto.CloneOf(r)
		r.Client = a.Unmap().String()
	}
	if r.GetAt() != 0 || r.GetAtTime() != 0 {
		return s.explainAt(ctx, r)
	}
	p, err := s.picture(ctx, r.GetNamespace(), r.GetName())
	if err != nil {
		return nil, err
	}
	p.client = r.GetClient()
	p.news = s.news(ctx, p, s.Agent.State().Index(), time.Time{})
	return &skeinv1.ExplainEgressResponse{Lines: explain(p)}, nil
}

// explainEgressAt explains an egress by the log as it was at a moment.
func (s EgressService) explainAt(ctx context.Context,
	r *skeinv1.ExplainEgressRequest) (*skeinv1.ExplainEgressResponse, error) {
	st, err := s.Agent.StateThen(ctx, r.GetAt(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	e, err := find(st, r.GetNamespace(), r.GetName())
	if err != nil {
		return nil, err
	}
	p := picture{egress: e, slots: st.Slots(e.GetNamespace(), e.GetName()), client: r.GetClient(), then: st,
		fouPort: st.Settings().GetFouPort()}
	for _, n := range st.Nodes() {
		p.nodes = append(p.nodes, member{node: n})
	}
	slices.SortFunc(p.nodes, func(x, y member) int { return strings.Compare(x.name(), y.name()) })
	p.news = s.news(ctx, p, st.Index(), time.Unix(0, cmp.Or(r.GetAtTime(), st.Time())))
	return &skeinv1.ExplainEgressResponse{Lines: explainThen(p)}, nil
}

// egressNews is what archives tell of an egress up to an index, and this node's journal of its slots here up to a
// moment (zero: now), oldest first.
func (s EgressService) news(ctx context.Context, p picture, index uint64, until time.Time) (out []occurrence) {
	namespace, name := p.egress.GetNamespace(), p.egress.GetName()
	_ = s.Agent.EachEvent(ctx, index, func(e *skeinv1.Event) { // without archives the journal has to do
		if text := eventText(e, namespace, name, p.nameOf); text != "" {
			out = append(out, occurrence{e.GetTime(), text})
		}
	})
	entries, err := s.Journal.Read(time.Time{}, until, func(e *skeinv1.JournalEntry) bool {
		h := e.GetSlotHeld()
		return h != nil && h.GetNamespace() == namespace && h.GetName() == name
	})
	if err != nil {
		s.Log.Warn("explain an egress: the journal cannot be read", "egress", fullName(namespace, name), "error", err)
	}
	for _, e := range entries {
		out = append(out, occurrence{e.GetTime(), slotHeldText(s.Agent.Name(s.Agent.Self()), e.GetSlotHeld())})
	}
	slices.SortStableFunc(out, func(x, y occurrence) int { return int(min(max(x.at-y.at, -1), 1)) })
	return out
}

// AttachEgress has a running pod of this host use egresses, or no longer.
func (s EgressService) AttachEgress(ctx context.Context,
	r *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error) {
	switch {
	case s.Host == nil:
		return nil, connect.NewError(connect.CodeFailedPrecondition, egress.ErrNone)
	case r.GetPod() == "" && r.GetContainerId() == "":
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no pod is named: give its name and "+
			"namespace, or its container's ID"))
	case len(r.GetEgresses()) == 0:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no egress is named; `skein egress list` "+
			"shows those there are"))
	}
	answer, err := s.Host.Attach(ctx, r)
	return answer, api.Error(err)
}

// DrainNode has a node lose its slots and relays, or ends that, and lists the slots that it still has.
func (s EgressService) DrainNode(ctx context.Context,
	r *skeinv1.DrainNodeRequest) (*skeinv1.DrainNodeResponse, error) {
	n, id, err := api.Find(s.Agent.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	out := &skeinv1.DrainNodeResponse{Node: n}
	if !r.GetDryRun() {
		answer, err := s.Agent.Propose(ctx,
			&skeinv1.Command{Body: &skeinv1.Command_DrainNode{DrainNode: &skeinv1.DrainNode{NodeId: n.GetId(),
				Draining: !r.GetUndo()}}})
		if err != nil {
			return nil, err
		}
		out.Index = answer.GetIndex()
	}
	st := s.Agent.State()
	if now := st.Node(id); now != nil {
		out.Node = now
	}
	nodes := s.nodes(ctx, st)
	for _, slot := range st.SlotsOf(n.GetId()) {
		out.Slots = append(out.Slots, slotView(slot, nodes))
	}
	return out, nil
}
