package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Stdio is what a command reads and writes; nil means nothing.
type Stdio struct {
	In       io.Reader
	Out, Err io.Writer
}

// ExecIO runs a command inside the namespace of a node, or of a pod as NODE/POD, with the environment that makes
// `skein status` ask that node's agent. It returns the command's exit status; an error means that it could not be run.
func (l *Lab) ExecIO(ctx context.Context, node string, argv []string, std Stdio) (int, error) {
	a, ns, err := l.place(node)
	if err != nil {
		return 0, err
	}
	if len(argv) == 0 {
		return 0, errors.New("no command was given")
	}
	path := argv[0]
	switch {
	case path == "skein":
		path = l.binary()
	case !strings.Contains(path, "/"):
		if path, err = exec.LookPath(path); err != nil {
			return 0, fmt.Errorf("node %s: %w", node, err)
		}
	}
	cmd := l.command(ctx, a.node.Name, path, argv)
	cmd.Env, cmd.Dir = l.environ(a), a.dir
	cmd.Stdin, cmd.Stdout, cmd.Stderr = std.In, std.Out, std.Err
	cmd.WaitDelay = time.Second // a grandchild that holds the pipes must not hold us
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := fabric.In(ns, cmd.Start); err != nil {
		return 0, fmt.Errorf("node %s: %s: %w", node, argv[0], err)
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("node %s: %s: %w", node, argv[0], ctx.Err())
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode(), nil
	case err != nil:
		return 0, fmt.Errorf("node %s: %s: %w", node, argv[0], err)
	}
	return 0, nil
}

// Exec runs a command inside the namespace of a node, or of a pod as NODE/POD, and returns what it prints, both outputs
// together.
func (l *Lab) Exec(ctx context.Context, node string, argv ...string) (output string, exit int, err error) {
	var buf bytes.Buffer
	exit, err = l.ExecIO(ctx, node, argv, Stdio{Out: &buf, Err: &buf})
	return buf.String(), exit, err
}

// execTimeout bounds one run of a step's command.
const execTimeout = 60 * time.Second

// runExec runs a step's command in each place until it does what is expected of it.
func (l *Lab) runExec(ctx context.Context, within time.Duration, e Exec) error {
	return eachPlace(e.Nodes, func(place string) error {
		return eventually(ctx, within, 0, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, execTimeout)
			defer cancel()
			out, exit, err := l.Exec(ctx, place, e.Command...)
			if err != nil {
				return err
			}
			return e.judge(place, out, exit)
		})
	})
}

// judge compares what a command did with what was expected.
func (e Exec) judge(node, out string, exit int) error {
	wrong := ""
	switch {
	case exit != e.Exit:
		wrong = fmt.Sprintf("exit status %d, not %d", exit, e.Exit)
	case e.Matches != nil && !e.Matches.MatchString(out):
		wrong = fmt.Sprintf("its output does not match %s", e.Matches)
	}
	for _, s := range e.Output {
		if wrong == "" && !strings.Contains(out, s) {
			wrong = fmt.Sprintf("its output does not contain %q", s)
		}
	}
	for _, s := range e.Absent {
		if wrong == "" && strings.Contains(out, s) {
			wrong = fmt.Sprintf("its output contains %q", s)
		}
	}
	if wrong == "" {
		return nil
	}
	const most = 4000
	if len(out) > most {
		out = out[:most] + "\n…"
	}
	return fmt.Errorf("on %s: %s: %s; it printed:\n    %s", node, filepath.Base(strings.Join(e.Command, " ")), wrong,
		strings.ReplaceAll(strings.TrimRight(out, "\n"), "\n", "\n    "))
}
