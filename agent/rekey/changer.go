package rekey

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Host is what a Changer needs of the agent. Its functions may be called from any goroutine.
type Host struct {
	ID          identity.ID
	Cluster     func() identity.ClusterID
	StateDir    string
	Link        string // of the tunnels
	ControlPort uint16 // of the control net, whose packets are never kept back
	Table       string // nftables' name of the table that keeps packets back
	Log         *slog.Logger
	Roster      *roster.Roster
	State       func() *events.State
	Tunnels     func() bool // whether this node has tunnels
	// Peers reads WireGuard's.
	Peers func(context.Context) ([]dataplane.PeerStatus, error)
	// Peered reports whether a node is a peer of this host's device, and not reached through another one.
	Peered func(identity.ID) bool
	// Send sends a signal by the best way, SendTunnelled by the tunnel alone, SendRelayed beside it.
	Send, SendTunnelled, SendRelayed func(identity.ID, *skeinv1.Signal) error
	Propose                          func(context.Context, *skeinv1.Command) (*skeinv1.Answer, error)
	// Report reports a problem with this host's key, or with an empty text that it is gone.
	Report func(text, advice string)
	Wake   func() // has the loop run once more
	Agreed func() // the log has this host's next key, from which the pairs' keys follow; called by Follow
}

// Changer has this host's WireGuard keys, and changes them; and it follows the changes of peers.
type Changer struct {
	keys  atomic.Pointer[Keys]
	host  Host
	own   own
	peers peers
}

// Set sets the keys, as Load has read them.
func (c *Changer) Set(k *Keys) { c.keys.Store(k) }

// Keys are this host's keys now.
func (c *Changer) Keys() *Keys { return c.keys.Load() }

// Attach gives what changes need. It comes before all methods but Set and Keys.
func (c *Changer) Attach(h Host) { c.host = h }

// View is what a projection has to know of peers that change their keys.
func (c *Changer) View() map[identity.ID]projection.Rekey {
	return c.peers.view(c.agreedKey, c.keyFree, time.Now())
}

// Next are the keys that peers change to.
func (c *Changer) Next() map[identity.ID]identity.WireGuardKey { return c.peers.next() }

// DeviceKey is the key of a member's device: the log's, unless the member has just changed it.
func (c *Changer) DeviceKey(id identity.ID, agreed identity.WireGuardKey) dataplane.Key {
	return dataplane.Key(c.peers.deviceKey(id, agreed))
}

// agreedKey is a member's WireGuard key by the log.
func (c *Changer) agreedKey(id identity.ID) (identity.WireGuardKey, bool) {
	m, ok := c.host.Roster.Get(id)
	return m.WireGuard, ok
}
