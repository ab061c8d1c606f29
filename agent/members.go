package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// name is what this node is called: as the log has it, or before it has joined, as its configuration says.
func (a *Agent) name() string {
	if a.phase.Load() == PhaseRunning {
		if n := a.self(); n != nil {
			return n.GetName()
		}
	}
	return a.cfg.Name
}

// SetNode changes a member's name, labels and settings, in one command.
func (s services) SetNode(ctx context.Context, r *skeinv1.SetNodeRequest) (*skeinv1.SetNodeResponse, error) {
	n, id, err := s.a.find(r.GetNode())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, proposeHold)
	defer cancel()
	for was := n.GetName(); ; {
		st := s.a.replica.State()
		if n = st.Node(id); n == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition,
				fmt.Errorf("node %s (%s) is not a member any more", was, id))
		}
		record := s.a.recordsAsked(ctx)[id]
		c, err := changeOfNode(n, record.GetKubernetesNode(), r)
		if err == nil {
			err = agreeOnSite(c, n, record)
		}
		if err != nil {
			return nil, api.Error(err)
		}
		answer, err := s.a.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: c}})
		if events.CodeOf(err) == events.Aborted {
			// The leader has seen a later change of the labels. It comes here with an event after the state just read.
			if err := s.a.replica.Wait(ctx, st.Index()); err != nil {
				return nil, api.Error(err)
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		if now := s.a.replica.State().Node(id); now != nil {
			n = now
		}
		return &skeinv1.SetNodeResponse{Node: n, Index: answer.GetIndex(), Was: was}, nil
	}
}

// changeOfNode is the command that gives a member what the request asks for. node is the Node in Kubernetes that the
// member says it is.
func changeOfNode(n *skeinv1.Node, node string, r *skeinv1.SetNodeRequest) (*skeinv1.ChangeNode, error) {
	c := &skeinv1.ChangeNode{
		NodeId: n.GetId(), Settings: r.GetSettings(), SettingsFields: r.GetFields(), Name: r.GetName(),
	}
	relabels := len(r.GetSetLabels())+len(r.GetRemoveLabels()) > 0
	switch {
	case relabels:
		labels, err := events.Relabel(n, node, r.GetSetLabels(), r.GetRemoveLabels())
		if err != nil {
			return nil, err
		}
		c.Labels, c.SetLabels, c.LabelsWere, c.CheckLabels = labels, true, n.GetLabels(), true
	case r.GetName() == "" && len(r.GetFields()) == 0:
		return nil, connect.NewError(connect.CodeInvalidArgument,
			errors.New("there is nothing to set: give a name, labels or settings"))
	}
	if len(r.GetFields()) == 0 && (c.GetName() == "" || c.GetName() == n.GetName()) &&
		(!relabels || maps.Equal(c.GetLabels(), n.GetLabels())) {
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("nothing changes: node %s has this name and these labels already", n.GetName()))
	}
	return c, nil
}

// agreeOnSite has a node that is chosen to lead stay in the site where its record says that it is, unless the log says
// where it is already.
func agreeOnSite(c *skeinv1.ChangeNode, n *skeinv1.Node, r *skeinv1.Record) error {
	names := func(field string) bool { return slices.Contains(c.GetSettingsFields(), field) }
	if !names("leader") || c.GetSettings().GetLeader() != "yes" || names("site") || n.GetSettings().GetSiteSet() {
		return nil
	}
	if r == nil {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(
			"the site of node %s is not known here: name the one that it shall lead, with --site", n.GetName()))
	}
	c.Settings, c.SettingsFields = proto.CloneOf(c.GetSettings()), append(slices.Clone(c.GetSettingsFields()), "site")
	c.Settings.SiteSet, c.Settings.Site = true, r.GetSite()
	return nil
}

// subjectLabels is the problem that the configuration has labels which are not agreed.
const subjectLabels = "labels"

// noteLabels tells of labels in the configuration that the log does not have: what is agreed counts.
func (a *Agent) noteLabels(n *skeinv1.Node) {
	message, advice := labelNews(n, a.conf().Labels)
	a.report(subjectLabels, warning, message, advice)
}

// labelNews says which labels of a node's configuration the log does not have, and what to do; empty: none.
func labelNews(n *skeinv1.Node, file map[string]string) (message, advice string) {
	if n == nil {
		return "", ""
	}
	var missing, set, steps []string
	for _, key := range slices.Sorted(maps.Keys(file)) {
		have, ok := n.GetLabels()[key]
		switch {
		case ok && have == file[key]:
			continue
		case ok:
			missing = append(missing, fmt.Sprintf("%s=%s (the log has %s=%s)", key, file[key], key, have))
		default:
			missing = append(missing, key+"="+file[key])
		}
		if !strings.HasPrefix(key, events.KubernetesPrefix) {
			set = append(set, key+"="+file[key])
		}
	}
	if len(missing) == 0 {
		return "", ""
	}
	if len(set) > 0 {
		steps = append(steps, fmt.Sprintf("run `skein node set %s %s` on an admin or a server", n.GetName(),
			strings.Join(set, " ")))
	}
	if len(set) < len(missing) {
		steps = append(steps, "label the Node in Kubernetes with those under "+events.KubernetesPrefix)
	}
	return "the configuration has labels that are not agreed, and what is agreed counts: " + strings.Join(missing, ", "),
		strings.Join(steps, ", and ") + ", or make the configuration say what is agreed"
}
