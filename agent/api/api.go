// Package api is what the services of the local API share: what they need of the agent, and how they answer. Below it
// stands a package for each group of commands, such as `pools` and `history`. A service reads what the agent has, or
// proposes a command to the cluster; it keeps nothing. The agent's own package puts the services together, with
// those that look into the agent itself, such as status and peers.
package api

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Records are nodes' records, by the ID of the node.
type Records = map[identity.ID]*skeinv1.Record

// Agent is what services need of the agent that they answer for. Its methods may be called from any goroutine.
type Agent interface {
	// Self is this node.
	Self() identity.ID
	// Name is a member's name, or its ID if nothing else is known.
	Name(identity.ID) string
	// State is the agreed state as this node has it.
	State() *events.State
	// StateThen is the agreed state after an event or, if index is 0, at a time in Unix nanoseconds; both 0: now. The
	// error has a code of the API.
	StateThen(ctx context.Context, index uint64, at int64) (*events.State, error)
	// EachEvent walks the archived events up to an index, oldest first. It asks a server, which may have older ones.
	EachEvent(ctx context.Context, last uint64, f func(*skeinv1.Event)) error
	// Propose hands a command to the cluster and waits until this node sees its effect. The error has a code of the API.
	Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error)
	// Records are the records that this node keeps; RecordsAsked are those of all members, for which other sites may have
	// to be asked.
	Records() Records
	RecordsAsked(ctx context.Context) Records
	// SiteOf is the site of a member with that record, as far as it is known here. The record may be nil.
	SiteOf(n *skeinv1.Node, r *skeinv1.Record) (site string, known bool)
	// Alive says whether a member was heard of lately.
	Alive(identity.ID) bool
	// Leader is the node that leads the cluster, as far as this one knows.
	Leader() (identity.ID, bool)
}

// Journal is read from a time to another, both may be zero, as far as keep says.
type Journal interface {
	Read(from, to time.Time, keep func(*skeinv1.JournalEntry) bool) ([]*skeinv1.JournalEntry, error)
}

// Error gives an error the code of the API that says most.
func Error(err error) error {
	var e *events.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		var code connect.Code
		if code.UnmarshalText([]byte(e.Code)) != nil {
			code = connect.CodeInternal
		}
		return connect.NewError(code, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeUnavailable, fmt.Errorf("no server decided in time: %w (is a majority of the "+
			"servers up? see `skein status`)", err))
	}
	var c *connect.Error
	if errors.As(err, &c) {
		return err
	}
	return connect.NewError(connect.CodeUnavailable, err)
}

// Find is a member by name or ID.
func Find(s *events.State, nameOrID string) (*skeinv1.Node, identity.ID, error) {
	if n := s.NodeByName(nameOrID); n != nil {
		id, err := identity.ParseID(n.GetId())
		return n, id, err
	}
	if id, err := identity.ParseID(nameOrID); err == nil {
		if n := s.Node(id); n != nil {
			return n, id, nil
		}
	}
	return nil, identity.ID{}, connect.NewError(connect.CodeNotFound, fmt.Errorf("no member is called %q; see `skein "+
		"nodes`", nameOrID))
}

// NodeName is a member's name, live or revoked; of a stranger, its ID.
func NodeName(st *events.State, id string) string {
	i, err := identity.ParseID(id)
	switch {
	case err != nil:
	case st.Node(i) != nil:
		return st.Node(i).GetName()
	case st.Revoked(i) != nil:
		return st.Revoked(i).GetNode().GetName() + " (revoked)"
	}
	return id
}

// ReasonText is a reason that somebody may have given.
func ReasonText(reason string) string {
	if reason == "" {
		return "no reason was given"
	}
	return reason
}

// Overlapped names what of a node's own addresses a network covers; "" if nothing.
func Overlapped(p netip.Prefix, r *skeinv1.Record) string {
	for _, c := range r.GetCandidates() {
		at, err := netip.ParseAddrPort(c.GetAddress())
		if err == nil && p.Contains(at.Addr().Unmap()) {
			return "the address " + at.Addr().String()
		}
	}
	if ip, err := netip.ParseAddr(r.GetInternalIp()); err == nil && p.Contains(ip) {
		return "the internal address " + ip.String()
	}
	for _, text := range r.GetNodeAddresses() {
		if n, err := netip.ParsePrefix(text); err == nil && n.Overlaps(p) {
			return "the network " + text
		}
	}
	return ""
}

// RedactPlainPeer leaves the carriers of a plain peer and takes their secrets, which are sealed, out.
func RedactPlainPeer(p *skeinv1.PlainPeer) {
	for _, c := range p.GetCarriers() {
		c.Sealed = nil
	}
}

// ProposeHold is how long a command from the command line may wait for a leader.
const ProposeHold = 15 * time.Second

// PeerPatience is how long another node may take to answer for a user.
const PeerPatience = 5 * time.Second

// ToldNothing words why another node did not tell of something.
func ToldNothing(name, what, command string, err error) error {
	var c *connect.Error
	if errors.As(err, &c) {
		switch c.Code() {
		case connect.CodeUnimplemented:
			return connect.NewError(connect.CodeUnimplemented, fmt.Errorf(
				"node %s runs an older version, which cannot report %s to others: upgrade it, or run `skein %s` there",
				name, what, command))
		case connect.CodePermissionDenied, connect.CodeFailedPrecondition, connect.CodeResourceExhausted,
			connect.CodeOutOfRange, connect.CodeInvalidArgument:
			return connect.NewError(c.Code(), fmt.Errorf("node %s: %s", name, c.Message()))
		}
	}
	return connect.NewError(connect.CodeUnavailable, fmt.Errorf(
		"node %s does not answer: %w; `skein nodes` says whether it is alive", name, err))
}

// Nanos is a time in Unix nanoseconds; 0: the zero time.
func Nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
