package lab

import (
	"fmt"
	"runtime"
	"time"

	"github.com/prometheus/procfs"
)

// machine is how long this machine's processors have worked until a moment. Two of them tell what it did between them,
// so that a step which failed because nothing got to run can be told from one that failed for a reason of its own.
type machine struct {
	at     time.Time
	all    time.Duration         // all processors; also what others on the same hardware took from them
	agents map[int]time.Duration // the process of each agent
	err    error                 // why all is not known
}

func (l *Lab) machine() machine {
	m := machine{at: time.Now(), agents: map[int]time.Duration{}}
	m.all, m.err = allBusy()
	for _, a := range l.agents {
		pid := a.record().Process.PID
		if used, err := ProcessorTime(pid); err == nil { // else it does not run
			m.agents[pid] = used
		}
	}
	return m
}

// until says what the machine did until a later moment. Stood is for how long at a time this process did not get to run
// meanwhile.
func (m machine) until(later machine, stood time.Duration) string {
	took := later.at.Sub(m.at)
	text := fmt.Sprintf("in %s, the lab itself did not get to run for up to %s", round(took), round(stood))
	if m.err != nil || later.err != nil || took <= 0 {
		return text
	}
	var agents time.Duration
	for pid, used := range later.agents {
		agents += used - m.agents[pid]
	}
	share := func(d time.Duration) float64 { return max(d, 0).Seconds() / took.Seconds() }
	return fmt.Sprintf("%s, and of %d processors its agents used %.2f and all else %.2f", text, runtime.NumCPU(),
		share(agents), share(later.all-m.all-agents))
}

// allBusy is how long all processors have worked. Guest times are in user's.
func allBusy() (time.Duration, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, err
	}
	st, err := fs.Stat()
	if err != nil {
		return 0, err
	}
	c := st.CPUTotal
	return time.Duration((c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal) * float64(time.Second)), nil
}

// ProcessorTime is how long a process has used a processor, by user and kernel together.
func ProcessorTime(pid int) (time.Duration, error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	st, err := p.Stat()
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	return time.Duration(st.CPUTime() * float64(time.Second)), nil
}
