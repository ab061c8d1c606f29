package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/goccy/go-yaml"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/simtime"
	"github.com/skeinmesh/skein/internal/testenv"
)

// TestMain lets this test binary stand in for the skein program: `up` is a stub agent that answers the
// local API and says that its overlay address is its underlay address. What the lab does to agents is
// tested with it; the real agent is tested by the examples.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "up" {
		os.Exit(stubUp(os.Args[2:]))
	}
	if filepath.Base(os.Args[0]) == cniPlugin {
		os.Exit(stubPlugin())
	}
	if len(os.Args) > 1 && os.Args[1] == "explain" {
		fmt.Println("the stub explains nothing")
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type stub struct {
	skeinv1connect.UnimplementedAgentServiceHandler
	name, state string
	addr        netip.Addr
}

func stubUp(args []string) int {
	flags := map[string]string{}
	for i := 0; i < len(args); i++ {
		if args[i] == "--init" {
			flags["init"] = "yes"
			continue
		}
		flags[strings.TrimPrefix(args[i], "--")] = args[i+1]
		i++
	}
	var config struct{ Name string }
	b, err := os.ReadFile(flags["config"])
	if err == nil {
		err = yaml.Unmarshal(b, &config)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	member := filepath.Join(flags["state-dir"], "member")
	if _, err := os.Stat(member); err != nil && flags["init"] == "" && flags["join-file"] == "" {
		fmt.Println("neither member, nor --init, nor --join-file")
		return 1
	}
	if err := os.WriteFile(member, nil, 0o600); err != nil {
		return 1
	}
	s := &stub{name: config.Name, state: flags["state-dir"], addr: ownAddress()}
	socket := filepath.Join(flags["run-dir"], "agent.sock")
	os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	_, handler := skeinv1connect.NewAgentServiceHandler(s)
	go http.Serve(l, handler)
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM)
	fmt.Println("stub agent runs")
	<-c
	if _, err := os.Stat(filepath.Join(s.state, "stubborn")); err == nil {
		select {}
	}
	return 0
}

func ownAddress() netip.Addr {
	addrs, _ := net.InterfaceAddrs()
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

func (s *stub) Status(context.Context, *skeinv1.StatusRequest) (*skeinv1.StatusResponse, error) {
	records, _ := os.ReadFile(filepath.Join(s.state, "records"))
	return &skeinv1.StatusResponse{Name: s.name, Phase: "running", Index: 7, StateHash: "aa", RecordsHash: string(records),
		Ipv4: s.addr.String()}, nil
}

func (s *stub) Peers(context.Context, *skeinv1.PeersRequest) (*skeinv1.PeersResponse, error) {
	return &skeinv1.PeersResponse{Peers: []*skeinv1.PeerView{{Name: "a1", Path: "direct"},
		{Name: "b1", Path: "relay", Reason: "the stub says so"}}}, nil
}

func (s *stub) Pools(context.Context, *skeinv1.PoolsRequest) (*skeinv1.PoolsResponse, error) {
	return &skeinv1.PoolsResponse{}, nil
}

func (s *stub) CreateToken(_ context.Context, r *skeinv1.CreateTokenRequest) (*skeinv1.CreateTokenResponse, error) {
	if r.GetUses() == 0 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no uses"))
	}
	return &skeinv1.CreateTokenResponse{Token: "skein1_x"}, nil
}

// stubLab reads a lab of two public sites and the given steps, under a name of this process.
func stubLab(t *testing.T, steps string) (*Spec, RunOptions, *lines) {
	t.Helper()
	return stubFile(t, `name: NAME
sites: {a: {nat: none}, b: {nat: none}}
nodes:
  a1: {site: a, server: true, config: {log: {level: debug}}}
  b1: {site: b}
  b2: {site: b}
steps:
`+steps)
}

// raiseStubs brings up a lab of stub agents; its file's name is NAME.
func raiseStubs(t *testing.T, file string) *Lab {
	t.Helper()
	spec, opts, _ := stubFile(t, file)
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.endFlows(); l.endServers() })
	return l
}

