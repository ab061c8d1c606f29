package containers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/testenv"
)

const file = `name: containers
sites:
  dc:    {nat: none}
  home:  {nat: port-restricted-cone}
  cloud: {nat: symmetric}
nodes:
  dc1:    {site: dc, server: true, relay: true}
  home1:  {site: home}
  cloud1: {site: cloud}
config:
  emptyBlockSeconds: 2
pools:
  default: {subnets: [{ipv4: 10.100.0.0/24, ipv6: 'fd00:100::/120'}], blockSizeBits: 3}
`

// TestContainers: two containers on each of three nodes behind different NATs get their addresses from the plugin, know
// their own, reach each other in both families, and leave nothing behind when they end.
func TestContainers(t *testing.T) {
	testenv.NeedRoot(t)
	for _, program := range []string{"containerd", "ctr", "runc", "busybox", "unshare"} {
		if _, err := exec.LookPath(program); err != nil {
			testenv.Missing(t, "needs "+program+": run `make test-containers`, which fetches it")
		}
	}
	l, dir := up(t)
	var all []*container
	for _, node := range l.Spec.NodeNames() {
		r := start(t, l, node, dir)
		all = append(all, r.run(t, "c1"), r.run(t, "c2"))
	}
	addrs := map[*container][]netip.Addr{}
	var pods []lab.Pod
	for _, c := range all {
		addrs[c] = known(t, l, c)
		pods = append(pods, lab.Pod{Node: c.on.node, Name: c.id, ContainerID: c.fullID(),
			NetNS: fmt.Sprintf("/proc/%d/ns/net", c.pid)})
	}
	if err := l.AddressesAgree(t.Context(), 20*time.Second, pods...); err != nil {
		t.Fatal(err)
	}
	for _, from := range all {
		for _, to := range all {
			for _, addr := range addrs[to] {
				if from != to {
					talk(t, from, to, addr)
				}
			}
		}
	}
	for _, c := range all {
		c.end(t)
	}
	if err := l.AddressesAgree(t.Context(), 20*time.Second); err != nil {
		t.Error(err)
	}
}

// up brings the lab up, and the binary with it.
func up(t *testing.T) (l *lab.Lab, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "skc") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "skein")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	spec, err := lab.Parse("containers.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("c%d", os.Getpid())
	artifacts := os.Getenv("SKEIN_ARTIFACTS")
	l, err = lab.Up(t.Context(), spec, lab.Options{Dir: filepath.Join(dir, "lab"), Binary: binary,
		Progress: func(s string) {
			t.Log(s)
		}, Artifacts: artifacts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && artifacts != "" {
			if kept, err := l.SaveArtifacts(context.Background(), artifacts); err == nil {
				t.Log("logs and states are in", kept)
			}
		}
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := l.WaitConverged(t.Context(), 30*time.Second); err != nil {
		t.Fatal(err)
	}
	return l, dir
}

// fullID is the container's ID as the plugin hears it: ctr puts containerd's namespace before it.
func (c *container) fullID() string { return "default-" + c.id }

// known asks the agent for a container's addresses, and the container whether it has them.
func known(t *testing.T, l *lab.Lab, c *container) []netip.Addr {
	t.Helper()
	client, err := l.Client(c.on.node)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Pods(t.Context(), &skeinv1.PodsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range resp.GetPods() {
		if h := p.GetHolder(); h.GetContainerId() == c.fullID() && h.GetUntil() == 0 {
			has, err := c.exec(t.Context(), "ip", "addr", "show", "eth0")
			if err != nil || !strings.Contains(has, "inet "+h.GetIpv4()+"/32 ") ||
				!strings.Contains(has, "inet6 "+h.GetIpv6()+"/128 ") {
				t.Errorf("%s/%s does not have %s and %s, as its agent says: %v\n%s", c.on.node, c.id, h.GetIpv4(),
					h.GetIpv6(), err, has)
			}
			return []netip.Addr{netip.MustParseAddr(h.GetIpv4()), netip.MustParseAddr(h.GetIpv6())}
		}
	}
	t.Fatalf("%s's agent does not know %s among %v", c.on.node, c.fullID(), resp.GetPods())
	return nil
}

// talk pings, and fetches a page.
func talk(t *testing.T, from, to *container, addr netip.Addr) {
	t.Helper()
	within(t, 15*time.Second, fmt.Sprintf("%s/%s reaches %s/%s at %s", from.on.node, from.id, to.on.node, to.id,
		addr), func() error {
		if _, err := from.exec(t.Context(), "ping", "-c", "1", "-W", "2", addr.String()); err != nil {
			return err
		}
		page, err := from.exec(t.Context(), "wget", "-q", "-O", "-", "http://"+net.JoinHostPort(addr.String(), "80")+"/")
		if want := to.on.node + "/" + to.id + "\n"; err == nil && page != want {
			err = errors.New("another one answers: " + page)
		}
		return err
	})
}
