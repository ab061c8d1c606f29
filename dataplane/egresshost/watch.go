package egresshost

import (
	"errors"
	"slices"

	"github.com/mdlayher/netlink"

	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Watch calls changed, from any goroutine, whenever something that the latest Spec wants may have changed, until Close:
// then Reconcile is to be called again. It hears of the calling thread's network namespace. Our own writes are not told
// apart: a Reconcile that finds nothing to do is cheap.
func (r *Reconciler) Watch(changed func()) error {
	ourTable := func(m netlink.Message) bool { return nftable.Concerns(m, r.n.EgressNftTable) }
	links := uint32(rtnl.Links | rtnl.Routes | rtnl.Rules | rtnl.Settings)
	return errors.Join(r.listener.Routing(0, links, rtnl.When(r.concerns, changed)),
		r.listener.Tables(0, rtnl.When(ourTable, changed)))
}

// concerns says whether a notification may be about something of ours.
func (r *Reconciler) concerns(m netlink.Message) bool {
	w := r.watched.Load()
	switch {
	case rtnl.IsLink(m): // or of one that was so named before
		return w.names[rtnl.LinkName(m)] || w.indexes[rtnl.Index(m)]
	case rtnl.IsSetting(m):
		return w.indexes[rtnl.Index(m)]
	case rtnl.IsRoute(m), rtnl.IsRule(m):
		return rtnl.Table(m) == r.n.EgressTable()
	}
	return false
}

// watched are the links that a Spec names, as far as they are there by their indexes, too.
type watched struct {
	names   map[string]bool
	indexes map[int]bool
}

func watchedOf(s Spec, links map[string]int) *watched {
	w := &watched{names: map[string]bool{}, indexes: map[int]bool{}}
	all := slices.Clone(s.Uplinks)
	for _, r := range s.Routes {
		all = append(all, r.Link)
	}
	for _, name := range all {
		w.names[name] = true
		if index, there := links[name]; there {
			w.indexes[index] = true
		}
	}
	return w
}
