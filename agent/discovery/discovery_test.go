package discovery

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/probe"
)

// Where two steps find the same address the earlier one has it: what was configured, what the router grants, what STUN
// servers see, what the cloud says, and the host's own addresses at last.
func TestDiscoverySteps(t *testing.T) {
	d := Discovery{cfg: Config{Socket: new(probe.Socket), Port: 51820, Log: slog.New(slog.DiscardHandler),
		Settings: Settings{Traversal: config.NatTraversal{IMDS: config.On}}}}
	steps, err := d.steps()
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, s := range steps {
		have = append(have, s.Source())
	}
	if got, want := strings.Join(have, " "), "config portmap stun imds interface"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A node that only relays has no discovery.
func TestOfANodeThatOnlyRelays(t *testing.T) {
	var d *Discovery
	d.Wait()
	if d.Server() != nil {
		t.Error("it has a STUN server")
	}
}