// stubFile makes a lab of stub agents from a file whose name is NAME.
func stubFile(t *testing.T, file string) (*Spec, RunOptions, *lines) {
	t.Helper()
	testenv.NeedRoot(t)
	h := uint16(1)
	for _, b := range []byte(t.Name()) {
		h = h*31 + uint16(b)
	}
	name := fmt.Sprintf("l%d-%04x", os.Getpid(), h)
	spec, err := Parse("test.yaml", []byte(strings.Replace(file, "NAME", name, 1)))
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sk") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	out := &lines{}
	opts := RunOptions{Options: Options{Dir: dir, Binary: exe, Progress: out.add}, Artifacts: t.TempDir()}
	t.Cleanup(func() {
		if err := Down(context.Background(), name, dir); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
		if t.Failed() {
			t.Log(out)
		}
	})
	return spec, opts, out
}

type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) add(s string) { l.mu.Lock(); l.text = append(l.text, s); l.mu.Unlock() }
func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.text, "\n")
}

func TestRunWholeScenario(t *testing.T) {
	spec, opts, out := stubLab(t, `
  - {wait: converged, within: 5s}
  - {expect: {from: all, to: all, reach: true, count: 3}}
  - {expect: {from: b2, to: a1, path: [direct, relay]}}
  - {partition: [[a1], [b1, b2]]}
  - {expect: {from: [b1, b2], to: a1, reach: false}}
  - {expect: {from: b1, to: b2, reach: true}}
  - {heal: b1}
  - {expect: {from: b1, to: a1, reach: true}}
  - {expect: {from: b2, to: a1, reach: false}}
  - {heal: all}
  - {block: {from: a1, to: b2, proto: icmp, oneway: true}}
  - {expect: {from: b2, to: a1, reach: false}}
  - {heal: all}
  - {expect: {from: b2, to: a1, reach: true, for: 200ms}}
  - {exec: {node: all, command: 'echo $SKEIN_NODE; test -d $SKEIN_STATE_DIR; command -v skein', output: bin/skein}}
  - {exec: {node: b1, command: [sh, -c, exit 3], exit: 3, absent: nonsense, matches: '^$'}}
  - {kill: a1}
  - {stop: b1}
  - {wait: converged}
  - {start: b1}
  - {heal: all}
  - {exec: {node: a1, command: skein explain peer b1, output: nothing}}
  - {log: the end}
  - {wait: 1ms}
`)
	res, err := Run(t.Context(), spec, opts)
	if err != nil || !res.OK || len(res.Steps) != len(spec.Steps) {
		t.Fatalf("%v, %d of %d steps", err, len(res.Steps), len(spec.Steps))
	}
	if !strings.Contains(out.String(), "\nthe end\n") {
		t.Error("the log step printed nothing")
	}
	nothingLeft(t, spec, opts.Dir)
}

func nothingLeft(t *testing.T, spec *Spec, dir string) {
	t.Helper()
	if left, err := fabric.Namespaces(spec.Name); err != nil || len(left) > 0 {
		t.Errorf("namespaces left: %v %v", left, err)
	}
	if _, err := os.Stat(filepath.Join(dir, spec.Name)); err == nil {
		t.Error("the lab's directory is left")
	}
	if left, err := List(dir); err != nil || slices.Contains(left, spec.Name) {
		t.Errorf("still listed: %v %v", left, err)
	}
}

