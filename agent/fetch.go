package agent

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// fetchWithin bounds how long a user waits for other sites to tell their nodes' records.
const fetchWithin = 3 * time.Second

// allRecords are the records of all members: those that this node keeps, and those that only other sites keep, which
// are asked for them. notAsked tells, a text for each, which sites could not be asked and why; their nodes' records are
// missing.
func (a *Agent) allRecords(ctx context.Context) (all map[identity.ID]gossip.Entry, notAsked []string) {
	return a.recordsOf(ctx, a.replica.State().Nodes())
}

// recordsOf are the records of some members.
func (a *Agent) recordsOf(ctx context.Context, nodes []*skeinv1.Node) (
	all map[identity.ID]gossip.Entry, notAsked []string) {
	kept := a.gossip.Records()
	if a.placed.Load() == nil { // each node has all there are
		return kept, nil
	}
	ask := sitesWithout(nodes, kept, a.elsewhere)
	if len(ask) == 0 {
		return kept, nil
	}
	ctx, cancel := context.WithTimeout(ctx, fetchWithin)
	defer cancel()
	found, err := a.gossip.Fetch(ctx, ask)
	all = maps.Clone(found)
	if all == nil {
		all = map[identity.ID]gossip.Entry{}
	}
	maps.Copy(all, kept)
	return all, notAskedTexts(err)
}

// sitesWithout are the sites of those nodes of which no record is kept, sorted.
func sitesWithout(
	nodes []*skeinv1.Node, kept map[identity.ID]gossip.Entry, site func(identity.ID) (string, bool),
) (out []string) {
	missing := map[string]bool{}
	for _, n := range nodes {
		id, err := identity.ParseID(n.GetId())
		if _, has := kept[id]; has || err != nil {
			continue
		}
		if s, known := site(id); known {
			missing[s] = true
		}
	}
	return slices.Sorted(maps.Keys(missing))
}

// notAskedTexts are what an error of Fetch says, a text for each site.
func notAskedTexts(err error) (out []string) {
	switch joined, many := err.(interface{ Unwrap() []error }); {
	case err == nil:
	case many && strings.Contains(err.Error(), "\n"):
		for _, e := range joined.Unwrap() {
			out = append(out, notAskedTexts(e)...)
		}
	default:
		out = append(out, err.Error())
	}
	return out
}

// recordsAsked are the records of all members, for what is checked when a user asks.
func (a *Agent) recordsAsked(ctx context.Context) map[identity.ID]*skeinv1.Record {
	all, _ := a.allRecords(ctx)
	out := make(map[identity.ID]*skeinv1.Record, len(all))
	for id, e := range all {
		out[id] = e.Record
	}
	return out
}
