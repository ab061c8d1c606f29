package agent

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
	"github.com/skeinmesh/skein/agent/rekey"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/linkhold"
	"github.com/skeinmesh/skein/identity"
)

// loadKeys reads this host's keys. A former key on the disk means that the agent ended in the middle of a change.
func (a *Agent) loadKeys() (err error) {
	var device identity.WireGuardKey
	if a.key, device, err = identity.LoadOrCreate(a.cfg.StateDir); err != nil {
		return err
	}
	former, has, err := identity.Former(a.cfg.StateDir)
	if err != nil {
		return err
	}
	agreed := device
	switch {
	case has && former == device: // it ended before it changed anything
		if err := identity.ForgetFormer(a.cfg.StateDir); err != nil {
			return err
		}
	case has:
		agreed = former
	}
	keys, err := rekey.NewKeys(agreed, device)
	if err != nil {
		return err
	}
	a.wg.Store(keys)
	return nil
}

// signalNextKey tells a peer of this host's next key.
func (a *Agent) signalNextKey(id identity.ID, keys *rekey.Keys) {
	m, _ := a.roster.Get(id)
	proof, err := identity.PairKey(keys.Device, m.WireGuard, a.cluster, nextKeyPurpose(a.id))
	if err != nil {
		a.log.Warn("a peer cannot be told of this host's next WireGuard key", "peer", m.Name, "error", err)
		return
	}
	a.signalOfRekey(a.sendSignal, id, &skeinv1.Signal_Rekey{Phase: skeinv1.Signal_Rekey_PREPARE, Key: keys.DevicePublic[:],
		Proof: proof[:]})
}

// RotateNodeKey gives this host another WireGuard key.
func (s services) RotateNodeKey(ctx context.Context,
	r *skeinv1.RotateNodeKeyRequest) (*skeinv1.RotateNodeKeyResponse, error) {
	a := s.a
	if !a.rekeying.One.TryLock() {
		return nil, connect.NewError(connect.CodeAborted, errors.New("this host's key is being changed already"))
	}
	defer a.rekeying.One.Unlock()
	if err := a.mayRekey(r.GetForce()); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return nil, err
	}
	own := a.wg.Load()
	keys, err := rekey.NewKeys(own.Agreed, next)
	if err != nil {
		return nil, err
	}
	peers, err := a.talkers(ctx)
	if err != nil {
		return nil, err
	}
	turned, agreed := a.rekeying.Begin(keys, peers)
	defer a.rekeying.End()
	late, err := a.prepareRekey(ctx, keys)
	if err != nil {
		return nil, err
	}
	if err := identity.ReplaceWireGuard(a.cfg.StateDir, next); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := a.turnOver(ctx, keys, turned, slices.DeleteFunc(slices.Clone(peers),
		func(id identity.ID) bool { return slices.Contains(late, id) })); err != nil {
		return nil, err
	}
	index, err := a.agreeOnKey(ctx, keys.DevicePublic)
	if err != nil { // the loop asks again until the log has it
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("this host has its next key, of which the cluster "+
			"is still to be told (%w): that goes on by itself, and peers that were not ready hear of it then", err))
	}
	// Another change may follow at once, so this one ends when this host has the event, too.
	select {
	case <-agreed:
	case <-ctx.Done():
	}
	out := &skeinv1.RotateNodeKeyResponse{WireguardKey: keys.DevicePublic[:], Index: index,
		TookNanos: int64(time.Since(began)), Ready: uint32(len(peers) - len(late))}
	for _, id := range late {
		out.Late = append(out.Late, a.roster.Name(id))
	}
	slices.Sort(out.Late)
	return out, nil
}

