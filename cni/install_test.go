package cni

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// script makes an executable file.
func script(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func install(t *testing.T) Install {
	dir := t.TempDir()
	script(t, filepath.Join(dir, "skein"), "echo skein")
	return Install{Program: filepath.Join(dir, "skein"), BinDir: filepath.Join(dir, "bin"),
		ConfDir: filepath.Join(dir, "net.d"), Name: "skein", Socket: DefaultSocket}
}

func written(r *Report) (n int) {
	for _, c := range r.Changes {
		if c.Done {
			n++
		}
	}
	return n
}

func TestInstallTwice(t *testing.T) {
	in := install(t)
	in.DryRun = true
	if r, err := in.Run(t.Context()); err != nil || written(r) != 0 || !strings.Contains(r.Conf, Type) {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := os.Stat(in.BinDir); err == nil {
		t.Error("a dry run has written")
	}
	in.DryRun = false
	if r, err := in.Run(t.Context()); err != nil || written(r) != 2 || len(r.Warnings) > 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	info, err := os.Stat(filepath.Join(in.BinDir, Type))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Fatalf("%v, %v", info, err)
	}
	if r, err := in.Run(t.Context()); err != nil || written(r) != 0 {
		t.Errorf("the second run changed something: %+v, %v", r, err)
	}
	again, err := os.Stat(filepath.Join(in.BinDir, Type))
	if err != nil || !os.SameFile(info, again) || !again.ModTime().Equal(info.ModTime()) {
		t.Errorf("the plugin was written again")
	}
	script(t, in.Program, "echo a newer skein")
	if r, err := in.Run(t.Context()); err != nil || written(r) != 1 {
		t.Errorf("a newer program: %+v, %v", r, err)
	}
	// What a runtime reads of it.
	list, err := libcni.LoadNetworkConf(in.ConfDir, "skein")
	if err != nil || list.CNIVersion != "1.1.0" || list.Plugins[0].Network.Type != Type ||
		!list.Plugins[0].Network.Capabilities["ips"] || !list.Plugins[0].Network.Capabilities[PodAnnotations] {
		t.Errorf("%+v, %v", list, err)
	}
}

func TestInstallRefuses(t *testing.T) {
	in := install(t)
	script(t, filepath.Join(in.ConfDir, confFile), "{}")
	if _, err := in.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "--force") {
		t.Errorf("another configuration was replaced: %v", err)
	}
	if _, err := os.Stat(filepath.Join(in.BinDir, Type)); err == nil {
		t.Error("half of it was installed")
	}
	in.Force = true
	script(t, filepath.Join(in.ConfDir, "00-first.conf"), "{}")
	script(t, filepath.Join(in.ConfDir, "00-first.txt"), "{}")
	r, err := in.Run(t.Context())
	if err != nil || written(r) != 2 || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "00-first.conf") {
		t.Errorf("%+v, %v", r, err)
	}
	for _, bad := range []Install{{Name: "a b", Socket: "/s"}, {Name: "", Socket: "/s"}, {Name: "n", Socket: "s"},
		{Name: "n", Socket: "/s", Chain: []string{"../x"}}, {Name: "n", Socket: "/s", Chain: []string{Type}}} {
		bad.Program, bad.BinDir, bad.ConfDir = in.Program, in.BinDir, t.TempDir()
		if _, err := bad.Run(t.Context()); err == nil {
			t.Errorf("accepted: %+v", bad)
		}
	}
}

// The versions are those that all plugins of the chain speak.
func TestInstallChain(t *testing.T) {
	in := install(t)
	in.Chain = []string{"portmap", "bandwidth"}
	if _, err := in.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "--chain portmap") {
		t.Errorf("a plugin that is not there was chained: %v", err)
	}
	script(t, filepath.Join(in.BinDir, "portmap"),
		`echo '{"cniVersion":"1.0.0","supportedVersions":["0.1.0","0.3.1","0.4.0","1.0.0"]}'`)
	script(t, filepath.Join(in.BinDir, "bandwidth"),
		`echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}'`)
	if _, err := in.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	list, err := libcni.LoadNetworkConf(in.ConfDir, "skein")
	if err != nil || list.CNIVersion != "1.0.0" || len(list.Plugins) != 3 ||
		!list.Plugins[1].Network.Capabilities["portMappings"] {
		t.Errorf("%+v, %v", list, err)
	}
	in.Force, in.Chain = true, []string{"absent"}
	r, err := in.Run(t.Context())
	if err != nil || !slices.ContainsFunc(r.Warnings, func(w string) bool { return strings.Contains(w, "absent") }) {
		t.Errorf("%+v, %v", r, err)
	}
	script(t, filepath.Join(in.BinDir, "old"), `echo '{"cniVersion":"0.2.0","supportedVersions":["0.1.0","0.2.0"]}'`)
	in.Chain = []string{"old"}
	if _, err := in.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "in common") {
		t.Errorf("a chain without a common version: %v", err)
	}
}
