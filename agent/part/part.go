// Package part is how a concern of its own, such as Kubernetes, joins the agent: the agent runs it beside its own
// loop, shows it each newest snapshot, and gives it a Host to act by. The agent does not know its parts, and a part
// knows of the agent what is here.
//
// Invariants: a part that fails, hangs or is away changes nothing of what the agent does without it. What a part
// wishes for its host (Wishes) stands behind the host's configuration and ends when the part takes it back.
//
// Source: DESIGN.md sections 4 and 12.
package part

import (
	"context"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// Part is one concern. Its methods are called from different goroutines.
type Part interface {
	// Open is called once, before the agent says anything of itself: the part reads what it has on disk, wishes what
	// follows from that, and registers its metrics. It must not wait for anybody. An error ends the agent's start.
	Open(h Host, r prometheus.Registerer) error
	// Run works until ctx ends, and returns then. It is called once, after Open.
	Run(ctx context.Context)
	// Follow is told of each snapshot that the agent's loop has taken in. It must not block. It may come before Run.
	Follow(s Snapshot)
}

// PodSource is a Part that knows more of this host's pods than their container runtime says.
type PodSource interface {
	// PodFacts tells of a pod that is being started; it may wait a little for news that are on their way. An error says
	// why the pod cannot be started now.
	PodFacts(ctx context.Context, namespace, pod string) (PodFacts, error)
}

// PodFacts is what a PodSource knows of a pod.
type PodFacts struct {
	Pool        string            // that its namespace has chosen; empty: as the log has it
	Annotations map[string]string // the pod's, about egresses; nil: not known
}

// Snapshot is what the agent knew at one moment. Its values are not changed afterwards.
type Snapshot struct {
	Self    identity.ID
	State   *events.State
	Records map[identity.ID]gossip.Entry // this node's own, as others get it, included
	Alive   func(identity.ID) bool       // whether gossip sees a member; asked for now, not for then
	// Elsewhere is the site of a member without a record here; nil: none is known. Members that say that they are Nodes
	// of Kubernetes have one.
	Elsewhere func(identity.ID) (site string, ok bool)

	// ClockOff is how far this host's clock is ahead of the leader's, as far as that is known.
	ClockOff time.Duration
	// RevokeAfter is for how long a member's Node must be gone, and the member silent, until it is revoked; 0: never.
	RevokeAfter time.Duration
}

// LeadersTime is what the leader's clock shows when this host's shows now. Times in the log are by the leader's.
func (s Snapshot) LeadersTime(now time.Time) time.Time { return now.Add(-s.ClockOff) }

// Host is the agent, as far as a part may use it. Its methods may be called concurrently; Merge not before Run.
type Host interface {
	// Merge takes in records of members that came by the part's way. It returns an error for each that is refused; those
	// of nodes that are not members yet wrap gossip.ErrUnknownNode.
	Merge(records []*skeinv1.SignedRecord) []error
	// Wish replaces what the part wishes for this host.
	Wish(w Wishes)
	// Propose gives a command and waits until this node has its effect. A refusal is an *events.Error.
	Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error)
	// CreateToken makes a token to join by.
	CreateToken(ctx context.Context, r *skeinv1.CreateTokenRequest) (token string, err error)
	// PodChanged tells that the annotations of a pod of this host are others now.
	PodChanged(namespace, pod string, annotations map[string]string)
	// Serves is closed once pods can start on this host: the data plane stands, and where the agent configures the
	// container runtime, it has done so.
	Serves() <-chan struct{}
	// FreshBoot tells whether that had not been so yet, when this agent started, since the host did.
	FreshBoot() bool
	// Report shows a problem in the agent's status, or clears it where message is empty.
	Report(subject string, severity Severity, message, advice string)
}

// Severity of a problem. One that Fails makes the agent not ready.
type Severity string

// Severities.
const (
	Warns Severity = "warning"
	Fails Severity = "error"
)

// Wishes are values for this host that its configuration may have too. A zero value wishes for nothing; what the
// configuration sets stays.
type Wishes struct {
	Site                string
	Leader              bool // of the site
	InternalIP          netip.Addr
	KubernetesNode      string // the Node object that this host is
	ForceEndpoint       string // host:port; the host may be a DNS name
	PersistentKeepalive uint32 // seconds
	BirthdayAttack      string // enabled | disabled: with all peers, whatever the cluster's setting is
}
