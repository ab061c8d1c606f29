package egressns

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// The tunnels' port changes during flows, at the gateway and at the client one after the other. No packet of the
// flows is lost, the lease stays, and packets to a port that is no longer the tunnels' are dropped.
func TestPortsChangeLive(t *testing.T) {
	s := newScene(t)
	spec := aSpec()
	s.apply(spec)
	s.grant(0, time.Minute)
	flows := map[netip.Addr]*net.UDPConn{target4: s.socket(client4), target6: s.socket(client6)}
	for to, c := range flows {
		s.seen(c, to)
	}
	const next = 6000
	both, turned := dataplane.FoUPorts{Also: next}, dataplane.FoUPorts{Send: next, Also: dataplane.FoUPort}
	for step, ports := range []struct{ gateway, client dataplane.FoUPorts }{
		{both, dataplane.FoUPorts{}}, {both, both}, {turned, both}, {turned, turned},
		{dataplane.FoUPorts{Send: next}, turned},
	} {
		spec.Ports = ports.gateway
		if w := s.apply(spec); w == 0 && step != 1 && step != 3 {
			t.Errorf("step %d: no write", step)
		}
		if w := s.apply(spec); w != 0 {
			t.Errorf("step %d: %d writes after it", step, w)
		}
		s.clientPorts(ports.client)
		for to, c := range flows {
			for range 10 {
				if s.ask(c, to, 5*time.Second) == "" {
					t.Fatalf("step %d: a packet to %s has no answer\n%s", step, to, s.state())
				}
			}
		}
	}
	s.clientPorts(dataplane.FoUPorts{Also: next}) // who has not heard
	for to, c := range flows {
		s.silent("the former port", c, to)
	}
}
