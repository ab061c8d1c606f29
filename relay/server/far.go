package server

import (
	"slices"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// forward moves a client's packet towards another relay.
func (f *forwarder) forward(body []byte) {
	far, node, channel, payload := wire.DecodeFar(body)
	if far == f.s.cfg.Self {
		f.data(wire.AppendData(nil, node, channel, payload)[wire.HeaderSize:])
		return
	}
	f.release()
	f.packets++
	f.bytes += uint64(len(payload))
	if f.s.cfg.Forward == nil || !f.s.cfg.Forward(far, f.from.id, node, channel, payload) {
		f.s.counters.unroutable.Add(1)
		f.from.noWay(far, node, wire.NoWayNoRelay)
	}
}

// forwarded delivers what another relay hands over, to clients of this relay only.
func (f *forwarder) forwarded(body []byte) {
	origin, node, channel, payload := wire.DecodeFar(body)
	f.release()
	if f.s.cfg.Relay == nil || !f.s.cfg.Relay(f.from.id) || !f.s.cfg.Member(origin) {
		f.s.counters.unroutable.Add(1)
		return
	}
	to := f.s.session(node)
	if to == nil {
		f.s.counters.unroutable.Add(1)
		f.from.noWay(origin, node, wire.NoWayOrigin)
		return
	}
	f.packets++
	f.bytes += uint64(len(payload))
	to.Queue.Lock()
	to.Queue.AddKind(f.now, wire.FrameFar, f.from.id, origin, channel, payload)
	to.Queue.Unlock()
	if !slices.Contains(f.touched, to) {
		f.touched = append(f.touched, to)
	}
}

func (x *session) noWay(a, node identity.ID, code wire.NoWayCode) {
	x.Queue.PushControl(func(b []byte) []byte { return wire.AppendNoWay(b, a, node, code) })
}

// NoWay tells a client of this relay, if it has a session, that a far relay does not have a node.
func (s *Server) NoWay(far, client, node identity.ID) {
	if x := s.session(client); x != nil {
		x.noWay(far, node, wire.NoWayGone)
	}
}
