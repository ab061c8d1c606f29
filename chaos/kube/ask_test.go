package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// object is one of Kubernetes', as JSON has it.
type object = map[string]any

// apply makes objects, or changes them.
func (f fleet) apply(objects ...object) {
	f.Helper()
	b, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		f.Fatal(err)
	}
	f.kubectl(b, "apply", "-f", "-")
}

// remove deletes objects when the case ends, whatever became of it, and does not wait for them.
func (f fleet) remove(objects ...string) {
	f.Cleanup(func() {
		args := append([]string{"delete", "--ignore-not-found", "--wait=false"}, objects...)
		if _, err := f.Cluster.Kubectl(context.Background(), nil, args...); err != nil {
			f.Error(err)
		}
	})
}

// pod is a Pod of the tools' image on a node: agnhost with some arguments.
func pod(name, node string, args ...string) object {
	return object{"apiVersion": "v1", "kind": "Pod",
		"metadata": object{"name": name, "namespace": "default", "labels": object{"name": name}, "annotations": object{}},
		"spec": object{
			"nodeName": node, "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
			"tolerations": []object{{"operator": "Exists"}},
			"containers":  []object{{"name": "main", "image": ToolsImage, "imagePullPolicy": "Never", "args": args}},
		}}
}

// web is a Pod that answers HTTP and datagrams on port 8080.
func web(name, node string) object {
	return pod(name, node, "netexec", "--http-port=8080", "--udp-port=8080")
}

// with sets a field of an object, by its path with dots between; one of a list is named by its number.
func with(o object, path string, value any) object {
	keys := strings.Split(path, ".")
	at := o
	for _, k := range keys[:len(keys)-1] {
		next := at[k]
		if next == nil {
			next = object{}
			at[k] = next
		}
		if list, ok := next.([]object); ok {
			next = list[0]
		}
		at = next.(object)
	}
	at[keys[len(keys)-1]] = value
	return o
}

// service is a Service of both families, in front of the pods that have a label.
func service(name string, selector object, port int) object {
	return object{"apiVersion": "v1", "kind": "Service", "metadata": object{"name": name, "namespace": "default"},
		"spec": object{"selector": selector, "ipFamilyPolicy": "RequireDualStack", "ipFamilies": []string{"IPv4", "IPv6"},
			"ports": []object{{"port": port, "targetPort": 8080}}}}
}

// ready waits until pods run and are ready.
func (f fleet) ready(pods ...string) {
	f.Helper()
	args := []string{"wait", "--for=condition=Ready", "--timeout=60s"}
	for _, p := range pods {
		args = append(args, "pod/"+p)
	}
	f.kubectl(nil, args...)
}

// addresses are a Pod's, IPv4 first.
func (f fleet) addresses(pod string) []netip.Addr {
	f.Helper()
	return f.listed("{.status.podIPs[*].ip}", "pod", pod)
}

// clusterIPs are a Service's addresses, IPv4 first.
func (f fleet) clusterIPs(service string) []netip.Addr {
	f.Helper()
	return f.listed("{.spec.clusterIPs[*]}", "service", service)
}

func (f fleet) listed(path string, args ...string) (out []netip.Addr) {
	f.Helper()
	for _, text := range strings.Fields(f.kubectl(nil, append([]string{"get", "-o", "jsonpath=" + path}, args...)...)) {
		a, err := netip.ParseAddr(text)
		if err != nil {
			f.Fatal(err)
		}
		out = append(out, a)
	}
	if len(out) != 2 || !out[0].Is4() || !out[1].Is6() {
		f.Fatalf("%s has the addresses %v, want one of each family", strings.Join(args, " "), out)
	}
	return out
}

// host is the network namespace of a lab's node.
func (f fleet) host(name string) string {
	f.Helper()
	info, err := f.Lab.Node(name)
	if err != nil {
		f.Fatal(err)
	}
	return info.Namespace
}

// inside is the network namespace of a pod on a node.
func (f fleet) inside(node, name string) string {
	f.Helper()
	all, err := f.sandboxes(node)
	if err != nil {
		f.Fatal(err)
	}
	for _, p := range all {
		if p.Name == name {
			return p.NetNS
		}
	}
	f.Fatalf("node %s has no pod %s", node, name)
	return ""
}

