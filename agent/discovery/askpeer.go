package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/identity"
)

// Where a firewall drops STUN's port and nothing else, public peers tell by their pongs where this host's packets come
// from. They answer members alone: WireGuard's port is silent for strangers.

const askPeerAgain = 400 * time.Millisecond

// askedPeers are the pings that ask for nothing else. It is safe for concurrent use.
type askedPeers struct {
	mu      sync.Mutex
	at      map[netip.AddrPort]identity.ID // whose WireGuard port it is
	waiting map[probe.TxID]chan<- probe.Pong
}

// peersAt says whose the ports are that may be asked.
func (q *askedPeers) peersAt(at map[netip.AddrPort]identity.ID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.at = at
}

// send sends a ping and notes where its answer goes. The lock is held meanwhile, since the answer may be quick.
func (q *askedPeers) send(at netip.AddrPort, answer chan<- probe.Pong,
	ping func(identity.ID) (probe.TxID, error)) (probe.TxID, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	id, ok := q.at[at]
	if !ok {
		return probe.TxID{}, fmt.Errorf("no public peer is at %s any more", at)
	}
	tx, err := ping(id)
	if err == nil {
		if q.waiting == nil {
			q.waiting = map[probe.TxID]chan<- probe.Pong{}
		}
		q.waiting[tx] = answer
	}
	return tx, err
}

// heard hands a pong to whoever waits for it.
func (q *askedPeers) heard(p probe.Pong) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if c := q.waiting[p.Tx]; c != nil && p.From == p.To {
		select {
		case c <- p:
		default:
		}
	}
}

func (q *askedPeers) forget(all []probe.TxID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, tx := range all {
		delete(q.waiting, tx)
	}
}

// askPeer asks a public peer's WireGuard port where this host's packets come from.
func (d *Discovery) askPeer(ctx context.Context, at netip.AddrPort) (netip.AddrPort, time.Duration, error) {
	return d.peers.ask(ctx, at, func(id identity.ID) (probe.TxID, error) { return d.cfg.Ping(id, at) })
}

// SetPeers sets the WireGuard ports of public peers, which are asked when no STUN server answers.
func (d *Discovery) SetPeers(at map[netip.AddrPort]identity.ID) {
	d.peers.peersAt(at)
	d.STUN.SetSpare(slices.SortedFunc(maps.Keys(at), netip.AddrPort.Compare))
}

// PongReceived handles a pong from a peer.
func (d *Discovery) PongReceived(p probe.Pong) { d.peers.heard(p) }

func (q *askedPeers) ask(ctx context.Context, at netip.AddrPort,
	ping func(identity.ID) (probe.TxID, error)) (netip.AddrPort, time.Duration, error) {
	answer := make(chan probe.Pong, 1)
	var sent []probe.TxID
	defer func() { q.forget(sent) }()
	again := time.NewTicker(askPeerAgain)
	defer again.Stop()
	for {
		tx, err := q.send(at, answer, ping)
		if err != nil {
			return netip.AddrPort{}, 0, err
		}
		sent = append(sent, tx)
		select {
		case p := <-answer:
			if !p.Observed.IsValid() {
				return netip.AddrPort{}, 0, errors.New("the peer does not tell where the ping came from")
			}
			return p.Observed, p.RTT, nil
		case <-again.C:
		case <-ctx.Done():
			return netip.AddrPort{}, 0, ctx.Err()
		}
	}
}
