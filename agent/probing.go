package agent

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/reflection"
	"github.com/skeinmesh/skein/identity"
)

// What is sent from WireGuard's port besides WireGuard's packets, and what comes to it.

// pinger sends pings from WireGuard's port, and ahead of those to a relay's reserved port what shows the relay where
// they come from.
type pinger struct{ a *Agent }

// SendPing pings a peer at an endpoint.
func (p pinger) SendPing(peer identity.ID, to netip.AddrPort) ([12]byte, error) {
	if b, ok := p.a.pool.Bind(to); ok {
		if err := p.a.socket.Send(to, b); err != nil {
			return [12]byte{}, fmt.Errorf("show relay port %s this host's mapping: %w", to, err)
		}
	}
	tx, err := p.a.prober.SendPing(peer, to)
	return tx, err
}

// SendPingSize is SendPing with padding. It follows a small one, which has shown the relay what is to be shown.
func (p pinger) SendPingSize(peer identity.ID, to netip.AddrPort, size int) ([12]byte, error) {
	tx, err := p.a.prober.SendPingSize(peer, to, size)
	return tx, err
}

// onPing and onPong take what members have sent to WireGuard's port.
func (a *Agent) onPing(p probe.Ping) {
	a.predictor.PingReceived(p)
	a.paths.PingReceived(p.Peer, p.From, p.At)
}

func (a *Agent) onPong(p probe.Pong) {
	a.discovery.PongReceived(p)
	if p.From == p.To {
		a.predictor.PongReceived(p.Peer, p.From)
		a.reflection.Saw(p.Observed, p.From.Addr(), p.At)
		if reflection.Strange(p.Observed, p.From, a.netcheck.Load()) {
			a.discovery.STUN.Revalidate()
		}
	}
	a.paths.PongReceived(p.Peer, p.From, p.Tx, p.At)
}

// onStun hands STUN answers that came to WireGuard's port to whoever asked. Requests get no answer there: strangers
// hear nothing from this port, and members ping it.
func (a *Agent) onStun(from netip.AddrPort, local netip.Addr, payload []byte, at time.Time) {
	a.discovery.STUN.HandleSTUN(from, local, payload, at)
}

// onRelay takes what a relay has sent to WireGuard's port.
func (a *Agent) onRelay(from netip.AddrPort, local netip.Addr, payload []byte, _ time.Time) {
	if answer, ok := a.pool.TakeChallenge(from, payload); ok {
		if err := a.socket.SendFrom(local, from, answer); err != nil {
			a.log.Debug("a relay's challenge could not be answered", "from", from, "error", err)
		}
	}
}
