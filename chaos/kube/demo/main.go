// Command demo is `make demo-kubernetes`: a Kubernetes cluster on nodes behind NATs, and its apiserver that dies and
// comes back.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	show "github.com/skeinmesh/skein/chaos/demo"
	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/internal/pause"
)

//go:embed demo.yaml
var manifest string

// demo is one run.
type demo struct {
	*show.Show
	*kube.Fleet
	web, client kube.PodState
}

func main() {
	binary := flag.String("binary", "bin/skein", "the skein program; the demo is run from the top of the repository")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *binary); err != nil {
		fmt.Fprintln(os.Stderr, "demo-kubernetes: "+err.Error())
		os.Exit(1)
	}
}

func run(ctx context.Context, binary string) (err error) {
	dir, err := os.MkdirTemp("", "skd")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	d := &demo{Show: show.NewShow(os.Stdout)}
	d.Chapter("A control plane behind an office's NAT, nodes behind a home's and a cloud's, and a virtual machine: " +
		"first the mesh, then Kubernetes on it")
	d.Fleet, err = kube.RaiseFleet(ctx, kube.FleetConfig{Root: ".", Dir: dir, Binary: binary,
		Name:     fmt.Sprintf("d%d", os.Getpid()),
		Progress: func(s string) { d.Say("  %s", s) }, Artifacts: "lab-failures"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close(context.WithoutCancel(ctx))) }()
	for _, chapter := range []func(context.Context) error{d.nodes, d.pods, d.reaches, d.vm, d.outage, d.back} {
		if err := chapter(ctx); err != nil {
			d.Stopped(err)
			break
		}
	}
	if !d.Summary() {
		kept, err := d.SaveArtifacts(context.WithoutCancel(ctx))
		d.Say("logs and states are in %s", kept)
		return errors.Join(show.ErrFailed, err)
	}
	return nil
}

func (d *demo) kubectl(ctx context.Context, args ...string) (string, error) {
	return d.Cluster.Kubectl(ctx, nil, args...)
}

func (d *demo) nodes(ctx context.Context) error {
	d.Chapter("The nodes, at addresses that no NAT changes")
	d.Verify("three nodes are Ready at overlay addresses", func() (string, error) {
		table, err := d.kubectl(ctx, "get", "nodes", "-o",
			`custom-columns=NAME:.metadata.name,READY:.status.conditions[?(@.type=="Ready")].status,INTERNAL-IP:.status.addresses[?(@.type=="InternalIP")].address`)
		if err != nil {
			return "", err
		}
		d.Say("%s", indent(table))
		for _, w := range d.Workers {
			if !strings.Contains(table, w.Addresses[0].String()) || strings.Count(table, "True") != len(d.Workers) {
				return "", fmt.Errorf("%s is not there at %s", w.Name, w.Addresses[0])
			}
		}
		return "kubelet was told --node-ip, and nothing else", nil
	})
	return nil
}

func (d *demo) pods(ctx context.Context) error {
	d.Chapter("A pod at home serves, one in the cloud asks")
	if _, err := d.Cluster.Kubectl(ctx, []byte(manifest), "apply", "-f", "-"); err != nil {
		return err
	}
	began := time.Now()
	if _, err := d.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "pod/web", "pod/client"); err != nil {
		return err
	}
	took := time.Since(began)
	var err error
	if d.web, err = d.Cluster.Pod(ctx, "default", "web"); err != nil {
		return err
	}
	if d.client, err = d.Cluster.Pod(ctx, "default", "client"); err != nil {
		return err
	}
	d.Verify("both pods run", func() (string, error) {
		return fmt.Sprintf("web has %s and client %s, %.1fs after kubectl apply", d.web.Status.PodIP, d.client.Status.PodIP,
			took.Seconds()), nil
	})
	for _, a := range d.web.Status.PodIPs {
		d.Verify("pod to pod, "+family(a.IP), func() (string, error) { return d.ping(ctx, a.IP, 20) })
	}
	d.Verify("pod to Service, by name", func() (string, error) {
		return "web.default.svc.cluster.local, by CoreDNS and kube-proxy", d.connect(ctx, 30*time.Second,
			"web.default.svc.cluster.local:80")
	})
	return nil
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// connect lets the client open a TCP connection.
func (d *demo) connect(ctx context.Context, within time.Duration, to string) error {
	_, err := until(ctx, within, func() (string, error) {
		return d.kubectl(ctx, "exec", "client", "--", "/agnhost", "connect", to, "--timeout=5s")
	})
	return err
}

