package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/testenv"
)

func profileFake(t *testing.T) *fakeAgent {
	t.Helper()
	f := newFakeAgent(t)
	f.lay(&skeinv1.ProfileRequest{}, &skeinv1.ProfileResponse{Node: "home1", Data: []byte("a profile")})
	return f
}

func TestPprofWritesAFile(t *testing.T) {
	f, dir := profileFake(t), t.TempDir()
	t.Chdir(dir)
	out, beside, err := f.skein(t, "debug", "pprof", "--seconds", "3")
	if err != nil || !strings.Contains(beside, "3 seconds") {
		t.Fatalf("%v, beside it %q", err, beside)
	}
	files, _ := filepath.Glob("skein-home1-cpu-*.pprof")
	if len(files) != 1 || !strings.Contains(out, files[0]) || !strings.Contains(out, "go tool pprof") {
		t.Fatalf("files %v, told: %q", files, out)
	}
	if r := f.asked[0].(*skeinv1.ProfileRequest); r.GetKind() != "cpu" || r.GetSeconds() != 3 {
		t.Errorf("asked for %v", r)
	}
	if _, _, err := f.skein(t, "debug", "pprof", "heap", "-o", "heap"); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("heap")
	info, _ := os.Stat("heap")
	if err != nil || string(b) != "a profile" || info.Mode().Perm() != 0o600 {
		t.Errorf("%q with mode %v, %v", b, info.Mode(), err)
	}
	if r := f.asked[1].(*skeinv1.ProfileRequest); r.GetKind() != "heap" || r.GetSeconds() != 0 {
		t.Errorf("asked for %v", r)
	}
	if out, beside, err := f.skein(t, "debug", "pprof", "trace", "-o", "-"); err != nil || out != "a profile" ||
		!strings.Contains(beside, "trace") {
		t.Errorf("to standard output: %q, beside it %q, %v", out, beside, err)
	}
}

// TestPprofLeavesNoHalf: what breaks off leaves the file as it was, and nothing beside it.
func TestPprofLeavesNoHalf(t *testing.T) {
	f, dir := profileFake(t), t.TempDir()
	file := filepath.Join(dir, "cpu")
	if err := os.WriteFile(file, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.err = connect.NewError(connect.CodeUnavailable, errors.New("the agent ends"))
	if _, _, err := f.skein(t, "debug", "pprof", "-o", file); err == nil || err.Error() != "the agent ends" {
		t.Errorf("%v", err)
	}
	if _, _, err := f.skein(t, "debug", "pprof", "-o", filepath.Join(dir, "none", "cpu")); err == nil ||
		!strings.Contains(err.Error(), "-o FILE") {
		t.Errorf("into a directory that is not there: %v, want what to do", err)
	}
	b, err := os.ReadFile(file)
	all, _ := os.ReadDir(dir)
	if err != nil || string(b) != "before" || len(all) != 1 {
		t.Errorf("%q, %d files, %v", b, len(all), err)
	}
}

// TestPprofRefusesATerminal: a pseudo-terminal is one.
func TestPprofRefusesATerminal(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		testenv.Missing(t, "no pseudo-terminals: "+err.Error())
	}
	defer master.Close()
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("/dev/pts/%d", n)
	tty, err := os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	for _, c := range []struct {
		out  io.Writer
		file string
		bad  bool
	}{{tty, "-", true}, {tty, "", false}, {io.Discard, "-", false}, {io.Discard, name, true},
		{io.Discard, os.DevNull, false}, {tty, "file", false}} {
		if err := refuseTerminal(c.out, c.file); (err != nil) != c.bad || c.bad &&
			!strings.Contains(err.Error(), "-o FILE") {
			t.Errorf("-o %q: %v", c.file, err)
		}
	}
}

func TestPprofUse(t *testing.T) {
	f := profileFake(t)
	for _, args := range [][]string{
		{"debug"}, {"debug", "pprof", "cmdline"}, {"debug", "pprof", "cpu", "heap"},
		{"debug", "pprof", "heap", "--seconds", "5"},
		{"debug", "pprof", "--seconds", "0"}, {"debug", "pprof", "--seconds", "61"},
		{"debug", "pprof", "--seconds", "-1"},
	} {
		if _, _, err := f.skein(t, args...); !errors.As(err, new(cli.UsageError)) || len(f.asked) > 0 {
			t.Errorf("skein %s: %v, want wrong use, and nothing asked", strings.Join(args, " "), err)
		}
	}
}

func TestProfileName(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 30, 1, 0, time.UTC)
	if got := profileName("../home1", "trace", at); got != "skein-.._home1-trace-20260301-123001.trace" {
		t.Error(got)
	}
}

// TestNoHTTPProfiles: the program holds no handler of net/http/pprof, which would be registered where nobody looks.
func TestNoHTTPProfiles(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := "\n" + string(out)
	if !strings.Contains(all, "\nruntime/pprof\n") || strings.Contains(all, "\nnet/http/pprof\n") {
		t.Error("the program links net/http/pprof, or this test reads another program's packages")
	}
}
