package cnitable

import (
	"bytes"
	"context"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// The lab's nodes.
const (
	server = "srv"
	node   = "n"
)

const labFile = `name: %s
config: {log: {level: info}}
sites:
  dc: {nat: none}
nodes:
  srv: {site: dc, server: true}
  n:   {site: dc}
pools:
  default: {blockSizeBits: 5, subnets: [{ipv4: 10.64.0.0/20, ipv6: 'fd64::/116'}]}
  gold:    {blockSizeBits: 2, subnets: [10.65.0.0/24], namespaces: [vip]}
  single:  {blockSizeBits: 0, subnets: [10.66.0.0/32], allowed: ['*']}
  few:     {blockSizeBits: 1, subnets: [10.67.0.0/24], allowed: ['*']}
`

// Bounds of one call, and of a condition that is waited for.
const (
	callTimeout = 90 * time.Second
	patience    = 30 * time.Second
)

// host is the node whose pods come and go.
type host struct {
	lab  *lab.Lab
	info lab.Info
	dir  string // of plugins, configurations and cnitool's results
	tool string // cnitool
	n    int    // pods so far
	conf []byte // the installed configuration
}

// raise brings the lab up and installs the plugin with its own command.
func raise(ctx context.Context, opts Options) (*host, error) {
	spec, err := lab.Parse("cni.yaml", fmt.Appendf(nil, labFile, fmt.Sprintf("cni%d", os.Getpid()%10000)))
	if err != nil {
		return nil, err
	}
	h := &host{}
	if h.tool, err = tool(opts.Tools, "cnitool"); err != nil {
		return nil, err
	}
	if h.lab, err = lab.Up(ctx, spec, lab.Options{Dir: opts.Dir, Binary: opts.Binary, Progress: opts.Progress,
		Artifacts: opts.Artifacts}); err != nil {
		return nil, err
	}
	if err := h.lab.WaitConverged(ctx, patience); err != nil { // that everybody knows the pools
		return h, err
	}
	return h, h.install(ctx, opts)
}

// tool finds a program in the tools' directory or on the path.
func tool(dir, name string) (string, error) {
	if dir != "" {
		p, err := filepath.Abs(filepath.Join(dir, name))
		if err != nil {
			return "", fmt.Errorf("the tools' directory: %w", err)
		}
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w: `make cni-tools` builds it into bin/tools", err)
	}
	return p, nil
}

func (h *host) bin() string               { return filepath.Join(h.dir, "bin") }
func (h *host) confDir(set string) string { return filepath.Join(h.dir, "net.d", set) }

// chained are the plugins of the second configuration.
var chained = []string{"portmap", "bandwidth"}

func (h *host) install(ctx context.Context, opts Options) (err error) {
	if h.info, err = h.lab.Node(node); err != nil {
		return err
	}
	h.dir = filepath.Join(h.lab.Dir, "cni")
	for _, d := range []string{h.bin(), filepath.Join(h.dir, "cache")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, name := range chained {
		path, err := tool(opts.Tools, name)
		if err == nil {
			err = os.Symlink(path, filepath.Join(h.bin(), name))
		}
		if err != nil {
			return err
		}
	}
	for set, more := range map[string][]string{"plain": nil, "chain": {"--chain", strings.Join(chained, ",")}} {
		argv := append([]string{"skein", "cni", "install", "--bin-dir", h.bin(), "--conf-dir", h.confDir(set),
			"--name", set}, more...)
		if err := h.exec(ctx, node, argv...); err != nil {
			return err
		}
		if err := h.eachVersion(set); err != nil {
			return err
		}
	}
	// Kubernetes asks for forwarding on every node, for host ports and for routers; skein sets it on its own links only.
	if err := h.exec(ctx, node, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"); err != nil {
		return err
	}
	return os.MkdirAll("/var/lib/cni", 0o755) // only the place where its own directory is mounted
}

// exec runs a command on a node that must succeed.
func (h *host) exec(ctx context.Context, on string, argv ...string) error {
	out, exit, err := h.lab.Exec(ctx, on, argv...)
	if err == nil && exit != 0 {
		err = fmt.Errorf("%s: exit status %d: %s", strings.Join(argv, " "), exit, out)
	}
	return err
}

// eachVersion writes the installed configuration once for each version of the specification.
func (h *host) eachVersion(set string) error {
	b, err := os.ReadFile(filepath.Join(h.confDir(set), "10-skein.conflist"))
	if err != nil {
		return err
	}
	var list map[string]any
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	if set == "plain" {
		ours := list["plugins"].([]any)[0].(map[string]any)
		delete(ours, "capabilities")
		ours["name"] = list["name"]
		if h.conf, err = json.Marshal(ours); err != nil {
			return err
		}
		list["plugins"].([]any)[0].(map[string]any)["capabilities"] = map[string]bool{"ips": true, "pool": true}
	}
	delete(list, "cniVersions")
	for _, v := range cni.Versions() {
		list["cniVersion"] = v
		b, err := json.Marshal(list)
		if err == nil {
			err = os.MkdirAll(h.confDir(set+"-"+v), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(h.confDir(set+"-"+v), "10-skein.conflist"), b, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// pod is a network namespace, and the name that both ways give its container.
type pod struct {
	name, path, id string
	prev           json.RawMessage // what the last ADD printed
}

// eth0 names a container's attachment.
func eth0(container string) podnet.Key { return podnet.Key{ContainerID: container, Interface: "eth0"} }

func (h *host) newPod() (*pod, error) {
	h.n++
	p := &pod{name: fmt.Sprintf("p%d", h.n)}
	p.path = fabric.Path(fabric.PodNS(h.lab.Spec.Name, node, p.name))
	sum := sha512.Sum512([]byte(p.path))
	p.id = fmt.Sprintf("cnitool-%x", sum[:10]) // as cnitool does
	return p, fabric.AddPod(h.lab.Spec.Name, node, p.name)
}

// vanish takes a pod's namespace away, as a runtime does that does not wait for DEL.
func (h *host) vanish(p *pod) error { return fabric.RemovePod(h.lab.Spec.Name, node, p.name) }

// socketDir is the agent's run directory.
func (h *host) socketDir() string { return filepath.Join(h.info.Dir, "run") }

// Outcome is what one call came to.
type Outcome struct {
	Code    uint32          `json:"code"` // 0: success; unknown for cnitool's failures
	Message string          `json:"message,omitempty"`
	Details string          `json:"details,omitempty"`
	Result  json.RawMessage `json:"-"`
	Err     string          `json:"-"` // standard error
}

func (o Outcome) ok() bool { return o.Code == 0 }

// unknownCode stands for the code of a failure that cnitool tells in words.
const unknownCode = ^uint32(0)

// addresses are those of ADD's result.
func (o Outcome) addresses(version string) ([]netip.Addr, error) {
	r, err := create.Create(version, o.Result)
	if err != nil {
		return nil, err
	}
	res, err := current.GetResult(r)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, ip := range res.IPs {
		a, _ := netip.AddrFromSlice(ip.Address.IP)
		out = append(out, a.Unmap())
	}
	return out, nil
}

// start runs a program inside the node's namespace.
func (h *host) start(cmd *exec.Cmd) error {
	cmd.WaitDelay = 10 * time.Second // on a busy machine another child may hold our pipes until its exec
	return fabric.In(h.info.Namespace, cmd.Start)
}

// byTool calls cnitool.
func (h *host) byTool(ctx context.Context, c call) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	set := "plain"
	if c.chain {
		set = "chain"
	}
	// In a mount namespace of its own, where /var/lib/cni is the lab's.
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", `mount --bind "$0" /var/lib/cni && exec "$@"`,
		filepath.Join(h.dir, "cache"), h.tool, strings.ToLower(c.verb), set, c.netns())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_PATH=" + h.bin(), "NETCONFPATH=" + h.confDir(set+"-"+c.version),
		"CNI_IFNAME=" + c.ifname(), "CNI_ARGS=" + c.args}
	if c.caps != nil {
		b, err := json.Marshal(c.caps)
		if err != nil {
			return Outcome{}, err
		}
		cmd.Env = append(cmd.Env, "CAP_ARGS="+string(b))
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := h.start(cmd); err != nil {
		return Outcome{}, err
	}
	err := cmd.Wait()
	o := Outcome{Result: out.Bytes(), Err: errs.String()}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return o, fmt.Errorf("cnitool %s: %w", c.verb, ctx.Err())
	case errors.As(err, &exit):
		lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
		o.Code, o.Message = unknownCode, lines[len(lines)-1]
	case err != nil:
		return o, err
	}
	return o, nil
}

// plugin is the installed plugin with one call's environment and input.
func (h *host) plugin(ctx context.Context, c call) (*exec.Cmd, error) {
	in := c.stdin
	if in == nil {
		conf := map[string]any{}
		if err := json.Unmarshal(h.conf, &conf); err != nil {
			return nil, err
		}
		conf["cniVersion"] = c.version
		if c.caps != nil {
			conf["runtimeConfig"] = c.caps
		}
		if c.verb != "ADD" && c.pod != nil && c.pod.prev != nil {
			conf["prevResult"] = c.pod.prev
		}
		for k, v := range c.conf {
			conf[k] = v
			if v == nil {
				delete(conf, k)
			}
		}
		var err error
		if in, err = json.Marshal(conf); err != nil {
			return nil, err
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(h.bin(), cni.Type))
	cmd.Env = []string{"CNI_COMMAND=" + c.verb, "CNI_PATH=" + h.bin()}
	if c.pod != nil {
		cmd.Env = append(cmd.Env, "CNI_CONTAINERID="+c.pod.id, "CNI_NETNS="+c.netns(), "CNI_IFNAME="+c.ifname(),
			"CNI_ARGS="+c.args)
	}
	cmd.Env = append(cmd.Env, c.env...)
	cmd.Stdin = bytes.NewReader(in)
	return cmd, nil
}

// direct calls the plugin as a runtime does.
func (h *host) direct(ctx context.Context, c call) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cmd, err := h.plugin(ctx, c)
	if err != nil {
		return Outcome{}, err
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := h.start(cmd); err != nil {
		return Outcome{}, err
	}
	err = cmd.Wait()
	o := Outcome{Result: out.Bytes(), Err: errs.String()}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return o, fmt.Errorf("plugin %s: %w", c.verb, ctx.Err())
	case errors.As(err, &exit):
		return o, o.read()
	case err != nil:
		return o, err
	}
	return o, nil
}

// read takes an error apart that the plugin has printed.
func (o *Outcome) read() error {
	var said struct {
		Version string `json:"cniVersion"`
		Code    uint32 `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details"`
	}
	if err := json.Unmarshal(o.Result, &said); err != nil || said.Code == 0 || said.Version == "" {
		return fmt.Errorf("the plugin failed without an error as the specification has it: %s %s", o.Result, o.Err)
	}
	o.Code, o.Message, o.Details = said.Code, said.Msg, said.Details
	return nil
}

// traces lists what pods have left on the node: routes and links by the kernel, leases by the agent if it runs.
func (h *host) traces(ctx context.Context) ([]string, error) {
	var out []string
	routes, err := fabric.Routes(h.info.Namespace, 116)
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if !r.Unreachable {
			out = append(out, "route to "+r.Prefix.String())
		}
	}
	links, err := fabric.Links(h.info.Namespace)
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		if strings.HasPrefix(l, "sk") && len(l) == 14 {
			out = append(out, "link "+l)
		}
	}
	if !slices.Contains(h.lab.Running(), node) {
		return out, nil
	}
	c, err := h.lab.Client(node)
	if err != nil {
		return nil, err
	}
	r, err := c.Pods(ctx, &skeinv1.PodsRequest{})
	if err != nil {
		return nil, err
	}
	for _, p := range r.GetPods() {
		if p.GetHolder().GetUntil() == 0 {
			out = append(out, "lease of "+p.GetHolder().GetContainerId())
		}
	}
	return out, nil
}

// gone waits until no trace is left.
func (h *host) gone(ctx context.Context) error {
	var left []string
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if left, err = h.traces(ctx); err == nil && len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	return errors.Join(err, fmt.Errorf("left behind: %s", strings.Join(left, ", ")))
}
