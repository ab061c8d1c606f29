package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const fleetSize = 1001 // with the node that is measured

// memoryLimits are what an agent may take that knows a thousand peers, in bytes, by WireGuard's driver. The one in
// userspace has its peers and buffers in the agent's own memory.
var memoryLimits = map[string]int{"kernel": 64 << 20, "userspace": 80 << 20}

func memoryTarget(limit int) string { return fmt.Sprintf("≤ %d MiB", limit>>20) }

// memory measures what agents hold that know a thousand peers: real `skein up` processes in a lab, whose
// server was given the members and their records by the product's own packages.
func (b *bench) memory(ctx context.Context) []Figure {
	const name = "agent memory with 1,000 known peers"
	got, err := b.measureMemory(ctx)
	if err != nil {
		return []Figure{notMeasured(name, memoryTargets(), err)}
	}
	return memoryFigures(name, got["home1"], got["dc1"])
}

// memoryTargets names the limits of both drivers, for when it is not known which one runs.
func memoryTargets() string {
	return fmt.Sprintf("%s with kernel, %s with userspace WireGuard", memoryTarget(memoryLimits["kernel"]),
		memoryTarget(memoryLimits["userspace"]))
}

// memoryFigures holds an agent's memory to the limit of its WireGuard driver, and tells beside it that of the server.
func memoryFigures(name string, agent, server residence) []Figure {
	limit, ok := memoryLimits[agent.driver]
	if !ok {
		return []Figure{notMeasured(name, memoryTargets(), fmt.Errorf("the agent runs WireGuard in %q", agent.driver))}
	}
	text := func(r residence) string {
		return fmt.Sprintf("%.1f MiB steady, %.1f MiB at most (of the steady: %.1f of its own, %.1f of files)",
			mib(r.steady), mib(r.peak), mib(r.private), mib(r.files))
	}
	return []Figure{
		{
			Name: name + ", " + agent.driver + " WireGuard", Target: memoryTarget(limit), Got: text(agent),
			Verdict: verdict(agent.steady <= limit), Load: loadAverage(),
			How: "RSS of a real agent behind a NAT, settled; no peer but one answers, all are in state, records, paths and " +
				"device. What is of files is the program's code and the journal. `make bench-kernel` measures the same " +
				"with kernel WireGuard",
		},
		{
			Name: "  the same, on a server that also relays", Got: text(server), Load: loadAverage(),
			How: "RSS of the single server, which also relays",
		},
	}
}

func mib(n int) float64 { return float64(n) / (1 << 20) }

// residence is what a process has of the host's memory, in bytes.
type residence struct {
	driver         string // of the agent's WireGuard
	steady, peak   int
	private, files int // of the steady: nobody else's, and what files hold as well
}

func (b *bench) measureMemory(ctx context.Context) (_ map[string]residence, err error) {
	l, down, err := b.raise(ctx, fleetLab)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	if err := l.Stop(ctx, "dc1", "home1"); err != nil {
		return nil, err
	}
	info, err := l.Node("dc1")
	if err != nil {
		return nil, err
	}
	b.note("memory: admitting %d members", fleetSize)
	if err := admitFleet(ctx, filepath.Join(info.Dir, "state"), fleetOf(fleetSize-2)); err != nil {
		return nil, fmt.Errorf("prepare a state of %d members: %w", fleetSize, err)
	}
	if err := l.Start(ctx, "dc1", "home1"); err != nil {
		return nil, err
	}
	for _, node := range []string{"home1", "dc1"} {
		if err := b.untilEvery(ctx, time.Second, 6*time.Minute, func() error {
			return knowsFleet(ctx, l, node)
		}); err != nil {
			return nil, err
		}
		b.note("memory: %s knows all", node)
	}
	out := map[string]residence{}
	for _, node := range []string{"home1", "dc1"} {
		if out[node], err = watchMemory(ctx, l, node, b.opts.pick(50*time.Second, 6*time.Second)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// knowsFleet tells whether an agent has a record of every member, and every peer in its device's Spec.
func knowsFleet(ctx context.Context, l *lab.Lab, node string) error {
	c, err := l.Client(node)
	if err != nil {
		return err
	}
	r, err := c.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return err
	}
	records, configured := 0, 0
	for _, p := range r.GetPeers() {
		if p.GetNatType() != skeinv1.NatType_NAT_TYPE_UNKNOWN {
			records++
		}
		if len(p.GetAllowedIps()) > 0 {
			configured++
		}
	}
	if records < fleetSize-1 || configured < fleetSize-1 {
		return fmt.Errorf("%s has records of %d and configured %d of its %d peers, want %d", node, records, configured,
			len(r.GetPeers()), fleetSize-1)
	}
	return nil
}

// watchMemory reads an agent's resident memory until it has stayed the same within 2 % for a while.
func watchMemory(ctx context.Context, l *lab.Lab, node string, settled time.Duration) (residence, error) {
	info, err := l.Node(node)
	if err != nil {
		return residence{}, err
	}
	r := residence{}
	if r.driver, err = wireguardDriver(ctx, l, node); err != nil {
		return r, err
	}
	var window []int
	n := int(settled / time.Second)
	for range 180 {
		rss, err := procStatus(info.PID, "VmRSS")
		if err != nil {
			return r, err
		}
		window = append(window, rss)
		if len(window) > n {
			window = window[1:]
			lo, hi := slices.Min(window), slices.Max(window)
			if hi-lo <= hi/50 {
				break
			}
		}
		select {
		case <-ctx.Done():
			return r, ctx.Err()
		case <-time.After(time.Second):
		}
	}
	slices.Sort(window)
	r.steady = window[len(window)/2]
	shared := 0 // files that lie in memory, as all do in a guest without a disk
	for key, to := range map[string]*int{"VmHWM": &r.peak, "RssAnon": &r.private, "RssFile": &r.files,
		"RssShmem": &shared} {
		if *to, err = procStatus(info.PID, key); err != nil {
			return r, err
		}
	}
	r.files += shared
	return r, nil
}

// wireguardDriver is whose WireGuard an agent uses: kernel or userspace.
func wireguardDriver(ctx context.Context, l *lab.Lab, node string) (string, error) {
	c, err := l.Client(node)
	if err != nil {
		return "", err
	}
	st, err := c.Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		return "", fmt.Errorf("node %s: which WireGuard it uses: %w", node, err)
	}
	return st.GetWireguardDriver(), nil
}

// procStatus reads a line of /proc/PID/status, in bytes.
func procStatus(pid int, key string) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(line, ":")
		if f := strings.Fields(v); k == key && len(f) == 2 {
			kib, err := strconv.Atoi(f[0])
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("process %d has no %s", pid, key)
}
