package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/bundle"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/doctor"
	"github.com/skeinmesh/skein/agent/journal"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

const (
	bundleEvents  = 500  // the last ones
	bundleEntries = 2000 // of the journal, the last ones
	bundleLines   = 5000 // of the log, the last ones
	bundlePeers   = 10   // explained, those in trouble first
)

func newBundleCmd(g *globals) *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: "bundle", Short: "Put what a maintainer needs into one file, without secrets",
		Long: "Put what a maintainer needs to look into a fault into one .tar.gz, readable by its owner only:\n" +
			"version, status, nodes, peers and why those in trouble are so, plan, events, settings, configuration,\n" +
			"log, metrics, profiles, the kernel's links, rules, routes and firewall, and what `skein doctor` finds;\n" +
			"and the end of its journal, also while no agent runs. INDEX.txt in it says what is there, and what was\n" +
			"left out and why.\n\n" +
			"Secrets are taken out: private keys, tokens, passwords and whatever is as long as a key. Names and addresses of\n" +
			"hosts stay. As root it has most.",
		Example: "  skein debug bundle\n  skein debug bundle -o /tmp/home1.tar.gz\n" +
			"  skein debug bundle -o - | ssh host 'cat > b.tar.gz'",
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return g.bundle(c, file) },
	}
	c.Flags().StringVarP(&file, "output", "o", "",
		"the `FILE` to write; - is standard output (default skein-NODE-bundle-TIME.tar.gz here)")
	_ = c.MarkFlagFilename("output") // the flag is there
	return c
}

func (g *globals) bundle(c *cobra.Command, file string) error {
	if f, ok := c.OutOrStdout().(*os.File); ok && file == "-" && term.IsTerminal(int(f.Fd())) {
		return errors.New("a bundle is binary, and standard output is a terminal: " +
			"name a file with -o FILE, or redirect the output")
	}
	now := time.Now()
	b := &bundler{g: g, cfg: g.configuration()}
	name := b.cfg.Value.Name
	ctx, cancel := context.WithTimeout(c.Context(), askWait)
	b.status, b.down = g.client().Status(ctx, &skeinv1.StatusRequest{})
	cancel()
	if b.down == nil {
		name = cmp.Or(b.status.GetName(), name)
	} else {
		b.down = g.plain(b.down)
	}
	head := fmt.Sprintf("skein %s, bundle of %s, %s", versionText(), name, now.UTC().Format(time.RFC3339))
	var out bytes.Buffer
	entries, err := bundle.Write(c.Context(), &out, head, b.parts(), now)
	if err != nil {
		return err
	}
	if file == "-" {
		_, err := out.WriteTo(c.OutOrStdout())
		return err
	}
	if file == "" {
		file = "skein-" + strings.ReplaceAll(name, "/", "_") + "-bundle-" + now.Format("20060102-150405") + ".tar.gz"
	}
	if err := writeWhole(file, out.Bytes()); err != nil {
		return err
	}
	left := 0
	for _, e := range entries {
		if e.Bytes == 0 {
			left++
		}
	}
	fmt.Fprintf(c.OutOrStdout(),
		"bundle of %s: %s (%s), %d parts, %d left out; what it has, and why the others are not there: "+
			"tar -xzOf %s skein-bundle/%s\n", name, file, size(uint64(out.Len())), len(entries)-left, left, file,
		bundle.IndexName)
	return nil
}

// writeWhole writes a file that only its owner may read: all of it, or none. What was there before is replaced, but for
// what is not a plain file, such as a pipe.
func writeWhole(file string, b []byte) error {
	if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("write the bundle: %w: name another file with -o FILE", err)
		}
		_, err = f.Write(b)
		return errors.Join(err, f.Close())
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".skein-bundle-*") // 0600
	if err != nil {
		return fmt.Errorf("write the bundle: %w: name a file elsewhere with -o FILE", err)
	}
	defer os.Remove(f.Name()) // fails after the rename, as it should
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	return nil
}

// bundler gathers the parts of a bundle.
type bundler struct {
	g      *globals
	cfg    doctor.Configuration
	status *skeinv1.StatusResponse
	down   error // why the agent does not answer

	once   sync.Once // examine
	report doctor.Report
	facts  doctor.Facts
}

