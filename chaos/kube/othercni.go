package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// useReferencePlugins gives a node CNI's reference plugins bridge and host-local as its CNI, with the pod CIDR that the
// controller manager gives its Node. They know nothing of other hosts.
func (f *Fleet) useReferencePlugins(ctx context.Context, w *Worker) error {
	cidrs, err := f.Cluster.podCIDRs(ctx, w.Name)
	if err != nil {
		return err
	}
	for _, plugin := range []string{"bridge", "host-local"} {
		if out, err := exec.CommandContext(ctx, "cp", "-L", filepath.Join(f.Config.Root, "bin/tools", plugin),
			filepath.Join(w.Machine.Dir, binDir)).CombinedOutput(); err != nil {
			return fmt.Errorf("the reference plugins of CNI are missing: run .ci/cni-tools: %w: %s", err, out)
		}
	}
	var ranges []any
	for _, c := range cidrs {
		ranges = append(ranges, []any{map[string]any{"subnet": c}})
	}
	b, err := json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": "pods", "plugins": []any{
		map[string]any{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false,
			"hairpinMode": true, "mtu": 1420,
			"ipam": map[string]any{"type": "host-local", "ranges": ranges,
				"routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}}}},
		map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}},
	}})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(w.Machine.Dir, confDir, "10-bridge.conflist"), b, 0o644)
}

// podCIDRs waits for the networks that the controller manager gives a Node.
func (c *Cluster) podCIDRs(ctx context.Context, node string) ([]string, error) {
	var cidrs []string
	_, err := poll(ctx, upWithin, tryEvery, func() error {
		out, err := c.Kubectl(ctx, nil, "get", "node", node, "-o", "jsonpath={.spec.podCIDRs[*]}")
		if cidrs = strings.Fields(out); err == nil && len(cidrs) == 0 {
			err = errors.New("it has none")
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("Node %s's pod CIDRs: %w", node, err)
	}
	return cidrs, nil
}

// Commands runs a script as an administrator would on a node: skein is the node's own, and kubectl the cluster's.
func (f *Fleet) Commands(ctx context.Context, node, script string) (string, error) {
	kubectl := fmt.Sprintf("%q --cache-dir %q --kubeconfig /dev/null --server https://%s --certificate-authority %q "+
		"--client-certificate %q --client-key %q",
		filepath.Join(f.Cluster.Programs, "kubectl"), f.Cluster.file("kubectl-cache"),
		netip.AddrPortFrom(f.Cluster.Addresses[0], apiPort), f.Cluster.file("ca.crt"),
		f.Cluster.file("admin.crt"), f.Cluster.file("admin.key"))
	root, err := filepath.Abs(f.Config.Root)
	if err != nil {
		return "", err
	}
	out, exit, err := f.Lab.Exec(ctx, node, "sh", "-ec", fmt.Sprintf("cd %q\nskein() { %q \"$@\"; }\nkubectl() { %s "+
		"\"$@\"; }\n%s",
		root, f.Config.Binary, kubectl, script))
	if err == nil && exit != 0 {
		err = fmt.Errorf("exit status %d", exit)
	}
	if err != nil {
		return out, fmt.Errorf("on %s: %w:\n%s\n%s", node, err, script, out)
	}
	return out, nil
}
