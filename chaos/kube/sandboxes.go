package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/skeinmesh/skein/chaos/lab"
)

// Sandbox is a pod that runs, as a node's container runtime has it.
type Sandbox struct {
	Node, Namespace, Pod string
	ID                   string
	PID                  int            // of the process that holds its network namespace
	Containers           map[string]int // processes of its containers, by their names
}

// Netns is the path of its network namespace.
func (s Sandbox) Netns() string { return fmt.Sprintf("/proc/%d/ns/net", s.PID) }

// Account is the pod as the lab's audit of addresses has it.
func (s Sandbox) Account() lab.Pod {
	return lab.Pod{Node: s.Node, Name: s.Namespace + "/" + s.Pod, Namespace: s.Namespace, ContainerID: s.ID,
		NetNS: s.Netns()}
}

// containerInfo is what containerd tells of a container of kubelet's.
type containerInfo struct {
	Labels struct {
		Kind      string `json:"io.cri-containerd.kind"`
		Namespace string `json:"io.kubernetes.pod.namespace"`
		Pod       string `json:"io.kubernetes.pod.name"`
		UID       string `json:"io.kubernetes.pod.uid"`
		Container string `json:"io.kubernetes.container.name"`
	}
	id string
}

// Sandboxes lists the pods that run on the node.
func (w *Worker) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	running, err := w.tasks(ctx)
	if err != nil {
		return nil, err
	}
	var out []Sandbox
	at := map[string]int{} // by the pod's UID
	var inside []containerInfo
	for id, pid := range running {
		text, err := w.ctr(ctx, "containers", "info", id)
		if err != nil {
			if now, terr := w.tasks(ctx); terr == nil && now[id] == 0 {
				continue // it has ended meanwhile
			}
			return nil, err
		}
		info := containerInfo{id: id}
		if err := json.Unmarshal([]byte(text), &info); err != nil {
			return nil, fmt.Errorf("node %s: container %s: %w", w.Name, id, err)
		}
		if info.Labels.Kind != "sandbox" {
			inside = append(inside, info)
			continue
		}
		at[info.Labels.UID] = len(out)
		out = append(out, Sandbox{Node: w.On.Name, Namespace: info.Labels.Namespace, Pod: info.Labels.Pod, ID: id, PID: pid,
			Containers: map[string]int{}})
	}
	for _, c := range inside {
		if i, known := at[c.Labels.UID]; known {
			out[i].Containers[c.Labels.Container] = running[c.id]
		}
	}
	return out, nil
}

// tasks are the processes of the containers that run, by the containers' IDs.
func (w *Worker) tasks(ctx context.Context) (map[string]int, error) {
	text, err := w.ctr(ctx, "tasks", "ls")
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) != 3 || words[2] != "RUNNING" {
			continue
		}
		pid, err := strconv.Atoi(words[1])
		if err != nil {
			return nil, fmt.Errorf("node %s: tasks: %q", w.Name, line)
		}
		out[words[0]] = pid
	}
	return out, nil
}
