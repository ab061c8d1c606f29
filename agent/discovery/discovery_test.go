package discovery

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/gossip/candidate"
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

// What is set for this host while discovery runs counts at the next look.
func TestSettingsOfTheHostChange(t *testing.T) {
	d, err := New(Config{Socket: new(probe.Socket), Port: 51820, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	internal := netip.MustParseAddr("10.0.0.7")
	if err := d.SetHost("203.0.113.7:51820", internal); err != nil {
		t.Fatal(err)
	}
	host := candidate.Host{Addrs: []netip.Addr{netip.MustParseAddr("10.9.9.9"), internal}}
	found := func(s candidate.Step) (out []string) {
		for _, c := range s.Look(t.Context(), candidate.Request{Host: host, Wake: func() {}}).Candidates {
			out = append(out, c.GetAddress())
		}
		return out
	}
	if have := found(d.forced); !slices.Equal(have, []string{"203.0.113.7:51820"}) {
		t.Errorf("the forced endpoint is %v", have)
	}
	if have := found(d.own); !slices.Contains(have, "10.0.0.7:51820") || slices.Contains(have, "10.9.9.9:51820") {
		t.Errorf("the host's own addresses are %v, want the one that was set", have)
	}
	if err := d.SetHost("no port", internal); err == nil {
		t.Error("an endpoint without a port was taken")
	}
}

// The steps whose settings change while discovery runs ask for another look, and those alone.
func TestTraversalChanges(t *testing.T) {
	off := config.NatTraversal{PortMapping: []string{}, IMDS: config.Off}
	d, err := New(Config{Socket: new(probe.Socket), Port: 51820, Log: slog.New(slog.DiscardHandler),
		Settings: Settings{Traversal: off}})
	if err != nil {
		t.Fatal(err)
	}
	woken := map[string]int{}
	for _, s := range []candidate.Step{d.portmap, d.imds} {
		s.Look(t.Context(), candidate.Request{Wake: func() { woken[s.Source()]++ }})
	}
	for _, c := range []struct {
		set           config.NatTraversal
		portmap, imds int // looks asked for until then
	}{
		{off, 0, 0},
		{config.NatTraversal{PortMapping: []string{"pcp"}, IMDS: config.Off}, 1, 0},
		{config.NatTraversal{PortMapping: []string{"pcp"}, IMDS: config.On}, 1, 1},
		{config.NatTraversal{IMDS: config.On}, 2, 1},
		{off, 3, 2},
	} {
		d.SetTraversal(c.set)
		if woken["portmap"] != c.portmap || woken["imds"] != c.imds {
			t.Errorf("%+v: %v, want portmap %d and imds %d", c.set, woken, c.portmap, c.imds)
		}
	}
}
