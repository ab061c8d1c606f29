package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/doctor"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// doctorConfig writes a configuration.
func doctorConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "skein.yaml")
	if err := os.WriteFile(file, []byte("name: home1\nstateDir: "+t.TempDir()+"\n"+text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestDoctorFailsByAFailure: the exit status is that of the worst finding, and JSON has all of them.
func TestDoctorFailsByAFailure(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.StatusRequest{}, &skeinv1.StatusResponse{Name: "home1", Problems: []*skeinv1.Problem{
		{Subject: "disk", Message: "it is full", Advice: "make room", Severity: "error"}}})
	f.lay(&skeinv1.PeersRequest{}, &skeinv1.PeersResponse{})
	out, _, err := f.skein(t, "doctor", "--config", doctorConfig(t, ""))
	if !errors.Is(err, errSick) || exitStatus(err, false) != 1 {
		t.Errorf("the agent reports an error, and doctor ends with: %v", err)
	}
	for _, want := range []string{"failure  agent: disk: it is full\n         why: the agent reports it itself\n        " +
		" do:  make room\n", "1 failure"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _, err = f.skein(t, "doctor", "--config", doctorConfig(t, "ports: {relay: 0}"), "-o", "json")
	var r doctor.Report
	if jerr := json.Unmarshal([]byte(out), &r); jerr != nil || !errors.Is(err, errSick) {
		t.Fatalf("%v, %v: %s", jerr, err, out)
	}
	if !slices.ContainsFunc(r.Findings, func(f doctor.Finding) bool {
		return f.Check == "configuration" && f.Verdict == doctor.Failure && strings.Contains(f.Seen, "ports.relay")
	}) {
		t.Errorf("the bad configuration is not found: %s", out)
	}
}

// TestDoctorWithoutAnAgent says what it could not do, and does the rest.
func TestDoctorWithoutAnAgent(t *testing.T) {
	f := newFakeAgent(t)
	f.err = errors.New("it does not answer")
	out, _, _ := f.skein(t, "doctor", "--config", doctorConfig(t, ""))
	for _, want := range []string{"not seen what the agent knows", "state directory", "note     agent: "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}
