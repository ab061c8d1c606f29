package bench

import (
	"context"
	"fmt"
)

// blockJobs are the figures of giving blocks and addresses.
func blockJobs() []job {
	return []job{
		{name: "address from a held block", target: "≤ 50 µs at p99", pkg: "./agent/ipam", run: "BenchmarkAssign/blocks=4",
			count: "20000x",
			how:   "from the request to the lease, written down so that kill -9 loses nothing; dual stack, blocks of 32",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("p50 %.0f µs, p99 %.0f µs", m["p50-µs"], m["p99-µs"]), m["p99-µs"] > 0 && m["p99-µs"] <= 50
			}},
		{name: "blocks given with three voters and fsync", target: "≥ 2,000/s", pkg: "./consensus",
			run: "BenchmarkBlocks/callers=512", count: "20000x",
			how: "512 nodes at a time want one more each; three Raft servers in one process, TCP on loopback, every log entry " +
				"synced to this disk by each; no block twice",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%s/s; p50 %.0f ms, p99 %.0f ms", thousands(m["commands/s"]), m["p50-ms"], m["p99-ms"]),
					m["commands/s"] >= 2000
			}},
		{name: "  one after another", target: "≤ 10 ms at p99", pkg: "./consensus",
			run: "BenchmarkBlocks/callers=1", count: "3000x",
			how: "the same, asked on the leader",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("p50 %.1f ms, p99 %.1f ms", m["p50-ms"], m["p99-ms"]), m["p99-ms"] > 0 && m["p99-ms"] <= 10
			}},
		{name: "1,000 nodes take a block each", target: "≤ 5 s, 0 duplicates, 0 leaks", pkg: "./consensus",
			run: "BenchmarkThousandNodes", count: "10x",
			how: "all ask at once; the same three servers; afterwards each has one and no block is anybody else's",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("p50 %.0f ms, worst %.0f ms; 0 duplicates, 0 leaks", m["p50-ms"], m["worst-ms"]),
					m["worst-ms"] > 0 && m["worst-ms"] <= 5000
			}},
		{name: "a state of 100,000 blocks", pkg: "./events", run: "BenchmarkCrowdedState", count: "5x",
			how: "dual stack; memory after a restore, the snapshot's size, and the time to write, to restore, and to hash it " +
				"from nothing",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%.1f MiB of memory, snapshot %.1f MiB; written in %.0f ms, restored in %.0f ms, hashed in "+
					"%.0f ms", m["restore/state-bytes"]/(1<<20), m["write/snapshot-bytes"]/(1<<20),
					m["write/ns/op"]/1e6, m["restore/ns/op"]/1e6, m["hash/ns/op"]/1e6), true
			}},
	}
}

// blocks measures the log's part of pods' addresses, and the node's without the kernel.
func (b *bench) blocks(ctx context.Context) []Figure { return b.measure(ctx, blockJobs()) }