func (b *bundler) examine(ctx context.Context) {
	b.once.Do(func() { b.report, b.facts = b.g.examine(ctx) })
}

// text makes a file of what a message says.
func text(m proto.Message, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = printProto(&b, m)
	return b.Bytes(), err
}

// asked is a part that an agent gives.
func asked[Q any, A proto.Message](b *bundler, name, what string, call func(context.Context, Q) (A, error),
	q Q) bundle.Part {
	return b.live(bundle.Part{Name: name, What: what, Take: func(ctx context.Context) ([]byte, error) {
		a, err := call(ctx, q)
		if err != nil {
			return nil, b.g.plain(err)
		}
		return text(a, nil)
	}})
}

// live is a part that needs a running agent; one that does not answer is not asked again and again.
func (b *bundler) live(p bundle.Part) bundle.Part {
	take := p.Take
	p.Take = func(ctx context.Context) ([]byte, error) {
		if b.down != nil {
			return nil, b.down
		}
		return take(ctx)
	}
	return p
}

func (b *bundler) parts() []bundle.Part {
	c := b.g.client()
	profile := func(kind string) bundle.Part {
		return b.live(bundle.Part{Name: "agent/" + kind + ".pprof", What: "profile, for go tool pprof", Raw: true,
			Take: func(ctx context.Context) ([]byte, error) { return b.profile(ctx, kind) }})
	}
	return []bundle.Part{
		{Name: "version.txt", What: "versions of this command and of the agent", Take: b.version},
		{Name: "doctor.txt", What: "what skein doctor finds", Take: b.doctor},
		{Name: "kernel.json", What: "links, rules, routes, firewall and settings as doctor has read them", Take: b.kernel},
		{Name: "skein.yaml", What: "the configuration file", Configuration: true, Take: b.configuration},
		{Name: "state-directory.txt", What: "names and sizes of the files there", Take: b.stateDirectory},
		{Name: "environment.txt", What: "the agent's variables that skein and Go read", Take: b.environment},
		{Name: "log.txt", What: "the end of the log, from the journal of systemd", Tail: true, Take: b.log},
		{Name: "journal.jsonl", What: "the end of the agent's journal", Tail: true, Take: b.journal},
		asked(b, "agent/status.json", "skein status", c.Status, &skeinv1.StatusRequest{}),
		asked(b, "agent/nodes.json", "skein nodes", c.Nodes, &skeinv1.NodesRequest{}),
		asked(b, "agent/peers.json", "skein peers", c.Peers, &skeinv1.PeersRequest{}),
		b.live(bundle.Part{Name: "agent/explain.jsonl", What: fmt.Sprintf("skein explain peer of up to %d peers in trouble",
			bundlePeers), Take: b.explain}),
		asked(b, "agent/netcheck.json", "skein netcheck", c.Netcheck, &skeinv1.NetcheckRequest{}),
		asked(b, "agent/relay.json", "skein relay", c.Relay, &skeinv1.RelayRequest{}),
		asked(b, "agent/usage.json", "what the agent costs", c.Usage, &skeinv1.UsageRequest{}),
		asked(b, "agent/settings.json", "skein settings", c.Settings, &skeinv1.SettingsRequest{}),
		asked(b, "agent/sites.json", "skein site list", c.Sites, &skeinv1.SitesRequest{}),
		asked(b, "agent/pools.json", "skein pool list", c.Pools, &skeinv1.PoolsRequest{}),
		asked(b, "agent/pods.json", "skein ip list", c.Pods, &skeinv1.PodsRequest{}),
		asked(b, "agent/egresses.json", "skein egress list", c.Egresses, &skeinv1.EgressesRequest{}),
		b.live(bundle.Part{Name: "agent/plan.txt",
			What: "skein plan --diff: what the kernel should have, and what it lacks", Take: b.plan}),
		b.live(bundle.Part{Name: "agent/events.jsonl", What: fmt.Sprintf("the last %d events", bundleEvents), Tail: true,
			Take: b.events}),
		b.live(bundle.Part{Name: "agent/metrics.txt", What: "the agent's metrics", Take: b.metrics}),
		profile("goroutine"), profile("heap"),
	}
}