// ping sends echoes from the client's pod, ten a second, without the apiserver's help.
func (d *demo) ping(ctx context.Context, to netip.Addr, count int) (string, error) {
	sandbox, err := d.Workers["cloud1"].Sandbox(d.client.Metadata.UID)
	if err != nil {
		return "", err
	}
	shell, err := exec.LookPath("busybox")
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", sandbox), shell, "ping",
		"-q", "-i", "0.1",
		"-W", "2", "-c", fmt.Sprint(count), to.String()).CombinedOutput()
	said := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	for _, line := range said {
		if strings.Contains(line, "packets received") {
			if !strings.Contains(line, " 0% packet loss") {
				return "", errors.New(line)
			}
			return line, nil
		}
	}
	return "", fmt.Errorf("ping says %s", out)
}

func (d *demo) reaches(ctx context.Context) error {
	d.Chapter("What nodes behind NATs usually lack: the apiserver reaches their kubelets")
	d.Verify("kubectl logs, of the pod at home", func() (string, error) {
		out, err := d.kubectl(ctx, "logs", "web")
		if err == nil && !strings.Contains(out, "8080") {
			err = fmt.Errorf("the log is %q", out)
		}
		return lastLine(out), err
	})
	d.Verify("kubectl exec, in the pod in the cloud", func() (string, error) {
		out, err := d.kubectl(ctx, "exec", "client", "--", "hostname")
		if err == nil && out != "client" {
			err = fmt.Errorf("its name is %q", out)
		}
		return "hostname says " + out, err
	})
	return nil
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

func (d *demo) vm(ctx context.Context) error {
	d.Chapter("A virtual machine of the mesh, which Kubernetes knows nothing of")
	d.Verify("the VM reaches the pod", func() (string, error) {
		return "TCP to " + d.web.Status.PodIP, d.fromVM(ctx, d.web.Status.PodIP)
	})
	return nil
}

func (d *demo) fromVM(ctx context.Context, pod string) error {
	out, exit, err := d.Lab.Exec(ctx, "vm1", filepath.Join(d.Cluster.Programs, "agnhost"), "connect",
		pod+":8080", "--timeout=5s")
	if err == nil && exit != 0 {
		err = fmt.Errorf("exit status %d: %s", exit, out)
	}
	return err
}

func (d *demo) outage(ctx context.Context) error {
	d.Chapter("The apiserver is killed with SIGKILL")
	if err := d.Cluster.KillAPIServer(); err != nil {
		return err
	}
	d.Verify("pods keep talking", func() (string, error) { return d.ping(ctx, d.web.Status.PodIPs[0].IP, 50) })
	d.Verify("a pod whose sandbox is killed comes back", func() (string, error) { return d.sandboxKilled(ctx) })
	d.Verify("its new address answers", func() (string, error) { return d.ping(ctx, d.web.Status.PodIPs[0].IP, 20) })
	d.Verify("an agent that is killed comes back", func() (string, error) {
		if err := d.Lab.Kill(ctx, "home1"); err != nil {
			return "", err
		}
		began := time.Now()
		if err := d.Lab.Start(ctx, "home1"); err != nil {
			return "", err
		}
		has, err := d.addresses(ctx, "web")
		if err == nil && !slices.Contains(has, d.web.Status.PodIPs[0].IP) {
			err = fmt.Errorf("it knows of %s", has)
		}
		return fmt.Sprintf("%.1fs after, and knows its pods", time.Since(began).Seconds()), err
	})
	d.Verify("pods keep talking, also through it", func() (string, error) {
		return until(ctx, 20*time.Second, func() (string, error) { return d.ping(ctx, d.web.Status.PodIPs[0].IP, 20) })
	})
	d.Verify("the VM reaches the pod", func() (string, error) {
		return "TCP to " + d.web.Status.PodIP, d.fromVM(ctx, d.web.Status.PodIP)
	})
	return nil
}

// addresses are the IPv4 addresses that home1's agent has given a pod: of an old sandbox, too, until that is taken
// away.
func (d *demo) addresses(ctx context.Context, pod string) (out []netip.Addr, err error) {
	c, err := d.Lab.Client("home1")
	if err != nil {
		return nil, err
	}
	r, err := c.Pods(ctx, &skeinv1.PodsRequest{})
	if err != nil {
		return nil, err
	}
	for _, p := range r.GetPods() {
		if a, err := netip.ParseAddr(p.GetHolder().GetIpv4()); err == nil && p.GetHolder().GetPod() == pod {
			out = append(out, a)
		}
	}
	return out, nil
}

// sandboxKilled ends the process that holds the pod's namespaces. kubelet makes the pod anew, with another address.
func (d *demo) sandboxKilled(ctx context.Context) (string, error) {
	before := d.web.Status.PodIPs[0].IP
	pid, err := d.Workers["home1"].Sandbox(d.web.Metadata.UID)
	if err != nil {
		return "", err
	}
	began := time.Now()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return "", err
	}
	after, err := until(ctx, 40*time.Second, func() (netip.Addr, error) {
		all, err := d.addresses(ctx, "web")
		if err != nil {
			return before, err
		}
		err = errors.New("it has no new address")
		for _, a := range all {
			if a != before {
				return a, d.fromVM(ctx, a.String())
			}
		}
		return before, err
	})
	if err != nil {
		return "", err
	}
	d.web.Status.PodIP, d.web.Status.PodIPs[0].IP = after.String(), after
	return fmt.Sprintf("%.1fs after, with %s instead of %s, from a block that its node holds", time.Since(began).Seconds(),
		after, before), nil
}

