package node

import (
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// fouPorts tracks the tunnels' port while the cluster changes it.
type fouPorts struct {
	change *skeinv1.FouPortChange
	seen   time.Time     // when this process saw the change
	age    time.Duration // age of the change at that time
}

// follow returns the current ports, and the time until they may differ; zero: only the state can change them. The age
// of a change is taken from the log's times plus the time since this process saw it, since hosts' clocks differ. The
// host's clock is used only for a change that was there when the process started.
func (f *fouPorts) follow(st *events.State, start bool, now time.Time) (p dataplane.FoUPorts, next time.Duration) {
	set := st.Settings()
	c := set.GetFouPortChange()
	p.Send = uint16(set.GetFouPort())
	if c == nil {
		f.change = nil
		return p, 0
	}
	if f.change.GetSince() != c.GetSince() || f.change.GetFormer() != c.GetFormer() {
		*f = fouPorts{change: c, seen: now, age: max(time.Duration(st.Time()-c.GetSince()), 0)}
		if start {
			f.age = max(now.Sub(time.Unix(0, c.GetSince())), f.age)
		}
	}
	age := f.age + now.Sub(f.seen)
	switch {
	case age < events.FoUPortTurn:
		return dataplane.FoUPorts{Send: uint16(c.GetFormer()), Also: p.Send}, events.FoUPortTurn - age
	case age < events.FoUPortEnd:
		p.Also = uint16(c.GetFormer())
		return p, events.FoUPortEnd - age
	}
	p.Gone = uint16(c.GetFormer())
	return p, 0
}
