package kube

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/skeinmesh/skein/internal/testenv"
)

// fleet is a real cluster on a mesh, for one test.
type fleet struct {
	*testing.T
	*Fleet
}

// TestFleet: kubelets, containerd, kube-proxy and CoreDNS on nodes behind NATs.
func TestFleet(t *testing.T) {
	testenv.NeedRoot(t)
	f := raiseFleet(t, FleetConfig{})
	for _, one := range []struct {
		name string
		run  func(fleet)
	}{
		{"NodesAreReady", fleet.nodesAreReady},
		{"Webs", fleet.webs},
		{"LogsExecPortForward", fleet.logsExecPortForward},
		{"KubeletMetrics", fleet.kubeletMetrics},
		{"Webhook", fleet.webhook},
		{"AggregatedAPI", fleet.aggregatedAPI},
		{"DualStack", fleet.dualStack},
		{"Services", fleet.services},
		{"Names", fleet.names},
		{"HostPorts", fleet.hostPorts},
		{"Bandwidth", fleet.bandwidth},
		{"PoolsOfPods", fleet.poolsOfPods},
		{"EgressesOfPods", fleet.egressesOfPods},
		{"EgressThatIsNot", fleet.egressThatIsNot},
		{"EgressByLoad", fleet.egressByLoad},
		{"Mixed", fleet.mixed},
		{"EightyPods", fleet.eightyPods},
		{"TablesSideBySide", fleet.tablesSideBySide},
	} {
		t.Run(one.name, func(t *testing.T) {
			f := f
			f.T = t
			one.run(f)
		})
	}
}

// raiseFleet raises a cluster that ends with the test. Its lab is called cfg.Name and this process: give fleets that
// stand at the same time different ones, of one letter.
func raiseFleet(t *testing.T, cfg FleetConfig) fleet {
	dir, err := os.MkdirTemp("", "skf") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg.Dir, cfg.Root, cfg.Binary = dir, "../..", filepath.Join(dir, "skein")
	cfg.Name = fmt.Sprintf("%s%d", cmp.Or(cfg.Name, "f"), os.Getpid())
	cfg.Artifacts = os.Getenv("SKEIN_ARTIFACTS")
	cfg.Progress = func(s string) { t.Log(s) }
	build := exec.Command("go", "build", "-o", cfg.Binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	f, err := RaiseFleet(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.Background()
		if t.Failed() && cfg.Artifacts != "" {
			kept, err := f.SaveArtifacts(ctx)
			t.Log("logs and states are in", kept, err)
		}
		if err := f.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return fleet{t, f}
}

func (f fleet) kubectl(stdin []byte, args ...string) string {
	f.Helper()
	out, err := f.Cluster.Kubectl(f.Context(), stdin, args...)
	if err != nil {
		f.Fatal(err)
	}
	return out
}

func (f fleet) nodesAreReady() {
	f.Log(f.kubectl(nil, "get", "nodes,pods", "-A", "-o", "wide"))
}
