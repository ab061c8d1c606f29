package cni

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWhoseConfigurationItIs(t *testing.T) {
	for what, c := range map[string]struct {
		socket, conf string
		ours         bool
	}{
		"ours":             {DefaultSocket, `{"plugins":[{"type":"skein-cni"},{"type":"portmap"}]}`, true},
		"ours, by a path":  {"/run/x.sock", `{"plugins":[{"type":"skein-cni","socket":"/run/x.sock"}]}`, true},
		"another agent's":  {DefaultSocket, `{"plugins":[{"type":"skein-cni","socket":"/run/x.sock"}]}`, false},
		"the default's":    {"/run/x.sock", `{"plugins":[{"type":"skein-cni"}]}`, false},
		"another plugin's": {DefaultSocket, `{"plugins":[{"type":"bridge"},{"type":"skein-cni"}]}`, false},
		"empty":            {DefaultSocket, `{"plugins":[]}`, false},
		"no JSON":          {DefaultSocket, `plugins: [skein-cni]`, false},
	} {
		if ours := (Install{Socket: c.socket}).Ours([]byte(c.conf)); ours != c.ours {
			t.Errorf("%s: %v", what, ours)
		}
	}
}

// An agent replaces what it wrote before, and leaves alone what is another's.
func TestAnAgentKeepsItsOwnConfiguration(t *testing.T) {
	in := install(t)
	in.File, in.Own = "20-mesh.conflist", true
	path := filepath.Join(in.ConfDir, in.File)
	if in.Stands("") {
		t.Error("it stands before it was written")
	}
	script(t, filepath.Join(in.BinDir, "portmap"), `echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}'`)
	script(t, filepath.Join(in.BinDir, "bandwidth"), "exit 1")
	names, warnings := Found(t.Context(), in.BinDir)
	if !slices.Equal(names, []string{"portmap"}) || len(warnings) != 1 || !strings.Contains(warnings[0], "bandwidth") {
		t.Errorf("found %v, %v", names, warnings)
	}
	in.Chain = names
	for _, before := range []string{"", `{"plugins":[{"type":"skein-cni"}]}`} {
		if before != "" {
			if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r, err := in.Run(t.Context())
		if err != nil || !in.Stands(r.Conf) || in.Stands(r.Conf+" ") {
			t.Fatalf("over %q: %+v, %v", before, r, err)
		}
		if b, err := os.ReadFile(path); err != nil || !strings.Contains(string(b), "portmap") || string(b) != r.Conf {
			t.Errorf("over %q: %s, %v", before, b, err)
		}
	}
	if err := os.Remove(filepath.Join(in.BinDir, Type)); err != nil {
		t.Fatal(err)
	}
	if r, err := in.Run(t.Context()); err != nil || written(r) != 1 {
		t.Errorf("a plugin that was removed: %+v, %v", r, err)
	}
	if removed, err := in.Remove(); err != nil || !removed {
		t.Errorf("%v, %v", removed, err)
	}
	if removed, err := in.Remove(); err != nil || removed {
		t.Errorf("a second time: %v, %v", removed, err)
	}
	other := `{"plugins":[{"type":"bridge"}]}`
	if err := os.WriteFile(path, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	if removed, err := in.Remove(); err != nil || removed {
		t.Errorf("another's configuration: %v, %v", removed, err)
	}
	if _, err := in.Run(t.Context()); err == nil {
		t.Error("another's configuration was replaced")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != other {
		t.Errorf("%s, %v", b, err)
	}
}
