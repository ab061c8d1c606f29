package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

var (
	descSwitches = prometheus.NewDesc("skein_context_switches_total",
		"Context switches of the agent's threads: voluntary (each is a wake-up later), involuntary.", []string{"kind"},
		nil)
	descNetlink = prometheus.NewDesc("skein_netlink_messages_total",
		"Netlink messages: request (to the kernel), notification (of the kernel, unasked).", []string{"kind"}, nil)
)

// Usage tells what the agent costs, besides what the collectors of Go and of the process tell. `skein top` has it, too.
func Usage(out chan<- prometheus.Metric) {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		counters(out, descSwitches, map[string]uint64{"voluntary": uint64(u.Nvcsw), "involuntary": uint64(u.Nivcsw)})
	}
	n := nlcount.Read()
	counters(out, descNetlink, map[string]uint64{"request": n.Requests, "notification": n.Notifications})
}
