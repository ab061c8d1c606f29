package lab

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Faults that spare some packets, agents that stand still, and what can be told of traffic meanwhile.
func TestGentleFaults(t *testing.T) {
	spec, opts, out := stubLab(t, `
  - {ping: {from: b1, to: [b2, a1], every: 5ms, size: 1200}}
  - {block: {from: b1, to: b2, above: 1000}}
  - {expect: {from: b1, to: b2, reach: false, size: 1200}}
  - {expect: {from: [b1, b2], to: [b1, b2], reach: true, count: 5}}
  - {expect: {from: b1, to: a1, reach: true, size: 1200}}
  - {heal: all}
  - {expect: {from: b1, to: b2, reach: true, size: 1200}}
  - {ping: {longest: 30s}}
  # TCP waits twice as long after each loss in a row; where the kernel can bound that, chance does not stretch the transfer.
  - {exec: {node: all, command: "f=/proc/sys/net/ipv4/tcp_rto_max_ms; if test -e $f; then echo 1000 > $f && cat $f; fi"}}
  - {block: {from: a1, to: b1, percent: 50, oneway: true}}
  - {transfer: {from: b1, to: [a1, b2], bytes: 100000}, within: 30s}
  - {heal: b1}
  - {pause: [b1, b2]}
  - {resume: b1}
  - {wait: converged, within: 10s}
  - {stop: b2}
  - {start: b2}
  - {pause: a1}
  - {heal: all}
  - {wait: converged, within: 10s}
`)
	res, err := Run(t.Context(), spec, opts)
	if err != nil || !res.OK {
		t.Fatal(err)
	}
	for _, want := range []string{"b1 to a1: 0 of ", "100000 bytes from b1 to a1 in "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("nothing says %q", want)
		}
	}
}

func TestBoundsOfTrafficAreKept(t *testing.T) {
	for _, end := range []string{"{ping: {longest: 100ms}}", "{ping: {lost: 5}}"} {
		spec, opts, _ := stubLab(t, `
  - {ping: {from: a1, to: b1, every: 5ms}}
  - {block: {from: a1, to: b1, oneway: true}}
  - {wait: 300ms}
  - `+end+"\n")
		if _, err := Run(t.Context(), spec, opts); err == nil || !strings.Contains(err.Error(), "allowed: ") {
			t.Errorf("%s: %v", end, err)
		}
	}
	spec, opts, _ := stubLab(t, `
  - {block: {from: a1, to: b1, proto: tcp}}
  - {transfer: {from: a1, to: b1, bytes: 1000}, within: 300ms}
`)
	if _, err := Run(t.Context(), spec, opts); err == nil || !strings.Contains(err.Error(), "1000 bytes from a1 to b1 "+
		"did not arrive within 300ms") {
		t.Errorf("a transfer over a cut: %v", err)
	}
}

// A paused agent is neither paused again nor taken for one that runs.
func TestPauseKnowsWhatRuns(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Pause("b1"); err != nil {
		t.Fatal(err)
	}
	if err := l.Pause("b1"); err == nil || !strings.Contains(err.Error(), "is paused, not running") {
		t.Errorf("paused twice: %v", err)
	}
	if slices.Contains(l.Running(), "b1") {
		t.Error("a paused agent counts as running")
	}
	if err := l.Resume("b2"); err == nil {
		t.Error("an agent was resumed that was not paused")
	}
	if err := l.Kill(t.Context(), "b1"); err != nil {
		t.Error(err)
	}
	if err := l.Heal(t.Context()); err != nil {
		t.Error(err)
	}
	if got := l.Running(); len(got) != 3 {
		t.Errorf("running: %v", got)
	}
}

// What has become of the network is known to whoever attaches to the lab, and Heal takes back what is a fault of it.
func TestNetworkChanges(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	spec.Sites[1].NAT = fabric.PortRestrictedCone // b
	spec.Source = []byte(strings.Replace(string(spec.Source), "b: {nat: none}", "b: {nat: port-restricted-cone}", 1))
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{l.SetNAT("b", fabric.UDPBlocked), l.Rebind(t.Context(), "b"), l.Move("b1", "a")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	again, err := Attach(spec.Name, Options{Dir: opts.Dir})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*Lab{l, again} {
		b, _ := l.Network().Site("b")
		info, err := l.Node("b1")
		if err != nil || b.NAT != fabric.UDPBlocked || b.Generation != 1 || info.Site != "a" ||
			info.Host.Addr.String() != "198.18.1.12" {
			t.Errorf("site b is %s, generation %d, b1 is at %s in %s, %v", b.NAT, b.Generation, info.Host.Addr, info.Site, err)
		}
	}
	s, err := again.Ping("b1", again.Network().Hosts[0].Addr, 20*time.Millisecond, 1)
	if err != nil {
		t.Fatal(err)
	}
	if r := s.Finish(); r.Received != 1 {
		t.Error("b1 does not reach its new neighbour")
	}
	if err := again.Heal(t.Context(), "b1"); err != nil { // it is no longer there
		t.Fatal(err)
	}
	if b, _ := again.Network().Site("b"); b.NAT != fabric.UDPBlocked {
		t.Errorf("healing a node elsewhere made site b %s", b.NAT)
	}
	if err := again.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, _ := again.Network().Site("b")
	if info, err := again.Node("b1"); err != nil || b.NAT != fabric.PortRestrictedCone || info.Site != "a" {
		t.Errorf("healed: site b is %s, b1 is in %s, %v", b.NAT, info.Site, err)
	}
	if err := again.SetNAT("a", fabric.Symmetric); err == nil {
		t.Error("a public site got a NAT")
	}
}

// Agents may join one after the other, and whoever brings a lab up hears of each.
func TestJoiningInTurn(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	var mu sync.Mutex
	var joined []string
	opts.AtOnce = 1
	opts.Joined = func(l *Lab, node string) {
		mu.Lock()
		defer mu.Unlock()
		joined = append(joined, node)
		if others := len(l.Running()); others > len(joined) {
			t.Errorf("%d agents run when %s is number %d to join", others, node, len(joined))
		}
	}
	if _, err := Up(t.Context(), spec, opts.Options); err != nil {
		t.Fatal(err)
	}
	if len(joined) != 3 || joined[0] != "a1" {
		t.Errorf("joined: %v", joined)
	}
}