func TestFailedStepLeavesAnAccount(t *testing.T) {
	spec, opts, out := stubLab(t, `
  - {expect: {from: a1, to: b1, path: direct}, within: 100ms}
  - {log: never printed}
`)
	res, err := Run(t.Context(), spec, opts)
	if err == nil || res.OK {
		t.Fatal("a step that cannot hold was passed")
	}
	for _, want := range []string{"test.yaml:9: step 1", "the path from a1 to b1 is relay (the stub says so), not direct",
		"not met within 100ms", "\nwhile it ran: in ", "\nwith the steps before: in ", "its agents used "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	for _, want := range []string{"a1 (running", "b1 (running", "about its peer b1", "FAIL  1/2"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("what was printed lacks %q", want)
		}
	}
	if strings.Contains(out.String(), "never printed") {
		t.Error("steps after the failed one were run")
	}
	for _, file := range []string{"lab.yaml", "lab.json", "core-kernel.txt", "router-a-kernel.txt", "nodes/a1/agent.log",
		"nodes/a1/skein.yaml", "nodes/a1/status.json", "nodes/b1/peers.json", "nodes/b2/kernel.txt", "nodes/b2/state/member",
		"nodes/a1/explain-b1.json"} {
		if st, err := os.Stat(filepath.Join(res.Artifacts, file)); err != nil ||
			(st.Size() == 0 && !strings.Contains(file, "state/")) {
			t.Errorf("artifact %s: %v", file, err)
		}
	}
	kernel, err := os.ReadFile(filepath.Join(res.Artifacts, "nodes/b2/kernel.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"eth0", "198.18.2.13", "skeinlab", "stamp"} {
		if !strings.Contains(string(kernel), want) {
			t.Errorf("the kernel's account lacks %s", want)
		}
	}
	nothingLeft(t, spec, opts.Dir)
}

func TestDisagreementIsShown(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	info, err := l.Node("b2")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(info.Dir, "state", "records"), []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := l.WaitConverged(t.Context(), 50*time.Millisecond); err == nil || !strings.Contains(err.Error(),
		"b2               index 7 state aa records other") {
		t.Errorf("disagreement: %v", err)
	}
	if err := l.WaitConverged(t.Context(), time.Second, "a1", "b1"); err != nil {
		t.Errorf("those that agree: %v", err)
	}
	different := []*skeinv1.StatusResponse{{Index: 3, StateHash: "x"}, {Index: 3, StateHash: "y"}}
	var final finalError
	if err := agree(different); !errors.As(err, &final) {
		t.Errorf("two states at one index: %v", err)
	}
	// One server is not to be lost while the others do not vote; those that were not asked may be away for long.
	servers := func(voter bool) []*skeinv1.ServerStatus {
		return []*skeinv1.ServerStatus{
			{NodeId: "1", Name: "dc1", Voter: true},
			{NodeId: "2", Name: "dc2", Voter: voter, Waiting: "it has just joined"},
			{NodeId: "3", Name: "dc3"},
		}
	}
	asked := func(voter bool) []*skeinv1.StatusResponse {
		return []*skeinv1.StatusResponse{{Name: "dc1", NodeId: "1", Servers: servers(voter)},
			{Name: "dc2", NodeId: "2", Servers: servers(true)}}
	}
	if err := agree(asked(false)); err == nil || errors.As(err, &final) ||
		err.Error() != "server dc2 does not vote yet, says dc1: it has just joined" {
		t.Errorf("a server without a vote: %v", err)
	}
	if err := agree(asked(true)); err != nil {
		t.Errorf("all that were asked vote: %v", err)
	}
	// An agent that dies by itself is told, with the end of its log.
	if err := syscall.Kill(info.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := l.WaitConverged(t.Context(), 5*time.Second); err == nil || !strings.Contains(err.Error(),
		"signal: killed") || !strings.Contains(err.Error(), "stub agent runs") {
		t.Errorf("an agent that died: %v", err)
	}
	if err := l.Start(t.Context(), "a1"); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("starting what runs: %v", err)
	}
}

// A lab is found again by another process, and can be taken down by its name alone.
func TestAttachAndDownAfterACrash(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	l, err := Up(t.Context(), spec, opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Partition([]string{"a1"}, []string{"b1"}); err != nil {
		t.Fatal(err)
	}
	again, err := Attach(spec.Name, Options{Dir: opts.Dir})
	if err != nil {
		t.Fatal(err)
	}
	st := again.Status(t.Context())
	b, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	if n := st.Nodes[1]; n.Name != "b1" || !n.Alive || n.Phase != "running" || n.Paths["a1"] != "direct" ||
		n.IPv4 != "198.18.2.12" || len(st.Cuts) != 2 {
		t.Errorf("status: %s", b)
	}
	if err := again.Kill(t.Context(), "b1"); err != nil { // not our child, from the Lab's view
		t.Fatal(err)
	}
	if err := again.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	out, exit, err := again.Exec(t.Context(), "b1", "sh", "-c", "echo $SKEIN_RUN_DIR; exit 4")
	if err != nil || exit != 4 || !strings.HasSuffix(strings.TrimSpace(out), "/b1/run") {
		t.Errorf("exec: %q, %d, %v", out, exit, err)
	}
	if _, err := Up(t.Context(), spec, opts.Options); err == nil || !strings.Contains(err.Error(), "skein lab down") {
		t.Errorf("a second lab of the same name: %v", err)
	}
	if labs, err := List(opts.Dir); err != nil || !slices.Contains(labs, spec.Name) {
		t.Errorf("list: %v, %v", labs, err)
	}
	os.Remove(recordFile(l.Dir)) // as after a crash in the worst moment
	if _, err := Attach(spec.Name, Options{Dir: opts.Dir}); err == nil || !strings.Contains(err.Error(), "half there") {
		t.Errorf("attach to half a lab: %v", err)
	}
	if err := Down(t.Context(), spec.Name, opts.Dir); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, spec, opts.Dir)
	if _, err := Attach(spec.Name, Options{Dir: opts.Dir}); err == nil || !strings.Contains(err.Error(), "no lab named") {
		t.Errorf("attach to no lab: %v", err)
	}
}

// TestLateNodes: whoever is late is not started with the lab, is not waited for, and joins when a step starts it.
func TestLateNodes(t *testing.T) {
	spec, opts, _ := stubFile(t, `name: NAME
sites: {a: {nat: none}, b: {nat: none}}
nodes: {a1: {site: a, server: true}, a2: {site: a}, b1: {site: b, late: true}}
steps:
  - {wait: converged, within: 10s}
  - {exec: {node: b1, command: 'test -e "$SKEIN_STATE_DIR/member"', exit: 1}}
  - {start: b1}
  - {exec: {node: b1, command: 'test -e "$SKEIN_STATE_DIR/member"'}}
  - {wait: converged, within: 10s}
  - {expect: {from: a1, to: b1, reach: true}}
`)
	if _, err := Run(t.Context(), spec, opts); err != nil {
		t.Error(err)
	}
}

func TestAgentThatCannotStart(t *testing.T) {
	spec, opts, _ := stubLab(t, "  []\n")
	opts.Options.Artifacts = opts.Artifacts
	script := filepath.Join(t.TempDir(), "skein")
	if err := os.WriteFile(script, []byte("#!/bin/sh\necho the port is in use >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	opts.Binary = script
	_, err := Up(t.Context(), spec, opts.Options)
	for _, want := range []string{"node a1", "exit status 1", "the port is in use", "logs and states are in "} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	nothingLeft(t, spec, opts.Dir)
}

func TestBrokenOffRunLeavesNothing(t *testing.T) {
	spec, opts, _ := stubLab(t, "  - {wait: 1h}\n")
	ctx, cancel := context.WithCancel(t.Context())
	opts.Progress = func(s string) {
		if strings.HasPrefix(s, "up in") {
			cancel()
		}
	}
	if _, err := Run(ctx, spec, opts); !errors.Is(err, context.Canceled) {
		t.Errorf("broken off: %v", err)
	}
	nothingLeft(t, spec, opts.Dir)
}

// A process number that was given to another is not touched.
func TestSignalHitsOnlyTheSameProcess(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "echo up; exec sleep 1000")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	p, err := processOf(cmd.Process.Pid)
	if err != nil || !p.alive() {
		t.Fatal(err)
	}
	older := process{p.PID, p.Start - 1}
	if older.alive() {
		t.Error("a process with another start time is taken for alive")
	}
	if err := older.signal(syscall.SIGKILL); err != nil || !p.alive() {
		t.Errorf("signal to a former owner of the number: %v, alive %v", err, p.alive())
	}
	if err := p.signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if p.alive() || p.signal(syscall.SIGKILL) != nil || p.wait(t.Context()) != nil {
		t.Error("a process that ended is not seen as gone")
	}
}

func TestConfigLiesOverWhatTheLabWrites(t *testing.T) {
	l := &Lab{Spec: &Spec{Config: map[string]any{"log": map[string]any{"level": "debug", "format": "json"}, "site": "x"}}}
	got, err := yaml.Marshal(l.config(Node{Name: "a", Site: "dc", Server: true, Relay: "true",
		Config: map[string]any{"log": map[string]any{"level": "warn"}}}))
	if err != nil {
		t.Fatal(err)
	}
	want := "log:\n  format: json\n  level: warn\nname: a\nnatTraversal:\n  imds: \"false\"\nrelay: \"true\"\nserver: " +
		"true\nsite: x\n"
	if string(got) != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// A look that takes long is not repeated at once, and all the same once more when the time is over.
func TestLooksThatTakeLong(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		began, looks := time.Now(), 0
		err := eventuallyWith(t.Context(), time.Minute, 0, restPerLook, func(context.Context) error {
			time.Sleep(40 * time.Second)
			if looks++; looks == 1 {
				return errors.New("not yet")
			}
			return nil
		})
		if took := time.Since(began); err != nil || looks != 2 || took != 80*time.Second+restMost {
			t.Errorf("%d looks, %v after %s", looks, err, took)
		}
	})
}
