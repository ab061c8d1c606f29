package server

import (
	"net/netip"
	"slices"

	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

const (
	wherePerSecond = 20 // questions of one client, after a burst
	whereBurst     = 64
)

// where answers a client that asks where a node's packets come from.
func (s *Server) where(x *session, node identity.ID) {
	if x.questions == nil {
		x.questions = rate.NewLimiter(wherePerSecond, whereBurst)
	}
	if !x.questions.Allow() {
		return
	}
	addrs := s.observed(x.id, node)
	x.Queue.PushControl(func(b []byte) []byte { return wire.AppendSeen(b, node, addrs) })
}

// observed lists where a node's packets come from now: its session, what it has shown besides, and its mapping towards
// the port that is reserved for its packets to the asker.
func (s *Server) observed(asker, node identity.ID) (addrs []netip.Addr) {
	x := s.session(node)
	if x == nil {
		return nil
	}
	note := func(a netip.Addr) {
		if a = a.Unmap().WithZone(""); a.IsValid() && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	note(wire.RemoteIP(x.TLS.NetConn()))
	if a := x.shown.Load(); a != nil {
		note(*a)
	}
	if s.cfg.UDP != nil {
		note(s.cfg.UDP.Observed(asker, node))
	}
	return addrs
}

// show notes where a node's second connection comes from. It counts as long as the node's session lasts.
func (s *Server) show(peer identity.ID, from netip.Addr) error {
	x := s.session(peer)
	if x == nil {
		return wire.ErrNotHere
	}
	x.shown.Store(&from)
	return nil
}
