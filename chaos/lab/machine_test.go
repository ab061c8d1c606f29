package lab

import (
	"os"
	"strings"
	"testing"
	"time"
)

func TestProcessorTimesAreRead(t *testing.T) {
	process := "4711 (a) b) S 1 4711 4711 0 -1 4194560 900 0 0 0 250 31 0 0 20 0 9 0 12345 1 1\n"
	if got := processBusy([]byte(process)); got != 2810*time.Millisecond {
		t.Errorf("a process with 250 and 31 ticks has used %s", got)
	}
	all := "cpu  100 20 3 70000 800 4 5 6 50 60\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
	if got := allBusy([]byte(all)); got != 1380*time.Millisecond {
		t.Errorf("processors with 138 ticks that were not idle have worked %s", got)
	}
	for _, text := range []string{"", "4711 (a)", "4711 (a) S 1 2"} {
		if got := processBusy([]byte(text)) + allBusy([]byte(text)); got != 0 {
			t.Errorf("%q: %s", text, got)
		}
	}
}

// TestTheMachineIsSeenAtWork: what this process does counts as work of others than the lab's agents.
func TestTheMachineIsSeenAtWork(t *testing.T) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	l := &Lab{}
	m, before := l.watchMachine(), processBusy(b)
	for processBusy(b) < before+5*tick {
		if b, err = os.ReadFile("/proc/self/stat"); err != nil {
			t.Fatal(err)
		}
	}
	text := m.report()
	if !strings.Contains(text, "its agents used 0.00 and all else ") || strings.HasSuffix(text, "else 0.00") {
		t.Error(text)
	}
	if !strings.Contains(text, "did not get to run for up to") {
		t.Error(text)
	}
}
