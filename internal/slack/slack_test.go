package slack

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Threads that there are have the slack afterwards, and so do those that begin later.
func TestAllThreadsHaveTheSlack(t *testing.T) {
	if err := Set(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	for range 4 { // each needs a thread of its own
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
			<-done
		}()
	}
	defer close(done)
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, th := range threads {
		b, err := os.ReadFile("/proc/" + th.Name() + "/timerslack_ns")
		if err != nil {
			continue // ended
		}
		if got := strings.TrimSpace(string(b)); got != "1000000" {
			t.Errorf("thread %s has a slack of %s ns, want 1000000", th.Name(), got)
		}
	}
	if got, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err != nil || got != 1000000 {
		t.Errorf("the kernel says this thread's slack is %d ns (%v)", got, err)
	}
}
