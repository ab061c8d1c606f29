package events

import (
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	fouSchema      = 10 // brought the setting of the tunnels' port
	defaultFoUPort = 5555
)

// While the port of the tunnels changes, everybody takes what comes to either port. Clients come to it one after the
// other, so senders keep to the former port for FoUPortTurn after the event. Nobody sends there any more long before
// FoUPortEnd, when the former port is given up.
const (
	FoUPortTurn = 2 * time.Minute
	FoUPortEnd  = 10 * time.Minute
)

// ownPorts are UDP ports that hosts have for something else, where a listener of tunnels on all addresses is in the
// way.
var ownPorts = map[uint32]string{51820: "WireGuard", 3478: "STUN and relays", 7946: "gossip"}

// setFoUPort notes in next how the tunnels come to their port.
func (d *decision) setFoUPort(next *skeinv1.Settings) error {
	old := d.s.Settings()
	next.FouPortChange = proto.CloneOf(old.GetFouPortChange())
	if withDefaults(next).GetFouPort() == old.GetFouPort() {
		return nil
	}
	for n := range d.s.nodes.all() {
		if n.GetMaxSchema() < fouSchema {
			return refuse(FailedPrecondition, "setting fou_port: node %s runs a version that knows only port %d: upgrade "+
				"skein on %s, "+
				"or remove it", n.GetName(), old.GetFouPort(), n.GetName())
		}
	}
	if c := old.GetFouPortChange(); c != nil {
		if left := FoUPortEnd - time.Duration(d.c.GetTime()-c.GetSince()); left > 0 && left <= FoUPortEnd {
			return refuse(FailedPrecondition, "setting fou_port: the tunnels are still changing from port %d to %d, which "+
				"takes %s: "+
				"try again in %s", c.GetFormer(), old.GetFouPort(), FoUPortEnd, left.Round(time.Second))
		}
	}
	next.FouPortChange = &skeinv1.FouPortChange{Former: old.GetFouPort(), Since: d.c.GetTime()}
	return nil
}
