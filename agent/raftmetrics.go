package agent

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	descRaftState = prometheus.NewDesc("skein_raft_state",
		"On a server, 1 for what it is to Raft: leader, follower, candidate, shutdown.", []string{"state"}, nil)
	descRaftTerm  = prometheus.NewDesc("skein_raft_term", "On a server: Raft's term.", nil, nil)
	descRaftIndex = prometheus.NewDesc("skein_raft_index",
		"On a server: the last entry of Raft's log, the last committed, the last applied, the last in a snapshot.",
		[]string{"of"}, nil)
	descRaftSilence = prometheus.NewDesc("skein_raft_leader_silence_seconds",
		"On a server: how long ago it heard its leader; 0 on the leader. Absent before the first time.", nil, nil)
	descRaftChanges = prometheus.NewDesc("skein_raft_leader_changes_total",
		"On a server: leaders that it has seen take over, the first one included.", nil, nil)
	descRaftServers = prometheus.NewDesc("skein_raft_servers",
		"On a server: servers of Raft's configuration: voters, and others; on the leader, those that do not answer it.",
		[]string{"what"}, nil)
	descRaftCommit = prometheus.NewDesc("skein_raft_commit_seconds",
		"On the leader: from handing changes to Raft until they are committed and applied.", nil, nil)

	descGossipRefused = prometheus.NewDesc("skein_gossip_records_refused_total",
		"Records of others that were not taken, by reason: too_large, malformed, unknown_node, signature, address.",
		[]string{"reason"}, nil)
	descGossipDropped = prometheus.NewDesc("skein_gossip_dropped_total",
		"Packets, streams and messages that gossip did not take, by reason: stranger, malformed, elsewhere, busy, overflow.",
		[]string{"reason"}, nil)
	descGossipSendErrors = prometheus.NewDesc("skein_gossip_send_errors_total",
		"Gossip packets that the control net could not send.", nil, nil)
	descGossipPulls = prometheus.NewDesc("skein_gossip_repairs_total",
		"How records that were missed are got: asked by a packet, answered, pulled by a stream, exchanged digests, failed.",
		[]string{"what"}, nil)
	descGossipConflicts = prometheus.NewDesc("skein_gossip_conflicts_total",
		"Records that should not be: two contents under one number, and numbers of this node that it has not given.",
		[]string{"kind"}, nil)
	descGossipRejoins = prometheus.NewDesc("skein_gossip_rejoins_total",
		"Attempts to meet members that gossip did not see, by outcome: met, failed.", []string{"outcome"}, nil)
	descGossipDisk = prometheus.NewDesc("skein_gossip_disk_writes_total",
		"Times that the records were written to disk, by outcome: ok, failed.", []string{"outcome"}, nil)
)

// collectRaft tells how the Raft node of a server does.
func (a *Agent) collectRaft(out chan<- prometheus.Metric) {
	srv := a.server.Load()
	if srv == nil {
		return
	}
	s := srv.Stats()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, state := range []string{"leader", "follower", "candidate", "shutdown"} {
		is := 0.0
		if strings.EqualFold(s.State, state) {
			is = 1
		}
		gauge(descRaftState, is, state)
	}
	gauge(descRaftTerm, float64(s.Term))
	for of, n := range map[string]uint64{
		"log": s.LogIndex, "committed": s.CommitIndex, "applied": s.AppliedIndex, "snapshot": s.SnapshotIndex,
	} {
		gauge(descRaftIndex, float64(n), of)
	}
	if s.Silence >= 0 {
		gauge(descRaftSilence, s.Silence.Seconds())
	}
	out <- prometheus.MustNewConstMetric(descRaftChanges, prometheus.CounterValue, float64(s.LeaderChanges))
	servers := map[string]int{"voter": 0, "no_vote": 0, "silent": 0}
	for _, m := range s.Members {
		if m.Voter {
			servers["voter"]++
		} else {
			servers["no_vote"]++
		}
		if !m.Healthy {
			servers["silent"]++
		}
	}
	for what, n := range servers {
		gauge(descRaftServers, float64(n), what)
	}
	buckets := make(map[float64]uint64, len(s.Commits.Under))
	for bound, n := range s.Commits.Under {
		buckets[bound.Seconds()] = n
	}
	out <- prometheus.MustNewConstHistogram(descRaftCommit, s.Commits.Count, s.Commits.Sum.Seconds(), buckets)
}

// collectGossip tells how gossip does.
func (a *Agent) collectGossip(out chan<- prometheus.Metric) {
	if a.gossip == nil {
		return
	}
	s := a.gossip.Stats()
	counters := func(d *prometheus.Desc, values map[string]uint64) {
		for label, v := range values {
			out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), label)
		}
	}
	counters(descGossipRefused, map[string]uint64{
		"too_large": s.RefusedTooLarge, "malformed": s.RefusedMalformed, "unknown_node": s.RefusedUnknown,
		"signature": s.RefusedSignature, "address": s.RefusedAddress,
	})
	counters(descGossipDropped, map[string]uint64{
		"stranger": s.Strangers, "malformed": s.BadFrames, "elsewhere": s.Elsewhere, "busy": s.Busy, "overflow": s.Overflow,
	})
	out <- prometheus.MustNewConstMetric(descGossipSendErrors, prometheus.CounterValue, float64(s.SendErrors))
	counters(descGossipPulls, map[string]uint64{
		"asked": s.Asked, "answered": s.Answered, "pulled": s.Pulls, "exchanged": s.Syncs, "failed": s.PullErrors,
	})
	counters(descGossipConflicts, map[string]uint64{"content": s.Equivocations, "number": s.Jumps})
	counters(descGossipRejoins, map[string]uint64{"met": s.Rejoins, "failed": s.RejoinFail})
	counters(descGossipDisk, map[string]uint64{"ok": s.DiskWrites, "failed": s.DiskErrors})
}
