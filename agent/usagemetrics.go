package agent

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
	descRecords = prometheus.NewDesc("skein_records_total",
		"Records: published (changes of this node's own), taken (of others, that were news).", []string{"kind"}, nil)
)

// collectUsage tells what the agent costs and does, besides what the collectors of Go and of the process tell. `skein
// top` has the same.
func (a *Agent) collectUsage(out chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, kind string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), kind)
	}
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) == nil {
		counter(descSwitches, uint64(u.Nvcsw), "voluntary")
		counter(descSwitches, uint64(u.Nivcsw), "involuntary")
	}
	n := nlcount.Read()
	counter(descNetlink, n.Requests, "request")
	counter(descNetlink, n.Notifications, "notification")
	if a.gossip != nil {
		g := a.gossip.Stats()
		counter(descRecords, g.Published, "published")
		counter(descRecords, g.Accepted, "taken")
	}
}
