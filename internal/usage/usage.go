package usage

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

var (
	// ErrRestarted says that two answers are of two runs of the agent, or of two agents.
	ErrRestarted = errors.New("the agent was started anew between the two samples: take two of one run")
	// ErrOrder says that the second answer is not the later one.
	ErrOrder = errors.New("the second sample is not later than the first")
)

// Between gives the rates between two answers of one run. Peers are ordered by bytes per second, the busiest first,
// then by name.
func Between(before, after *skeinv1.UsageResponse) (*skeinv1.UsageRates, error) {
	took := time.Duration(after.GetUptimeNanos() - before.GetUptimeNanos())
	switch {
	case before.GetNodeId() != after.GetNodeId() || before.GetStartedAt() != after.GetStartedAt() ||
		before.GetPid() != after.GetPid():
		return nil, ErrRestarted
	case took <= 0:
		return nil, ErrOrder
	}
	per := func(was, is uint64) float64 { return grown(was, is) / took.Seconds() }
	percent := func(was, is int64) float64 { return 100 * float64(max(is-was, 0)) / float64(took) }
	r := &skeinv1.UsageRates{
		Usage: proto.CloneOf(after), IntervalNanos: int64(took),
		CpuPercent:                    percent(before.GetCpuNanos(), after.GetCpuNanos()),
		GcCpuPercent:                  percent(before.GetGcCpuNanos(), after.GetGcCpuNanos()),
		WakeupsPerSecond:              per(before.GetWakeups(), after.GetWakeups()),
		PreemptionsPerSecond:          per(before.GetPreemptions(), after.GetPreemptions()),
		GcCyclesPerSecond:             per(before.GetGcCycles(), after.GetGcCycles()),
		PingsSentPerSecond:            per(before.GetPingsSent(), after.GetPingsSent()),
		PingsReceivedPerSecond:        per(before.GetPingsReceived(), after.GetPingsReceived()),
		PongsSentPerSecond:            per(before.GetPongsSent(), after.GetPongsSent()),
		PongsReceivedPerSecond:        per(before.GetPongsReceived(), after.GetPongsReceived()),
		NetlinkRequestsPerSecond:      per(before.GetNetlinkRequests(), after.GetNetlinkRequests()),
		NetlinkNotificationsPerSecond: per(before.GetNetlinkNotifications(), after.GetNetlinkNotifications()),
		KernelWritesPerSecond:         per(before.GetKernelWrites(), after.GetKernelWrites()),
		RecordsPublishedPerSecond:     per(before.GetRecordsPublished(), after.GetRecordsPublished()),
		RecordsTakenPerSecond:         per(before.GetRecordsTaken(), after.GetRecordsTaken()),
		PathChangesPerSecond:          per(before.GetPathChanges(), after.GetPathChanges()),
	}
	r.Usage.Peers = nil
	addPeers(r, before.GetPeers(), after.GetPeers(), per)
	return r, nil
}

func addPeers(r *skeinv1.UsageRates, before, after []*skeinv1.PeerUsage, per func(was, is uint64) float64) {
	was := map[string]*skeinv1.PeerUsage{}
	for _, p := range before {
		was[p.GetNodeId()] = p
	}
	for _, p := range after {
		one := &skeinv1.PeerRates{Peer: p}
		if old, ok := was[p.GetNodeId()]; ok { // what one that is new has carried before says nothing of now
			one.RxBytesPerSecond = per(old.GetRxBytes(), p.GetRxBytes())
			one.TxBytesPerSecond = per(old.GetTxBytes(), p.GetTxBytes())
		}
		r.RxBytesPerSecond += one.RxBytesPerSecond
		r.TxBytesPerSecond += one.TxBytesPerSecond
		switch p.GetPath() {
		case "direct":
			r.PeersDirect++
		case "relay":
			r.PeersRelay++
		default:
			r.PeersDown++
		}
		r.Peers = append(r.Peers, one)
	}
	slices.SortFunc(r.Peers, func(a, b *skeinv1.PeerRates) int {
		return cmp.Or(cmp.Compare(b.RxBytesPerSecond+b.TxBytesPerSecond, a.RxBytesPerSecond+a.TxBytesPerSecond),
			cmp.Compare(a.GetPeer().GetName(), b.GetPeer().GetName()))
	})
}

// grown is by how much a counter grew. One that is lower than before began anew, as a peer's bytes do when it is
// configured anew.
func grown(was, is uint64) float64 {
	if is < was {
		return float64(is)
	}
	return float64(is - was)
}
