package lab

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// process is one that may outlive us: it is known by its number and the moment it started, so that
// another that was given the same number later is never taken for it.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, as in /proc/PID/stat
}

// processOf remembers a running process.
func processOf(pid int) (process, error) {
	start, _, err := stat(pid)
	if err != nil {
		return process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return process{pid, start}, nil
}

// stat reads a process's start time and whether it is a zombie.
func stat(pid int) (start uint64, zombie bool, err error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, false, err
	}
	st, err := p.Stat()
	// The first thread may be a zombie while others still run, and hold files and locks.
	return st.Starttime, st.State == "Z" && st.NumThreads <= 1, err
}

// alive tells whether it still runs.
func (p process) alive() bool {
	if p.PID == 0 {
		return false
	}
	start, zombie, err := stat(p.PID)
	return err == nil && start == p.Start && !zombie
}

// signal sends a signal to this process and no other; one that is gone is not an error.
func (p process) signal(sig unix.Signal) error {
	if p.PID == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	if !p.alive() { // looked at after the pidfd is held: the number can no longer change hands
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// wait returns when the process has ended.
func (p process) wait(ctx context.Context) error {
	for p.alive() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d does not end: %w", p.PID, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}
