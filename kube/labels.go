package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// unprovenAfter is how long a member must have been without the proof that it is a Node until it loses the labels of
// one: its agent puts back within a moment what somebody else has changed of the proof.
const unprovenAfter = time.Minute

// isOurs tells whether a label's key is one of those that go from Nodes to the log, under the same key. Keys under this
// prefix are Kubernetes' in the log: a host's configuration has the others.
func isOurs(key string) bool { return strings.HasPrefix(key, Prefix) }

// labelsOf are the labels that the log is to have for a member that is a Node, and keys that the log cannot have.
func labelsOf(have, node map[string]string) (want map[string]string, bad []string) {
	want = map[string]string{}
	maps.Copy(want, have)
	maps.DeleteFunc(want, func(key, _ string) bool { return isOurs(key) })
	for _, key := range slices.Sorted(maps.Keys(node)) {
		switch {
		case !isOurs(key):
		case len(key) > events.MaxLabelKey || len(want) >= events.MaxLabels:
			bad = append(bad, key)
		default:
			want[key] = node[key]
		}
	}
	return want, bad
}

// labeling takes the labels of Nodes to the log.
type labeling struct {
	unproven map[identity.ID]time.Time // members with labels of a Node and without its proof: since when
	retry    map[identity.ID]time.Time // whom the log has refused: when the next try is due
	told     map[string]bool           // members' names that status tells of
}

// relabel is a member whose labels in the log are to be others.
type relabel struct {
	id   identity.ID
	want map[string]string
	bad  []string
}

// look decides whose labels are to be others now, and when to look again; 0: when something changes. A member whose
// Node is not there keeps what it has: an apiserver that has lost its data moves no gateway.
func (l *labeling) look(s *part.Snapshot, nodes map[string]*Node, members map[identity.ID]*Node,
	now time.Time) (out []relabel, next time.Duration) {
	without := map[identity.ID]bool{}
	for _, n := range s.State.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		var labels map[string]string
		if node := members[id]; node != nil {
			labels = node.Labels
		} else if e, known := s.Records[id]; !known || !hasOurs(n.GetLabels()) ||
			e.Record.GetKubernetesNode() != "" && nodes[e.Record.GetKubernetesNode()] == nil {
			continue
		} else {
			without[id] = true
			if l.unproven[id].IsZero() {
				l.unproven[id] = now
			}
			if wait := unprovenAfter - now.Sub(l.unproven[id]); wait > 0 {
				next = sooner(next, wait)
				continue
			}
		}
		want, bad := labelsOf(n.GetLabels(), labels)
		if len(bad) == 0 && maps.Equal(want, n.GetLabels()) {
			bad = nil
		}
		if !maps.Equal(want, n.GetLabels()) || len(bad) > 0 || l.told[n.GetName()] {
			out = append(out, relabel{id, want, bad})
		}
	}
	maps.DeleteFunc(l.unproven, func(id identity.ID, _ time.Time) bool { return !without[id] })
	return out, next
}

func hasOurs(labels map[string]string) bool {
	for key := range labels {
		if isOurs(key) {
			return true
		}
	}
	return false
}

// sooner is the shorter of two waits, of which 0 is none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// syncLabels makes the labels of members in the log those of their Nodes.
func (c *controller) syncLabels(ctx context.Context, s *part.Snapshot, nodes map[string]*Node,
	members map[identity.ID]*Node) (again time.Duration) {
	changes, again := c.labels.look(s, nodes, members, time.Now())
	for _, r := range changes {
		n := s.State.Node(r.id)
		name := n.GetName()
		if wait := time.Until(c.labels.retry[r.id]); wait > 0 {
			again = sooner(again, wait)
			continue
		}
		var problem string
		if len(r.bad) > 0 {
			problem = fmt.Sprintf("labels of its Node that the log cannot hold are left out: %s; want keys of at most %d "+
				"characters and %d labels", strings.Join(r.bad, ", "), events.MaxLabelKey, events.MaxLabels)
		}
		if !maps.Equal(r.want, n.GetLabels()) {
			err := c.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{
				ChangeNode: &skeinv1.ChangeNode{NodeId: r.id.String(), Labels: r.want, SetLabels: true,
					LabelsWere: n.GetLabels(), CheckLabels: true},
			}})
			switch {
			case ctx.Err() != nil:
				return again
			case events.CodeOf(err) == events.Aborted:
				continue // somebody else has changed labels of it; that event, which is on its way here, has us look again
			case err != nil:
				problem = "the labels of its Node are not in the log: " + err.Error()
				c.labels.retry[r.id] = time.Now().Add(refusedEvery)
				again = sooner(again, refusedEvery)
			default:
				delete(c.labels.retry, r.id)
				c.p.log.Info("a member has the labels of its Node", "member", name, "labels", r.want)
			}
		}
		c.labels.report(c.p.host, name, problem)
	}
	return again
}

// report shows what is wrong with a member's labels.
func (l *labeling) report(h part.Host, name, problem string) {
	if problem == "" && !l.told[name] {
		return
	}
	l.told[name] = problem != ""
	h.Report("kubernetes: labels of "+name, part.Warns, problem,
		"see docs/kubernetes.md for the labels that choose gateways")
}
