package agent

import (
	"errors"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/internal/sock"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/udp"
)

// relayTable is the kernel's forwarding as the relay wants it.
type relayTable struct{ *relaynft.Table }

func (t relayTable) Map(old, new udp.Mapping) error {
	return t.Table.Map(relaynft.Mapping(old), relaynft.Mapping(new))
}

func (t relayTable) Used(m udp.Mapping) (bool, error) { return t.Table.Used(relaynft.Mapping(m)) }

// openUDPRelay makes what forwards UDP between reserved ports, nil if this node does not.
func (a *Agent) openUDPRelay() (*udp.Relay, error) {
	if a.cfg.Dataplane.Relay == config.NoUDP {
		return nil, nil
	}
	first, last, err := a.cfg.Ports.UDPRelayRange()
	if err != nil {
		return nil, err
	}
	cfg := udp.Config{First: first, Last: last, Control: sock.Mark(a.numbers.MarkWG),
		Log: a.log.With("component", "relay")}
	if a.cfg.Dataplane.Relay != config.Userspace {
		if err := a.openRelayTable(); err != nil {
			if a.cfg.Dataplane.Relay == config.Kernel {
				a.report("UDP relay", warning, "dataplane.relay is kernel, and "+err.Error(), "no UDP is relayed; relay sessions "+
					"are not affected")
				return nil, nil
			}
			a.relayWhy = err
		} else {
			cfg.Kernel, cfg.Avoid = relayTable{a.relayTable}, a.relayTable.Stale
		}
	}
	return udp.New(cfg)
}

// openRelayTable takes the kernel's table, which one agent of a network namespace can have. A node that does nothing
// but relay has it too, beside an agent with the same numbers.
func (a *Agent) openRelayTable() error {
	unlock, err := claims.LockName("skein-relay-table" + a.numbers.Owner())
	if err != nil {
		return errors.New("another agent on this host relays UDP in the kernel")
	}
	if a.relayTable, err = relaynft.Open(relaynft.Config{Numbers: a.numbers, Log: a.log}); err != nil {
		unlock()
		return err
	}
	if a.cfg.Dataplane.Relay == config.Kernel {
		if err := a.relayTable.Ready(false); err != nil {
			err = errors.Join(err, a.relayTable.Close())
			a.relayTable = nil
			unlock()
			return err
		}
	}
	a.relayUnlock = unlock
	return nil
}

// closeRelayTable lets go of the table, and with purge removes it.
func (a *Agent) closeRelayTable(purge bool) error {
	if a.relayTable == nil {
		return nil
	}
	err := a.relayTable.Close()
	a.relayTable = nil
	if purge {
		err = errors.Join(err, relaynft.Purge(relaynft.Config{Numbers: a.numbers}))
	}
	a.relayUnlock()
	return err
}

// udpDriver is who forwards UDP here, as the record says it; empty: nobody.
func (a *Agent) udpDriver() string {
	relay := a.udp.Load()
	if relay == nil {
		return ""
	}
	name, _ := relay.Driver()
	return name
}

// udpText is udpDriver for people: with what keeps the kernel from it.
func (a *Agent) udpText() string {
	relay := a.udp.Load()
	if relay == nil {
		return ""
	}
	name, why := relay.Driver()
	if why == nil {
		why = a.relayWhy
	}
	if why != nil && name == config.Userspace {
		return name + " (" + why.Error() + ")"
	}
	return name
}

// checkUDPRelay tells the user when the kernel does not do what it should. That it forwards nothing at all is no
// problem unless the configuration asks for it: auto means this process then.
func (a *Agent) checkUDPRelay() {
	relay := a.udp.Load()
	if relay == nil {
		return
	}
	_, why := relay.Driver()
	if why == nil || !errors.Is(why, udp.ErrForwardingDropped) && a.cfg.Dataplane.Relay != config.Kernel {
		a.report("UDP relay", "", "", "")
		return
	}
	a.report("UDP relay", warning, why.Error(), "UDP is relayed by this process meanwhile: slower, and otherwise the same")
}

// onReserved takes what a relay says of its ports.
func (a *Agent) onReserved(r client.Reservation) {
	if a.paths != nil {
		a.paths.Reserved(r.Peer, r.Relay, r.Endpoint, r.Ready, r.Refused)
	}
}
