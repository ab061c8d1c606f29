package filewatch

import (
	"os"
	"path/filepath"
	"strings"
)

// maxLinks is how many symbolic links the kernel follows on one way: path_resolution(7).
const maxLinks = 40

// step is an entry of a directory on the way to a file.
type step struct{ dir, name string }

// way finds the entries on the way to a file where another one may be put: symbolic links, the file itself, and what
// is missing. The directories in it have no links in their paths, so that they stay the same while the links change.
func way(file string) (steps []step) {
	rest, at := strings.Split(strings.TrimPrefix(filepath.Clean(file), "/"), "/"), "/"
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		if name == ".." {
			at = filepath.Dir(at)
			continue
		}
		full := filepath.Join(at, name)
		info, err := os.Lstat(full)
		switch {
		case err != nil:
			return append(steps, step{at, name})
		case info.Mode()&os.ModeSymlink != 0:
			steps = append(steps, step{at, name})
			to, err := os.Readlink(full)
			if links++; err != nil || links > maxLinks {
				return steps
			}
			if to = filepath.Clean(to); filepath.IsAbs(to) {
				at, to = "/", strings.TrimPrefix(to, "/")
			}
			if to != "" && to != "." {
				rest = append(strings.Split(to, "/"), rest...)
			}
		case len(rest) == 0:
			return append(steps, step{at, name})
		default:
			at = full
		}
	}
	return steps
}
