package kube

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/testenv"
)

// readyLab has agents that configure the container runtime by themselves, and Nodes whose annotations say their sites.
var readyLab = strings.ReplaceAll(fleetLab, "config: {kubernetes:",
	`config: {site: "", cni: {confDir: /etc/cni/net.d}, kubernetes:`)

// TestReady: real kubelets and containerd, which get their network when the agents say so.
func TestReady(t *testing.T) {
	testenv.NeedRoot(t)
	f := raiseFleet(t, FleetConfig{Name: "r", Lab: readyLab, OwnCNI: true})
	for _, one := range []struct {
		name string
		run  func(fleet)
	}{
		{"NodesBecomeReady", fleet.nodesBecomeReady},
		{"PodsReachHostsByName", fleet.podsReachHostsByName},
		{"NodesInTwoSites", fleet.nodesInTwoSites}, // the last, since it changes whom hosts reach how
	} {
		t.Run(one.name, func(t *testing.T) {
			f := f
			f.T = t
			one.run(f)
		})
	}
}

// nodesBecomeReady: kubelets registered their Nodes with the taint, and the agents took it off; the configuration
// chains the reference plugins that came after the agents' start.
func (f fleet) nodesBecomeReady() {
	for _, n := range f.Config.Nodes {
		f.await(30*time.Second, "Node "+n+" is free of the taint", func() error {
			if out := f.kubectl(nil, "get", "node", n, "-o", "jsonpath={.spec.taints[*].key}"); strings.Contains(out, taint) {
				return fmt.Errorf("%s", out)
			}
			return nil
		})
		f.await(30*time.Second, "the configuration of "+n, func() error {
			out, exit, err := f.Lab.Exec(f.Context(), n, "cat", "/etc/cni/net.d/10-skein.conflist")
			var conf struct{ Plugins []struct{ Type string } }
			if err == nil && exit == 0 {
				err = json.Unmarshal([]byte(out), &conf)
			}
			if err != nil || len(conf.Plugins) != 3 || conf.Plugins[0].Type != "skein-cni" {
				return fmt.Errorf("%d, %w: %s", exit, err, out)
			}
			return nil
		})
	}
}

// podsReachHostsByName: the cluster's DNS knows a host that is not a Node, in both families, and a pod reaches it.
func (f fleet) podsReachHostsByName() {
	const name = "vm1.skein-system.svc.cluster.local"
	f.runPod("asks", "home1")
	vm, err := f.Lab.Node("vm1")
	if err != nil {
		f.Fatal(err)
	}
	for _, a := range vm.Overlay {
		f.await(60*time.Second, "the DNS knows "+a, func() error {
			out, err := f.Cluster.Kubectl(f.Context(), nil, "exec", "asks", "--", "nslookup", name)
			if err != nil || !strings.Contains(out, a) {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	took := f.await(30*time.Second, "a pod reaches vm1 by name", func() error {
		out, err := f.Cluster.Kubectl(f.Context(), nil, "exec", "asks", "--", "ping", "-c", "1", "-W", "2",
			"vm1.skein-system.svc")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	f.Logf("a pod reaches vm1 by name within %s", took.Round(time.Millisecond))
}