func (b *bundler) version(context.Context) ([]byte, error) {
	agent := "does not answer"
	if b.down == nil {
		agent = b.status.GetVersion()
	}
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	system, _ := os.ReadFile("/etc/os-release")
	return fmt.Appendf(nil, "command %s\nagent %s\nkernel %s\n%s", versionText(), agent,
		strings.TrimSpace(string(kernel)), system), nil
}

func (b *bundler) doctor(ctx context.Context) ([]byte, error) {
	b.examine(ctx)
	var out bytes.Buffer
	printDoctor(&out, b.report)
	return out.Bytes(), nil
}

func (b *bundler) kernel(ctx context.Context) ([]byte, error) {
	b.examine(ctx)
	f := b.facts
	f.Config.Value = config.Config{} // the file itself is there
	return json.MarshalIndent(f, "", " ")
}

func (b *bundler) configuration(context.Context) ([]byte, error) {
	text, err := os.ReadFile(b.cfg.File)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: there is no configuration file, so all defaults apply", bundle.ErrAbsent)
	}
	return text, err
}

func (b *bundler) stateDirectory(context.Context) ([]byte, error) {
	dir := b.cfg.Value.StateDir
	var out bytes.Buffer
	fmt.Fprintln(&out, dir)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil // it has gone meanwhile
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&out, "%s %12d %s %s\n", info.Mode(), info.Size(), info.ModTime().UTC().Format(time.RFC3339), rel)
		return nil
	})
	return out.Bytes(), err
}

// environment has the variables whose names are skein's or the Go runtime's.
func (b *bundler) environment(context.Context) ([]byte, error) {
	p := findAgent(b.g.socket())
	defer p.close()
	if p.pid == 0 {
		return nil, fmt.Errorf("the process behind %s is unknown: no agent answers there, or it runs in another PID "+
			"namespace", b.g.socket())
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
	if err != nil {
		return nil, fmt.Errorf("%w: run as root", err)
	}
	return variables(string(environ))
}

// variables are those of an environment that a bundle may have, a line each.
func variables(environ string) ([]byte, error) {
	var out []string
	for _, v := range strings.Split(environ, "\x00") {
		name, _, _ := strings.Cut(v, "=")
		if strings.HasPrefix(name, "SKEIN_") || slices.Contains([]string{"GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GODEBUG"},
			name) {
			out = append(out, v)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: the agent's environment has none of these variables", bundle.ErrAbsent)
	}
	slices.Sort(out)
	return []byte(strings.Join(out, "\n") + "\n"), nil
}

// log asks journalctl, which alone knows the journal's format.
func (b *bundler) log(ctx context.Context) ([]byte, error) {
	program, err := exec.LookPath("journalctl")
	if err != nil {
		return nil, fmt.Errorf("%w: this host has no journalctl; look where the agent's standard error goes",
			bundle.ErrAbsent)
	}
	p := findAgent(b.g.socket())
	p.close()
	unit := cmp.Or(p.unit, "skein.service")
	c := exec.CommandContext(ctx, program, "--unit", unit, "--lines", fmt.Sprint(bundleLines), "--no-pager", "--quiet",
		"--output", "short-iso")
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		return out, fmt.Errorf("journalctl --unit %s: %w: %s", unit, err, strings.TrimSpace(errs.String()))
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: the systemd journal has no entries of %s", bundle.ErrAbsent, unit)
	}
	return out, nil
}

// journal asks the agent, which holds the file while it runs, and else reads the file.
func (b *bundler) journal(ctx context.Context) ([]byte, error) {
	if b.down == nil {
		r, err := b.g.client().Journal(ctx, &skeinv1.JournalRequest{Most: bundleEntries})
		if connect.CodeOf(err) == connect.CodeUnimplemented {
			err = errors.New("the running agent holds the journal open, and its version cannot export it; " +
				"agent/explain.jsonl has its entries about peers in trouble")
		}
		if err != nil {
			return nil, err
		}
		return lines(r.GetEntries())
	}
	entries, err := journal.Tail(filepath.Join(b.cfg.Value.StateDir, "journal.db"), bundleEntries)
	if err != nil {
		return nil, err
	}
	return lines(entries)
}

// lines has a message on each line.
func lines[M proto.Message](all []M) ([]byte, error) {
	var out bytes.Buffer
	for _, m := range all {
		one, err := text(m, nil)
		if err == nil {
			err = json.Compact(&out, one)
		}
		if err != nil {
			return out.Bytes(), err
		}
		out.WriteByte('\n')
	}
	return out.Bytes(), nil
}

// troubled are the names of peers to explain: those without a path first, then those that relay.
func troubled(peers []*skeinv1.PeerView) (out []string) {
	rank := func(p *skeinv1.PeerView) int {
		switch {
		case p.GetPath() == "none" || p.GetPath() == "down":
			return 0
		case !p.GetAlive():
			return 1
		case p.GetPath() == "relay":
			return 2
		}
		return 3
	}
	sorted := slices.SortedStableFunc(slices.Values(peers), func(a, b *skeinv1.PeerView) int { return rank(a) - rank(b) })
	for _, p := range sorted {
		if rank(p) < 3 && len(out) < bundlePeers {
			out = append(out, cmp.Or(p.GetNodeId(), p.GetName()))
		}
	}
	return out
}

func (b *bundler) explain(ctx context.Context) ([]byte, error) {
	peers, err := b.g.client().Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, b.g.plain(err)
	}
	names := troubled(peers.GetPeers())
	if len(names) == 0 {
		return nil, fmt.Errorf("%w: all %d peers are reached directly", bundle.ErrAbsent, len(peers.GetPeers()))
	}
	var all []*skeinv1.ExplainPeerResponse
	var errs []error
	for _, name := range names {
		e, err := b.g.client().ExplainPeer(ctx, &skeinv1.ExplainPeerRequest{Peer: name})
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, b.g.plain(err)))
			continue
		}
		all = append(all, e)
	}
	out, err := lines(all)
	return out, errors.Join(append(errs, err)...)
}

