package rss

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fileMapped is what the kernel counts of files that are mapped, in KiB.
func fileMapped(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "RssFile:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Skip("this kernel does not tell of files that are mapped")
	return 0
}

func TestForgetFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "database")
	if err := os.WriteFile(file, bytes.Repeat([]byte{7}, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	database, err := unix.Mmap(int(f.Fd()), 0, 8<<20, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(database)
	sum := func() (n int) {
		for i := 0; i < len(database); i += 4096 {
			n += int(database[i])
		}
		return n
	}
	all := sum()
	before := fileMapped(t)
	if err := ForgetFiles(); err != nil {
		t.Fatal(err)
	}
	after := fileMapped(t) // the code that asks is there again
	t.Logf("%d KiB before, %d KiB after", before, after)
	if after > (before-8<<10)*3/4 {
		t.Errorf("%d KiB of files are mapped, before it were %d, 8192 of a database among them", after, before)
	}
	if again := sum(); again != all || all != 7*len(database)/4096 {
		t.Errorf("the database's pages sum up to %d, and to %d after it", all, again)
	}
}

func TestReadOnly(t *testing.T) {
	maps := `00400000-02000000 r-xp 00000000 08:01 1234  /usr/bin/skein
02000000-04000000 r--p 01c00000 08:01 1234                               /usr/bin/skein
04000000-04100000 rw-p 03c00000 08:01 1234                               /usr/bin/skein
04100000-04200000 r--p 03c00000 08:01 1234                               /usr/bin/skein (deleted)
7f0000000000-7f0000001000 r--p 00000000 08:01 99                         /lib/other
7f0000001000-7f0000002000 r--s 00000000 08:01 98                         /var/lib/skein/events.db
7f0000002000-7f0000003000 rw-s 00000000 08:01 98                         /var/lib/skein/events.db
7f0000003000-7f0000004000 r--s 00000000 00:0c 97                         anon_inode:[perf_event]
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0                          [vdso]
`
	have, err := readOnly(strings.NewReader(maps), "/usr/bin/skein")
	want := []mapping{{0x400000, 0x1c00000}, {0x2000000, 0x2000000}, {0x7f0000001000, 0x1000}}
	if err != nil || !slices.Equal(have, want) {
		t.Errorf("%x, %v; want %x", have, err, want)
	}
	if _, err := readOnly(strings.NewReader("zz-1 r-xp 0 0 0 /usr/bin/skein\n"), "/usr/bin/skein"); err == nil {
		t.Error("a mapping that is none is understood")
	}
}
