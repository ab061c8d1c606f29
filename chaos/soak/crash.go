package soak

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/skeinmesh/skein/chaos/lab"
)

// crashSigns begin a line that the Go runtime writes when a process ends by a fault of its own. An agent's own lines
// begin with their time.
var crashSigns = []string{
	"panic: ", "fatal error: ", "runtime: out of memory", "SIGSEGV: ", "unexpected fault address ",
}

// crashIn finds the first sign of a crash in a log.
func crashIn(log io.Reader) (string, error) {
	r := bufio.NewReader(log)
	for {
		line, err := r.ReadString('\n')
		for _, s := range crashSigns {
			if strings.HasPrefix(line, s) {
				return strings.TrimSpace(line), nil
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return "", nil
		case err != nil:
			return "", err
		}
	}
}

// crashed looks into the logs of all agents: one that crashed right before it was killed left no other trace.
func crashed(l *lab.Lab) error {
	var errs []error
	for _, n := range l.Spec.NodeNames() {
		info, err := l.Node(n)
		if err != nil {
			return err
		}
		f, err := os.Open(info.Log)
		if err != nil {
			return fmt.Errorf("look for crashes: %w", err)
		}
		sign, err := crashIn(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("look for crashes of %s: %w", n, err)
		}
		if sign != "" {
			errs = append(errs, fmt.Errorf("an agent of node %s crashed: %s", n, sign))
		}
	}
	return errors.Join(errs...)
}