// sandboxes are the pods that a node's runtime has, but for those in the host's own network namespace.
func (f fleet) sandboxes(node string) (out []lab.Pod, err error) {
	root := fmt.Sprintf("/proc/%d/root", f.Machines[node].holder.Process.Pid)
	files, err := filepath.Glob(root + "/run/containerd/io.containerd.runtime.v2.task/k8s.io/*/config.json")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // it has just ended
		}
		var c struct {
			Annotations map[string]string `json:"annotations"`
			Linux       struct {
				Namespaces []struct{ Type, Path string } `json:"namespaces"`
			} `json:"linux"`
		}
		if err == nil {
			err = json.Unmarshal(b, &c)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		const is = "io.kubernetes.cri."
		if c.Annotations[is+"container-type"] != "sandbox" {
			continue
		}
		for _, ns := range c.Linux.Namespaces {
			if ns.Type == "network" && strings.Contains(ns.Path, "/netns/") {
				out = append(out, lab.Pod{Node: node, Name: c.Annotations[is+"sandbox-name"],
					Namespace: c.Annotations[is+"sandbox-namespace"], ContainerID: filepath.Base(filepath.Dir(file)),
					NetNS: root + "/run/netns/" + filepath.Base(ns.Path)})
			}
		}
	}
	return out, nil
}

// addressesAgree waits until the accounts of addresses agree, with the cluster's pods among them.
func (f fleet) addressesAgree(within time.Duration) {
	f.Helper()
	f.await(within, "accounts of addresses agree", func() error {
		var all []lab.Pod
		for node := range f.Workers {
			more, err := f.sandboxes(node)
			if err != nil {
				return err
			}
			all = append(all, more...)
		}
		return f.Lab.AddressesAgree(f.Context(), 0, all...)
	})
}

const askPatience = 2 * time.Second

// dialer connects from a network namespace.
func dialer(ns string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, at string) (c net.Conn, err error) {
		err = fabric.In(ns, func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, at)
			return err
		})
		return c, err
	}
}

// get asks a web server from a network namespace, for a path with its leading slash.
func get(ctx context.Context, ns string, at netip.Addr, port int, path string) (string, error) {
	return getWithin(ctx, askPatience, ns, at, port, path)
}

func getWithin(ctx context.Context, d time.Duration, ns string, at netip.Addr, port int, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	c := http.Client{Transport: &http.Transport{DialContext: dialer(ns), DisableKeepAlives: true}}
	to := "http://" + net.JoinHostPort(at.String(), strconv.Itoa(port)) + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, to, nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %s", to, resp.StatusCode, b)
	}
	return string(b), err
}

// echo sends a datagram that asks for the server's name, from a network namespace.
func echo(ctx context.Context, ns string, at netip.Addr, port int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askPatience)
	defer cancel()
	c, err := dialer(ns)(ctx, "udp", net.JoinHostPort(at.String(), strconv.Itoa(port)))
	if err != nil {
		return "", err
	}
	defer c.Close()
	end, _ := ctx.Deadline()
	if err := c.SetDeadline(end); err != nil {
		return "", err
	}
	if _, err := c.Write([]byte("hostname\n")); err != nil {
		return "", err
	}
	b := make([]byte, 256)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// answersOf asks until each of the names has answered.
func (f fleet) answersOf(what string, names []string, ask func(context.Context) (string, error)) {
	f.Helper()
	seen := map[string]bool{}
	f.await(20*time.Second, what, func() error {
		for range 4 * len(names) {
			name, err := ask(f.Context())
			if err != nil {
				return err
			}
			if !slices.Contains(names, name) {
				f.Fatalf("%s: %q has answered, want one of %v", what, name, names)
			}
			if seen[name] = true; len(seen) == len(names) {
				return nil
			}
		}
		return fmt.Errorf("only %v have answered", seen)
	})
}

// clientOf reads which client a server has seen: agnhost's answer, or that of a lab's server.
func clientOf(answer string) (netip.Addr, error) {
	var seen lab.Seen
	if json.Unmarshal([]byte(answer), &seen) == nil {
		return seen.Address, nil
	}
	at, err := netip.ParseAddrPort(answer)
	return at.Addr().Unmap(), err
}
