package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/linkhold"
	"github.com/skeinmesh/skein/identity"
)

// ownKeys are this host's WireGuard keys. They differ between the change of the device and the event about it.
type ownKeys struct {
	// agreed is the key that the log has: keys of control packets and of probes follow from it at both ends.
	agreed, agreedPublic identity.WireGuardKey
	// device is the key of the tunnels.
	device, devicePublic identity.WireGuardKey
}

func newOwnKeys(agreed, device identity.WireGuardKey) (*ownKeys, error) {
	k := &ownKeys{agreed: agreed, device: device}
	var err1, err2 error
	k.agreedPublic, err1 = agreed.Public()
	k.devicePublic, err2 = device.Public()
	return k, errors.Join(err1, err2)
}

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
	keys, err := newOwnKeys(agreed, device)
	if err != nil {
		return err
	}
	a.wg.Store(keys)
	return nil
}

// settled reports whether the log has the device's key.
func (k *ownKeys) settled() bool { return k.agreed == k.device }

// rekeying is this host's own change of its key: one at a time.
type rekeying struct {
	one sync.Mutex // held by the request

	mu      sync.Mutex
	keys    *ownKeys // nil: no change is under way
	peers   []identity.ID
	phase   skeinv1.Signal_Rekey_Phase // that peers are to come to
	waits   map[identity.ID]bool       // for these
	changed chan struct{}              // closed when one is
	turned  chan struct{}              // closed when the device has the key; nil: it has
	agreed  chan struct{}              // closed when the log that this host knows has the key; nil: it has

	telling atomic.Bool // the log is being asked to take the device's key, or was a moment ago
}

func (r *rekeying) begin(keys *ownKeys, peers []identity.ID) (turned, agreed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.peers, r.waits = keys, peers, make(map[identity.ID]bool, len(peers))
	r.changed, r.turned, r.phase = make(chan struct{}), make(chan struct{}), skeinv1.Signal_Rekey_READY
	r.agreed = make(chan struct{})
	for _, id := range peers {
		r.waits[id] = true
	}
	return r.turned, r.agreed
}

// settled notes that the log has the device's key.
func (r *rekeying) settled() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.agreed != nil {
		close(r.agreed)
		r.agreed = nil
	}
}

// expect waits for peers once more.
func (r *rekeying) expect(peers []identity.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.phase = skeinv1.Signal_Rekey_FOLLOWED
	clear(r.waits)
	for _, id := range peers {
		r.waits[id] = true
	}
}

// active reports whether a request is at it.
func (r *rekeying) active() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keys != nil
}

func (r *rekeying) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.peers, r.waits, r.agreed = nil, nil, nil, nil
}

// came notes how far a peer is with a key of this host's.
func (r *rekeying) came(id identity.ID, phase skeinv1.Signal_Rekey_Phase, key identity.WireGuardKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waits[id] && phase == r.phase && r.keys.devicePublic == key {
		delete(r.waits, id)
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// left are the peers that are waited for, and a channel that is closed when there is one less.
func (r *rekeying) left() ([]identity.ID, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.waits)), r.changed
}

// turning is the change that a device goes through which gets a private key; nil: none. has is called when it has it.
func (r *rekeying) turning(private dataplane.Key) (keys *ownKeys, peers []identity.ID, has func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys == nil || r.turned == nil || dataplane.Key(r.keys.device) != private {
		return nil, nil, nil
	}
	return r.keys, r.peers, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.turned != nil {
			close(r.turned)
			r.turned = nil
		}
	}
}

// signalNextKey tells a peer of this host's next key.
func (a *Agent) signalNextKey(id identity.ID, keys *ownKeys) {
	m, _ := a.roster.get(id)
	proof, err := identity.PairKey(keys.device, m.wg, a.cluster, nextKeyPurpose(a.id))
	if err != nil {
		a.log.Warn("a peer cannot be told of this host's next WireGuard key", "peer", m.name, "error", err)
		return
	}
	a.signalOfRekey(a.sendSignal, id, &skeinv1.Signal_Rekey{Phase: skeinv1.Signal_Rekey_PREPARE, Key: keys.devicePublic[:],
		Proof: proof[:]})
}

