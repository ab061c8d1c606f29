package bench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// job is one figure that a Go benchmark or test beside the code gives.
type job struct {
	name, target, how string
	pkg, run          string // a benchmark, or with test a test's name
	count             string // -benchtime
	test              bool
	judge             func(metrics) (got string, reached bool)
}

// metrics are what a benchmark reported, unit → value; of sub-benchmarks, name/unit.
type metrics map[string]float64

func jobs() []job {
	return []job{
		{name: "a record change seen by 200 simulated nodes", target: "≤ 2 s", pkg: "./gossip",
			run: "BenchmarkConvergence/nodes=200", count: "10x",
			how: "200 nodes in one process on virtual time, 5–40 ms one way, 2 % loss; from Publish to the last node",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("p50 %.0f ms, p99 %.0f ms", m["p50-ms"], m["p99-ms"]), m["p99-ms"] > 0 && m["p99-ms"] <= 2000
			}},
		{name: "commits with three voters and fsync", target: "≥ 2,000/s", pkg: "./consensus", run: "BenchmarkCommit",
			count: "20000x",
			how: "512 callers that each wait for their answer; three Raft servers in one process, TCP on loopback, every log " +
				"entry synced to this disk by each",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%s/s; answer p50 %.0f ms, p99 %.0f ms", thousands(m["commands/s"]), m["p50-ms"], m["p99-ms"]),
					m["commands/s"] >= 2000
			}},
		{name: "  the same, asked on an agent", pkg: "./consensus", run: "BenchmarkCommitFromAgent", count: "5000x",
			how: "128 callers on a node that is not a server; by RPC to a server, which may forward",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%s/s; answer p50 %.0f ms, p99 %.0f ms", thousands(m["commands/s"]), m["p50-ms"],
					m["p99-ms"]), true
			}},
		{name: "Fold", target: "≥ 500,000 events/s", pkg: "./events", run: "BenchmarkFold", count: "2s",
			how: "a mixed log of a cluster of 1,000 nodes, one processor's time, collection of garbage included",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%s/s by the clock, %s/s of processor time", thousands(m["events/s"]),
					thousands(m["events/cpu-s"])), m["events/s"] >= 500_000 || m["events/cpu-s"] >= 500_000
			}},
		{name: "projection of 1,000 peers", target: "≤ 20 ms", pkg: "./agent/projection",
			run: "BenchmarkProject1000", count: "2s",
			how: "state, records and endpoints of 1,000 peers to a whole Spec",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%.1f ms", m["ns/op"]/1e6), m["ns/op"] > 0 && m["ns/op"] <= 20e6
			}},
		{name: "UDP through a relay's kernel", pkg: "./relay/udp", run: "BenchmarkRelayed", count: "3x",
			how: "trains of 16 full datagrams, as wireguard-go sends them, from one network namespace to another, at most " +
				"512 under way; in brackets sent one by one, as kernel WireGuard does. A datagram of 148 bytes there and back on " +
				"an idle line gives the times. One run for all, the best of three rounds each; the processors are the ends' too. " +
				"The session is on the loopback, without the little internet's bridge",
			judge: relayed},
		{name: "heartbeats for 1,000 idle and 50 busy peers", target: "≤ 2 % of one core", pkg: "./agent/probe",
			run: "BenchmarkHeartbeats", count: "20x",
			how: "path manager, prober and raw socket of one process over a veth; all peers answer and watch back; processor " +
				"time, with the half of the kernel's work on the other side that a veth lets the sender do",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("%.1f %% with %.0f pings/s", m["%core"], m["pings/s"]), m["pings/s"] > 0 && m["%core"] <= 2
			}},
		{name: "one changed peer among 1,000: messages", target: "constant", pkg: "./dataplane/plane",
			run: "TestOneChangeAmongAThousandPeers", test: true,
			how: "counted at the netlink and UAPI sockets, in a network namespace", judge: oneChange},
		{name: "a plan of a day ago", target: "≤ 1.00 s", pkg: "./agent/planlog", run: "BenchmarkOldest", count: "10x",
			how: "the oldest plan of a full file: 100,000 plans of 200 peers, one a second, each with one change; what " +
				"`skein plan --at` reads",
			judge: func(m metrics) (string, bool) {
				took := time.Duration(m["ns/op"])
				return fmt.Sprintf("%s; the file has %.1f MiB, 16 at most are kept", ms(took), m["MiB"]),
					took > 0 && took <= time.Second && m["MiB"] <= 32
			}},
		{name: "unchanged restart: netlink writes", target: "0", pkg: "./dataplane/plane",
			run: "TestRestartAdoptsAndWritesNothing", test: true,
			how: "the data plane closed, opened and applied again with the same Spec; a whole agent's restart with kernel " +
				"WireGuard is examples/kernel-restart.yaml in the kernel tier. With userspace WireGuard only nft outlives the " +
				"process: link, peers, rules and routes are made again",
			judge: func(m metrics) (string, bool) {
				if m["userspace"] == 1 {
					return "nft 0; link, peers, rules and routes not measured, this kernel has no WireGuard", false
				}
				return "0", true
			}},
	}
}