// mayRekey says why this host's key is not to be changed now.
func (a *Agent) mayRekey(force bool) error {
	n := a.self()
	switch {
	case n == nil:
		return errors.New("this host is no member yet")
	case a.plane == nil:
		return errors.New("this node only relays: it has no tunnels, and no key of theirs in use")
	case !a.wg.Load().Settled():
		return errors.New("the cluster is still to be told of this host's last key: see `skein status`")
	case force:
		return nil
	}
	var named []string
	for _, p := range a.replica.State().PlainPeers() {
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
func (a *Agent) talkers(ctx context.Context) (out []identity.ID, err error) {
	read, err := a.plane.Peers(ctx)
	if err != nil {
		return nil, fmt.Errorf("read WireGuard's peers: %w", err)
	}
	all, reach := (*tunnels.Stats)(&read), a.reach.Load()
	for _, id := range a.roster.Members() {
		if id == a.id || !reach.Peer(id) {
			continue
		}
		m, _ := a.roster.Get(id)
		if p, ok := all.Of(a.deviceKey(id, m.WireGuard)); ok && time.Since(p.LastHandshake) < sessionLife {
			out = append(out, id)
		}
	}
	return out, nil
}

// sessionLife is how long a session of WireGuard's lasts after its handshake, by the protocol.
const sessionLife = 180 * time.Second

// prepareRekey tells the peers of the next key until all are ready, or their time is over.
func (a *Agent) prepareRekey(ctx context.Context, keys *rekey.Keys) (late []identity.ID, err error) {
	over := time.NewTimer(rekeyWait)
	defer over.Stop()
	for {
		left, changed := a.rekeying.Left()
		if len(left) == 0 {
			return nil, nil
		}
		for _, id := range left {
			a.signalNextKey(id, keys)
		}
		again := time.NewTimer(rekey.Again)
		for waiting := true; waiting; {
			select {
			case <-changed:
				if left, changed = a.rekeying.Left(); len(left) == 0 {
					waiting = false
				}
			case <-again.C:
				waiting = false
			case <-over.C:
				left, _ := a.rekeying.Left()
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
func (a *Agent) turnOver(ctx context.Context, keys *rekey.Keys, turned <-chan struct{}, ready []identity.ID) error {
	held, err := linkhold.Start(linkhold.Options{Table: a.numbers.RekeyNftTable, Link: a.cfg.Dataplane.Link,
		Queue: rekeyQueue, Port: a.cfg.Ports.Control, Log: a.log})
	if err != nil {
		a.log.Warn("what is sent while the WireGuard key changes may be lost", "error", err)
	} else {
		defer func() {
			n, err := held.End()
			a.log.Info("the WireGuard key was changed", "packets_kept_back", n, "error", err)
		}()
	}
	a.rekeying.Expect(ready)
	a.wg.Store(keys)
	a.wakeUp()
	over := time.NewTimer(rekeyTurn)
	defer over.Stop()
	select {
	case <-turned:
	case <-over.C:
		return connect.NewError(connect.CodeUnavailable, errors.New("the tunnel's link has not taken the next key: "+
			"`skein status` says what is wrong with it; the agent goes on trying"))
	case <-ctx.Done():
		return api.Error(ctx.Err())
	}
	over.Reset(rekeyHeld)
	again := time.NewTicker(rekey.Tell)
	defer again.Stop()
	for {
		left, changed := a.rekeying.Left()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-again.C:
			for _, id := range left {
				a.signalRekey(a.sendSignalRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
			}
		case <-over.C:
			return nil
		case <-ctx.Done():
			return api.Error(ctx.Err())
		}
	}
}

// turnKey has the device changed, by apply, and tells the peers before it, by the tunnel where that is their way, and
// after it, beside the tunnel: that carries nothing more to those that have not heard. What is sent into it all the
// same begins the handshake, with those behind a relay, too.
func (a *Agent) turnKey(private dataplane.Key, apply func() (dataplane.Report, error)) (dataplane.Report, error) {
	keys, peers, has := a.rekeying.Turning(private)
	if keys == nil {
		return apply()
	}
	for _, id := range peers {
		a.signalRekey(a.sendSignal, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
	}
	report, err := apply()
	for _, id := range peers {
		a.signalRekey(a.sendSignalTunnelled, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
		a.signalRekey(a.sendSignalRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.DevicePublic)
	}
	if tried := err == nil || len(report.Errors) > 0; tried && report.Errors["wireguard"] == nil {
		has()
	}
	return report, err
}

// agreeOnKey has the log take this host's key.
func (a *Agent) agreeOnKey(ctx context.Context, key identity.WireGuardKey) (index uint64, err error) {
	answer, err := a.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{
		RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: a.id.String(), WireguardKey: key[:]}}})
	return answer.GetIndex(), err
}

// subjectKey is the problem that the log does not have this host's key.
const subjectKey = "WireGuard key"

// followKey takes over what the log says of this host's key, and has it take the device's where that is another: after
// a change whose event failed, after a start in the middle of one, and where a backup has brought a former key back.
// Where somebody was quicker to have the log take the device's key, which peers had heard of, the device gets one that
// nobody has heard of.
func (a *Agent) followKey(ctx context.Context) {
	n, own := a.loop.state.Node(a.id), a.wg.Load()
	if n == nil {
		return
	}
	switch {
	case bytes.Equal(n.GetWireguardKey(), own.DevicePublic[:]):
		if own.Settled() {
			return
		}
		keys, err := rekey.NewKeys(own.Device, own.Device)
		if err != nil { // it was one already
			return
		}
		a.wg.Store(keys)
		a.rekeying.Agree()
		a.packetKeys.Clear()
		for id := range a.loop.members { // probes have other keys, too
			if m, ok := a.roster.Get(id); ok && id != a.id {
				a.loop.unprobed[id] = m
			}
		}
		a.report(subjectKey, warning, "", "")
		if err := identity.ForgetFormer(a.cfg.StateDir); err != nil {
			a.log.Warn("the former WireGuard key stays on the disk", "error", err)
		}
	case a.rekeying.Active():
	case a.keyTaken(own.DevicePublic):
		if err := a.anotherKey(own); err != nil {
			a.report(subjectKey, warning, err.Error(), "this host cannot be reached until it has a key that the log takes")
		}
		a.wakeUp()
	case a.client != nil && a.rekeying.Telling.CompareAndSwap(false, true):
		go func() {
			if _, err := a.agreeOnKey(ctx, own.DevicePublic); err != nil {
				a.report(subjectKey, warning, "the cluster does not know this host's key yet: "+err.Error(),
					"it is told again every few seconds; peers that have not heard of it cannot be reached")
			}
			time.AfterFunc(rekeyRetry, func() {
				a.rekeying.Telling.Store(false)
				a.wakeUp()
			})
		}()
	}
}

// keyTaken reports whether the log has given a key to another node or plain peer.
func (a *Agent) keyTaken(key identity.WireGuardKey) bool {
	owner := a.loop.state.KeyOwner(key[:])
	return owner != "" && owner != a.id.String()
}

// anotherKey replaces the next key of a change whose event is missing.
func (a *Agent) anotherKey(own *rekey.Keys) error {
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return err
	}
	keys, err := rekey.NewKeys(own.Agreed, next)
	if err != nil {
		return err
	}
	if err := identity.ReplaceWireGuard(a.cfg.StateDir, next); err != nil {
		return err
	}
	a.log.Warn("somebody else has this host's next WireGuard key in the log: it gets another one",
		"who", a.loop.state.KeyOwner(own.DevicePublic[:]))
	a.wg.Store(keys)
	return nil
}