// RotateNodeKey gives this host another WireGuard key.
func (s services) RotateNodeKey(ctx context.Context,
	r *skeinv1.RotateNodeKeyRequest) (*skeinv1.RotateNodeKeyResponse, error) {
	a := s.a
	if !a.rekeying.one.TryLock() {
		return nil, connect.NewError(connect.CodeAborted, errors.New("this host's key is being changed already"))
	}
	defer a.rekeying.one.Unlock()
	if err := a.mayRekey(r.GetForce()); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return nil, err
	}
	own := a.wg.Load()
	keys, err := newOwnKeys(own.agreed, next)
	if err != nil {
		return nil, err
	}
	peers, err := a.talkers(ctx)
	if err != nil {
		return nil, err
	}
	turned, agreed := a.rekeying.begin(keys, peers)
	defer a.rekeying.end()
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
	index, err := a.agreeOnKey(ctx, keys.devicePublic)
	if err != nil { // the loop asks again until the log has it
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("this host has its next key, of which the cluster "+
			"is still to be told (%w): that goes on by itself, and peers that were not ready hear of it then", err))
	}
	// Another change may follow at once, so this one ends when this host has the event, too.
	select {
	case <-agreed:
	case <-ctx.Done():
	}
	out := &skeinv1.RotateNodeKeyResponse{WireguardKey: keys.devicePublic[:], Index: index,
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
	case !a.wg.Load().settled():
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
	all, reach := (*tunnelStats)(&read), a.reach.Load()
	for _, id := range a.roster.Members() {
		if id == a.id || !reach.peer(id) {
			continue
		}
		m, _ := a.roster.get(id)
		if p, ok := all.of(a.deviceKey(id, m.wg)); ok && time.Since(p.LastHandshake) < sessionLife {
			out = append(out, id)
		}
	}
	return out, nil
}

// sessionLife is how long a session of WireGuard's lasts after its handshake, by the protocol.
const sessionLife = 180 * time.Second

// prepareRekey tells the peers of the next key until all are ready, or their time is over.
func (a *Agent) prepareRekey(ctx context.Context, keys *ownKeys) (late []identity.ID, err error) {
	over := time.NewTimer(rekeyWait)
	defer over.Stop()
	for {
		left, changed := a.rekeying.left()
		if len(left) == 0 {
			return nil, nil
		}
		for _, id := range left {
			a.signalNextKey(id, keys)
		}
		again := time.NewTimer(rekeyAgain)
		for waiting := true; waiting; {
			select {
			case <-changed:
				if left, changed = a.rekeying.left(); len(left) == 0 {
					waiting = false
				}
			case <-again.C:
				waiting = false
			case <-over.C:
				left, _ := a.rekeying.left()
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
func (a *Agent) turnOver(ctx context.Context, keys *ownKeys, turned <-chan struct{}, ready []identity.ID) error {
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
	a.rekeying.expect(ready)
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
	again := time.NewTicker(rekeyTell)
	defer again.Stop()
	for {
		left, changed := a.rekeying.left()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-again.C:
			for _, id := range left {
				a.signalRekey(a.sendSignalRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.devicePublic)
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
	keys, peers, has := a.rekeying.turning(private)
	if keys == nil {
		return apply()
	}
	for _, id := range peers {
		a.signalRekey(a.sendSignal, id, skeinv1.Signal_Rekey_SWITCHED, keys.devicePublic)
	}
	report, err := apply()
	for _, id := range peers {
		a.signalRekey(a.sendSignalTunnelled, id, skeinv1.Signal_Rekey_SWITCHED, keys.devicePublic)
		a.signalRekey(a.sendSignalRelayed, id, skeinv1.Signal_Rekey_SWITCHED, keys.devicePublic)
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
	case bytes.Equal(n.GetWireguardKey(), own.devicePublic[:]):
		if own.settled() {
			return
		}
		keys, err := newOwnKeys(own.device, own.device)
		if err != nil { // it was one already
			return
		}
		a.wg.Store(keys)
		a.rekeying.settled()
		a.packetKeys.Clear()
		for id := range a.loop.members { // probes have other keys, too
			if m, ok := a.roster.get(id); ok && id != a.id {
				a.loop.unprobed[id] = m
			}
		}
		a.report(subjectKey, warning, "", "")
		if err := identity.ForgetFormer(a.cfg.StateDir); err != nil {
			a.log.Warn("the former WireGuard key stays on the disk", "error", err)
		}
	case a.rekeying.active():
	case a.keyTaken(own.devicePublic):
		if err := a.anotherKey(own); err != nil {
			a.report(subjectKey, warning, err.Error(), "this host cannot be reached until it has a key that the log takes")
		}
		a.wakeUp()
	case a.client != nil && a.rekeying.telling.CompareAndSwap(false, true):
		go func() {
			if _, err := a.agreeOnKey(ctx, own.devicePublic); err != nil {
				a.report(subjectKey, warning, "the cluster does not know this host's key yet: "+err.Error(),
					"it is told again every few seconds; peers that have not heard of it cannot be reached")
			}
			time.AfterFunc(rekeyRetry, func() {
				a.rekeying.telling.Store(false)
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
func (a *Agent) anotherKey(own *ownKeys) error {
	next, err := identity.NewWireGuardKey()
	if err != nil {
		return err
	}
	keys, err := newOwnKeys(own.agreed, next)
	if err != nil {
		return err
	}
	if err := identity.ReplaceWireGuard(a.cfg.StateDir, next); err != nil {
		return err
	}
	a.log.Warn("somebody else has this host's next WireGuard key in the log: it gets another one",
		"who", a.loop.state.KeyOwner(own.devicePublic[:]))
	a.wg.Store(keys)
	return nil
}