func (b *bundler) plan(ctx context.Context) ([]byte, error) {
	p, err := b.g.client().Plan(ctx, &skeinv1.PlanRequest{Diff: true})
	if err != nil {
		return nil, b.g.plain(err)
	}
	return []byte(p.GetText() + "\n\nchanges\n" + strings.Join(p.GetChanges(), "\n") + "\n"), nil
}

func (b *bundler) events(ctx context.Context) ([]byte, error) {
	since := uint64(0)
	if i := b.status.GetIndex(); i > bundleEvents {
		since = i - bundleEvents
	}
	s, err := b.g.client().Events(ctx, &skeinv1.EventsRequest{Since: since})
	if err != nil {
		return nil, b.g.plain(err)
	}
	defer s.Close()
	var all []*skeinv1.Event
	for s.Receive() {
		all = append(all, s.Msg().GetEvent())
	}
	out, err := lines(all)
	return out, errors.Join(b.g.plain(s.Err()), err)
}

// metrics asks this host's own port, and no other host's.
func (b *bundler) metrics(ctx context.Context) ([]byte, error) {
	at, err := netip.ParseAddrPort(b.cfg.Value.Ports.Metrics)
	if err != nil {
		return nil, fmt.Errorf("%w: ports.metrics is %s", bundle.ErrAbsent, b.cfg.Value.Ports.Metrics)
	}
	if at.Addr().IsUnspecified() {
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
	}
	if !at.Addr().IsLoopback() && !ownAddress(at.Addr()) {
		return nil, fmt.Errorf("ports.metrics: %s is not an address of this host", at.Addr())
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	client := http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true}, // and no proxy
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	a, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", at, a.Status)
	}
	return io.ReadAll(io.LimitReader(a.Body, bundle.MostBytes))
}

func ownAddress(a netip.Addr) bool {
	all, _ := net.InterfaceAddrs()
	return slices.ContainsFunc(all, func(one net.Addr) bool {
		p, err := netip.ParsePrefix(one.String())
		return err == nil && p.Addr().Unmap() == a.Unmap()
	})
}

func (b *bundler) profile(ctx context.Context, kind string) ([]byte, error) {
	s, err := b.g.client().Profile(ctx, &skeinv1.ProfileRequest{Kind: kind})
	if err != nil {
		return nil, b.g.plain(err)
	}
	defer s.Close()
	var out bytes.Buffer
	for first := true; s.Receive(); first = false {
		if !first { // the first message says that it is being taken
			out.Write(s.Msg().GetData())
		}
		if out.Len() > bundle.MostBytes {
			return nil, fmt.Errorf("the profile is larger than %d bytes", bundle.MostBytes)
		}
	}
	return out.Bytes(), b.g.plain(s.Err())
}
