package kilo_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/imports/kilo"
)

func read(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("../../cmd/skein/testdata/kilo.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestParse(t *testing.T) {
	r, err := kilo.Parse(read(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Nodes) != 2 || r.Nodes[0].Name != "cloud1" || len(r.Peers) != 1 {
		t.Fatalf("%+v", r)
	}
	edge, cloud := r.Nodes[1], r.Nodes[0]
	if edge.Site != "lab" || !edge.Leader || edge.Endpoint != "edge1.example.com:51820" || edge.Keepalive != 10 ||
		len(edge.Problems) != 0 || len(edge.Left) != 3 {
		t.Errorf("edge1 is %+v", edge)
	}
	if cloud.Site != "eu" || cloud.Leader || cloud.Internal != "10.0.0.7" || cloud.Keepalive != 0 ||
		len(cloud.Problems) != 2 {
		t.Errorf("cloud1 is %+v", cloud)
	}
	if p := r.Peers[0]; p.Endpoint != "laptop.example.com:51820" || p.AllowedIPs[0] != "10.5.0.1/32" {
		t.Errorf("the peer is %+v", p)
	}
	// A Peer's secret goes nowhere.
	all, err := json.Marshal(r)
	if err != nil || strings.Contains(string(all), "c2VjcmV0") {
		t.Errorf("the preshared key is shown: %v, %s", err, all)
	}
}

func TestRefusals(t *testing.T) {
	for text, want := range map[string]string{
		"":                             "there is no Node and no Peer",
		"apiVersion: v1\nkind: List\n": "there is no Node and no Peer",
		"a: [":                         "document 1",
		"kind: Node\n":                 "apiVersion or kind is missing",
		"apiVersion: v1\nkind: Node\n": "Node without a name",
		"apiVersion: kilo.squat.ai/v2\nkind: Peer\nmetadata: {name: a}\n": "Peer a: kilo.squat.ai/v2 is not understood",
		strings.Repeat("[", 1000):                                             "nested",
		strings.Repeat("#", kilo.MaxBytes+1):                                  "more than 16 MiB",
		"apiVersion: v1\nkind: Node\nmetadata: {name: a, annotations: [x]}\n": "document 1",
	} {
		if _, err := kilo.Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %v, want %q", text, err, want)
		}
	}
	// JSON, as kubectl -o json prints it.
	if r, err := kilo.Parse([]byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"a"}}`)); err != nil ||
		len(r.Nodes) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(read(f))
	f.Add([]byte("apiVersion: v1\nkind: List\nitems: [{}]\n---\n- x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := kilo.Parse(b)
		if (r == nil) == (err == nil) {
			t.Errorf("%v and %v", r, err)
		}
	})
}
