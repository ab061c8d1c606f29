package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// patience bounds every wait for something that is to happen.
const patience = 30 * time.Second

// site is one place for an agent on a host: configuration, state and sockets.
type site struct {
	t       *testing.T
	host    string // of the lab
	dir     string
	user    *syscall.SysProcAttr
	only    []uintptr // capabilities left to processes that run as root; nil: all
	clients skeinv1connect.AgentServiceClient
}

// newSite makes a place on a host. The configuration is a mapping as the file has it.
func newSite(t *testing.T, host, name string, config map[string]any) *site {
	t.Helper()
	shared(t)
	dir, err := os.MkdirTemp(base, "s")
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, host: host, dir: dir}
	s.clients = s.clientAt(s.socket())
	all := map[string]any{"name": name, "site": "dc"}
	for k, v := range config {
		all[k] = v
	}
	b, err := yaml.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	s.write("skein.yaml", b)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return s
}

// in is the same site for a sub-test.
func (s *site) in(t *testing.T) *site {
	c := *s
	c.t = t
	return &c
}

func (s *site) path(name string) string  { return filepath.Join(s.dir, name) }
func (s *site) state(name string) string { return filepath.Join(s.dir, "state", name) }
func (s *site) socket() string           { return filepath.Join(s.dir, "run", "agent.sock") }

func (s *site) write(name string, b []byte) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), b, 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) clientAt(socket string) skeinv1connect.AgentServiceClient {
	return skeinv1connect.NewAgentServiceClient(&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}}, "http://skein")
}

// command is `skein args…` on the site's host with its directories.
func (s *site) command(args ...string) *exec.Cmd {
	s.t.Helper()
	c := exec.Command(program(s.t), args...)
	c.Dir = s.dir
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "SKEIN_STATE_DIR=" + s.path("state"), "SKEIN_RUN_DIR=" + s.path("run")}
	c.SysProcAttr = s.user
	return c
}

