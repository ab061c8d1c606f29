package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/skeinmesh/skein/agent"
)

func TestUnitOfAnAgent(t *testing.T) {
	for _, c := range []struct{ name, environ, cgroup, want string }{
		{"version 1", "A=b\x00SYSTEMD_EXEC_PID=42\x00", "9:name=systemd:/system.slice/skein.service\n1:cpu:/other.service\n", "skein.service"},
		{"version 2", "SYSTEMD_EXEC_PID=42", "0::/system.slice/skein.service\n", "skein.service"},
		{"an instance", "SYSTEMD_EXEC_PID=42", "0::/system.slice/system-skein.slice/skein@dc.service\n", "skein@dc.service"},
		{"started by a service, which is not its own", "SYSTEMD_EXEC_PID=41", "0::/system.slice/ci.service\n", ""},
		{"by hand", "TERM=xterm", "0::/user.slice/user-0.slice/session-1.scope\n", ""},
		{"a user's own service", "SYSTEMD_EXEC_PID=42", "0::/user.slice/user-7.slice/user@7.service/app.slice/x.service\n", ""},
		{"a container", "SYSTEMD_EXEC_PID=42", "0::/system.slice/docker-0123.scope\n", ""},
		{"nothing to read", "", "", ""},
		{"not as expected", "SYSTEMD_EXEC_PID=42", "what\n::\n", ""},
	} {
		if got := unitOf(42, c.environ, c.cgroup); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// Every error has one exit status; a final one keeps its own under whatever is said about it.
func TestExitStatus(t *testing.T) {
	plain := errors.New("x")
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {plain, 1}, {usageError{plain}, 2}, {agent.ErrFinal, exitFinal}, {fmt.Errorf("up: %w", agent.ErrFinal), exitFinal},
		{errors.Join(agent.ErrFinal, plain), exitFinal}, {errors.Join(plain, agent.ErrFinal), exitFinal},
	} {
		if got := exitStatus(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}
