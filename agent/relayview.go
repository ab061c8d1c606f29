package agent

import (
	"context"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Relay tells how this node's relay sessions do, and what it relays for others.
func (s services) Relay(context.Context, *skeinv1.RelayRequest) (*skeinv1.RelayResponse, error) {
	out := &skeinv1.RelayResponse{Server: s.a.relayServer()}
	for _, l := range s.a.pool.Stats() {
		out.Sessions = append(out.Sessions, &skeinv1.RelaySession{
			NodeId: l.Relay.String(), Name: s.a.roster.Name(l.Relay), Addresses: l.Addresses, State: l.State(), Need: l.Need,
			RttNanos: int64(l.RTT),
			Peers:    uint32(l.Peers), RxBytes: l.RxBytes, TxBytes: l.TxBytes, RxPackets: l.RxPackets, TxPackets: l.TxPackets,
			Dropped: l.Dropped, Reconnects: l.Reconnects, Error: l.LastError,
		})
	}
	return out, nil
}

// isRelay tells whether a member relays, as its record says.
func (a *Agent) isRelay(id identity.ID) bool {
	known := a.relayIDs.Load()
	return known != nil && (*known)[id]
}

// relayServer tells what this node relays; nil: it does not.
func (a *Agent) relayServer() *skeinv1.RelayServer {
	listener := a.listener.Load() // it comes after the relay, which may begin while the agent runs
	if listener == nil {
		return nil
	}
	s, l := a.relay.Stats(), a.relay.Limits()
	out := &skeinv1.RelayServer{
		Streams: uint32(s.Streams), Packets: s.Packets, Bytes: s.Bytes, BytesPerSecond: s.Rate, Dropped: s.Dropped,
		Unroutable: s.Unroutable,
		Replaced:   s.Replaced, Refused: s.Refused, Limited: s.Limited, MemoryBytes: uint64(max(s.Memory, 0)),
		StreamBytes: s.StreamBytes,
		Limits: &skeinv1.RelayServerLimits{
			MemoryBytes: uint64(l.MaxMemory), Sessions: uint32(l.MaxSessions), Streams: uint32(l.MaxStreams),
			StreamsPerClient: uint32(l.MaxStreamsPerClient),
			QueueBytes:       uint64(l.QueueBytes), ClientBytesPerSecond: uint64(l.ClientBytes),
			ClientPacketsPerSecond: uint64(l.ClientPackets),
		},
	}
	open, refused := listener.Stats()
	out.Handshakes, out.HandshakesRefused = uint32(open), refused
	if udp := a.udp.Load(); udp != nil {
		out.UdpPairs = uint32(udp.Stats().Pairs)
	}
	for _, c := range a.relay.Clients() {
		out.Clients = append(out.Clients, &skeinv1.RelayClient{
			NodeId: c.ID.String(), Name: a.roster.Name(c.ID), Address: c.Address, Since: c.Since.UnixNano(), RxBytes: c.RxBytes,
			TxBytes:   c.TxBytes,
			RxPackets: c.RxPackets, TxPackets: c.TxPackets, BytesPerSecond: c.Rate, Dropped: c.Dropped,
			QueueBytes: uint64(c.QueueBytes), QueuePackets: uint32(c.Packets), Limited: c.Limited,
		})
	}
	return out
}
