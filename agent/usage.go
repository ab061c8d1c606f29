package agent

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	rtmetrics "runtime/metrics"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Usage tells what this agent costs and does. All of it is counted anyway, or asked of the kernel now: nobody who does
// not ask pays.
func (s services) Usage(context.Context, *skeinv1.UsageRequest) (*skeinv1.UsageResponse, error) {
	a := s.a
	now := time.Now()
	r := &skeinv1.UsageResponse{
		NodeId: a.id.String(), Name: a.name(), Version: a.opts.Version, Pid: uint32(os.Getpid()),
		At: now.UnixNano(), StartedAt: a.started.UnixNano(), UptimeNanos: int64(now.Sub(a.started)),
		KernelWrites: a.writes.Load(),
	}
	if err := usageOfProcess(r); err != nil {
		return nil, api.Error(err)
	}
	usageOfRuntime(r)
	n := nlcount.Read()
	r.NetlinkRequests, r.NetlinkNotifications = n.Requests, n.Notifications
	if a.prober != nil {
		p := a.prober.Stats()
		r.PingsSent, r.PingsReceived, r.PongsSent, r.PongsReceived = p.PingsSent, p.PingsReceived, p.PongsSent,
			p.PongsReceived
	}
	if a.gossip != nil {
		g := a.gossip.Stats()
		r.RecordsPublished, r.RecordsTaken = g.Published, g.Accepted
	}
	if a.paths != nil {
		p := a.paths.Metrics()
		r.PathChanges = p.Upgrades + p.Downgrades + p.Reroutes + p.RelaySwaps + p.PortsUsed + p.PortsLost
	}
	if a.replica != nil {
		if n := a.self(); n != nil {
			r.Name = n.GetName()
		}
		r.Peers = a.peerUsage()
	}
	return r, nil
}

// usageOfProcess asks the kernel about this process.
func usageOfProcess(r *skeinv1.UsageResponse) error {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil { // of all threads, also those that have ended
		return fmt.Errorf("ask the kernel what this process has used: %w", err)
	}
	r.CpuNanos, r.Wakeups, r.Preemptions = u.Utime.Nano()+u.Stime.Nano(), uint64(u.Nvcsw), uint64(u.Nivcsw)
	// Without a readable /proc these stay 0, as the metrics of the process are then absent.
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		var size, resident uint64
		if _, err := fmt.Sscan(string(text), &size, &resident); err == nil {
			r.RssBytes = resident * uint64(os.Getpagesize())
		}
	}
	r.Files = countEntries("/proc/self/fd")
	r.Threads = countEntries("/proc/self/task")
	if r.Files > 0 {
		r.Files-- // the one that it was read by
	}
	return nil
}

// countEntries counts a directory's entries without sorting them: a relay has thousands of files.
func countEntries(path string) (n uint64) {
	d, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(512)
		n += uint64(len(names))
		if err == io.EOF || err != nil {
			return n
		}
	}
}

// usageOfRuntime asks the Go runtime; none of this stops the world.
func usageOfRuntime(r *skeinv1.UsageResponse) {
	m := []rtmetrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/gc/cycles/total:gc-cycles"},
		{Name: "/cpu/classes/gc/total:cpu-seconds"},
	}
	rtmetrics.Read(m)
	r.HeapBytes, r.GcCycles = m[0].Value.Uint64(), m[1].Value.Uint64()
	r.GcCpuNanos = int64(m[2].Value.Float64() * float64(time.Second))
	r.Goroutines = uint64(runtime.NumGoroutine())
}

// peerUsage is how each peer with a tunnel is reached and what WireGuard has counted for it, by name.
func (a *Agent) peerUsage() []*skeinv1.PeerUsage {
	var out []*skeinv1.PeerUsage
	paths, stats := a.currentPaths(), a.stats.Load()
	for _, n := range a.replica.State().Nodes() {
		id, err := identity.ParseID(n.GetId())
		p, known := paths[id]
		if err != nil || id == a.id || !known {
			continue // no record of it is known, or there is no tunnel to it
		}
		u := &skeinv1.PeerUsage{NodeId: n.GetId(), Name: n.GetName(), Path: p.Transport()}
		if u.Path == "relay" {
			u.Detail = "session"
			if p.UDP() {
				u.Detail = "udp"
			}
		}
		if len(n.GetWireguardKey()) == len(dataplane.Key{}) {
			st, _ := stats.Of(a.keys.DeviceKey(id, identity.WireGuardKey(n.GetWireguardKey())))
			u.RxBytes, u.TxBytes = st.RxBytes, st.TxBytes
		}
		out = append(out, u)
	}
	slices.SortFunc(out, func(x, y *skeinv1.PeerUsage) int { return strings.Compare(x.GetName(), y.GetName()) })
	return out
}
