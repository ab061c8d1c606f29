package events

import (
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func (d *decision) addServer(c *skeinv1.AddServer) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	d.answer.Node = n
	if find(&d.s.servers, n.GetId()) != nil {
		return nil
	}
	if err := d.checkServerSchema(n.GetName(), n.GetMaxSchema()); err != nil {
		return err
	}
	allowed := proto.CloneOf(n)
	allowed.AgentsOnly = false
	d.emitChange(allowed)
	d.emitServerAdded(n.GetId())
	return nil
}

// checkServerSchema refuses a server that could not fold what is there already. It would stop, and until it is gone
// nothing of that kind could be decided any more.
func (d *decision) checkServerSchema(name string, high uint32) error {
	what, need := d.s.neededSchema()
	if high >= need {
		return nil
	}
	return refuse(FailedPrecondition, "%s folds event schemas up to %d, and the cluster has %s, which need %d: upgrade "+
		"skein on %s before it becomes a server", name, high, what, need, name)
}

func (d *decision) promoteServer(c *skeinv1.PromoteServer) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	d.answer.Node = n
	v := find(&d.s.servers, n.GetId())
	switch {
	case v == nil:
		return refuse(FailedPrecondition, "%s is not a server: add it first with skein server add %[1]s", n.GetName())
	case v.GetVoter():
		return nil
	case d.voters() >= MaxVoters:
		return refuse(FailedPrecondition, "there are %d voters already, and more make the cluster slower and no safer: %s "+
			"stays a non-voter", MaxVoters, n.GetName())
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{NodeId: n.GetId()}}})
	return nil
}

func (d *decision) removeServer(c *skeinv1.RemoveServer) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	if r := find(&d.s.revoked, c.GetNodeId()); r != nil {
		return nil // it lost the role when it was revoked
	}
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	d.answer.Node = n
	if find(&d.s.servers, n.GetId()) == nil {
		return nil
	}
	if err := d.checkQuorumWithout(n, c.GetForce()); err != nil {
		return err
	}
	d.emitServerRemoved(n.GetId(), c.GetReason())
	return nil
}

func (d *decision) voters() (count int) {
	for v := range d.s.servers.all() {
		if v.GetVoter() {
			count++
		}
	}
	return count
}

// checkQuorumWithout refuses to take away the last voter. Going from three voters to two with nobody to
// follow must be forced: two voters stand still when either fails.
func (d *decision) checkQuorumWithout(n *skeinv1.Node, force bool) error {
	if !find(&d.s.servers, n.GetId()).GetVoter() {
		return nil
	}
	voters := d.voters()
	switch {
	case voters == 1:
		return refuse(FailedPrecondition, "%s is the cluster's only voter, and without it nothing can be agreed any more: "+
			"set server: true on another node and wait until it votes", n.GetName())
	case voters == 3 && d.s.servers.n == 3 && !force:
		return refuse(FailedPrecondition, "without %s two voters would be left, and the cluster would stand still when "+
			"either fails: add another server first, or repeat it with --force", n.GetName())
	}
	return nil
}

func (d *decision) emitServerAdded(id string) {
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_ServerAdded{ServerAdded: &skeinv1.ServerAdded{NodeId: id}}})
}

func (d *decision) emitServerRemoved(id, reason string) {
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_ServerRemoved{ServerRemoved: &skeinv1.ServerRemoved{NodeId: id,
		Reason: reason}}})
}
