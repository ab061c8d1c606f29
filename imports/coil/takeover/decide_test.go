package takeover

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

var (
	numbers = dataplane.DefaultNumbers()
	own     = netip.MustParsePrefix("10.100.0.32/27")
	other   = netip.MustParsePrefix("10.100.0.64/27")
	agreed  = Log{Node: "home1", Blocks: []netip.Prefix{own}, Reserved: []netip.Prefix{other}}
)

func toPod(table int, address, link string) Route {
	return Route{Table: table, Dst: netip.MustParsePrefix(address), Link: link, Type: unix.RTN_UNICAST, Protocol: 30}
}

func TestDecide(t *testing.T) {
	at116 := Pod{Link: "veth1", Container: "c1", Routes: []Route{toPod(116, "10.100.0.33/32", "veth1")}}
	at200 := Pod{Link: "veth2", Container: "c2", Routes: []Route{toPod(200, "10.100.0.34/32", "veth2")}}
	both := Pod{Link: "veth3", Container: "c3",
		Routes: []Route{toPod(116, "10.100.0.35/32", "veth3"), toPod(200, "10.100.0.35/32", "veth3")}}
	reserved := Pod{Link: "veth4", Container: "c4", Routes: []Route{toPod(116, "10.100.0.65/32", "veth4")}}
	nowhere := Pod{Link: "veth5", Container: "c5", Routes: []Route{toPod(116, "10.9.0.1/32", "veth5")}}
	rule := Rule{Priority: 1234, Table: 200}
	conf := Conf{File: "10-coil.conflist", Chain: []string{"tuning", "portmap"}}
	for _, c := range []struct {
		name  string
		host  Host
		lines []string
		note  string
		err   string
	}{
		{name: "nothing of Coil"},
		{name: "a pod where both keep routes, and nothing else", host: Host{Pods: []Pod{at116}}},
		{name: "a pod in a table of Coil's own", host: Host{Pods: []Pod{at200}, Rules: []Rule{rule}}, lines: []string{
			"add the route 10.100.0.34/32 dev veth2 in table 116", "wait until the agent knows Coil's pods (addresses: 1)",
			"remove the route 10.100.0.34/32 dev veth2 in table 200", "remove the IPv4 rule 1234 to table 200"}},
		{name: "a pod in both", host: Host{Pods: []Pod{both}}, lines: []string{
			"wait until the agent knows Coil's pods (addresses: 1)", "remove the route 10.100.0.35/32 dev veth3 in table 200"}},
		{name: "a configuration with plugins behind Coil's", host: Host{Confs: []Conf{conf}}, lines: []string{
			"put skein's network configuration in place, with tuning and portmap behind its plugin", "remove 10-coil.conflist"}},
		{name: "routes of blocks",
			host:  Host{Blocks: []Route{toPod(119, own.String(), "lo"), toPod(119, "10.9.0.0/27", "lo")}},
			lines: []string{"remove the route 10.100.0.32/27 dev lo in table 119"}},
		{name: "a pod in a reserved block", host: Host{Pods: []Pod{reserved}},
			note: "replace the pod, then release the block"},
		{name: "a pod in no block", host: Host{Pods: []Pod{nowhere, at116}},
			err: "10.9.0.1 of container c5 (link veth5) lies in no block that the log has for node home1: import Coil's"},
		{name: "Coil's daemon runs", host: Host{Daemon: "/run/coild.sock", Pods: []Pod{at116}},
			err: "Coil's daemon answers at /run/coild.sock: stop it first"},
		{name: "two configurations that differ", host: Host{Confs: []Conf{conf, {File: "20-coil.conf", Chain: []string{}}}},
			err: "10-coil.conflist and 20-coil.conf have different plugins"},
	} {
		p, err := Decide(c.host, agreed, numbers)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.err)
		}
		if err != nil {
			continue
		}
		if !slices.Equal(p.Lines(), c.lines) {
			t.Errorf("%s: it does %q, want %q", c.name, p.Lines(), c.lines)
		}
		if text := strings.Join(p.Notes, " "); !strings.Contains(text, c.note) || (text == "") != (c.note == "") {
			t.Errorf("%s: it notes %q, want %q", c.name, text, c.note)
		}
	}
}

// All that stands in the way is told at once.
func TestDecideTellsAll(t *testing.T) {
	pod := func(address string) Pod {
		return Pod{Link: "veth", Container: "c", Routes: []Route{toPod(116, address, "veth")}}
	}
	_, err := Decide(Host{Daemon: "/s", Pods: []Pod{pod("10.9.0.1/32"), pod("10.9.0.2/32")}}, agreed, numbers)
	for _, want := range []string{"/s", "10.9.0.1", "10.9.0.2"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

func TestParseConf(t *testing.T) {
	for _, c := range []struct {
		text, socket string
		chain        []string
		ok           bool
	}{
		{`{"name": "n", "plugins": [{"type": "coil", "socket": "/run/x.sock"}, {"type": "tuning"}, {"type": "portmap"}]}`,
			"/run/x.sock", []string{"tuning", "portmap"}, true},
		{`{"name": "n", "type": "coil"}`, "", []string{}, true},
		{`{"name": "n", "plugins": [{"type": "skein-cni"}]}`, "", nil, false},
		{`{"name": "n", "type": "bridge"}`, "", nil, false},
		{`{"plugins": "coil"}`, "", nil, false},
		{`coil`, "", nil, false},
		{``, "", nil, false},
	} {
		have, ok := parseConf([]byte(c.text))
		if ok != c.ok || have.Socket != c.socket || !slices.Equal(have.Chain, c.chain) {
			t.Errorf("%s: %+v, %t", c.text, have, ok)
		}
	}
}