// relayLoad are the figures of a relay under load. Beside one that has a whole processor its clients, which do as much
// work and more, may have too little of the other to offer twice as much; so what each of them used is told, and the
// same is measured with the relay held back.
func relayLoad() (all []job) {
	const how = "TLS sessions on loopback, full packets, half of the clients send; the relay a process on one " +
		"processor%s, the clients another. Peak: a window of 256 packets per pair; 1× offers the peak's rate, 2× twice " +
		"that; added latency from Send to the receiver; middle of %s"
	text := func(m metrics) string {
		return fmt.Sprintf("at 2× %.0f %% of the peak; peak %.2f Gb/s, %.2f s of processor per Gb; added at half load p50 "+
			"%.1f ms, p99 %.1f ms; at 1× p50 %.0f, p99 %.0f ms; at 2× p50 %.0f, p99 %.0f ms, %.2f s per Gb",
			m["2x-%ofpeak"], m["peak-Gb/s"],
			m["peak-cpu-s/Gb"], m["half-p50-ms"], m["half-p99-ms"], m["1x-p50-ms"], m["1x-p99-ms"], m["2x-p50-ms"],
			m["2x-p99-ms"], m["2x-cpu-s/Gb"])
	}
	for _, clients := range []int{2, 20, 100} {
		name, run := fmt.Sprintf("relay, %d clients", clients), fmt.Sprintf("BenchmarkLoad/clients=%d", clients)
		all = append(all,
			job{name: name + ", a whole processor: goodput at twice the load", target: "≥ 90 % of the peak",
				pkg: "./relay/client", run: run, count: "3x", how: fmt.Sprintf(how, "", "three"),
				judge: func(m metrics) (string, bool) {
					return fmt.Sprintf("%s; of their processors the clients use %.0f %% then, the relay %.0f %%", text(m),
						100*m["2x-clients-cpu"], 100*m["2x-relay-cpu"]), m["2x-%ofpeak"] >= 90
				}},
			job{name: name + ", 15 % of a processor: goodput at twice the load", target: "≥ 90 % of the peak",
				pkg: "./relay/client", run: run + ",starved", count: "9x",
				how:   fmt.Sprintf(how, ", held to 15 % of its time by a control group", "nine"),
				judge: func(m metrics) (string, bool) { return text(m), m["2x-%ofpeak"] >= 90 }})
	}
	for _, c := range []struct{ how, run string }{{"killed", "killed"}, {"stopped (it reads no more)", "stopped"}} {
		all = append(all, job{name: "relay " + c.how + ": packets again", target: "≤ 2.00 s at p99", pkg: "./relay/client",
			run: "BenchmarkRelayLost/" + c.run, count: "50x",
			how: "three relays, each a process; two nodes, 50 packets a second both ways over one of them, which gets a " +
				"signal; the longest silence of either way, 50 runs",
			judge: func(m metrics) (string, bool) {
				return fmt.Sprintf("p50 %.0f ms, p99 %.0f ms, worst %.0f ms", m["p50-ms"], m["p99-ms"], m["worst-ms"]),
					m["p99-ms"] > 0 && m["p99-ms"] <= 2000
			}})
	}
	return append(all, job{name: "relay: what one that floods, and one that does not read, costs others", target: "< 5 %",
		pkg: "./relay/client", run: "BenchmarkOthers", count: "5x",
		how: "four pairs at a steady third of the peak together; then beside a client that floods one of the receivers, " +
			"and beside one that sends to a reader that has stopped; middle of five",
		judge: func(m metrics) (string, bool) {
			return fmt.Sprintf("flood %.1f %%, slow reader %.1f %%; p99 alone %.1f ms, flood %.1f ms, slow reader %.1f ms",
					m["flood-cost-%"], m["slow-cost-%"], m["alone-p99-ms"], m["flood-p99-ms"], m["slow-p99-ms"]),
				m["flood-cost-%"] < 5 && m["slow-cost-%"] < 5
		}})
}

// code runs what measures one program by itself.
func (b *bench) code(ctx context.Context) []Figure {
	return b.measure(ctx, append(jobs(), relayLoad()...))
}

