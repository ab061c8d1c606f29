package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/gossip"
)

var (
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
	descRecords = prometheus.NewDesc("skein_records_total",
		"Records: published (changes of this node's own), taken (of others, that were news).", []string{"kind"}, nil)
)

// Gossip tells how gossip does.
func Gossip(out chan<- prometheus.Metric, s gossip.Stats) {
	counters(out, descRecords, map[string]uint64{"published": s.Published, "taken": s.Accepted})
	counters(out, descGossipRefused, map[string]uint64{
		"too_large": s.RefusedTooLarge, "malformed": s.RefusedMalformed, "unknown_node": s.RefusedUnknown,
		"signature": s.RefusedSignature, "address": s.RefusedAddress,
	})
	counters(out, descGossipDropped, map[string]uint64{
		"stranger": s.Strangers, "malformed": s.BadFrames, "elsewhere": s.Elsewhere, "busy": s.Busy, "overflow": s.Overflow,
	})
	counter(out, descGossipSendErrors, s.SendErrors)
	counters(out, descGossipPulls, map[string]uint64{
		"asked": s.Asked, "answered": s.Answered, "pulled": s.Pulls, "exchanged": s.Syncs, "failed": s.PullErrors,
	})
	counters(out, descGossipConflicts, map[string]uint64{"content": s.Equivocations, "number": s.Jumps})
	counters(out, descGossipRejoins, map[string]uint64{"met": s.Rejoins, "failed": s.RejoinFail})
	counters(out, descGossipDisk, map[string]uint64{"ok": s.DiskWrites, "failed": s.DiskErrors})
}
