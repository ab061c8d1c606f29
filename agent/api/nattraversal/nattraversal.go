// Package nattraversal answers the commands about how this host gets through NATs: what discovery found (`skein
// netcheck`), its relay sessions, and what it relays for others (`skein relay`).
package nattraversal

import (
	"context"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/discovery"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
)

// checkWithin bounds how long a user waits for a new discovery.
const checkWithin = 10 * time.Second

// Host is what the answers need of the agent. Its methods may be called from any goroutine.
type Host interface {
	// Name is a member's name, or its ID if nothing else is known.
	Name(identity.ID) string
	// Discovery finds this host's addresses and its NAT; nil: this node only relays, or has not begun yet.
	Discovery() *discovery.Discovery
	// LastChecked is a result of discovery; nil: there is none. It may be older than Discovery's.
	LastChecked() *candidate.Result
	// TunnelMTU is the largest packet, in bytes, that the tunnel carries; 0: no link is known.
	TunnelMTU() int
	// Relays has the sessions with relays.
	Relays() *client.Pool
	// Relaying is what relays for others here. The listener is nil where nothing does, and the UDP relay where none is.
	Relaying() (*server.Server, *admission.Listener, *udp.Relay)
}

// TraversalService is that part of the API.
type TraversalService struct {
	Host          Host
	WireGuardPort uint16
}

// Netcheck is what discovery found, after a new one if that is asked for.
func (s TraversalService) Netcheck(ctx context.Context, r *skeinv1.NetcheckRequest) (*skeinv1.NetcheckResponse, error) {
	if d := s.Host.Discovery(); r.GetRefresh() && d != nil {
		ctx, cancel := context.WithTimeout(ctx, checkWithin)
		defer cancel()
		if _, err := d.Check(ctx); err != nil {
			return nil, api.Error(err)
		}
	}
	out := &skeinv1.NetcheckResponse{}
	if n := s.newest(); n != nil {
		out = &skeinv1.NetcheckResponse{
			NatType: n.NAT, Udp: n.UDP, Ipv4: n.IPv4, Ipv6: n.IPv6, Candidates: n.Candidates,
			Hairpin: n.Hairpin, Mapping: string(n.Mapping), Filtering: string(n.Filtering), CheckedAt: n.At.UnixNano(),
			PortPreserving: n.Preserving, PortStep: int32(n.PortStep),
		}
		out.Advice = n.AllAdvice(s.WireGuardPort)
		for _, note := range n.Notes {
			out.Notes = append(out.Notes, &skeinv1.DiscoveryNote{Source: note.Source, Ok: note.OK, Text: note.Text})
		}
		for _, g := range n.Host.Gateways {
			out.Gateways = append(out.Gateways, g.Addr.String())
		}
		out.TunnelMtu = uint32(s.Host.TunnelMTU())
		for _, m := range n.Mapped {
			out.Mapped = append(out.Mapped, m.String())
		}
	}
	for _, l := range s.Host.Relays().Stats() {
		out.Relays = append(out.Relays, &skeinv1.RelayCheck{
			NodeId: l.Relay.String(), Name: s.Host.Name(l.Relay), Address: strings.Join(l.Addresses, " "),
			Connected: l.Connected, RttNanos: int64(l.RTT), Error: l.LastError, State: l.State(),
		})
	}
	return out, nil
}

// newest is the newest result of discovery.
func (s TraversalService) newest() *candidate.Result {
	if d := s.Host.Discovery(); d != nil {
		if r := d.Result(); !r.At.IsZero() {
			return &r
		}
	}
	return s.Host.LastChecked()
}

// Relay tells how this node's relay sessions do, and what it relays for others.
func (s TraversalService) Relay(context.Context, *skeinv1.RelayRequest) (*skeinv1.RelayResponse, error) {
	out := &skeinv1.RelayResponse{Server: s.server()}
	for _, l := range s.Host.Relays().Stats() {
		out.Sessions = append(out.Sessions, &skeinv1.RelaySession{
			NodeId: l.Relay.String(), Name: s.Host.Name(l.Relay), Addresses: l.Addresses, State: l.State(), Need: l.Need,
			RttNanos: int64(l.RTT),
			Peers:    uint32(l.Peers), RxBytes: l.RxBytes, TxBytes: l.TxBytes, RxPackets: l.RxPackets, TxPackets: l.TxPackets,
			Dropped: l.Dropped, Reconnects: l.Reconnects, Error: l.LastError,
		})
	}
	return out, nil
}

// server tells what this node relays; nil: it does not.
func (s TraversalService) server() *skeinv1.RelayServer {
	relay, listener, udp := s.Host.Relaying()
	if listener == nil {
		return nil
	}
	n, l := relay.Stats(), relay.Limits()
	out := &skeinv1.RelayServer{
		Streams: uint32(n.Streams), Packets: n.Packets, Bytes: n.Bytes, BytesPerSecond: n.Rate, Dropped: n.Dropped,
		Unroutable: n.Unroutable,
		Replaced:   n.Replaced, Refused: n.Refused, Limited: n.Limited, MemoryBytes: uint64(max(n.Memory, 0)),
		StreamBytes: n.StreamBytes,
		Limits: &skeinv1.RelayServerLimits{
			MemoryBytes: uint64(l.MaxMemory), Sessions: uint32(l.MaxSessions), Streams: uint32(l.MaxStreams),
			StreamsPerClient: uint32(l.MaxStreamsPerClient),
			QueueBytes:       uint64(l.QueueBytes), ClientBytesPerSecond: uint64(l.ClientBytes),
			ClientPacketsPerSecond: uint64(l.ClientPackets),
		},
	}
	open, refused := listener.Stats()
	out.Handshakes, out.HandshakesRefused = uint32(open), refused
	if udp != nil {
		out.UdpPairs = uint32(udp.Stats().Pairs)
	}
	for _, c := range relay.Clients() {
		out.Clients = append(out.Clients, &skeinv1.RelayClient{
			NodeId: c.ID.String(), Name: s.Host.Name(c.ID), Address: c.Address, Since: c.Since.UnixNano(), RxBytes: c.RxBytes,
			TxBytes:   c.TxBytes,
			RxPackets: c.RxPackets, TxPackets: c.TxPackets, BytesPerSecond: c.Rate, Dropped: c.Dropped,
			QueueBytes: uint64(c.QueueBytes), QueuePackets: uint32(c.Packets), Limited: c.Limited,
		})
	}
	return out
}
