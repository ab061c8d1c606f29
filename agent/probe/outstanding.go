package probe

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// ping is one that waits for its pong.
type ping struct {
	peer identity.ID
	to   netip.AddrPort
	size int
	at   time.Time
}

// outstanding holds the pings under way, oldest first in order. It stays below maxOutstanding by
// forgetting the oldest, and forgets what has waited for too long whenever one is added.
type outstanding struct {
	byTx  map[TxID]ping
	most  int    // that there were in it
	order []TxID // may name pings that were answered
	head  int
}

func (o *outstanding) add(tx TxID, p ping) {
	for o.head < len(o.order) {
		old, ok := o.byTx[o.order[o.head]]
		if ok && p.at.Sub(old.at) < pongWait && len(o.byTx) < maxOutstanding && len(o.order)-o.head < 2*maxOutstanding {
			break
		}
		delete(o.byTx, o.order[o.head])
		o.head++
	}
	if o.head > 64 && o.head*2 > len(o.order) {
		o.order = o.order[:copy(o.order, o.order[o.head:])]
		o.head = 0
	}
	if o.most = max(o.most, len(o.byTx)); o.most > 1024 && len(o.byTx) < o.most/8 {
		// Maps never shrink, and a start pings everybody at once.
		o.byTx, o.order, o.most = maps.Collect(maps.All(o.byTx)), slices.Clone(o.order[o.head:]), len(o.byTx)
		o.head = 0
	}
	o.byTx[tx] = p
	o.order = append(o.order, tx)
}

// resolve ends the wait for a pong, which must come from the peer that was pinged.
func (o *outstanding) resolve(tx TxID, from identity.ID, now time.Time) (ping, bool) {
	p, ok := o.byTx[tx]
	if !ok || p.peer != from {
		return ping{}, false
	}
	delete(o.byTx, tx)
	return p, now.Sub(p.at) < pongWait
}
