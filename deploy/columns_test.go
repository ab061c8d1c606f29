package deploy_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	"github.com/goccy/go-yaml"
)

// TestColumns: what `kubectl get meshnodes` shows of a member at a glance, and what `kubectl scale` changes of an
// egress.
func TestColumns(t *testing.T) {
	b, err := os.ReadFile("kubernetes/crds.yaml")
	if err != nil {
		t.Fatal(err)
	}
	type version struct {
		Columns []struct {
			Name string `yaml:"name"`
			Path string `yaml:"jsonPath"`
		} `yaml:"additionalPrinterColumns"`
		Subresources struct {
			Scale struct {
				Spec   string `yaml:"specReplicasPath"`
				Status string `yaml:"statusReplicasPath"`
			} `yaml:"scale"`
		} `yaml:"subresources"`
	}
	versions := map[string]version{}
	for d := yaml.NewDecoder(bytes.NewReader(b)); ; {
		var crd struct {
			Spec struct {
				Names struct {
					Kind string `yaml:"kind"`
				} `yaml:"names"`
				Versions []version `yaml:"versions"`
			} `yaml:"spec"`
		}
		if err := d.Decode(&crd); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		for _, v := range crd.Spec.Versions {
			versions[crd.Spec.Names.Kind] = v
		}
	}
	shown := map[string]string{}
	for _, c := range versions["MeshNode"].Columns {
		shown[c.Name] = c.Path
	}
	for name, path := range map[string]string{"NAT": ".status.nat", "Mode": ".status.mode", "Site": ".status.site",
		"Endpoint": ".status.endpoint"} {
		if shown[name] != path {
			t.Errorf("MeshNode's column %s is %q, want %q", name, shown[name], path)
		}
	}
	if s := versions["Egress"].Subresources.Scale; s.Spec != ".spec.replicas" || s.Status != ".status.replicas" {
		t.Errorf("Egress is scaled by %+v", s)
	}
}