func (b *bench) measure(ctx context.Context, list []job) (out []Figure) {
	if _, err := os.Stat(filepath.Join(b.opts.Source, "go.mod")); err != nil {
		return []Figure{notMeasured("rates of the code", "", fmt.Errorf("%w: run it in the source's directory, or name "+
			"that with --source", err))}
	}
	for _, j := range list {
		b.note("code: %s", j.name)
		m, err := b.goTest(ctx, j)
		if err != nil {
			out = append(out, notMeasured(j.name, j.target, err))
			continue
		}
		got, reached := j.judge(m)
		f := Figure{Name: j.name, Target: j.target, Got: got, How: j.how, Load: loadAverage()}
		if j.target != "" {
			f.Verdict = verdict(reached)
		}
		if j.test && m["userspace"] == 1 && !reached && strings.Contains(got, "not measured") {
			f.Verdict = Partly
		}
		out = append(out, f)
	}
	return out
}

func (b *bench) goTest(ctx context.Context, j job) (metrics, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	args := []string{"test", j.pkg, "-count=1", "-timeout=280s"}
	if j.test {
		args = append(args, "-v", "-run", "^"+j.run+"$")
	} else {
		var parts []string
		for _, p := range strings.Split(j.run, "/") {
			parts = append(parts, "^"+p+"$")
		}
		args = append(args, "-run", "^$", "-bench", strings.Join(parts, "/"), "-benchtime", j.time(b.opts.Quick))
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.opts.Source
	text, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, text)
	}
	if j.test {
		return testMetrics(text)
	}
	return parseBench(text)
}

// time is the benchmark's length; a quick look takes a fifth.
func (j job) time(quick bool) string {
	n, err := strconv.Atoi(strings.TrimSuffix(j.count, "x"))
	switch {
	case quick && err == nil:
		return fmt.Sprintf("%dx", max(1, n/5))
	case quick:
		return "500ms"
	}
	return j.count
}

// parseBench reads the lines of `go test -bench`: name, count, then pairs of value and unit.
func parseBench(text []byte) (metrics, error) {
	m := metrics{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		_, sub, _ := strings.Cut(strings.TrimRight(strings.TrimRight(f[0], "0123456789"), "-"), "/")
		for i := 2; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return nil, fmt.Errorf("benchmark's line %q: %w", lines.Text(), err)
			}
			m[f[i+1]] = v
			if sub != "" {
				m[sub+"/"+f[i+1]] = v
			}
		}
	}
	if len(m) == 0 {
		return nil, fmt.Errorf("no benchmark reported anything:\n%s", text)
	}
	return m, lines.Err()
}

// oneChangeLine is what TestOneChangeAmongAThousandPeers logs for each change.
var oneChangeLine = regexp.MustCompile(
	`: (endpoint|one more block|one block less|peer gone|nothing): map\[nft:(\d+) route:(\d+) wireguard:(\d+)\]`)

// testMetrics is what a test that passed counted.
func testMetrics(text []byte) (metrics, error) {
	if !bytes.Contains(text, []byte("--- PASS")) {
		return nil, errors.New("the test did not run: it needs root and network namespaces")
	}
	m := metrics{"passed": 1}
	if bytes.Contains(text, []byte("kernel has no WireGuard")) {
		m["userspace"] = 1
	}
	for _, g := range oneChangeLine.FindAllSubmatch(text, -1) {
		sum := 0.0
		for _, n := range g[2:] {
			v, err := strconv.ParseFloat(string(n), 64)
			if err != nil {
				return nil, err
			}
			sum += v
		}
		m[string(g[1])] = sum
	}
	return m, nil
}

// relayed tells the ways through a relay beside no relay.
func relayed(m metrics) (string, bool) {
	way := func(name string) string {
		return fmt.Sprintf("%.2f Gb/s (%.2f), p50 %.0f µs, p99 %.0f µs", m[name+"/Gb/s"], m[name+"/singly-Gb/s"],
			m[name+"/p50-us"], m[name+"/p99-us"])
	}
	session := fmt.Sprintf("%.2f Gb/s, p50 %.0f µs, p99 %.0f µs", m["session/singly-Gb/s"], m["session/p50-us"],
		m["session/p99-us"])
	return "kernel " + way("kernel") + "; userspace " + way("userspace") + "; TLS session " + session + "; no relay " +
		way("none"), true
}

func oneChange(m metrics) (string, bool) {
	if _, ok := m["endpoint"]; !ok {
		return "the test passed, but its counts are not understood", false
	}
	return fmt.Sprintf("endpoint %.0f, block added %.0f, block taken %.0f, peer gone %.0f, nothing %.0f", m["endpoint"],
			m["one more block"], m["one block less"], m["peer gone"], m["nothing"]),
		m["endpoint"] <= 1 && m["one more block"] <= 2 && m["one block less"] <= 2 && m["peer gone"] <= 3 && m["nothing"] == 0
}

func thousands(v float64) string {
	s := strconv.FormatInt(int64(v), 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
