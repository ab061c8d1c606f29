package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Deadlines of an agent's life. They are for a loaded machine; a healthy one needs a second.
const (
	readyWithin = 60 * time.Second
	stopWithin  = 20 * time.Second
)

// Condition is what the lab wants of an agent.
type Condition string

// Conditions.
const (
	Running Condition = "running"
	Killed  Condition = "killed"
	Stopped Condition = "stopped"
	Paused  Condition = "paused"
	Never   Condition = "not started"
)

// agent is one node's process and the way to it.
type agent struct {
	node   Node
	ns     string
	dir    string // state, run, skein.yaml and agent.log are in it
	client skeinv1connect.AgentServiceClient

	mu     sync.Mutex
	rec    agentRecord
	exited chan struct{} // closed when a process that we started has ended
	exit   error         // valid then
}

// agentRecord is what a later `skein lab` needs to know.
type agentRecord struct {
	Process   process    `json:"process"`
	Condition Condition  `json:"condition"`
	Joined    bool       `json:"joined"` // it has been a running member: a start resumes
	IPv4      netip.Addr `json:"ipv4"`
	IPv6      netip.Addr `json:"ipv6"`
}

func newAgent(l *Lab, n Node) *agent {
	a := &agent{node: n, ns: fabric.HostNS(l.Spec.Name, n.host()), dir: filepath.Join(l.Dir, "nodes", n.Name)}
	a.rec.Condition = Never
	a.client = skeinv1connect.NewAgentServiceClient(unixClient(a.socket()), "http://skein")
	return a
}

func unixClient(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		},
		DisableKeepAlives: true, // an agent that is killed and started again is another server
	}}
}

func (a *agent) stateDir() string   { return filepath.Join(a.dir, "state") }
func (a *agent) runDir() string     { return filepath.Join(a.dir, "run") }
func (a *agent) socket() string     { return filepath.Join(a.runDir(), "agent.sock") }
func (a *agent) configFile() string { return filepath.Join(a.dir, "skein.yaml") }
func (a *agent) logFile() string    { return filepath.Join(a.dir, "agent.log") }

func (a *agent) record() agentRecord {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rec
}

// launch starts the process in its namespace, as leader of a session of its own, so that neither
// Ctrl-C in our terminal nor our end reaches it.
func (a *agent) launch(l *Lab, extra ...string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.rec.Process.alive() {
		return fmt.Errorf("node %s: its agent runs already, as process %d", a.node.Name, a.rec.Process.PID)
	}
	log, err := os.OpenFile(a.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("node %s: log file: %w", a.node.Name, err)
	}
	defer log.Close()
	fmt.Fprintf(log, "--- lab: skein up %s at %s\n", strings.Join(extra, " "), time.Now().Format(time.RFC3339Nano))
	args := append([]string{l.binary(), "up", "--config", a.configFile(), "--state-dir", a.stateDir(), "--run-dir",
		a.runDir()}, extra...)
	if a.node.Role != "" {
		args = append(args, "--role", a.node.Role)
	}
	cmd := l.command(context.Background(), a.node.Name, l.binary(), args)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = a.dir, l.environ(a), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := fabric.In(a.ns, cmd.Start); err != nil {
		return fmt.Errorf("node %s: start %s: %w", a.node.Name, l.binary(), err)
	}
	p, err := processOf(cmd.Process.Pid)
	if err != nil {
		_ = cmd.Process.Kill()
		return fmt.Errorf("node %s: %w", a.node.Name, err)
	}
	a.rec.Process, a.rec.Condition = p, Running
	exited := make(chan struct{})
	a.exited, a.exit = exited, nil
	go func() {
		err := cmd.Wait()
		a.mu.Lock()
		if a.exited == exited {
			a.exit = err
		}
		a.mu.Unlock()
		close(exited)
	}()
	return nil
}

