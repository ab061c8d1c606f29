package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/podready"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/testenv"
)

// confPaths are the keys of the file by the Go path of their fields, such as Ports.Metrics.
func confPaths(t reflect.Type, path, key string, all map[string]string) {
	for _, f := range reflect.VisibleFields(t) {
		p, k := path+f.Name, key+f.Tag.Get("yaml")
		if f.Type.Kind() == reflect.Struct {
			confPaths(f.Type, p+".", k+".", all)
			continue
		}
		all[p] = k
	}
}

// A live key is read from conf, which follows the file; a.cfg is what it was at the start. Whoever hands out all of
// a.cfg hands out live keys, too.
func TestLiveKeysAreReadFromConf(t *testing.T) {
	keys, live := map[string]string{}, map[string]bool{}
	confPaths(reflect.TypeFor[config.Config](), "", "", keys)
	keys["Ports.UDPRelayRange"], keys["NatTraversal.Protocols"] = "ports.udpRelay", "natTraversal.portMapping" // methods
	for _, k := range config.Keys {
		live[k.Name] = k.Class == config.Live
	}
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) < 50 {
		t.Fatal(len(files), err)
	}
	re := regexp.MustCompile(`\ba\.cfg\b((?:\.[A-Z]\w*)*)`)
	wholes := map[string]bool{"claims.LockHost(a.cfg, !a.relayOnly())": true,
		"a.live.open(a.cfg)": true, "return &a.cfg": true}
	read := 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(b), "\n") {
			for _, m := range re.FindAllStringSubmatch(line, -1) {
				path := strings.TrimPrefix(m[1], ".")
				known := false
				for p, key := range keys {
					if !strings.HasPrefix(path+".", p+".") && !strings.HasPrefix(p+".", path+".") {
						continue
					}
					known = true
					if read++; live[key] && path != "" {
						t.Errorf("%s:%d reads %s, which is live, from a.cfg: read it from a.conf()", file, i+1, key)
					}
				}
				whole := false
				for w := range wholes {
					whole = whole || strings.Contains(line, w)
				}
				if path == "" && !whole && !strings.HasPrefix(strings.TrimSpace(line), "//") {
					t.Errorf("%s:%d hands out all of a.cfg: %s", file, i+1, strings.TrimSpace(line))
				}
				if !known && path != "" {
					t.Errorf("%s:%d: no key is at %s", file, i+1, path)
				}
			}
		}
	}
	if read < 20 {
		t.Errorf("only %d uses were found", read)
	}
}

// reloads is an agent with a configuration file.
type reloads struct {
	*Agent
	t *testing.T
}

func newReloads(t *testing.T, text string) *reloads {
	t.Helper()
	h := newHost(t, "a")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.loop.state = w.state
	a.opts.File = filepath.Join(t.TempDir(), "skein.yaml")
	a.opts.Load = func() (config.Config, error) {
		c, err := config.Load(a.opts.File, true)
		c.StateDir = "/by/flag"
		return c, err
	}
	r := &reloads{Agent: a, t: t}
	r.write(text)
	c, err := a.opts.Load()
	if err != nil {
		t.Fatal(err)
	}
	a.cfg = c
	a.live.open(c)
	a.replica = newReplica(t, w)
	a.followConfig()
	return r
}

