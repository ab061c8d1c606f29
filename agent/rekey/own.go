package rekey

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/linkhold"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// signalNextKey tells a peer of this host's next key.
func (c *Changer) signalNextKey(id identity.ID, keys *Keys) {
	m, _ := c.host.Roster.Get(id)
	proof, err := identity.PairKey(keys.Device, m.WireGuard, c.host.Cluster(), nextKeyPurpose(c.host.ID))
	if err != nil {
		c.host.Log.Warn("a peer cannot be told of this host's next WireGuard key", "peer", m.Name, "error", err)
		return
	}
	c.send(c.host.Send, id, &skeinv1.Signal_Rekey{Phase: skeinv1.Signal_Rekey_PREPARE, Key: keys.DevicePublic[:],
		Proof: proof[:]})
}

// Rotate gives this host another WireGuard key; force does so although configurations of plain peers name the present
// one. Its errors say by their codes what became of it.
func (c *Changer) Rotate(ctx context.Context, force bool) (*skeinv1.RotateNodeKeyResponse, error) {
	if !c.own.one.TryLock() {
		return nil, connect.NewError(connect.CodeAborted, errors.New("this host's key is being changed already"))
	}
	defer c.own.one.Unlock()
	if err := c.mayRotate(force); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return nil, err
	}
	own := c.keys.Load()
	keys, err := NewKeys(own.Agreed, next)
	if err != nil {
		return nil, err
	}
	peers, err := c.talkers(ctx)
	if err != nil {
		return nil, err
	}
	turned, agreed := c.own.begin(keys, peers)
	defer c.own.end()
	late, err := c.prepare(ctx, keys)
	if err != nil {
		return nil, err
	}
	if err := identity.ReplaceWireGuard(c.host.StateDir, next); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := c.turnOver(ctx, keys, turned, slices.DeleteFunc(slices.Clone(peers),
		func(id identity.ID) bool { return slices.Contains(late, id) })); err != nil {
		return nil, err
	}
	index, err := c.agreeOnKey(ctx, keys.DevicePublic)
	if err != nil { // the loop asks again until the log has it
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("this host uses its next key, but the cluster "+
			"does not know it yet (%w): the agent tells it again until it does, and peers that were not ready learn it "+
			"then; see `skein status`", err))
	}
	// Another change may follow at once, so this one ends when this host has the event, too.
	select {
	case <-agreed:
	case <-ctx.Done():
	}
	out := &skeinv1.RotateNodeKeyResponse{WireguardKey: keys.DevicePublic[:], Index: index,
		TookNanos: int64(time.Since(began)), Ready: uint32(len(peers) - len(late))}
	for _, id := range late {
		out.Late = append(out.Late, c.host.Roster.Name(id))
	}
	slices.Sort(out.Late)
	return out, nil
}

// mayRotate says why this host's key is not to be changed now.
func (c *Changer) mayRotate(force bool) error {
	n := c.host.State().Node(c.host.ID)
	switch {
	case n == nil:
		return errors.New("this host is not a member yet")
	case !c.host.Tunnels():
		return errors.New("this node only relays: it has no tunnels, and no key of theirs in use")
	case !c.keys.Load().Settled():
		return errors.New("the cluster is still to be told of this host's last key: see `skein status`")
	case force:
		return nil
	}
	var named []string
	for _, p := range c.host.State().PlainPeers() {
		if slices.ContainsFunc(p.GetCarriers(), func(c *skeinv1.PlainCarrier) bool { return c.GetNodeId() == n.GetId() }) {
			named = append(named, p.GetName())
		}
	}
	if len(named) > 0 {
		return fmt.Errorf("the configurations of the plain peers %s name this host's key: change it with --force, "+
			"and then give each of them a new one with `skein peer add NAME --replace`", strings.Join(named, ", "))
	}
	return nil
}

// talkers are the peers with a session of WireGuard's: others have nothing to lose.
func (c *Changer) talkers(ctx context.Context) (out []identity.ID, err error) {
	read, err := c.host.Peers(ctx)
	if err != nil {
		return nil, fmt.Errorf("read WireGuard's peers: %w", err)
	}
	all := (*tunnels.Stats)(&read)
	for _, id := range c.host.Roster.Members() {
		if id == c.host.ID || !c.host.Peered(id) {
			continue
		}
		m, _ := c.host.Roster.Get(id)
		if p, ok := all.Of(c.DeviceKey(id, m.WireGuard)); ok && time.Since(p.LastHandshake) < sessionLife {
			out = append(out, id)
		}
	}
	return out, nil
}

// sessionLife is how long a session of WireGuard's lasts after its handshake, by the protocol.
const sessionLife = 180 * time.Second

// prepare tells the peers of the next key until all are ready, or their time is over.
func (c *Changer) prepare(ctx context.Context, keys *Keys) (late []identity.ID, err error) {
	over := time.NewTimer(waitReady)
	defer over.Stop()
	for {
		left, changed := c.own.left()
		if len(left) == 0 {
			return nil, nil
		}
		for _, id := range left {
			c.signalNextKey(id, keys)
		}
		again := time.NewTimer(askAgain)
		for waiting := true; waiting; {
			select {
			case <-changed:
				if left, changed = c.own.left(); len(left) == 0 {
					waiting = false
				}
			case <-again.C:
				waiting = false
			case <-over.C:
				left, _ := c.own.left()
				return left, nil
			case <-ctx.Done():
				again.Stop()
				return nil, api.Error(ctx.Err())
			}
		}
		again.Stop()
	}
}

