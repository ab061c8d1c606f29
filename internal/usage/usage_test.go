package usage

import (
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func sample(uptime time.Duration) *skeinv1.UsageResponse {
	return &skeinv1.UsageResponse{
		NodeId: "7ef4fee4c02da850", Name: "home1", Pid: 7, StartedAt: 1, UptimeNanos: int64(uptime), CpuNanos: 3e9,
		Wakeups: 1000, RssBytes: 40 << 20,
		GcCycles: 20, GcCpuNanos: 5e6, PingsSent: 100, PingsReceived: 90, PongsSent: 90, PongsReceived: 80,
		NetlinkRequests: 50, NetlinkNotifications: 5, KernelWrites: 4, RecordsPublished: 3, RecordsTaken: 8, PathChanges: 4,
		Peers: []*skeinv1.PeerUsage{
			{NodeId: "b", Name: "b", Path: "direct", RxBytes: 1000, TxBytes: 1000},
			{NodeId: "a", Name: "a", Path: "direct"},
			{NodeId: "c", Name: "c", Path: "relay", RxBytes: 9000, TxBytes: 9000},
			{NodeId: "d", Name: "d", Path: "down"},
		},
	}
}

func TestRates(t *testing.T) {
	before, after := sample(10*time.Second), sample(14*time.Second)
	after.CpuNanos += int64(100 * time.Millisecond)
	after.GcCpuNanos += int64(4 * time.Millisecond)
	after.Wakeups += 60
	after.Preemptions += 4
	after.GcCycles += 2
	after.PingsSent, after.PingsReceived, after.PongsSent, after.PongsReceived = 108, 94, 94, 86
	after.NetlinkRequests, after.NetlinkNotifications, after.KernelWrites = 90, 6, 5
	after.RecordsPublished, after.RecordsTaken, after.PathChanges = 4, 20, 6
	after.Peers[0].RxBytes += 400
	after.Peers[2].RxBytes, after.Peers[2].TxBytes = 4000, 0 // configured anew
	after.Peers = append(after.Peers, &skeinv1.PeerUsage{NodeId: "e", Name: "e", Path: "direct", RxBytes: 1 << 30})
	r, err := Between(before, after)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what      string
		got, want float64
	}{
		{"CPU", r.CpuPercent, 2.5}, {"GC's CPU", r.GcCpuPercent, 0.1}, {"wake-ups", r.WakeupsPerSecond, 15},
		{"preemptions", r.PreemptionsPerSecond, 1},
		{"GC", r.GcCyclesPerSecond, 0.5}, {"pings sent", r.PingsSentPerSecond, 2},
		{"pings received", r.PingsReceivedPerSecond, 1},
		{"pongs sent", r.PongsSentPerSecond, 1}, {"pongs received", r.PongsReceivedPerSecond, 1.5},
		{"requests", r.NetlinkRequestsPerSecond, 10}, {"notifications", r.NetlinkNotificationsPerSecond, 0.25},
		{"writes", r.KernelWritesPerSecond, 0.25},
		{"published", r.RecordsPublishedPerSecond, 0.25}, {"taken", r.RecordsTakenPerSecond, 3},
		{"path changes", r.PathChangesPerSecond, 0.5},
		{"rx of all", r.RxBytesPerSecond, 1100}, {"tx of all", r.TxBytesPerSecond, 0},
		{"direct", float64(r.PeersDirect), 3}, {"by relay", float64(r.PeersRelay), 1},
		{"down", float64(r.PeersDown), 1},
		{"interval", float64(r.IntervalNanos), 4e9},
	} {
		if c.got != c.want {
			t.Errorf("%s: %g, want %g", c.what, c.got, c.want)
		}
	}
	var order []string
	for _, p := range r.Peers {
		order = append(order, p.GetPeer().GetName())
	}
	if want := []string{"c", "b", "a", "d", "e"}; !slices.Equal(order, want) {
		t.Errorf("peers %v, want the busiest first, then by name: %v", order, want)
	}
	if r.Usage.GetRssBytes() != after.RssBytes || len(r.Usage.GetPeers()) != 0 || len(after.Peers) != 5 {
		t.Error("usage is not the later answer without its peers, or the answer was changed")
	}
}

func TestTwoRunsHaveNoRates(t *testing.T) {
	for name, change := range map[string]func(*skeinv1.UsageResponse){
		"started anew":    func(u *skeinv1.UsageResponse) { u.StartedAt++ },
		"another process": func(u *skeinv1.UsageResponse) { u.Pid++ },
		"another node":    func(u *skeinv1.UsageResponse) { u.NodeId = "x" },
	} {
		after := sample(2 * time.Second)
		change(after)
		if _, err := Between(sample(time.Second), after); !errors.Is(err, ErrRestarted) {
			t.Errorf("%s: %v, want ErrRestarted", name, err)
		}
	}
}

func TestOrder(t *testing.T) {
	one := sample(time.Second)
	for _, after := range []*skeinv1.UsageResponse{proto.CloneOf(one), sample(500 * time.Millisecond)} {
		if _, err := Between(one, after); !errors.Is(err, ErrOrder) {
			t.Errorf("%v, want ErrOrder", err)
		}
	}
}
