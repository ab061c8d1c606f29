package kerneltest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestListenNeedsTheVerdict(t *testing.T) {
	for name, c := range map[string]struct{ serial, want string }{
		"passed": {"SeaBIOS\r\n" + Up + "\r\n--- PASS: TestX\r\n" + Passed +
			"\r\n[ 39.6] reboot: Restarting\r\n", Passed},
		"failed":             {Up + "\n" + Failed + "\n", Failed},
		"panic in the midst": {Up + "\n--- PASS: TestX\nKernel panic - not syncing\n", Up},
		"never up":           {"qemu: no\n", ""},
		"cut line":           {Up + "\n" + Passed[:10], Up},
		"verdict quoted":     {Up + "\nlog: " + Passed + "\n", Up},
	} {
		var out strings.Builder
		ups := 0
		if got := listen(strings.NewReader(c.serial), &out, func() { ups++ },
			func(time.Duration) error { return nil }, nil); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if ups != strings.Count(c.serial, Up) {
			t.Errorf("%s: up %d times", name, ups)
		}
	}
}

func TestListenFreezes(t *testing.T) {
	var out strings.Builder
	var frozen []time.Duration
	serial := Up + "\r\n" + Freeze + "12s\r\n" + Freeze + "soon\r\nlog: " + Freeze + "1s\r\n" + Passed + "\r\n"
	verdict := listen(strings.NewReader(serial), &out, func() {},
		func(d time.Duration) error { frozen = append(frozen, d); return nil }, nil)
	if verdict != Passed || !slices.Equal(frozen, []time.Duration{12 * time.Second}) ||
		!strings.Contains(out.String(), `frozen for soon (error: time: invalid duration "soon")`) {
		t.Errorf("%s, frozen %v\n%s", verdict, frozen, out.String())
	}
}

func TestRunStepShowsResultsAndFailures(t *testing.T) {
	script := "echo === RUN TestX; echo noise; echo '--- PASS: TestX (0.00s)'; exit $0"
	step := func(code string) Step {
		return Step{Name: "pkg", Args: []string{"/bin/sh", "-c", script, code}, Test: true}
	}
	var out strings.Builder
	if err := RunStep(&out, step("0"), nil); err != nil || strings.Contains(out.String(), "noise") ||
		!strings.Contains(out.String(), "--- PASS: TestX") {
		t.Errorf("passing: %v\n%s", err, out.String())
	}
	out.Reset()
	if err := RunStep(&out, step("3"), nil); err == nil || !strings.Contains(out.String(), "noise") ||
		!strings.Contains(out.String(), "pkg FAILED") {
		t.Errorf("failing: %v\n%s", err, out.String())
	}
	if err := RunStep(&out, Step{Name: "none", Args: []string{"/no/such/program"}}, nil); err == nil {
		t.Error("a program that is not there passed")
	}
}

func TestArchiveIsAlignedAndEnds(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("12345"), 0o644); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	a := newArchive(&b)
	a.file("/a/b/c", 0o755, []byte("x"))
	a.symlink("/sbin/modprobe", "/init")
	a.copyTree("/t", dir)
	a.copyTree("/u", filepath.Join(dir, "none"))
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	var names []string
	for rest := b.Bytes(); len(rest) > 0; {
		if !bytes.HasPrefix(rest, []byte("070701")) {
			t.Fatalf("no header after %q", names)
		}
		size, nameLen := hexField(t, rest, 6), hexField(t, rest, 11)
		names = append(names, string(rest[110:110+nameLen-1]))
		at := (110 + nameLen + 3) &^ 3
		rest = rest[(at+size+3)&^3:]
	}
	if want := []string{"a", "a/b", "a/b/c", "sbin", "sbin/modprobe", "t", "t/f",
		"TRAILER!!!"}; !slices.Equal(names, want) {
		t.Errorf("%q, want %q", names, want)
	}
}

func hexField(t *testing.T, header []byte, n int) int {
	t.Helper()
	v := 0
	for _, c := range header[6+8*n : 14+8*n] {
		v = v<<4 | strings.IndexByte("0123456789abcdef", c)
	}
	return v
}

// What a failed step has left comes out whole, between other lines.
func TestKept(t *testing.T) {
	from := t.TempDir()
	text := bytes.Repeat([]byte("all is well, and again "), 1000)
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(text), func(i, j int) { text[i], text[j] = text[j], text[i] })
	if err := errors.Join(os.Mkdir(filepath.Join(from, "logs"), 0o755),
		os.WriteFile(filepath.Join(from, "logs", "home1.log"), text, 0o644)); err != nil {
		t.Fatal(err)
	}
	var serial, out bytes.Buffer
	serial.WriteString(Up + "\n")
	if err := SendKept(&serial, from); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(serial.String(), Kept); n < 2 {
		t.Errorf("%d lines", n)
	}
	serial.WriteString("more\n" + Failed + "\n")
	kept := keptFile{path: filepath.Join(t.TempDir(), "kept", "guest.tar.gz")}
	verdict := listen(&serial, &out, func() {}, nil, kept.add)
	at, err := kept.close()
	if verdict != Failed || out.String() != "more\n" || err != nil {
		t.Fatalf("%s, %q, %v", verdict, out.String(), err)
	}
	to := t.TempDir()
	if out, err := exec.Command("tar", "xizf", at, "-C", to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if b, err := os.ReadFile(filepath.Join(to, "logs", "home1.log")); !bytes.Equal(b, text) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	if err := SendKept(&serial, filepath.Join(from, "none")); err == nil {
		t.Error("a directory that is not there was kept")
	}
}
