package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// name is what this node is called: as the log has it, or before it has joined, as its configuration says.
func (a *Agent) name() string {
	if a.phase.Load() == PhaseRunning {
		if n := a.self(); n != nil {
			return n.GetName()
		}
	}
	return a.cfg.Name
}

// subjectLabels is the problem that the configuration has labels which are not agreed.
const subjectLabels = "labels"

// noteLabels tells of labels in the configuration that the log does not have: what is agreed counts.
func (a *Agent) noteLabels(n *skeinv1.Node) {
	message, advice := labelNews(n, a.conf().Labels)
	a.report(subjectLabels, warning, message, advice)
}

// labelNews says which labels of a node's configuration the log does not have, and what to do; empty: none.
func labelNews(n *skeinv1.Node, file map[string]string) (message, advice string) {
	if n == nil {
		return "", ""
	}
	var missing, set, steps []string
	for _, key := range slices.Sorted(maps.Keys(file)) {
		have, ok := n.GetLabels()[key]
		switch {
		case ok && have == file[key]:
			continue
		case ok:
			missing = append(missing, fmt.Sprintf("%s=%s (the log has %s=%s)", key, file[key], key, have))
		default:
			missing = append(missing, key+"="+file[key])
		}
		if !strings.HasPrefix(key, events.KubernetesPrefix) {
			set = append(set, key+"="+file[key])
		}
	}
	if len(missing) == 0 {
		return "", ""
	}
	if len(set) > 0 {
		steps = append(steps, fmt.Sprintf("run `skein node set %s %s` on an admin or a server", n.GetName(),
			strings.Join(set, " ")))
	}
	if len(set) < len(missing) {
		steps = append(steps, "label the Node in Kubernetes with those under "+events.KubernetesPrefix)
	}
	return "the configuration has labels that are not agreed, and what is agreed counts: " + strings.Join(missing, ", "),
		strings.Join(steps, ", and ") + ", or make the configuration say what is agreed"
}
