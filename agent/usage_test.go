package agent

import (
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/hostlinks"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/usage"
)

func TestUsage(t *testing.T) {
	a, _, client := socketAgent(t)
	a.writes.Store(3)
	c := client(asSelf)
	before, err := c.Usage(t.Context(), &skeinv1.UsageRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if before.GetName() != "home1" || before.GetNodeId() != a.id.String() || before.GetVersion() != "v1" ||
		before.GetPid() != uint32(os.Getpid()) || before.GetStartedAt() != a.started.UnixNano() ||
		before.GetKernelWrites() != 3 {
		t.Errorf("not this agent: %v", before)
	}
	for what, v := range map[string]uint64{
		"CPU": uint64(before.GetCpuNanos()), "RSS": before.GetRssBytes(), "heap": before.GetHeapBytes(),
		"goroutines": before.GetGoroutines(),
		"threads":    before.GetThreads(), "files": before.GetFiles(), "uptime": uint64(before.GetUptimeNanos()),
	} {
		if v == 0 {
			t.Errorf("%s is 0", what)
		}
	}
	wakeUpOften(t)
	runtime.GC()
	if _, err := net.Interfaces(); err != nil { // not counted: the runtime's own
		t.Fatal(err)
	}
	if _, err := hostlinks.Read(nil); err != nil { // counted
		t.Fatal(err)
	}
	after, err := c.Usage(t.Context(), &skeinv1.UsageRequest{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := usage.Between(before, after)
	if err != nil {
		t.Fatal(err)
	}
	if r.GetWakeupsPerSecond() <= 0 || r.GetGcCyclesPerSecond() <= 0 ||
		after.GetNetlinkRequests() <= before.GetNetlinkRequests() {
		t.Errorf("something is not counted: %v", r)
	}
}

// wakeUpOften makes a thread wait for another until the kernel has counted that.
func wakeUpOften(t *testing.T) {
	t.Helper()
	var was, is skeinv1.UsageResponse
	if err := usageOfProcess(&was); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); is.GetWakeups() < was.GetWakeups()+5; {
		if time.Now().After(deadline) {
			t.Fatal("no thread was woken in ten seconds")
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		go w.Write([]byte{1})
		r.Read(make([]byte, 1))
		r.Close()
		w.Close()
		if err := usageOfProcess(&is); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFilesAreCounted(t *testing.T) {
	var was, is skeinv1.UsageResponse
	if err := usageOfProcess(&was); err != nil {
		t.Fatal(err)
	}
	const more, others = 100, 20 // what connections of other tests still open or close meanwhile
	for range more {
		f, err := os.Open("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	if err := usageOfProcess(&is); err != nil {
		t.Fatal(err)
	}
	if grown := int(is.GetFiles()) - int(was.GetFiles()); grown < more-others || grown > more+others {
		t.Errorf("%d files, then %d more: %d", was.GetFiles(), more, is.GetFiles())
	}
}
