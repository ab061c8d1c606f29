package history

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// pathUnknown is the path of a past moment that the journal does not have.
const pathUnknown = "unknown"

// OnlyRelays is why a node that does nothing but relay has no paths to draw.
const OnlyRelays = "This node only relays: it has no paths of its own."

// notKeptOfSites is what is missing of the past where sites speak through leaders.
const notKeptOfSites = "Sites spoke through leaders then. Who led, and which leader passed packets on, is not kept: " +
	"a path to another site is the last one that this node had decided itself."

// GraphThen is the mesh at a moment of the past: the log tells of the members, this node's journal of the rest.
func (s HistoryService) GraphThen(ctx context.Context, r *skeinv1.GraphRequest) (*skeinv1.GraphResponse, error) {
	st, err := s.Agent.StateThen(ctx, r.GetAtIndex(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	moment := time.Unix(0, cmp.Or(r.GetAtTime(), st.Time()))
	now := maps.Clone(s.Agent.Records())
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		if site, known := s.Elsewhere(id); known && now[id] == nil {
			now[id] = &skeinv1.Record{Site: site}
		}
	}
	var then *path.Then
	if s.Journal != nil {
		read, err := path.ThenAt(s.Journal, moment)
		if err != nil {
			return nil, api.Error(err)
		}
		then = &read
	}
	return pastGraph(st, s.Agent.Self(), moment, then, now), nil
}

// pastGraph draws a moment of the past. then is nil at a node that only relays; now is what records say today,
// which has to do for the sites that the journal does not know.
func pastGraph(
	st *events.State, self identity.ID, moment time.Time, then *path.Then, now api.Records,
) *skeinv1.GraphResponse {
	out := &skeinv1.GraphResponse{NodeId: self.String(), Index: st.Index(), Time: moment.UnixNano(), Past: true}
	var guessed, unknown []string
	members := slices.Clone(st.Nodes())
	slices.SortFunc(members, func(x, y *skeinv1.Node) int { return strings.Compare(x.GetName(), y.GetName()) })
	name := func(id identity.ID) string { return api.NodeName(st, id.String()) }
	for _, n := range members {
		id, _ := identity.ParseID(n.GetId())
		v := &skeinv1.NodeView{Node: n, Self: id == self, Role: string(st.Role(n.GetId())), Path: "self"}
		if srv := st.Server(id); srv != nil {
			v.Server, v.Voter = true, srv.GetVoter()
		}
		var ofNow bool
		if v.Record, ofNow = pastRecord(id, self, then, now); ofNow && !n.GetSettings().GetSiteSet() {
			guessed = append(guessed, n.GetName())
		}
		v.Site, _ = sites.Of(n, v.Record)
		if !v.Self && then != nil {
			p := pastPath(n, id, then, name)
			v.Path = pathWord(p)
			if p.GetPath() == pathUnknown {
				unknown = append(unknown, n.GetName())
			}
			out.Peers = append(out.Peers, p)
		} else if !v.Self {
			v.Path = "none"
		}
		out.Nodes = append(out.Nodes, v)
	}
	out.Notes = pastNotes(moment, then, guessed, unknown)
	if sites.InUse(st.Settings()) {
		out.Notes = append(out.Notes, notKeptOfSites)
	}
	return out
}

// pastRecord is what is known of a record of then, and whether its site is that of today. nil: nothing is known.
func pastRecord(id, self identity.ID, then *path.Then, now api.Records) (r *skeinv1.Record, ofNow bool) {
	if then != nil {
		if n, ok := then.Nodes[id]; ok {
			return &skeinv1.Record{NodeId: id.String(), Site: n.Site, NatType: n.NAT}, false
		}
		if id == self && then.Self != nil {
			return &skeinv1.Record{NodeId: id.String(), Site: then.Self.Site, NatType: then.Self.NAT}, false
		}
	}
	if r, ok := now[id]; ok {
		return &skeinv1.Record{NodeId: id.String(), Site: r.GetSite()}, true
	}
	return nil, false
}

// pastNotes says what is not known of a past moment.
func pastNotes(moment time.Time, then *path.Then, guessed, unknown []string) []string {
	out := []string{
		"Members, servers and roles are those of the log; " +
			"sites, NAT types and paths are what this node's journal has of then.",
		"Who was seen by gossip, led, relayed or offered to lead then is not kept, nor are round-trip times.",
	}
	switch {
	case then == nil:
		out = append(out, OnlyRelays)
	case then.Begins.IsZero():
		out = append(out, "This node's journal is empty: paths of then are not known.")
	case then.Begins.After(moment):
		out = append(out, "This node's journal begins at "+then.Begins.Format(time.RFC3339)+
			", later than this moment: paths of then are not known.")
	case len(unknown) > 0:
		out = append(out, "The path to "+someNames(unknown)+
			" is not known: none had been decided since the agent's start, or the journal no longer has it.")
	}
	if len(guessed) > 0 {
		out = append(out, "The site of "+someNames(guessed)+" is today's: the journal has no record of then.")
	}
	return out
}

// someNames lists a few names, and how many more there are.
func someNames(names []string) string {
	const most = 4
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
