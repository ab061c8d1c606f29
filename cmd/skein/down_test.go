package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent"
	"github.com/skeinmesh/skein/internal/cli"
)

func TestUnitOfAnAgent(t *testing.T) {
	for _, c := range []struct{ name, environ, cgroup, want string }{
		{"version 1", "A=b\x00SYSTEMD_EXEC_PID=42\x00", "9:name=systemd:/system.slice/skein.service\n1:cpu:/other.service\n",
			"skein.service"},
		{"version 2", "SYSTEMD_EXEC_PID=42", "0::/system.slice/skein.service\n", "skein.service"},
		{"an instance", "SYSTEMD_EXEC_PID=42", "0::/system.slice/system-skein.slice/skein@dc.service\n", "skein@dc.service"},
		{"started by a service, which is not its own", "SYSTEMD_EXEC_PID=41", "0::/system.slice/ci.service\n", ""},
		{"by hand", "TERM=xterm", "0::/user.slice/user-0.slice/session-1.scope\n", ""},
		{"a user's own service", "SYSTEMD_EXEC_PID=42", "0::/user.slice/user-7.slice/user@7.service/app.slice/x.service\n",
			""},
		{"a container", "SYSTEMD_EXEC_PID=42", "0::/system.slice/docker-0123.scope\n", ""},
		{"nothing to read", "", "", ""},
		{"not as expected", "SYSTEMD_EXEC_PID=42", "what\n::\n", ""},
	} {
		if got := unitOf(42, c.environ, c.cgroup); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// By hand an end is a failure like any other. A supervisor hears whether it may start the agent again, whatever else
// went wrong.
func TestExitStatus(t *testing.T) {
	plain := errors.New("x")
	for _, c := range []struct {
		err              error
		hand, supervised int
	}{
		{nil, 0, 0},
		{plain, 1, 1},
		{cli.UsageError{Err: plain}, 2, 2},
		{agent.ErrFinal, 1, exitFinal},
		{fmt.Errorf("up: %w", agent.ErrFinal), 1, exitFinal},
		{errors.Join(agent.ErrFinal, plain), 1, exitFinal},
		{errors.Join(plain, agent.ErrFinal), 1, exitFinal},
	} {
		if hand, supervised := exitStatus(c.err, false), exitStatus(c.err, true); hand != c.hand ||
			supervised != c.supervised {
			t.Errorf("%v: %d by hand, %d under a supervisor, want %d and %d", c.err, hand, supervised, c.hand, c.supervised)
		}
	}
}

// The chart's pods that clean a host end with a container that waits, and that finds no agent: it must not fail, or the
// pod is never ready for longer than a moment.
func TestDownWaitsWithoutAnAgent(t *testing.T) {
	down := func(ctx context.Context, args ...string) error {
		root := newRoot()
		root.SetOut(io.Discard)
		root.SetErr(io.Discard)
		root.SetArgs(append([]string{"down", "--run-dir", t.TempDir()}, args...))
		return root.ExecuteContext(ctx)
	}
	if err := down(t.Context()); err == nil || !strings.Contains(err.Error(), "no agent answers") {
		t.Errorf("without --wait: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- down(ctx, "--wait") }()
	select {
	case err := <-ended:
		t.Fatalf("it has not waited: %v", err)
	case <-time.After(200 * time.Millisecond): // an agent that is not there is found out at once
	}
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it did not end when it was told to")
	}
}
