package path

import (
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A ping that is nearly due leaves when its peer's machine runs for another reason, and not before.
func TestPingsMayLeaveEarly(t *testing.T) {
	e := ap("203.0.113.2:2000")
	peer := node(natRestricted, cand(srflx, e.String()))
	for name, c := range map[string]struct {
		busy  bool
		early time.Duration
	}{"busy": {true, heartbeatEarly}, "idle": {false, idleKeepalive / keepaliveEarly}} {
		t.Run(name, func(t *testing.T) {
			m := NewMachine(nodeIDs[0], nodeIDs[1], simStart)
			var wake Action
			tick := func(now time.Time) (pinged bool) {
				var actions []Action
				m, actions = Step(m, now, Input{Kind: InputTick})
				for _, a := range actions {
					pinged = pinged || a.Kind == ActionPing
					if a.Kind == ActionWake {
						wake = a
					}
				}
				if !now.Before(wake.At.Add(-wake.Early)) {
					t.Fatalf("woken at %v it asks to be woken %v before %v: that is now", now, wake.Early, wake.At)
				}
				return pinged
			}
			m, _ = Step(m, simStart, Input{Kind: InputPeer, Node: &peer})
			for now := simStart; now.Sub(simStart) < 2*watchFor; now = wake.At { // later it is not watched for being new
				if tick(now) {
					m, _ = Step(m, now, Input{Kind: InputPong, Endpoint: e, RTT: 0, Sent: now})
					tick(now)
				}
				if c.busy {
					m, _ = Step(m, now, Input{Kind: InputTraffic})
				}
			}
			if m.Path.Kind != Direct || wake.Early != c.early {
				t.Fatalf("path %v, to be woken up to %v early", m.Path, wake.Early)
			}
			at := wake.At.Add(-c.early)
			if tick(at.Add(-1)) {
				t.Errorf("a ping more than %v early", c.early)
			}
			if !tick(at) {
				t.Errorf("no ping %v early", c.early)
			}
		})
	}
}

// moments counts the times at which pings leave.
type moments struct {
	*echo
	last time.Time
	n    int
}

func (c *moments) SendPing(peer identity.ID, to netip.AddrPort) ([12]byte, error) {
	if !c.now.Equal(c.last) {
		c.last, c.n = c.now, c.n+1
	}
	return c.echo.SendPing(peer, to)
}

// A wake-up costs more than a ping: the pings of many idle peers leave together.
func TestIdlePeersArePingedTogether(t *testing.T) {
	e, ids := fleet(1000)
	c := &moments{echo: e}
	e.m.cfg.Prober = c
	before := e.m.Metrics().PingsSent
	e.run(5 * time.Minute)
	pings := e.m.Metrics().PingsSent - before
	t.Logf("%d pings to %d peers at %d moments", pings, len(ids), c.n)
	if c.n > 5*60*4 {
		t.Errorf("%d moments in five minutes, want four a second at most", c.n)
	}
}
