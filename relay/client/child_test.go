package client_test

import (
	"bufio"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
)

// A relay in a process of its own, so that its processor time is told apart from its clients', and so that
// it can be killed and stopped as a whole.

const childEnv = "SKEIN_TEST_RELAY"

func TestMain(m *testing.M) {
	if n, err := strconv.Atoi(os.Getenv("SKEIN_TEST_CPU")); err == nil {
		pin(n)
	}
	switch {
	case os.Getenv(childEnv) != "":
		childRelay()
		return
	}
	os.Exit(m.Run())
}

// childRelay is the child's main: it tells its key and address, answers each line with its statistics, and ends with
// its input.
func childRelay() {
	key, err := identity.NewKey()
	if err != nil {
		panic(err)
	}
	cfg := server.Config{Self: key.ID()}
	if text := os.Getenv("SKEIN_TEST_CONFIG"); text != "" {
		if err := json.Unmarshal([]byte(text), &cfg); err != nil {
			panic(err)
		}
	}
	r := relaytest.NewRelay(key, cfg)
	if err := r.Open("127.0.0.1:0"); err != nil {
		panic(err)
	}
	fmt.Printf("%s %s\n", base64.StdEncoding.EncodeToString(key.Public()), r.Address)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		b, err := json.Marshal(r.Server.Stats())
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s\n", b)
	}
}

// pin ties this process to one processor, whichever its parent had. It only makes figures steadier: where there is no
// such processor, nothing happens.
func pin(cpu int) {
	var set unix.CPUSet
	set.Set(cpu)
	if unix.SchedSetaffinity(os.Getpid(), &set) == nil {
		runtime.GOMAXPROCS(1)
		bind(set)
	}
}

// bind ties all threads of this process to processors; new ones inherit that.
func bind(set unix.CPUSet) {
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, t := range tasks {
		if id, err := strconv.Atoi(t.Name()); err == nil {
			_ = unix.SchedSetaffinity(id, &set) // a thread that has just ended
		}
	}
}

// pinClients keeps this process off the relay's processor until the benchmark ends.
func pinClients(b *testing.B) {
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		b.Fatal(err)
	}
	procs := runtime.GOMAXPROCS(0)
	pin(0)
	b.Cleanup(func() {
		bind(before)
		runtime.GOMAXPROCS(procs)
	})
}

// child is a relay in another process.
type child struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
	address string
	key     ed25519.PublicKey
}

func startChild(t testing.TB, env ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(append(os.Environ(), childEnv+"=1"), env...)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	c.out = bufio.NewScanner(out)
	if !c.out.Scan() {
		t.Fatal("the relay's process said nothing")
	}
	key, address, _ := strings.Cut(c.out.Text(), " ")
	raw, err := base64.StdEncoding.DecodeString(key)
	if err != nil {
		t.Fatal(err)
	}
	c.key, c.address = raw, address
	return c
}

func (c *child) relay() client.Relay {
	return client.Relay{ID: identity.IDOf(c.key), Addresses: []string{c.address}, Key: c.key}
}

func (c *child) signal(s syscall.Signal) { _ = c.cmd.Process.Signal(s) }

func (c *child) kill() {
	c.signal(syscall.SIGKILL)
	_ = c.cmd.Wait()
}

func (c *child) stats(t testing.TB) (s server.Stats) {
	t.Helper()
	if _, err := io.WriteString(c.in, "stats\n"); err != nil || !c.out.Scan() {
		t.Fatal("the relay's process is gone:", err)
	}
	if err := json.Unmarshal(c.out.Bytes(), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// cpu is the processor time that the relay has used.
func (c *child) cpu(t testing.TB) time.Duration {
	t.Helper()
	var total int64
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", c.cmd.Process.Pid, task.Name()))
		if err != nil {
			continue // a thread that has just ended
		}
		first, _, _ := strings.Cut(string(b), " ")
		n, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	return time.Duration(total)
}
