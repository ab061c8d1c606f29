package fabric

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Teardown removes a lab: it ends every process that lives in one of its namespaces, waits for them,
// and takes the names away, the core's last. Links, routes and rules go with their namespaces. It may
// be called again after a crash, and of a lab that is not there it removes nothing.
func Teardown(ctx context.Context, lab string) error {
	list, err := Namespaces(lab)
	if err != nil {
		return err
	}
	if err := killInside(ctx, list); err != nil {
		return err
	}
	var errs []error
	for _, name := range list {
		if name != Core(lab) {
			errs = append(errs, remove(name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // the core stays: it marks what is left as this lab's
	}
	return remove(Core(lab))
}

// Unbind ends what lives in the namespaces that are bound to files, and takes the files away. Others than bound
// namespaces are only removed.
func Unbind(ctx context.Context, files []string) error {
	if err := killInside(ctx, files); err != nil {
		return err
	}
	var errs []error
	for _, f := range files {
		errs = append(errs, remove(f))
	}
	return errors.Join(errs...)
}

// killInside kills what lives in the namespaces until nothing does. Membership is by the namespace's
// inode, so it can only ever hit what the lab started.
func killInside(ctx context.Context, list []string) error {
	inodes := inodesOf(list)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		left, err := processes(inodes)
		if err != nil || len(left) == 0 {
			return err
		}
		for _, pid := range left {
			killOne(pid, inodes)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v in the lab's namespaces do not end: %w", left, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// inodesOf tells the namespaces' inodes; never the caller's own, whatever a name may have been bound to.
func inodesOf(list []string) map[uint64]bool {
	inodes := map[uint64]bool{}
	for _, name := range list {
		var st unix.Stat_t
		if err := unix.Stat(Path(name), &st); err == nil {
			inodes[st.Ino] = true
		}
	}
	delete(inodes, netnsOf(os.Getpid()))
	return inodes
}

// processes lists the processes whose network namespace is one of the inodes. Zombies have none.
func processes(inodes map[uint64]bool) ([]int, error) {
	if len(inodes) == 0 {
		return nil, nil
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if inodes[netnsOf(pid)] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func netnsOf(pid int) uint64 {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &st); err != nil {
		return 0
	}
	return st.Ino
}

// killOne kills through a pidfd and looks again after opening it, so that a number that was given to
// another process meanwhile is not hit.
func killOne(pid int, inodes map[uint64]bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if inodes[netnsOf(pid)] {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // gone already is as good
	}
}
