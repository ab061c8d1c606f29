package members

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// SetNode changes a member's name, labels and settings, in one command.
func (s MemberService) SetNode(ctx context.Context, r *skeinv1.SetNodeRequest) (*skeinv1.SetNodeResponse, error) {
	n, id, err := api.Find(s.Host.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, api.ProposeHold)
	defer cancel()
	for was := n.GetName(); ; {
		st := s.Host.State()
		if n = st.Node(id); n == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition,
				fmt.Errorf("node %s (%s) is not a member any more", was, id))
		}
		record := s.Host.RecordsAsked(ctx)[id]
		c, err := changeOfNode(n, record.GetKubernetesNode(), r)
		if err == nil {
			err = agreeOnSite(c, n, record)
		}
		if err != nil {
			return nil, api.Error(err)
		}
		answer, err := s.Host.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: c}})
		if events.CodeOf(err) == events.Aborted {
			// The leader has seen a later change of the labels. It comes here with an event after the state just read.
			if err := s.Host.Wait(ctx, st.Index()); err != nil {
				return nil, api.Error(err)
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		if now := s.Host.State().Node(id); now != nil {
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
