package node

import (
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// fouPorts follows the port of egresses' tunnels while the cluster changes it.
type fouPorts struct {
	change *skeinv1.FouPortChange
	seen   time.Time     // when this process saw the change
	age    time.Duration // that it had then
}

// follow is which ports hold now, and in how long there may be others; zero: not by time alone. A change is as old as
// the log shows, and then as long as this process knows it: clocks of hosts differ. Only where it was there when the
// process started does the host's clock count, too.
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
