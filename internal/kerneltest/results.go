package kerneltest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// maxKept bounds what is kept of a step's output for the case that it fails.
const maxKept = 1 << 20 // bytes

// RunStep runs one step, shows what matters while it runs, and everything if it failed. It is used in
// the guest and natively alike.
func RunStep(out io.Writer, s Step, env []string) error {
	fmt.Fprintf(out, "== %s\n", s.Name)
	start := time.Now()
	c := exec.Command(s.Args[0], s.Args[1:]...)
	c.Dir, c.Env = s.Dir, env
	r, w := io.Pipe()
	c.Stdout, c.Stderr = w, w
	done := make(chan string, 1)
	go func() { done <- follow(out, r, s.Test) }()
	err := c.Run()
	w.Close()
	kept := <-done
	var exit *exec.ExitError
	if s.Report && errors.As(err, &exit) {
		fmt.Fprintf(out, "== %s ended after %s: %v\n", s.Name, time.Since(start).Round(time.Millisecond), err)
		return nil
	}
	if err != nil {
		if s.Test {
			fmt.Fprintf(out, "-- all of its output:\n%s", kept)
		}
		fmt.Fprintf(out, "== %s FAILED after %s: %v\n", s.Name, time.Since(start).Round(time.Millisecond), err)
		return fmt.Errorf("%s: %w", s.Name, err)
	}
	fmt.Fprintf(out, "== %s passed in %s\n", s.Name, time.Since(start).Round(time.Millisecond))
	return nil
}

// follow shows the lines that matter and keeps all.
func follow(out io.Writer, r io.Reader, test bool) string {
	var kept strings.Builder
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, maxKept)
	for sc.Scan() {
		line := sc.Text()
		if kept.Len() < maxKept {
			kept.WriteString(line + "\n")
		}
		if !test || Matters(line) {
			fmt.Fprintln(out, line)
		}
	}
	_, _ = io.Copy(io.Discard, r) // a line too long must not block the program
	return kept.String()
}

// Matters says whether a line of go test -v is a result.
func Matters(line string) bool {
	l := strings.TrimLeft(line, " ")
	return strings.HasPrefix(l, "--- ") || strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "FAIL")
}
