package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/testenv"
)

// labName is also the beginning of the namespaces' names. It holds this process's number, so that two
// runs do not meet.
var labName = labPrefix + strconv.Itoa(os.Getpid())

const labPrefix = "bad"

const labFile = `
sites:
  dc: {nat: none}
nodes:
  seed:  {site: dc, server: true, relay: true}
  peer:  {site: dc, server: true, config: {nodeAddresses: [192.168.77.0/24, 10.4.0.0/24]}}
  third: {site: dc, server: true}
  spare: {site: dc}
config: {routeNodeAddresses: true}
`

// base holds the binary, the lab and the tests' directories. Unix sockets allow only short paths.
var base string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if base, err = os.MkdirTemp("", "ske"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(base)
		if err := os.Chmod(base, 0o755); err != nil { // one test runs the binary as nobody
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() {
			if theLab != nil {
				if err := theLab.Down(context.Background()); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		}()
		return m.Run()
	}())
}

// skein is the program under test, built as it is released.
var skein = sync.OnceValues(func() (string, error) {
	path := filepath.Join(base, "skein")
	cmd := exec.Command("go", "build", "-o", path, "github.com/skeinmesh/skein/cmd/skein")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, nil
})

func program(t *testing.T) string {
	t.Helper()
	path, err := skein()
	if err != nil {
		t.Fatalf("build skein: %v", err)
	}
	return path
}

var (
	theLab *lab.Lab
	labErr error
	raise  sync.Once
)

// shared is the lab of all tests. The agent of `spare` is stopped and its kernel clean.
func shared(t *testing.T) *lab.Lab {
	t.Helper()
	testenv.NeedRoot(t)
	bin := program(t)
	raise.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if labErr = clearAway(ctx); labErr != nil {
			return
		}
		spec, err := lab.Parse("lab.yaml", []byte("name: "+labName+labFile))
		if labErr = err; err != nil {
			return
		}
		if theLab, labErr = lab.Up(ctx, spec, lab.Options{Dir: filepath.Join(base, "lab"), Binary: bin}); labErr != nil {
			return
		}
		client, err := theLab.Client("spare")
		if labErr = err; err != nil {
			return
		}
		if _, labErr = client.Down(ctx, &skeinv1.DownRequest{Purge: true}); labErr == nil {
			labErr = theLab.Stop(ctx, "spare")
		}
	})
	if labErr != nil {
		t.Fatalf("raise the lab: %v", labErr)
	}
	return theLab
}

// clearAway takes down what runs that were killed have left behind.
func clearAway(ctx context.Context) error {
	labs, err := fabric.Labs()
	if err != nil {
		return err
	}
	for _, name := range labs {
		number, ok := strings.CutPrefix(name, labPrefix)
		pid, err := strconv.Atoi(number)
		if !ok || err != nil || syscall.Kill(pid, 0) == nil {
			continue
		}
		if err := lab.Down(ctx, name, filepath.Join(base, "lab")); err != nil {
			return err
		}
	}
	return nil
}
