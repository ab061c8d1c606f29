package lab

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"
)

// tick is the unit of the times in /proc/stat and /proc/PID/stat: USER_HZ is 100 wherever Go runs.
const tick = 10 * time.Millisecond

// machine tells what became of this machine while a step ran, so that a step which failed because nothing got to run
// can be told from one that failed for a reason of its own.
type machine struct {
	lab     *Lab
	start   time.Time
	all     time.Duration         // what all processors had worked by then; negative: unknown
	agents  map[int]time.Duration // what each agent had, by process
	longest func() time.Duration
}

// watchMachine begins to watch. Report ends it.
func (l *Lab) watchMachine() *machine {
	all, err := busy()
	if err != nil {
		all = -1
	}
	return &machine{lab: l, start: time.Now(), all: all, agents: l.agentsBusy(), longest: stands()}
}

// report ends the watch and says what was seen.
func (m *machine) report() string {
	stood, took := m.longest(), time.Since(m.start)
	text := fmt.Sprintf("in %s, the lab itself did not get to run for up to %s", round(took), round(stood))
	all, err := busy()
	if err != nil || m.all < 0 || took <= 0 {
		return text
	}
	var agents time.Duration
	for pid, used := range m.lab.agentsBusy() {
		agents += used - m.agents[pid]
	}
	share := func(d time.Duration) float64 { return max(d, 0).Seconds() / took.Seconds() }
	return fmt.Sprintf("%s, and of %d processors its agents used %.2f and all else %.2f", text, runtime.NumCPU(),
		share(agents), share(all-m.all-agents))
}

// agentsBusy is how long each agent's process has used a processor.
func (l *Lab) agentsBusy() map[int]time.Duration {
	used := map[int]time.Duration{}
	for _, a := range l.agents {
		p := a.record().Process
		if b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/stat"); p.PID > 0 && err == nil {
			used[p.PID] = processBusy(b)
		}
	}
	return used
}

// processBusy reads utime and stime, fields 14 and 15 of /proc/PID/stat. The name, field 2, may have spaces in it.
func processBusy(stat []byte) time.Duration {
	const user, system = 14 - 3, 15 - 3 // counted from the first field after the name
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) <= system {
		return 0
	}
	return ticks(fields[user]) + ticks(fields[system])
}

// busy is how long this machine's processors have worked, or were taken by others on the same hardware.
func busy() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return allBusy(b), nil
}

// allBusy adds up the first line of /proc/stat, without idle and iowait, and without guest times, which are in user's.
func allBusy(stat []byte) (sum time.Duration) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	if !bytes.HasPrefix(line, []byte("cpu ")) {
		return 0
	}
	for i, field := range bytes.Fields(line) {
		switch i { // user, nice, system, irq, softirq, steal
		case 1, 2, 3, 6, 7, 8:
			sum += ticks(field)
		}
	}
	return sum
}

func ticks(field []byte) time.Duration {
	n, err := strconv.ParseInt(string(field), 10, 64)
	if err != nil {
		return 0
	}
	return time.Duration(n) * tick
}

// stands measures until it is asked how long at a time this process did not get to run.
func stands() (longest func() time.Duration) {
	const every = 20 * time.Millisecond
	var most time.Duration
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(every)
		defer t.Stop()
		for last, over := time.Now(), false; !over; {
			select {
			case <-t.C:
			case <-stop:
				over = true
			}
			now := time.Now()
			most, last = max(most, now.Sub(last)-every), now
		}
	}()
	end := sync.OnceFunc(func() { close(stop); <-done })
	return func() time.Duration { end(); return most }
}
