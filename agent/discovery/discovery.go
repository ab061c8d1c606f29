// Package discovery finds this host's own addresses and the kind of its NAT for the daemon. It runs the steps of
// gossip/candidate with this host's settings, and the STUN server by which a public host shows other hosts theirs.
package discovery

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/filtertest"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/forced"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/imds"
	"github.com/skeinmesh/skein/gossip/candidate/portmap"
	"github.com/skeinmesh/skein/gossip/candidate/reflexive"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
)

const firmware = "/sys/class/dmi/id"

// Config configures a Discovery.
type Config struct {
	Socket   reflexive.Socket // of WireGuard's port
	Port     uint16           // WireGuard's
	StunPort uint16           // of this host's STUN server
	Mark     uint32           // of all packets that it sends
	Network  candidate.Network
	Secret   []byte // identifies this host's port mappings to a router
	Settings Settings
	// Ping sends a ping to a peer's endpoint.
	Ping func(peer identity.ID, to netip.AddrPort) (probe.TxID, error)
	// ServerAlive reports whether a STUN server's host is known to be up.
	ServerAlive func(server netip.AddrPort) bool
	Tests       filtertest.Tests
	OnResult    func(candidate.Result)
	Log         *slog.Logger
}

// Settings are the settings that may change while a Discovery runs.
type Settings struct {
	ForceEndpoint string     // set for this host; "": none
	InternalIP    netip.Addr // set for this host; the zero Addr: none
	Traversal     config.NatTraversal
	StunServers   []string
	StunOff       bool // this host does not ask STUN servers
}

// Discovery finds this host's addresses. Its methods are safe for concurrent use; on a nil Discovery, as of a node that
// only relays, Server and Wait work, too.
type Discovery struct {
	*candidate.Discoverer
	STUN *reflexive.Step

	cfg     Config
	forced  *forced.Step
	portmap *portmap.Step
	imds    *candidate.Switch
	own     *hostaddr.Step
	peers   askedPeers
	ended   chan struct{} // closed when Run has ended
	server  atomic.Pointer[stunserver.Server]
}

// New prepares discovery. Run starts it.
func New(cfg Config) (*Discovery, error) {
	d := &Discovery{cfg: cfg, ended: make(chan struct{})}
	steps, err := d.steps()
	if err != nil {
		return nil, err
	}
	d.Discoverer = candidate.New(candidate.Config{
		Steps: steps, First: []candidate.Step{d.STUN, d.own}, OnResult: cfg.OnResult, Network: cfg.Network, Log: cfg.Log,
	})
	return d, nil
}

// steps makes the steps in order of trust: an address found by two belongs to the earlier one.
func (d *Discovery) steps() ([]candidate.Step, error) {
	c, s := d.cfg, d.cfg.Settings
	var err error
	if d.forced, err = forced.New(s.ForceEndpoint, nil, c.Log); err != nil {
		return nil, err
	}
	d.portmap, err = portmap.New(portmap.Config{
		Port: c.Port, Mark: c.Mark, Protocols: s.Traversal.Protocols(), Secret: c.Secret, Prove: c.Tests.Prove, Log: c.Log,
	})
	if err != nil {
		return nil, err
	}
	d.STUN, err = reflexive.New(reflexive.Config{
		Socket: c.Socket, Port: int(c.Port), Mark: c.Mark, Off: s.StunOff, Servers: s.StunServers,
		Alive: c.ServerAlive, Ping: d.askPeer, Log: c.Log,
	})
	if err != nil {
		return nil, err
	}
	d.imds = candidate.NewSwitch(imds.New(c.Port, c.Mark, c.Log), asksIMDS(s.Traversal))
	d.own = &hostaddr.Step{Port: c.Port}
	d.own.SetInternal(s.InternalIP)
	return []candidate.Step{d.forced, d.portmap, d.STUN, d.imds, d.own}, nil
}

// asksIMDS reports whether this host queries Amazon's instance metadata service (IMDS).
func asksIMDS(n config.NatTraversal) bool {
	return n.IMDS == config.On || n.IMDS == config.Auto && imds.Likely(firmware)
}

// Run discovers until ctx ends, and then has the routers remove this host's port mappings.
func (d *Discovery) Run(ctx context.Context) {
	defer close(d.ended)
	d.Discoverer.Run(ctx)
}

// Wait waits for the end of Run.
func (d *Discovery) Wait() {
	if d != nil {
		<-d.ended
	}
}

// SetHost sets the endpoint and the internal address set for this host. An endpoint that cannot be used is an error,
// and changes nothing.
func (d *Discovery) SetHost(forceEndpoint string, internalIP netip.Addr) error {
	d.own.SetInternal(internalIP)
	return d.forced.Set(forceEndpoint)
}

// SetTraversal sets the protocols of port mapping, and whether IMDS is queried.
func (d *Discovery) SetTraversal(n config.NatTraversal) {
	d.portmap.SetProtocols(n.Protocols())
	d.imds.Set(asksIMDS(n))
}

// Serve opens this host's STUN server, or closes it.
func (d *Discovery) Serve(on bool) error {
	switch {
	case !on:
		if s := d.server.Swap(nil); s != nil {
			return s.Close()
		}
	case d.server.Load() == nil:
		s, err := stunserver.Listen(stunserver.Config{
			Port: int(d.cfg.StunPort), Mark: d.cfg.Mark, ChangeIP: d.cfg.Tests.Delegate, Log: d.cfg.Log,
		})
		if err != nil {
			return err
		}
		d.server.Store(s)
	}
	return nil
}

// Server returns this host's STUN server, or nil.
func (d *Discovery) Server() *stunserver.Server {
	if d == nil {
		return nil
	}
	return d.server.Load()
}
