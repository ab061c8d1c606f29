// Package deploy_test holds the chart in deploy/chart to its schema, and the manifests in deploy/kubernetes to the
// chart.
package deploy_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/internal/testenv"
)

var update = flag.Bool("update", false, "write deploy/kubernetes and the schema anew")

const chart = "chart/skein"

// manifests are the files in deploy/kubernetes, and the chart's templates that each is made of.
var manifests = map[string][]string{
	"crds.yaml":      {"crds.yaml"},
	"agent.yaml":     {"namespace.yaml", "agent.yaml"},
	"admin.yaml":     {"admin.yaml"},
	"daemonset.yaml": {"join.yaml", "daemonset.yaml"},
}

// helm runs Helm with the chart as its last argument.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program, err := filepath.Abs("../.cache/helm/helm")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(program); err != nil {
		testenv.Missing(t, "Helm is missing: run .ci/helm-tools, which builds it: "+err.Error())
	}
	var out, errs bytes.Buffer
	c := exec.Command(program, append(args, chart)...)
	c.Stdout, c.Stderr = &out, &errs
	c.Env = append(os.Environ(), "HELM_CACHE_HOME="+t.TempDir(), "HELM_CONFIG_HOME="+t.TempDir(),
		"HELM_DATA_HOME="+t.TempDir())
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("helm %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

func template(t *testing.T, args ...string) (string, error) {
	return helm(t, append([]string{"template", "skein", "--namespace", "skein-system", "--kube-version", "1.37.2"},
		args...)...)
}

func mustTemplate(t *testing.T, args ...string) string {
	t.Helper()
	out, err := template(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var (
	sourceRE = regexp.MustCompile(`(?m)^# Source: .*\n`)
	blankRE  = regexp.MustCompile(`\s*\n---\s*\n`)
)

// rendered is one file of deploy/kubernetes as the chart has it now.
func rendered(t *testing.T, file string) string {
	var docs []string
	for _, name := range manifests[file] {
		out := mustTemplate(t, "--set", "createNamespace=true", "--show-only", "templates/"+name)
		out = blankRE.ReplaceAllString(sourceRE.ReplaceAllString(out, ""), "\n---\n")
		docs = append(docs, strings.TrimSpace(strings.TrimPrefix(out, "---")))
	}
	return "# Made from deploy/chart/skein by `make manifests`; change it there.\n" + strings.Join(docs, "\n---\n") + "\n"
}

// TestManifests: what is in deploy/kubernetes is what the chart says.
func TestManifests(t *testing.T) {
	for file := range manifests {
		want := rendered(t, file)
		path := filepath.Join("kubernetes", file)
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		have, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(have) != want {
			t.Errorf("deploy/%s is not what the chart makes: %s; run `make manifests`", path,
				firstDifference(string(have), want))
		}
	}
	files, err := filepath.Glob("kubernetes/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if manifests[filepath.Base(f)] == nil {
			t.Errorf("deploy/%s is not made from the chart", f)
		}
	}
}

func firstDifference(have, want string) string {
	a, b := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("line %d is %q, want %q", i+1, a[i], b[i])
		}
	}
	return fmt.Sprintf("it has %d lines, want %d", len(a), len(b))
}

// setByChart are the keys of the configuration that the chart sets itself, or that it mounts the directories of.
var setByChart = []string{"name", "kubernetes", "cni", "stateDir", "runDir", "server"}

// schemaOf is the JSON schema of a part of the agent's configuration.
func schemaOf(typ reflect.Type, skip ...string) map[string]any {
	switch typ.Kind() {
	case reflect.Pointer:
		return schemaOf(typ.Elem())
	case reflect.Struct:
		properties := map[string]any{}
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("yaml"), ",")
			if name != "" && !slices.Contains(skip, name) {
				properties[name] = schemaOf(typ.Field(i).Type)
			}
		}
		return map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	case reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": schemaOf(typ.Elem())}
	case reflect.Slice:
		return map[string]any{"type": "array", "items": schemaOf(typ.Elem())}
	case reflect.Bool:
		return map[string]any{"type": "boolean"}
	case reflect.String:
		return map[string]any{"type": "string"}
	default:
		return map[string]any{"type": "integer", "minimum": 0}
	}
}

// TestSchema: the schema's part about the agent's configuration is what the agent knows.
func TestSchema(t *testing.T) {
	path := filepath.Join(chart, "values.schema.json")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(b, &schema); err != nil {
		t.Fatal(err)
	}
	schema["properties"].(map[string]any)["config"] = schemaOf(reflect.TypeFor[config.Config](), setByChart...)
	want, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(b) != string(want) {
		t.Errorf("deploy/%s: %s; run `make manifests`", path, firstDifference(string(b), string(want)))
	}
	values, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var v map[string]any
	if err := yaml.Unmarshal(values, &v); err != nil {
		t.Fatal(err)
	}
	sameKeys(t, "values", v, schema)
}

// sameKeys holds values.yaml to the schema: each key of one is in the other, and nothing else is allowed.
func sameKeys(t *testing.T, at string, v, schema map[string]any) {
	t.Helper()
	properties, _ := schema["properties"].(map[string]any)
	if schema["additionalProperties"] != false {
		t.Errorf("%s: the schema allows other keys", at)
	}
	for k, value := range v {
		p, ok := properties[k].(map[string]any)
		if !ok {
			t.Errorf("%s.%s is not in the schema", at, k)
			continue
		}
		if m, ok := value.(map[string]any); ok && len(m) > 0 && p["properties"] != nil {
			sameKeys(t, at+"."+k, m, p)
		}
	}
	for k := range properties {
		if _, ok := v[k]; !ok {
			t.Errorf("%s.%s is in the schema and not in values.yaml", at, k)
		}
	}
}

// TestSchemaRefuses: values that cannot be right are refused with the field's path.
func TestSchemaRefuses(t *testing.T) {
	for _, one := range []struct{ set, path string }{
		{"image.repo=x", "/image"},
		{"imge.repository=x", "imge"},
		{"apiserver.port=70000", "/apiserver/port"},
		{"image.digest=abc", "/image/digest"},
		{"cni.binDir=opt/cni", "/cni/binDir"},
		{"cluster.create=perhaps", "/cluster/create"},
		{"servers.label=", "/servers/label"},
		{"config.ports.wireguard=x", "/config/ports/wireguard"},
		{"config.stateDir=/elsewhere", "/config"},
		{"config.natTraversal.portGuess=enabled", "/config/natTraversal"},
		{"updateStrategy.maxUnavailable=many", "/updateStrategy/maxUnavailable"},
		{"tolerations[0].effect=Never", "/tolerations/0/effect"},
	} {
		_, err := template(t, "--set", one.set)
		if err == nil || !strings.Contains(err.Error(), one.path) {
			t.Errorf("%s: %v; want a refusal that names %s", one.set, err, one.path)
		}
	}
}

// TestLint: Helm has nothing to say of the chart.
func TestLint(t *testing.T) {
	if out, err := helm(t, "lint", "--strict"); err != nil {
		t.Fatal(err, out)
	}
}