func (d *demo) back(ctx context.Context) error {
	d.Chapter("The apiserver comes back")
	if err := d.Cluster.StartAPIServer(ctx); err != nil {
		return err
	}
	began := time.Now()
	d.Verify("the nodes are Ready", func() (string, error) {
		_, err := d.kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=60s", "node", "--all")
		return fmt.Sprintf("%.1fs after", time.Since(began).Seconds()), err
	})
	d.Verify("members are shown as they are", func() (string, error) {
		_, err := until(ctx, 30*time.Second, func() (string, error) { return d.members(ctx) })
		return fmt.Sprintf("%.1fs after", time.Since(began).Seconds()), err
	})
	d.Verify("the pod is known by its new address", func() (string, error) {
		_, err := until(ctx, 100*time.Second, func() (string, error) {
			p, err := d.Cluster.Pod(ctx, "default", "web")
			if err == nil && p.Status.PodIP != d.web.Status.PodIP {
				err = fmt.Errorf("the apiserver says %s, want %s", p.Status.PodIP, d.web.Status.PodIP)
			}
			return "", err
		})
		return fmt.Sprintf("%.1fs after; kubelet says it", time.Since(began).Seconds()), err
	})
	d.Verify("the Service leads to it", func() (string, error) {
		// kube-proxy and the controllers ask again after up to half a minute.
		err := d.connect(ctx, 90*time.Second, "web.default.svc.cluster.local:80")
		return fmt.Sprintf("by name, %.1fs after", time.Since(began).Seconds()), err
	})
	d.Verify("kubectl exec", func() (string, error) {
		return d.kubectl(ctx, "exec", "web", "--", "hostname")
	})
	return nil
}

// members are the names of the MeshNodes, all of which have to be alive.
func (d *demo) members(ctx context.Context) (string, error) {
	out, err := d.kubectl(ctx, "get", "meshnodes", "-o",
		`jsonpath={range .items[*]}{.metadata.name}={.status.alive} {end}`)
	if err != nil {
		return "", err
	}
	for _, n := range d.Lab.Spec.NodeNames() {
		if !slices.Contains(strings.Fields(out), n+"=true") {
			return "", fmt.Errorf("MeshNodes: %s", out)
		}
	}
	return out, nil
}

func indent(s string) string { return "    " + strings.ReplaceAll(s, "\n", "\n    ") }

// until calls f until it gives no error, or a time has passed; then it returns the last outcome.
func until[T any](ctx context.Context, within time.Duration, f func() (T, error)) (v T, err error) {
	err = pause.Until(ctx, within, 100*time.Millisecond, func() (err error) {
		v, err = f()
		return err
	})
	return v, err
}
