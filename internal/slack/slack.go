// Package slack lets the kernel wake this process's threads a little later than they ask for.
//
// Go's runtime has a thread that watches the others while any goroutine runs: it sleeps for 20 µs at a time. Each time
// an idle process wakes for a packet or a timer, this thread wakes five to ten times. With a slack of a millisecond the
// kernel has it sleep for that long instead, and most bursts of work are over by then. Go's own timers are no less
// exact: the runtime waits for them in whole milliseconds anyway.
//
// Source: prctl(2), PR_SET_TIMERSLACK; proc(5), /proc/pid/timerslack_ns.
package slack

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Set gives all threads of this process the slack; threads that begin later have it from those that begin them. It is
// called before the process does much. Other threads than the caller's need CAP_SYS_NICE, so a service that lacks it is
// given its slack by who starts it (systemd: TimerSlackNSec=), and is left alone here. The error says which threads
// kept theirs; the process works as well without.
func Set(d time.Duration) error {
	if now, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err == nil && int64(now) == d.Nanoseconds() {
		return nil
	}
	const tasks = "/proc/self/task"
	all, err := os.ReadDir(tasks)
	if err != nil {
		return fmt.Errorf("list this process's threads: %w", err)
	}
	var errs []error
	for _, t := range all {
		// Not below /proc/self/task: the file is there for the thread's own ID only.
		err := os.WriteFile("/proc/"+t.Name()+"/timerslack_ns", []byte(strconv.FormatInt(d.Nanoseconds(), 10)), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // the thread has ended
			errs = append(errs, fmt.Errorf("set the timer slack of thread %s: %w", t.Name(), err))
		}
	}
	return errors.Join(errs...)
}
