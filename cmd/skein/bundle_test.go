package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/bundle"
	"github.com/skeinmesh/skein/agent/journal"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func (f *fakeAgent) Journal(_ context.Context, r *skeinv1.JournalRequest) (*skeinv1.JournalResponse, error) {
	return answerTo[*skeinv1.JournalResponse](f, r)
}

func (f *fakeAgent) Plan(_ context.Context, r *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	return answerTo[*skeinv1.PlanResponse](f, r)
}

func (f *fakeAgent) ExplainPeer(_ context.Context, r *skeinv1.ExplainPeerRequest) (*skeinv1.ExplainPeerResponse,
	error) {
	return answerTo[*skeinv1.ExplainPeerResponse](f, r)
}

func (f *fakeAgent) Events(_ context.Context, _ *skeinv1.EventsRequest,
	s *connect.ServerStream[skeinv1.EventsResponse]) error {
	for _, e := range f.events {
		if err := s.Send(&skeinv1.EventsResponse{Event: e}); err != nil {
			return err
		}
	}
	return f.err
}

// readBundle has the files of a bundle by name; what is compressed in it is unpacked, too.
func readBundle(t *testing.T, file string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if inner, err := gzip.NewReader(bytes.NewReader(body)); err == nil {
			if body, err = io.ReadAll(inner); err != nil {
				t.Fatal(err)
			}
		}
		out[strings.TrimPrefix(h.Name, "skein-bundle/")] = string(body)
	}
}

// TestBundleHasNoSecret plants secrets wherever a bundle looks, and looks that each place is in the bundle without
// them.
func TestBundleHasNoSecret(t *testing.T) {
	secrets := map[string]string{
		"a password": "Correct-Horse-9", "a word in a comment": "Battery-Staple-7",
		"a token":            "skein1_Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4",
		"a Kubernetes token": "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJza2VpbiJ9.c2lnbmF0dXJl",
	}
	seed, gossip := make([]byte, 32), make([]byte, 32)
	_, _ = rand.Read(seed)
	_, _ = rand.Read(gossip)
	secrets["the preshared seed"], secrets["a gossip key"] = base64.StdEncoding.EncodeToString(seed),
		base64.StdEncoding.EncodeToString(gossip)
	secrets["a gossip key in hex"] = hex.EncodeToString(gossip)

	// The state directory has real keys.
	state := t.TempDir()
	if _, _, err := identity.LoadOrCreate(state); err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(state, "identity.pem"))
	if err != nil {
		t.Fatal(err)
	}
	secrets["the identity key"] = strings.Split(string(key), "\n")[1]

	// The configuration names a kubeconfig, which has a token, and has what it should not.
	dir, err := os.MkdirTemp("", "bundle") // a long name with capitals might be taken for a key
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	kubeconfig := filepath.Join(dir, "kubeconfig")
	metrics, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "skein_x{url=\"https://bob:"+secrets["a password"]+"@example.net\"} 1\n")
	})}
	go func() { _ = server.Serve(metrics) }()
	defer server.Close()
	config := filepath.Join(dir, "skein.yaml")
	for file, text := range map[string]string{
		kubeconfig: "users: [{name: a, user: {token: " + secrets["a Kubernetes token"] + "}}]\n",
		config: "name: home1 # " + secrets["a word in a comment"] + "\nstateDir: " + state + "\nkubernetes: {kubeconfig: " +
			kubeconfig + "}\n" +
			"labels: {db-password: " + secrets["a password"] + "}\nports: {metrics: \"" + metrics.Addr().String() + "\"}\n",
		filepath.Join(dir, "journalctl"): "#!/bin/sh\ncat <<'X'\nline one\njoined with " + secrets["a token"] + "\n" +
			string(key) +
			"psk " + secrets["the preshared seed"] + " gossip " + secrets["a gossip key in hex"] + "\nkube " +
			secrets["a Kubernetes token"] +
			"\nget https://bob:" + secrets["a password"] + "@example.net/\nline last\nX\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("HTTPS_PROXY", "http://bob:"+secrets["a password"]+"@127.0.0.1:1")

	// The agent says what it should not.
	f := newFakeAgent(t)
	f.lay(&skeinv1.StatusRequest{}, &skeinv1.StatusResponse{Name: "home1", Index: 3, Problems: []*skeinv1.Problem{
		{Subject: "kubernetes", Message: "refused Bearer " + secrets["a Kubernetes token"], Severity: "warning"}}})
	f.lay(&skeinv1.PeersRequest{}, &skeinv1.PeersResponse{Peers: []*skeinv1.PeerView{{NodeId: "b33ad742981917ca",
		Name: "dc1",
		Path: "none", Reason: "token " + secrets["a token"]}}})
	f.lay(&skeinv1.ExplainPeerRequest{}, &skeinv1.ExplainPeerResponse{Decided: "psk=" + secrets["a password"]})
	f.lay(&skeinv1.PlanRequest{}, &skeinv1.PlanResponse{Text: "preshared-key " + secrets["the preshared seed"],
		Changes: []string{string(key)}})
	f.lay(&skeinv1.JournalRequest{}, &skeinv1.JournalResponse{Entries: []*skeinv1.JournalEntry{{
		Body: &skeinv1.JournalEntry_Reconciled{Reconciled: &skeinv1.Reconciled{
			Error: "login with password=" + secrets["a password"]}}}}})
	f.lay(&skeinv1.ProfileRequest{}, &skeinv1.ProfileResponse{Node: "home1", Data: []byte("a profile")})
	f.events = []*skeinv1.Event{{Index: 1,
		Body: &skeinv1.Event_GossipKeyRotated{GossipKeyRotated: &skeinv1.GossipKeyRotated{
			Keys: &skeinv1.GossipKeys{Primary: gossip, Accepted: [][]byte{seed}}}}}}

	file := filepath.Join(t.TempDir(), "b.tar.gz")
	out, _, err := f.skein(t, "--config", config, "--state-dir", state, "debug", "bundle", "-o", file)
	if err != nil || !strings.Contains(out, file) {
		t.Fatalf("%v: %s", err, out)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	files := readBundle(t, file)
	for name, text := range files {
		for what, secret := range secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%s is in %s:\n%s", what, name, text)
			}
		}
	}
	for name, want := range map[string]string{
		"skein.yaml": "kubeconfig: " + kubeconfig, "log.txt": "line last", "journal.jsonl": "login with",
		"agent/status.json": "kubernetes",
		"agent/peers.json":  "dc1", "agent/explain.jsonl": `"decided":`, "agent/plan.txt": "preshared-key",
		"agent/events.jsonl": "gossipKeyRotated",
		"agent/metrics.txt":  "skein_x", "agent/heap.pprof": "a profile", "agent/goroutine.pprof": "a profile",
		"doctor.txt":  "configuration",
		"kernel.json": "Sysctl", "state-directory.txt": "identity.pem", "version.txt": "command",
		bundle.IndexName: "bundle of home1",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s has no %q:\n%.500s", name, want, files[name])
		}
	}
	for _, name := range []string{"skein.yaml", "log.txt", "journal.jsonl", "agent/status.json", "agent/peers.json",
		"agent/explain.jsonl",
		"agent/plan.txt", "agent/events.jsonl", "agent/metrics.txt"} {
		if !strings.Contains(files[name], "[redacted") {
			t.Errorf("nothing was redacted in %s, where a secret was planted", name)
		}
	}
	if !strings.Contains(files[bundle.IndexName], "netcheck") {
		t.Errorf("the index does not tell of a part that failed:\n%s", files[bundle.IndexName])
	}
}

