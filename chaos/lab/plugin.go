package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// What the lab, as a container runtime, says to the plugin.
const (
	cniVersion   = "1.1.0"
	cniNetwork   = "skein"     // name of the network configuration
	cniPlugin    = "skein-cni" // its type, and so the program's name
	podInterface = "eth0"

	// podAnnotations is the capability by which containerd and CRI-O pass a pod's annotations.
	podAnnotations = "io.kubernetes.cri.pod-annotations"

	pluginTimeout = 30 * time.Second
)

// PluginError is what a CNI plugin says when it fails.
type PluginError struct {
	Verb    string
	Code    uint // of the CNI specification; 0: it said nothing that can be understood
	Message string
	Details string
}

// Error is all of it.
func (e *PluginError) Error() string {
	text := fmt.Sprintf("CNI %s: code %d: %s", e.Verb, e.Code, e.Message)
	if e.Details != "" {
		text += ": " + e.Details
	}
	return text
}

// plugin runs the CNI plugin for a pod inside its node's namespace, as a container runtime does, and returns what it
// prints.
func (l *Lab) plugin(ctx context.Context, a *agent, verb string, p Pod) (json.RawMessage, error) {
	config, err := json.Marshal(l.network(a, p))
	if err != nil {
		return nil, fmt.Errorf("network configuration: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, pluginTimeout)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(l.Dir, "bin", cniPlugin))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(config), &out, &errOut
	cmd.Dir, cmd.WaitDelay = a.dir, 10*time.Second // on a busy machine another child may hold our pipes until its exec
	cmd.Env = append(l.environ(a), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+p.ContainerID, "CNI_NETNS="+p.NetNS,
		"CNI_IFNAME="+podInterface,
		"CNI_PATH="+filepath.Join(l.Dir, "bin"), "CNI_ARGS="+p.args())
	if err := fabric.In(a.ns, cmd.Start); err != nil {
		return nil, fmt.Errorf("start the CNI plugin: %w", err)
	}
	err = cmd.Wait()
	if err == nil {
		return out.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("CNI %s did not end within %s: %w", verb, pluginTimeout, ctx.Err())
	}
	return nil, pluginError(verb, err, out.Bytes(), errOut.String())
}

func pluginError(verb string, err error, out []byte, errOut string) error {
	var said types.Error
	if json.Unmarshal(out, &said) == nil && said.Code != 0 {
		return &PluginError{Verb: verb, Code: said.Code, Message: said.Msg, Details: said.Details}
	}
	return &PluginError{Verb: verb, Message: err.Error(), Details: strings.TrimSpace(string(out) + " " + errOut)}
}

// network is the configuration that the plugin reads: that of this node's agent, with what is asked for one pod.
func (l *Lab) network(a *agent, p Pod) map[string]any {
	config := map[string]any{"cniVersion": cniVersion, "name": cniNetwork, "type": cniPlugin,
		"socket": filepath.Join(a.runDir(), "cni.sock")}
	runtime := map[string]any{}
	if len(p.Asked) > 0 {
		runtime["ips"] = p.Asked
	}
	if p.Pool != "" {
		runtime["pool"] = p.Pool
	}
	if len(p.Annotations) > 0 {
		runtime[podAnnotations] = p.Annotations
	}
	if len(runtime) > 0 {
		config["capabilities"] = map[string]bool{"ips": true, "pool": true, podAnnotations: true}
		config["runtimeConfig"] = runtime
	}
	if len(p.Result) > 0 {
		config["prevResult"] = p.Result
	}
	return config
}

func (p Pod) args() string {
	return strings.Join([]string{"IgnoreUnknown=1", "K8S_POD_NAMESPACE=" + p.Namespace, "K8S_POD_NAME=" + p.Name,
		"K8S_POD_INFRA_CONTAINER_ID=" + p.ContainerID}, ";")
}

// addressesIn reads a pod's addresses from what ADD printed.
func addressesIn(result json.RawMessage) ([]netip.Addr, error) {
	var r types100.Result
	if err := json.Unmarshal(result, &r); err != nil {
		return nil, fmt.Errorf("what CNI ADD printed: %w: %s", err, result)
	}
	var out []netip.Addr
	for _, ip := range r.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return nil, fmt.Errorf("what CNI ADD printed: %s is not an address", ip.Address.IP)
		}
		out = append(out, addr.Unmap())
	}
	if len(out) == 0 {
		return nil, errors.New("what CNI ADD printed has no address: " + string(result))
	}
	return out, nil
}
