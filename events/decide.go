package events

import (
	"crypto/sha256"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Decide turns a command into the events that follow from it, and its answer. It changes nothing: fold
// the events to make them so. Time and entropy are the command's; the events' times are its time.
//
// A command with a request ID ends with CommandAnswered, so that the same request ID, from the same issuer and for the
// same kind of command, gives the same outcome again and no events: the same index and things, shown as they are then
// (see AnswerTo). A command that asks for what already is has no other events. A refusal is always an *Error and leaves
// no trace.
func Decide(s *State, c *skeinv1.Command) ([]*skeinv1.Event, *skeinv1.Answer, error) {
	return decide(s, c, schemaOf)
}

// decision is a command on its way.
type decision struct {
	s        *State
	c        *skeinv1.Command
	base     uint64 // index of the last event before it
	schema   func(*skeinv1.Event) uint32
	events   []*skeinv1.Event
	answer   *skeinv1.Answer
	allotted int  // ranges of sites, by this command
	silent   bool // the answer is not remembered: nothing was done, and the same may be asked in earnest
}

func decide(s *State, c *skeinv1.Command,
	schema func(*skeinv1.Event) uint32) ([]*skeinv1.Event, *skeinv1.Answer, error) {
	if err := checkText("request ID", c.GetRequestId(), MaxText); err != nil {
		return nil, nil, err
	}
	if c.GetTime() <= 0 {
		return nil, nil, refuse(InvalidArgument, "the command carries no time: only a leader may decide")
	}
	d := &decision{s: s, c: c, base: s.index, schema: schema, answer: &skeinv1.Answer{RequestId: c.GetRequestId()}}
	if err := d.checkBeforeAnswer(); err != nil {
		return nil, nil, err
	}
	if a := s.remembered(c); a != nil {
		return nil, a, nil
	}
	if err := d.dispatch(); err != nil {
		return nil, nil, err
	}
	d.remember()
	if err := d.checkServers(); err != nil {
		return nil, nil, err
	}
	if err := standardBudget().check(s, c, d.events); err != nil {
		return nil, nil, err
	}
	return d.events, d.answer, nil
}

// checkBeforeAnswer refuses who may not hear a remembered answer either. A joiner is not a member yet: what it shows
// counts.
func (d *decision) checkBeforeAnswer() error {
	if b, ok := d.c.GetBody().(*skeinv1.Command_AdmitNode); ok && d.s.Cluster() != nil {
		_, err := d.admission(b.AdmitNode)
		return err
	}
	return nil
}

// remember ends the command with its answer, if it has a request ID, and says which event is the command's last.
func (d *decision) remember() {
	d.answer.Index = d.base + uint64(len(d.events))
	key := answerKey(d.c)
	if key == "" || d.silent {
		return
	}
	d.answer.Index++
	stored := Reference(d.answer)
	stored.RequestId = key
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{Answer: stored}}})
}

func (d *decision) dispatch() error {
	if b, ok := d.c.GetBody().(*skeinv1.Command_CreateCluster); ok {
		return d.createCluster(b.CreateCluster)
	}
	if d.s.Cluster() == nil && d.c.GetBody() != nil {
		return refuse(FailedPrecondition, "there is no cluster yet: start its first node with skein up --init")
	}
	switch b := d.c.GetBody().(type) {
	case *skeinv1.Command_ChangeSettings:
		return d.changeSettings(b.ChangeSettings)
	case *skeinv1.Command_CreateToken:
		return d.createToken(b.CreateToken)
	case *skeinv1.Command_RevokeToken:
		return d.revokeToken(b.RevokeToken)
	case *skeinv1.Command_AdmitNode:
		return d.admitNode(b.AdmitNode)
	case *skeinv1.Command_ChangeNode:
		return d.changeNode(b.ChangeNode)
	case *skeinv1.Command_RevokeNode:
		return d.revokeNode(b.RevokeNode)
	case *skeinv1.Command_RotateNodeKey:
		return d.rotateNodeKey(b.RotateNodeKey)
	case *skeinv1.Command_AddServer:
		return d.addServer(b.AddServer)
	case *skeinv1.Command_PromoteServer:
		return d.promoteServer(b.PromoteServer)
	case *skeinv1.Command_RemoveServer:
		return d.removeServer(b.RemoveServer)
	case *skeinv1.Command_RotateGossipKey:
		return d.rotateGossipKey()
	case *skeinv1.Command_SetAdmin:
		return d.setAdmin(b.SetAdmin)
	case *skeinv1.Command_IntroduceRoles:
		return d.introduceRoles()
	case *skeinv1.Command_RepairClock:
		return d.repairClock()
	case *skeinv1.Command_SetPodCidrs:
		return d.setPodCIDRs(b.SetPodCidrs)
	case *skeinv1.Command_SetPlainPeer:
		return d.setPlainPeer(b.SetPlainPeer)
	case *skeinv1.Command_RemovePlainPeer:
		return d.removePlainPeer(b.RemovePlainPeer)
	case *skeinv1.Command_SetSiteTranslation:
		return d.setSiteTranslation(b.SetSiteTranslation)
	case *skeinv1.Command_RemoveSiteTranslation:
		return d.removeSiteTranslation(b.RemoveSiteTranslation)
	}
	return d.dispatchPool()
}

// emit appends an event; the caller fills the body alone.
func (d *decision) emit(e *skeinv1.Event) {
	e.Index = d.nextIndex()
	e.Time = d.c.GetTime()
	e.RequestId, e.Issuer = d.c.GetRequestId(), d.c.GetIssuer()
	e.Schema = d.schema(e)
	d.events = append(d.events, e)
}

// nextIndex is the index of the event that is emitted next.
func (d *decision) nextIndex() uint64 { return d.base + uint64(len(d.events)) + 1 }

// checkServers refuses events that a server could not fold: it would stop.
func (d *decision) checkServers() error {
	need := uint32(0)
	for _, e := range d.events {
		need = max(need, e.GetSchema())
	}
	for v := range d.s.servers.all() {
		n := find(&d.s.nodes, v.GetNodeId())
		if n.GetMaxSchema() < need {
			return refuse(FailedPrecondition, "server %s folds event schemas up to %d and this command needs %d: upgrade "+
				"skein on %s first",
				n.GetName(), n.GetMaxSchema(), need, n.GetName())
		}
	}
	return nil
}

// secret derives 32 secret bytes for one purpose from the command's entropy.
func (d *decision) secret(purpose string) ([]byte, error) {
	if len(d.c.GetEntropy()) < minEntropy {
		return nil, refuse(InvalidArgument, "the command carries %d bytes of entropy: the leader must add at least %d",
			len(d.c.GetEntropy()), minEntropy)
	}
	h := sha256.New()
	h.Write([]byte("skein " + purpose + " v1\x00"))
	h.Write(d.c.GetEntropy())
	return h.Sum(nil), nil
}
