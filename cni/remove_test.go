package cni

import (
	"os"
	"path/filepath"
	"testing"
)

func TestUninstall(t *testing.T) {
	for _, one := range []struct {
		name, conf string
		stays      bool
	}{
		{"ours", `{"plugins": [{"type": "skein-cni"}]}`, false},
		{"of another", `{"plugins": [{"type": "bridge"}]}`, true},
	} {
		t.Run(one.name, func(t *testing.T) {
			in := Install{BinDir: t.TempDir(), ConfDir: t.TempDir()}
			conf, plugin := filepath.Join(in.ConfDir, DefaultConfFile), filepath.Join(in.BinDir, Type)
			other := filepath.Join(in.BinDir, "bridge")
			for file, text := range map[string]string{conf: one.conf, plugin: "x", other: "x"} {
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 { // the second finds nothing to do
				if _, err := in.Uninstall(); err != nil {
					t.Fatal(err)
				}
			}
			for file, want := range map[string]bool{conf: one.stays, plugin: false, other: true} {
				if _, err := os.Stat(file); (err == nil) != want {
					t.Errorf("%s: %v, want it there: %v", file, err, want)
				}
			}
		})
	}
}