// start runs a command in the host's namespace, and never in this process's own.
func (s *site) start(c *exec.Cmd) {
	s.t.Helper()
	err := fabric.In(fabric.HostNS(labName, s.host), func() error {
		if err := s.dropCapabilities(); err != nil {
			return err
		}
		return c.Start()
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// dropCapabilities takes all but `only` from what this thread's children can have. The thread ends with
// its work.
func (s *site) dropCapabilities() error {
	for bit := uintptr(0); s.only != nil && bit <= unix.CAP_LAST_CAP; bit++ {
		if slices.Contains(s.only, bit) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, bit, 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("drop capability %d: %w", bit, err)
		}
	}
	return nil
}

// run waits for a command and gives both outputs and the exit status.
func (s *site) run(args ...string) (stdout, stderr string, exit int) {
	s.t.Helper()
	c := s.command(args...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	s.start(c)
	timer := time.AfterFunc(patience, func() { c.Process.Kill() })
	defer timer.Stop()
	err := c.Wait()
	var e *exec.ExitError
	if err != nil && !errors.As(err, &e) {
		s.t.Fatal(err)
	}
	return out.String(), errs.String(), c.ProcessState.ExitCode()
}

// ok runs a command that must succeed.
func (s *site) ok(args ...string) string {
	s.t.Helper()
	out, errs, exit := s.run(args...)
	if exit != 0 {
		s.t.Fatalf("skein %s: exit status %d\n%s%s", strings.Join(args, " "), exit, out, errs)
	}
	return strings.TrimSpace(out)
}

// fails runs a command that must end with a status and with exactly this complaint on its last line,
// where … stands for anything and {name} for a path of the site.
func (s *site) fails(exit int, complaint string, args ...string) {
	s.t.Helper()
	_, errs, have := s.run(args...)
	s.complains(errs, complaint)
	if have != exit {
		s.t.Errorf("skein %s: exit status %d, want %d", strings.Join(args, " "), have, exit)
	}
}

func (s *site) complains(stderr, want string) {
	s.t.Helper()
	_, have, found := cutLast(stderr, "skein: ")
	have = strings.TrimSpace(have)
	if !found || !s.like(want).MatchString(have) {
		s.t.Errorf("it says\n  %s\nwant\n  %s\nall of its output:\n%s", have, want, stderr)
	}
	if strings.Count(have, "\n") > 0 && !strings.Contains(want, "\n") {
		s.t.Errorf("the complaint has several lines:\n%s", have)
	}
}

func cutLast(s, sep string) (before, after string, found bool) {
	for i := strings.LastIndex(s, sep); i >= 0; i = strings.LastIndex(s[:i], sep) {
		if i == 0 || s[i-1] == '\n' {
			return s[:i], s[i+len(sep):], true
		}
	}
	return s, "", false
}

var placeholder = regexp.MustCompile(`\\\{[a-z0-9./\\]*\\\}`)

// like turns a complaint with … and {path} into an expression.
func (s *site) like(want string) *regexp.Regexp {
	e := regexp.QuoteMeta(want)
	e = placeholder.ReplaceAllStringFunc(e, func(m string) string {
		return regexp.QuoteMeta(s.path(strings.Trim(strings.ReplaceAll(m, `\.`, "."), `\{}`)))
	})
	return regexp.MustCompile(`^` + strings.ReplaceAll(e, "…", `[^\n]*`) + `$`)
}

// proc is a running `skein up`.
type proc struct {
	s      *site
	cmd    *exec.Cmd
	log    *lockedBuffer
	exited chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (s *site) upArgs(extra ...string) []string {
	return append([]string{"up", "--config", s.path("skein.yaml")}, extra...)
}

// up starts an agent, which ends with the test at the latest, and leaves the kernel clean.
func (s *site) up(extra ...string) *proc {
	s.t.Helper()
	p := &proc{s: s, cmd: s.command(s.upArgs(extra...)...), log: &lockedBuffer{}, exited: make(chan struct{})}
	p.cmd.Stderr = p.log
	s.start(p.cmd)
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait()
	}()
	s.t.Cleanup(func() {
		p.kill()
		if s.t.Failed() {
			s.t.Logf("an agent said:\n%s", p.log)
		}
		s.run("down", "--purge", "--config", s.path("skein.yaml"))
	})
	return p
}

// running starts an agent and waits until it is a member.
func (s *site) running(extra ...string) *proc {
	s.t.Helper()
	p := s.up(extra...)
	p.ready()
	return p
}

func (p *proc) ready() {
	p.s.t.Helper()
	eventually(p.s.t, "the agent runs", func() error {
		select {
		case <-p.exited:
			p.s.t.Fatalf("the agent ended: %s\n%s", p.cmd.ProcessState, p.log)
		default:
		}
		st, err := p.s.clients.Status(context.Background(), &skeinv1.StatusRequest{})
		if err == nil && st.GetPhase() != "running" {
			err = fmt.Errorf("it is %s", st.GetPhase())
		}
		return err
	})
}

// kill ends the agent as a power cut would.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// ends waits until the agent has ended by itself.
func (p *proc) ends() int {
	p.s.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.s.t.Fatalf("the agent still runs after %s:\n%s", patience, p.log)
	}
	return p.cmd.ProcessState.ExitCode()
}

func (s *site) status() *skeinv1.StatusResponse {
	s.t.Helper()
	st, err := s.clients.Status(context.Background(), &skeinv1.StatusRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

var errNotYet = errors.New("not yet")

// eventually waits for a condition.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(30 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("%s: not after %s: %v", what, patience, err)
}

// token asks the seed for one.
func token(t *testing.T, flags ...string) string {
	t.Helper()
	return onSeed(t, append([]string{"token", "create"}, flags...)...)
}

// onSeed runs a command on the seed that must succeed.
func onSeed(t *testing.T, args ...string) string {
	t.Helper()
	out, exit, err := shared(t).Exec(t.Context(), "seed", append([]string{"skein"}, args...)...)
	if err != nil || exit != 0 {
		t.Fatalf("skein %s on seed: exit status %d, %v\n%s", strings.Join(args, " "), exit, err, out)
	}
	return strings.TrimSpace(out)
}
