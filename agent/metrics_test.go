package agent

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/skeinmesh/skein/agent/metrics"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
)

// collected are the values of metrics by name and labels, such as name{label}; of a histogram its count.
func collected(t *testing.T, collect func(chan<- prometheus.Metric)) map[string]float64 {
	t.Helper()
	out := make(chan prometheus.Metric)
	go func() {
		collect(out)
		close(out)
	}()
	all := map[string]float64{}
	for m := range out {
		var v dto.Metric
		if err := m.Write(&v); err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(m.Desc().String(), `fqName: "`)
		name, _, _ = strings.Cut(name, `"`)
		for _, l := range v.GetLabel() {
			name += fmt.Sprintf("{%s}", l.GetValue())
		}
		all[name] = v.GetGauge().GetValue() + v.GetCounter().GetValue() + float64(v.GetHistogram().GetSampleCount())
	}
	return all
}

// A server tells what its Raft node does: it leads, commits, and counts both.
func TestRaftMetrics(t *testing.T) {
	h := newHost(t, "a")
	a, server := newSeedAndServer(t, h, newWorld(t, h))
	raft := func(out chan<- prometheus.Metric) { metrics.Raft(out, server.Stats()) }
	a.server.Store(server)
	applied := func() map[string]float64 { // Raft says so a moment after the command was answered
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			got := collected(t, raft)
			if got["skein_raft_index{applied}"] == got["skein_raft_index{committed}"] {
				return got
			}
			if time.Now().After(deadline) {
				t.Fatalf("what is committed is not applied: %v", got)
			}
		}
	}
	before := applied()
	for i := range 3 {
		a.mustPropose(t, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
			Id: fmt.Sprintf("%016x", i), SecretHash: bytes.Repeat([]byte{7}, 32), LifetimeNanos: int64(time.Hour), Uses: 1}}})
	}
	after := applied()
	for name, want := range map[string]float64{
		"skein_raft_state{leader}": 1, "skein_raft_state{follower}": 0, "skein_raft_servers{voter}": 1,
		"skein_raft_servers{no_vote}": 0,
		"skein_raft_servers{silent}":  0, "skein_raft_leader_silence_seconds": 0, "skein_raft_leader_changes_total": 1,
		"skein_raft_index{snapshot}": 0,
	} {
		if got, ok := after[name]; !ok || got != want {
			t.Errorf("%s is %v (%v), want %v", name, got, ok, want)
		}
	}
	for _, name := range []string{"skein_raft_commit_seconds", "skein_raft_index{committed}", "skein_raft_index{applied}",
		"skein_raft_index{log}"} {
		if after[name]-before[name] != 3 {
			t.Errorf("%s went from %v to %v by three commands", name, before[name], after[name])
		}
	}
	if after["skein_raft_term"] < 1 {
		t.Errorf("term %v", after["skein_raft_term"])
	}
	if err := server.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := collected(t, raft); got["skein_raft_state{shutdown}"] != 1 || got["skein_raft_state{leader}"] != 0 {
		t.Errorf("stopped: %v", got)
	}
}

// Gossip's counters follow what others bring: records that are refused, each for its reason, are counted and not taken.
func TestGossipMetrics(t *testing.T) {
	one, two, stranger := newHost(t, "a"), newHost(t, "b"), newHost(t, "x")
	w := newWorld(t, one, two)
	a := newTestAgent(one, w.state)
	defer a.withGossip(t, one.key, w.state)()
	count := func(out chan<- prometheus.Metric) { metrics.Gossip(out, a.gossip.Stats()) }
	record := func(h, signer host) *skeinv1.SignedRecord {
		n := h.node(t)
		s, err := gossip.Sign(signer.key, &skeinv1.Record{NodeId: h.key.ID().String(), WireguardKey: n.GetWireguardKey(),
			Epoch: 1, Seq: 1, Time: 1})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	deeds := map[string]*skeinv1.SignedRecord{
		"skein_gossip_records_refused_total{unknown_node}": record(stranger, stranger),
		"skein_gossip_records_refused_total{signature}":    record(two, stranger),
		"skein_gossip_records_refused_total{malformed}":    {Record: []byte{0xff}, Signature: make([]byte, 64)},
		"skein_gossip_records_refused_total{too_large}": {Record: bytes.Repeat([]byte{1}, 1<<20),
			Signature: make([]byte, 64)},
	}
	for name, r := range deeds {
		before := collected(t, count)
		a.gossip.Merge([]*skeinv1.SignedRecord{r})
		after := collected(t, count)
		for other := range after {
			if !strings.HasPrefix(other, "skein_gossip_records") { // meanwhile it looks for the other member in vain
				continue
			}
			if want := before[other] + map[bool]float64{true: 1}[other == name]; after[other] != want {
				t.Errorf("%s: %s went from %v to %v", name, other, before[other], after[other])
			}
		}
	}
}