// turnOver has the device get its next key, and keeps back what leaves through it until the peers that are ready take
// it in the new sessions.
func (c *Changer) turnOver(ctx context.Context, keys *Keys, turned <-chan struct{}, ready []identity.ID) error {
	held, err := linkhold.Start(linkhold.Options{Table: c.host.Table, Link: c.host.Link,
		Queue: queue, Port: c.host.ControlPort, Log: c.host.Log})
	if err != nil {
		c.host.Log.Warn("what is sent while the WireGuard key changes may be lost", "error", err)
	} else {
		defer func() {
			n, err := held.End()
			c.host.Log.Info("the WireGuard key was changed", "packets_kept_back", n, "error", err)
		}()
	}
	c.own.expect(ready)
	c.keys.Store(keys)
	c.host.Wake()
	over := time.NewTimer(turnWait)
	defer over.Stop()
	select {
	case <-turned:
	case <-over.C:
		return connect.NewError(connect.CodeUnavailable, errors.New("the tunnel's link has not taken the next key: "+
			"`skein status` says what is wrong with it; the agent goes on trying"))
	case <-ctx.Done():
		return api.Error(ctx.Err())
	}
	over.Reset(keptBack)
	again := time.NewTicker(tellAgain)
	defer again.Stop()
	for {
		left, changed := c.own.left()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-again.C:
			for _, id := range left {
				c.signal(c.host.SendRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
			}
		case <-over.C:
			return nil
		case <-ctx.Done():
			return api.Error(ctx.Err())
		}
	}
}

// Turn has the device changed, by apply, and tells the peers before it, by the tunnel where that is their way, and
// after it, beside the tunnel: that carries nothing more to those that have not heard. What is sent into it all the
// same begins the handshake, with those behind a relay, too.
func (c *Changer) Turn(private dataplane.Key, apply func() (dataplane.Report, error)) (dataplane.Report, error) {
	keys, peers, has := c.own.turning(private)
	if keys == nil {
		return apply()
	}
	for _, id := range peers {
		c.signal(c.host.Send, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
	}
	report, err := apply()
	for _, id := range peers {
		c.signal(c.host.SendTunnelled, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
		c.signal(c.host.SendRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
	}
	if tried := err == nil || len(report.Errors) > 0; tried && report.Errors["wireguard"] == nil {
		has()
	}
	return report, err
}

// agreeOnKey has the log take this host's key.
func (c *Changer) agreeOnKey(ctx context.Context, key identity.WireGuardKey) (index uint64, err error) {
	answer, err := c.host.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{
		RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: c.host.ID.String(), WireguardKey: key[:]}}})
	return answer.GetIndex(), err
}

// Follow takes over what the log says of this host's key, and has it take the device's where that is another: after
// a change whose event failed, after a start in the middle of one, and where a backup has brought a former key back.
// Where somebody was quicker to have the log take the device's key, which peers had heard of, the device gets one that
// nobody has heard of.
func (c *Changer) Follow(ctx context.Context, s *events.State) {
	n, own := s.Node(c.host.ID), c.keys.Load()
	if n == nil {
		return
	}
	switch {
	case bytes.Equal(n.GetWireguardKey(), own.DevicePublic[:]):
		if own.Settled() {
			return
		}
		keys, err := NewKeys(own.Device, own.Device)
		if err != nil { // it was one already
			return
		}
		c.keys.Store(keys)
		c.own.agree()
		c.host.Agreed()
		c.host.Report("", "")
		if err := identity.ForgetFormer(c.host.StateDir); err != nil {
			c.host.Log.Warn("the former WireGuard key stays on the disk", "error", err)
		}
	case c.own.active():
	case c.takenBy(s, own.DevicePublic) != "":
		if err := c.anotherKey(s, own); err != nil {
			c.host.Report(err.Error(), "this host cannot be reached until it has a key that the log takes")
		}
		c.host.Wake()
	case c.own.telling.CompareAndSwap(false, true):
		go func() {
			if _, err := c.agreeOnKey(ctx, own.DevicePublic); err != nil {
				c.host.Report("the cluster does not know this host's key yet: "+err.Error(),
					"it is told again every few seconds; peers that have not heard of it cannot be reached")
			}
			time.AfterFunc(proposeAgain, func() {
				c.own.telling.Store(false)
				c.host.Wake()
			})
		}()
	}
}

// takenBy is the other node, or plain peer, to which the log has given a key; empty: nobody.
func (c *Changer) takenBy(s *events.State, key identity.WireGuardKey) string {
	if owner := s.KeyOwner(key[:]); owner != c.host.ID.String() {
		return owner
	}
	return ""
}

// anotherKey replaces the next key of a change whose event is missing.
func (c *Changer) anotherKey(s *events.State, own *Keys) error {
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return err
	}
	keys, err := NewKeys(own.Agreed, next)
	if err != nil {
		return err
	}
	if err := identity.ReplaceWireGuard(c.host.StateDir, next); err != nil {
		return err
	}
	c.host.Log.Warn("somebody else has this host's next WireGuard key in the log: it gets another one",
		"who", c.takenBy(s, own.DevicePublic))
	c.keys.Store(keys)
	return nil
}
