package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// PodState is what the apiserver says of a pod.
type PodState struct {
	Metadata struct{ Name, Namespace, UID string }
	Spec     struct{ NodeName string }
	Status   struct {
		Phase  string
		PodIP  string
		PodIPs []struct{ IP netip.Addr }
	}
}

// Pod asks the apiserver for a pod.
func (c *Cluster) Pod(ctx context.Context, namespace, name string) (p PodState, err error) {
	out, err := c.Kubectl(ctx, nil, "-n", namespace, "get", "pod", name, "-o", "json")
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal([]byte(out), &p)
}

// Processes are those of a pod's containers, its sandbox among them, by this machine's numbers: the kernel's word,
// which needs no apiserver.
func (w *Worker) Processes(uid string) (pids []int, err error) {
	err = filepath.WalkDir(filepath.Join(hierarchies()[0], w.Machine.cgroup), func(path string, d fs.DirEntry,
		err error) error {
		if err != nil || d.Name() != "cgroup.procs" || !strings.Contains(path, "pod"+uid+"/") {
			return nil // groups come and go meanwhile
		}
		b, err := os.ReadFile(path)
		for _, text := range strings.Fields(string(b)) {
			if pid, perr := strconv.Atoi(text); perr == nil {
				pids = append(pids, pid)
			}
		}
		return err
	})
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("node %s has no process of pod %s", w.Name, uid)
	}
	return pids, err
}

// Sandbox is the process that holds a pod's namespaces.
func (w *Worker) Sandbox(uid string) (int, error) {
	pids, err := w.Processes(uid)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.HasPrefix(string(b), "/bin/sleep\x002147483647") {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("node %s has no sandbox of pod %s", w.Name, uid)
}