func (r *reloads) write(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.opts.File, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func (r *reloads) must() reloaded {
	r.t.Helper()
	out, err := r.reload(false)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *reloads) problem(subject string) *skeinv1.Problem {
	for _, p := range r.problems.list() {
		if p.GetSubject() == subject {
			return p
		}
	}
	return nil
}

func TestReload(t *testing.T) {
	r := newReloads(t, "name: a\nsite: dc\n")
	r.write("name: b\nsite: attic\nleader: true\nports: {wireguard: 51999}\nstateDir: /elsewhere\n")
	out := r.must()
	have := keyNames(out.live) + " | " + keyNames(out.restart) + " | " + keyNames(out.agreed)
	if want := "site leader | ports.wireguard | name"; have != want {
		t.Errorf("live, restart, agreed: %s, want %s", have, want)
	}
	c := r.conf()
	if c.Site != "attic" || !c.Leader || c.Ports.WireGuard != 51820 || c.Name != "a" || c.StateDir != "/by/flag" {
		t.Errorf("it runs with %+v", c)
	}
	if h := r.host(); h.Site != "attic" || !h.Leader {
		t.Errorf("of this host holds %+v", h)
	}
	p := r.problem(subjectRestart)
	if !strings.Contains(p.GetMessage(), "ports.wireguard (51999, now 51820)") || p.GetSeverity() != warning {
		t.Errorf("the restart that is due: %v", p)
	}
	if due := r.live.due(); len(due) != 1 || due[0].Name != "ports.wireguard" {
		t.Errorf("due: %+v", due)
	}
	r.followConfig()()
	if again := r.must(); len(again.live) > 0 || again.followed != nil || keyNames(again.last) != "site leader" {
		t.Errorf("the same file again: %+v", again)
	}
	r.write("name: a\nsite: dc\n")
	out = r.must()
	if keyNames(out.live) != "site leader" || r.conf().Leader || r.problem(subjectRestart) != nil ||
		len(r.live.due()) > 0 {
		t.Errorf("taken back: %+v, %v", out, r.problems.list())
	}
}

// One bad key, a missing file, and what is not YAML change nothing, and are a problem until the file is repaired.
func TestReloadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"bad value": {"name: a\nsite: attic\nlazyPaths: often\n",
			`skein.yaml:3: lazyPaths: "often" is not allowed; allowed: auto, off`},
		"unknown key":  {"name: a\nsite: attic\nsit: dc\n", `skein.yaml:3: unknown key "sit"; allowed here: `},
		"no YAML":      {"name: a\nsite: [\n", "skein.yaml"},
		"a dead value": {"name: a\nsite: attic\nports: {relay: 7946}\n", "ports.control"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReloads(t, "name: a\nsite: dc\n")
			before := r.conf()
			r.write(c.text)
			if _, err := r.reload(true); err == nil || r.problem(subjectConfig) != nil {
				t.Errorf("a dry run: %v, %v", err, r.problems.list())
			}
			_, err := r.reload(false)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
			if r.conf() != before || r.problem(subjectConfig).GetMessage() != err.Error() {
				t.Errorf("after that it runs with %+v, and tells %v", r.conf(), r.problems.list())
			}
			r.write("name: a\nsite: attic\n")
			if out := r.must(); keyNames(out.live) != "site" || r.problem(subjectConfig) != nil {
				t.Errorf("repaired: %+v, %v", out, r.problems.list())
			}
		})
	}
	r := newReloads(t, "name: a\nsite: dc\n")
	if err := os.Remove(r.opts.File); err != nil {
		t.Fatal(err)
	}
	if _, err := r.reload(false); !errors.Is(err, os.ErrNotExist) || r.conf().Site != "dc" {
		t.Errorf("a missing file: %v, %+v", err, r.conf())
	}
	r.opts.Load = nil
	if _, err := r.reload(false); !errors.Is(err, errNoFile) {
		t.Errorf("without a file: %v", err)
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	r := newReloads(t, "name: a\nsite: dc\n")
	before := r.conf()
	r.write("name: a\nsite: attic\nports: {metrics: off, wireguard: 51999}\n")
	out, err := r.reload(true)
	if err != nil || keyNames(out.live) != "site ports.metrics" || keyNames(out.restart) != "ports.wireguard" {
		t.Errorf("%+v, %v", out, err)
	}
	if r.conf() != before || len(r.problems.list()) > 0 || len(r.live.due()) > 0 {
		t.Errorf("it runs with %+v, and tells %v", r.conf(), r.problems.list())
	}
}

