package lab

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// manyNodes is from how many nodes on a lab has root's inotify instances raised. Each agent watches its configuration
// file, and kernels give a user 128.
const manyNodes = 64

// RaiseInotify lets root have as many inotify instances as a few hundred agents, or a few Kubernetes clusters, take.
// The limit is the host's, and stays.
func RaiseInotify() error {
	const file, want = "/proc/sys/fs/inotify/max_user_instances", 1024
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the limit of inotify instances: %w", err)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && n >= want {
		return nil
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(want)), 0); err != nil {
		return fmt.Errorf("raise the limit of inotify instances to %d: %w", want, err)
	}
	return nil
}