// TestBundleWithoutAnAgent has what is left, tells why the rest is not there, and replaces an older bundle as a whole.
func TestBundleWithoutAnAgent(t *testing.T) {
	f := newFakeAgent(t)
	f.err = connect.NewError(connect.CodeUnavailable, errors.New("the agent ends"))
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	if err := os.WriteFile(file, []byte("older"), 0o644); err != nil {
		t.Fatal(err)
	}
	state := t.TempDir()
	j, err := journal.Open(filepath.Join(state, "journal.db"), 100)
	if err != nil {
		t.Fatal(err)
	}
	j.Append(&skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_Reconciled{Reconciled: &skeinv1.Reconciled{Error: "late"}}})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	_, _, err = f.skein(t, "--state-dir", state, "debug", "bundle", "--config", doctorConfig(t, ""), "-o", file)
	if err != nil {
		t.Fatal(err)
	}
	files := readBundle(t, file)
	for _, name := range []string{"doctor.txt", "kernel.json", "skein.yaml", "state-directory.txt", "version.txt"} {
		if files[name] == "" {
			t.Errorf("%s is not there", name)
		}
	}
	if !strings.Contains(files["journal.jsonl"], `"late"`) {
		t.Errorf("the journal is not read from its file: %q", files["journal.jsonl"])
	}
	index := files[bundle.IndexName]
	if !strings.Contains(index, "agent/plan.txt") || !strings.Contains(index, "the agent ends") {
		t.Errorf("the index does not tell why the agent's parts are not there:\n%s", index)
	}
	if n := len(f.asked); n > 2 {
		t.Errorf("an agent that does not answer was asked %d times", n)
	}
	info, err := os.Stat(file)
	all, _ := os.ReadDir(filepath.Dir(file))
	if err != nil || info.Mode().Perm() != 0o600 || len(all) != 1 {
		t.Errorf("mode %v, %d files, %v", info.Mode(), len(all), err)
	}
	if _, _, err := f.skein(t, "debug", "bundle", "-o", filepath.Join(t.TempDir(), "none", "b")); err == nil ||
		!strings.Contains(err.Error(), "-o FILE") {
		t.Errorf("into a directory that is not there: %v", err)
	}
}

// TestVariables: an agent's environment may hold anybody's secrets.
func TestVariables(t *testing.T) {
	b, err := variables(
		"PATH=/bin\x00SKEIN_NODE=home1\x00GOGC=50\x00AWS_SECRET_ACCESS_KEY=x\x00SKEIN_TOKEN=skein1_abc\x00")
	if err != nil || string(b) != "GOGC=50\nSKEIN_NODE=home1\nSKEIN_TOKEN=skein1_abc\n" {
		t.Errorf("%q, %v", b, err)
	}
	if text, _ := bundle.Scrub(string(b)); strings.Contains(text, "skein1_abc") {
		t.Errorf("%q", text)
	}
	if _, err := variables("PATH=/bin\x00"); !errors.Is(err, bundle.ErrAbsent) {
		t.Errorf("%v", err)
	}
}

func TestTroubled(t *testing.T) {
	got := troubled([]*skeinv1.PeerView{{Name: "good", Path: "direct", Alive: true}, {Name: "relayed", Path: "relay",
		Alive: true},
		{Name: "silent", Path: "direct"}, {Name: "lost", Path: "none"}})
	if strings.Join(got, " ") != "lost silent relayed" {
		t.Errorf("%q", got)
	}
}