// The loop hands over what parts do not read themselves, and whoever asked for the reload hears of it.
func TestFollowConfig(t *testing.T) {
	r := newReloads(t, "name: a\n")
	r.loop.settled = r.loop.state
	r.write("name: a\nlabels: {rack: r7}\n")
	out := r.must()
	done := func() bool {
		select {
		case <-out.followed:
			return true
		default:
			return false
		}
	}
	followed := r.followConfig()
	if r.loop.settled != nil {
		t.Error("the paths keep their settings")
	}
	if p := r.problem(subjectLabels); !strings.Contains(p.GetMessage(), "rack=r7") {
		t.Errorf("labels that are not agreed: %v", r.problems.list())
	}
	if done() {
		t.Error("followed before the data plane was")
	}
	if again := r.must(); len(again.live) > 0 || again.followed != out.followed {
		t.Error("who asks meanwhile does not wait for the data plane")
	}
	followed()
	if !done() {
		t.Error("not followed")
	}
	r.write("name: a\n")
	out = r.must()
	r.followConfig()()
	if !done() || r.problem(subjectLabels) != nil {
		t.Errorf("taken out: followed %v, %v", done(), r.problems.list())
	}
}

// The file is read when it changes, be it written or replaced, and when a signal comes.
func TestWatchConfig(t *testing.T) {
	r := newReloads(t, "name: a\nsite: dc\n")
	signal := make(chan os.Signal, 1)
	r.opts.Reread = signal
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); r.watchConfig(ctx) }()
	defer func() { stop(); <-ended }()
	site := func(want string) func() bool { return func() bool { return r.conf().Site == want } }
	r.write("name: a\nsite: written\n")
	testenv.Eventually(t, "written", site("written"))
	next := filepath.Join(filepath.Dir(r.opts.File), "new")
	if err := os.WriteFile(next, []byte("name: a\nsite: replaced\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, r.opts.File); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "replaced", site("replaced"))
	r.write("name: a\nsite: [\n")
	testenv.Eventually(t, "a bad file is a problem", func() bool { return r.problem(subjectConfig) != nil })
	r.write("name: a\nsite: repaired\n")
	testenv.Eventually(t, "repaired", func() bool { return site("repaired")() && r.problem(subjectConfig) == nil })
	watched := r.opts.Load
	stop()
	<-ended
	r.opts.File += ".other" // nobody writes that, so that only the signal can have it read
	r.opts.Load = func() (config.Config, error) {
		c, err := watched()
		c.Site = "signalled"
		return c, err
	}
	r.write("name: a\n")
	ctx, again := context.WithCancel(t.Context())
	defer again()
	go r.watchConfig(ctx)
	testenv.Eventually(t, "read once at the start", site("signalled"))
	watched = func() (config.Config, error) { return config.Config{}, errors.New("signal heard") }
	signal <- nil
	testenv.Eventually(t, "the signal", func() bool {
		return strings.Contains(r.problem(subjectConfig).GetMessage(), "signal heard")
	})
}

// Metrics move to another address, also to one that overlaps theirs, and stay where they are when they cannot.
func TestMetricsMove(t *testing.T) {
	r := newReloads(t, "name: a\nports: {metrics: off}\n")
	r.metrics = newMetrics(r.Agent)
	r.metrics.Serve(t.Context(), "off", nil)
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return l.Addr().String()
	}
	get := func(at string) error {
		c := http.Client{Timeout: 5 * time.Second}
		answer, err := c.Get("http://" + at + "/healthz")
		if err == nil {
			answer.Body.Close()
		}
		return err
	}
	move := func(to string) error {
		r.write(fmt.Sprintf("name: a\nsite: %q\nports: {metrics: %q}\n", to, to))
		_, err := r.reload(false)
		return err
	}
	first := free()
	if err := errors.Join(move(first), get(first)); err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(first)
	if err := errors.Join(move("0.0.0.0:"+port), get("127.0.0.1:"+port)); err != nil {
		t.Fatal("the same port of all addresses: ", err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	err = move(taken.Addr().String())
	if err == nil || !strings.Contains(err.Error(), "skein.yaml:3: ports.metrics: ") {
		t.Errorf("an address that is taken: %v", err)
	}
	if c := r.conf(); c.Ports.Metrics != "0.0.0.0:"+port || c.Site != c.Ports.Metrics || r.problem(subjectConfig) == nil {
		t.Errorf("after that: metrics at %s, site %s, %v", c.Ports.Metrics, c.Site, r.problems.list())
	}
	if err := get("127.0.0.1:" + port); err != nil {
		t.Error("it answers no more where it did: ", err)
	}
	if err := move("off"); err != nil {
		t.Error(err)
	}
	if err := get("127.0.0.1:" + port); err == nil {
		t.Error("it answers after it was switched off")
	}
}

// The runtime's configuration follows cni.*: it moves, and goes with the key.
func TestCNIConfigurationFollows(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	c := config.Default()
	c.RunDir, c.CNI.ConfDir, c.CNI.BinDir = dir, filepath.Join(dir, "net.d"), filepath.Join(dir, "bin")
	a := &Agent{settingUp: settingUp{cfg: c}}
	a.live.open(a.cfg)
	stands := make(chan struct{})
	close(stands)
	ready, err := podready.Open(podready.Config{RunDir: dir, Conf: a.confChanged, Stands: stands, Log: quiet(),
		Report: func(string, part.Severity, string, string) {}})
	if err != nil {
		t.Fatal(err)
	}
	able := func(context.Context) error { return nil }
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); ready.Run(ctx, able, time.Hour) }()
	defer func() { stop(); <-ended }()
	there := func(file, text string) func() bool {
		return func() bool {
			b, err := os.ReadFile(filepath.Join(dir, file))
			return err == nil && strings.Contains(string(b), text)
		}
	}
	gone := func(file string) func() bool {
		return func() bool { _, err := os.Stat(filepath.Join(dir, file)); return errors.Is(err, os.ErrNotExist) }
	}
	set := func(change func(*config.CNI)) {
		c := *a.conf()
		change(&c.CNI)
		a.live.set(&c)
	}
	testenv.Eventually(t, "it is there", there("net.d/10-skein.conflist", `"skein"`))
	set(func(c *config.CNI) { c.Network = "pods" })
	testenv.Eventually(t, "it has the new name", there("net.d/10-skein.conflist", `"pods"`))
	set(func(c *config.CNI) { c.ConfFile = "05-skein.conflist" })
	testenv.Eventually(t, "it is in the new file", there("net.d/05-skein.conflist", `"pods"`))
	testenv.Eventually(t, "it is no more in the old one", gone("net.d/10-skein.conflist"))
	set(func(c *config.CNI) { c.ConfDir = "" })
	testenv.Eventually(t, "it goes with the key", gone("net.d/05-skein.conflist"))
	set(func(c *config.CNI) { c.ConfDir = filepath.Join(dir, "net.d") })
	testenv.Eventually(t, "it comes with the key", there("net.d/05-skein.conflist", `"pods"`))
}

// snapshots is a part that keeps what it was shown last.
type snapshots struct{ last part.Snapshot }

func (*snapshots) Open(part.Host, prometheus.Registerer) error { return nil }
func (*snapshots) Run(context.Context)                         {}
func (p *snapshots) Follow(s part.Snapshot)                    { p.last = s }

// Parts get what they need of the configuration with each snapshot.
func TestPartsFollowTheConfiguration(t *testing.T) {
	r := newReloads(t, "name: a\n")
	end := r.withGossip(t, r.key, r.loop.state)
	defer end()
	p := &snapshots{}
	r.opts.Parts = []part.Part{p}
	for text, want := range map[string]time.Duration{
		"": 10 * time.Minute, "kubernetes: {revokeAfterSeconds: 60}\n": time.Minute,
	} {
		r.write("name: a\n" + text)
		r.must()
		if r.followParts(); p.last.RevokeAfter != want {
			t.Errorf("%q: revoked after %s, want %s", text, p.last.RevokeAfter, want)
		}
	}
}
