// Package rss keeps small what the kernel counts as this process's resident memory.
package rss

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ForgetFiles unmaps the pages of files that are only read: the program's own code and constants, and files that are
// mapped as they are, as databases are. The kernel maps up to fifteen more around each that is used, and never takes
// them back while memory is not short, so a process at rest counts most of what it needed to start. Those that are
// needed again come back from the page cache, with a fault of about a microsecond each. Nothing is written, and what
// the process has changed stays.
func ForgetFiles() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("find the program's file: %w", err)
	}
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return fmt.Errorf("read the process's mappings: %w", err)
	}
	defer f.Close()
	all, err := readOnly(f, program)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range all {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.length, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("unmap pages of files: %w", errno))
		}
	}
	return errors.Join(errs...)
}

// mapping is a part of the address space.
type mapping struct{ start, length uintptr }

// readOnly finds mappings that cannot be written to: the private ones of the program, and those that share a file with
// whoever writes it. Another file's private one may once have been written to, and would lose that. See
// proc_pid_maps(5).
func readOnly(maps io.Reader, program string) (out []mapping, err error) {
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		fields := strings.SplitN(lines.Text(), " ", 6)
		if len(fields) < 6 {
			continue
		}
		file, access := strings.TrimSpace(fields[5]), fields[1]
		own := file == program && (access == "r-xp" || access == "r--p")
		if !own && !(strings.HasPrefix(file, "/") && access == "r--s") {
			continue
		}
		from, to, _ := strings.Cut(fields[0], "-")
		start, err1 := strconv.ParseUint(from, 16, strconv.IntSize)
		end, err2 := strconv.ParseUint(to, 16, strconv.IntSize)
		if err1 != nil || err2 != nil || end < start {
			return nil, fmt.Errorf("the mapping %q of %s is not understood", fields[0], file)
		}
		out = append(out, mapping{uintptr(start), uintptr(end - start)})
	}
	return out, lines.Err()
}
