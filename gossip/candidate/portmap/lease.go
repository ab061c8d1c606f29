package portmap

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/natpmp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/pcp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/upnp"
)

// Protocols by the names that candidates, notes and the configuration use.
const (
	PCP    = "pcp"
	NATPMP = "natpmp"
	UPnP   = "upnp"
)

// Protocols are all of them, the preferred ones first: PCP ties a mapping to who asked for it, and UPnP takes the most
// round trips.
var Protocols = []string{PCP, NATPMP, UPnP}

const (
	askFor      = 2 * time.Hour  // of lifetime; RFC 6886 section 3.3 recommends it
	mostOf      = 24 * time.Hour // of a longer grant is believed
	permanent   = time.Hour      // a mapping without an end is looked after as often
	checkEvery  = time.Minute
	proveEvery  = 10 * time.Minute // a router may lose a mapping without a word
	lookEvery   = 5 * time.Minute  // for a router that speaks none of the protocols
	retryLeast  = 10 * time.Second
	announceGap = 5 * time.Second
)

// lease is a mapping that a router granted.
type lease struct {
	protocol string
	gateway  candidate.Gateway
	outer    netip.AddrPort
	granted  time.Time
	lifetime time.Duration
	forever  bool // it ends only when it is deleted
	epoch    epoch
	device   *upnp.Device // of UPnP
	proof    Proof
	provenAt time.Time
}

func (l *lease) renewAt() time.Time   { return l.granted.Add(l.lifetime / 2) }
func (l *lease) expiresAt() time.Time { return l.granted.Add(l.lifetime) }

// errForgotten means that the router has lost the mapping.
var errForgotten = errors.New("the router has forgotten the mapping")

// errUseless means that a grant leads nowhere from outside.
var errUseless = errors.New("not published")

// peer is the gateway as the protocols want it.
func (s *Step) peer(g candidate.Gateway) ask.Gateway {
	return ask.Gateway{Addr: netip.AddrPortFrom(g.Addr, pcp.Port), Local: g.Local, Mark: s.c.Mark}
}

// requestMapping asks for a mapping, or renews one, by one protocol. outer is what is wished for.
func (s *Step) requestMapping(ctx context.Context, protocol string, g candidate.Gateway, outer netip.AddrPort,
	device *upnp.Device) (*lease, error) {
	l := &lease{protocol: protocol, gateway: g, device: device}
	var err error
	switch protocol {
	case PCP:
		var grant pcp.Grant
		grant, err = pcp.Map(ctx, s.peer(g), s.wish(g, outer, askFor))
		l.outer, l.lifetime, l.epoch.seconds = grant.Outer, grant.Lifetime, grant.Epoch
	case NATPMP:
		var grant natpmp.Grant
		if grant, err = natpmp.Map(ctx, s.peer(g), natpmp.Wish{Inner: s.c.Port, Outer: outer.Port(),
			Lifetime: askFor}); err == nil {
			var a netip.Addr
			a, l.epoch.seconds, err = natpmp.Address(ctx, s.peer(g))
			l.outer, l.lifetime = netip.AddrPortFrom(a, grant.Outer), grant.Lifetime
		}
	case UPnP:
		var grant upnp.Grant
		grant, err = device.Map(ctx, upnp.Wish{Inner: s.c.Port, Outer: outer.Port(), Lifetime: askFor})
		if l.outer, l.lifetime = grant.Outer, grant.Lifetime; l.lifetime == 0 {
			l.lifetime, l.forever = permanent, true
		}
	}
	if err != nil {
		return nil, err
	}
	l.granted = time.Now()
	l.epoch.at = l.granted
	l.lifetime = min(l.lifetime, mostOf)
	return l, nil
}

func (s *Step) wish(g candidate.Gateway, outer netip.AddrPort, lifetime time.Duration) pcp.Wish {
	inner := netip.AddrPortFrom(g.Local, s.c.Port)
	return pcp.Wish{Inner: inner, Outer: outer, Lifetime: lifetime, Nonce: pcp.MakeNonce(s.c.Secret, g.Addr, inner)}
}

// check asks whether the router still has a lease; errForgotten means that it does not.
func (s *Step) check(ctx context.Context, l *lease) error {
	var seconds uint32
	var err error
	outer := l.outer.Addr()
	switch l.protocol {
	case PCP:
		seconds, err = pcp.Announce(ctx, s.peer(l.gateway))
	case NATPMP:
		outer, seconds, err = natpmp.Address(ctx, s.peer(l.gateway))
	case UPnP:
		if err = l.device.Check(ctx, s.c.Port, l.outer.Port()); errors.Is(err, upnp.ErrLost) {
			return errForgotten
		}
		if err == nil {
			outer, err = l.device.ExternalAddress(ctx)
		}
		if err == nil && outer != l.outer.Addr() {
			return errForgotten
		}
		return err
	}
	if err != nil {
		return err
	}
	now := epoch{seconds, time.Now()}
	if l.epoch.lost(now) || outer != l.outer.Addr() {
		return errForgotten
	}
	l.epoch = now
	return nil
}

// giveBack ends a lease at the router.
func (s *Step) giveBack(ctx context.Context, l *lease) error {
	var err error
	switch l.protocol {
	case PCP:
		_, err = pcp.Map(ctx, s.peer(l.gateway), s.wish(l.gateway, netip.AddrPort{}, 0))
	case NATPMP:
		_, err = natpmp.Map(ctx, s.peer(l.gateway), natpmp.Wish{Inner: s.c.Port})
	case UPnP:
		err = l.device.Unmap(ctx, l.outer.Port())
	}
	if err != nil {
		return fmt.Errorf("give the mapping of %s back: %w", l.outer, err)
	}
	return nil
}