// end sends a signal and waits for the process to go. A graceful end that takes too long becomes an
// error, and the process is killed.
func (a *agent) end(ctx context.Context, sig unix.Signal, then Condition) error {
	a.mu.Lock()
	p, exited := a.rec.Process, a.exited
	a.rec.Condition = then
	a.mu.Unlock()
	if err := errors.Join(p.signal(sig), p.signal(unix.SIGCONT)); err != nil { // one that is paused hears nothing else
		return fmt.Errorf("node %s: %w", a.node.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	if err := p.wait(ctx); err != nil {
		_ = p.signal(unix.SIGKILL)
		return fmt.Errorf("node %s: its agent did not end within %s of signal %s and was killed: %w", a.node.Name,
			stopWithin, sig, err)
	}
	if exited != nil {
		<-exited // reaped, and its log is complete
	}
	return nil
}

// turn takes a process from one condition to another by a signal that does not end it.
func (a *agent) turn(sig unix.Signal, from, to Condition) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.rec.Condition != from || !a.rec.Process.alive() {
		return fmt.Errorf("node %s: its agent is %s, not %s", a.node.Name, a.rec.Condition, from)
	}
	if err := a.rec.Process.signal(sig); err != nil {
		return fmt.Errorf("node %s: %w", a.node.Name, err)
	}
	a.rec.Condition = to
	return nil
}

// ready waits until the agent answers, and with member until it is a running member.
func (a *agent) ready(ctx context.Context, member bool) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	var last error
	for {
		st, err := a.status(ctx)
		switch {
		case err != nil:
			last = err
		case !member || st.GetPhase() == "running":
			a.learn(st)
			return nil
		default:
			last = fmt.Errorf("it is still %s", st.GetPhase())
		}
		if err := a.died(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("node %s: its agent is not ready after %s: %w; the end of its log:\n%s", a.node.Name, readyWithin,
				last, a.logTail())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (a *agent) learn(st *skeinv1.StatusResponse) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rec.Joined = a.rec.Joined || st.GetPhase() == "running"
	if addr, ok := address(st.GetIpv4()); ok {
		a.rec.IPv4 = addr
	}
	if addr, ok := address(st.GetIpv6()); ok {
		a.rec.IPv6 = addr
	}
}

// address reads an address that may carry a prefix length.
func address(s string) (netip.Addr, bool) {
	s, _, _ = strings.Cut(s, "/")
	addr, err := netip.ParseAddr(s)
	return addr, err == nil
}

// died tells whether an agent that should run has ended by itself.
func (a *agent) died() error {
	a.mu.Lock()
	condition, p, exited := a.rec.Condition, a.rec.Process, a.exited
	a.mu.Unlock()
	if condition != Running || p.alive() {
		return nil
	}
	a.mu.Lock()
	meant := a.rec.Condition != Running || a.rec.Process != p // it was ended, or started anew, since we looked
	a.mu.Unlock()
	if meant {
		return nil
	}
	how := "is gone"
	if exited != nil { // our child: it has ended, so that it is reaped in a moment
		<-exited
		a.mu.Lock()
		how = "ended by itself with status 0"
		if a.exit != nil {
			how = "ended by itself: " + a.exit.Error()
		}
		a.mu.Unlock()
	}
	return fmt.Errorf("node %s: its agent %s; the end of its log:\n%s", a.node.Name, how, a.logTail())
}

// status asks the agent, and does not wait long: it is on the same machine.
func (a *agent) status(ctx context.Context) (*skeinv1.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	st, err := a.client.Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", a.node.Name, err)
	}
	return st, nil
}

// logTail is the end of the agent's log, indented.
func (a *agent) logTail() string {
	const lines, limit = 12, 64 << 10
	f, err := os.Open(a.logFile())
	if err != nil {
		return "    (no log: " + err.Error() + ")"
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > limit {
		_, _ = f.Seek(-limit, 2)
	}
	buf := make([]byte, limit)
	n, _ := f.Read(buf)
	all := strings.Split(strings.TrimRight(string(buf[:n]), "\n"), "\n")
	return "    " + strings.Join(all[max(0, len(all)-lines):], "\n    ")
}

// each runs fn for several agents at once and joins what went wrong.
func each(agents []*agent, fn func(*agent) error) error { return eachPlace(agents, fn) }

// eachPlace is each for whatever stands for a place.
func eachPlace[T any](places []T, fn func(T) error) error {
	errs := make([]error, len(places))
	var wg sync.WaitGroup
	for i, p := range places {
		wg.Go(func() { errs[i] = fn(p) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
