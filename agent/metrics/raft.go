package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/consensus"
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
)

// Raft tells how the Raft node of a server does.
func Raft(out chan<- prometheus.Metric, s consensus.Stats) {
	for _, state := range []string{"leader", "follower", "candidate", "shutdown"} {
		gauge(out, descRaftState, one(strings.EqualFold(s.State, state)), state)
	}
	gauge(out, descRaftTerm, float64(s.Term))
	for of, n := range map[string]uint64{
		"log": s.LogIndex, "committed": s.CommitIndex, "applied": s.AppliedIndex, "snapshot": s.SnapshotIndex,
	} {
		gauge(out, descRaftIndex, float64(n), of)
	}
	if s.Silence >= 0 {
		gauge(out, descRaftSilence, s.Silence.Seconds())
	}
	counter(out, descRaftChanges, s.LeaderChanges)
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
		gauge(out, descRaftServers, float64(n), what)
	}
	buckets := make(map[float64]uint64, len(s.Commits.Under))
	for bound, n := range s.Commits.Under {
		buckets[bound.Seconds()] = n
	}
	out <- prometheus.MustNewConstHistogram(descRaftCommit, s.Commits.Count, s.Commits.Sum.Seconds(), buckets)
}
