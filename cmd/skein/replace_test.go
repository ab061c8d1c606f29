package main

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// apiserver is one with the pods that a test has laid out. A pod that is evicted has ended at once, and another one of
// its controller is ready.
type apiserver struct {
	*testing.T
	sync.Mutex
	url     string
	pods    []map[string]any
	events  []map[string]any // since version 0
	changed chan struct{}    // closed, and made anew, with each event
	evicted []string
}

func newAPIServer(t *testing.T, pods ...map[string]any) *apiserver {
	a := &apiserver{T: t, pods: pods, changed: make(chan struct{})}
	s := httptest.NewServer(a)
	t.Cleanup(s.Close)
	a.url = s.URL
	return a
}

// kubePod is a pod with an address; without a controller its name of one is empty.
func kubePod(name, address, controller string) map[string]any {
	meta := map[string]any{"namespace": "web", "name": name, "uid": "uid-" + name, "resourceVersion": "5"}
	if controller != "" {
		meta["ownerReferences"] = []any{
			map[string]any{"kind": "ReplicaSet", "name": controller, "uid": controller, "controller": true}}
	}
	return map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": map[string]any{"nodeName": "node1"},
		"status": map[string]any{"phase": "Running", "podIPs": []any{map[string]any{"ip": address}},
			"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}}
}

func nameOf(p map[string]any) string { return p["metadata"].(map[string]any)["name"].(string) }

func (a *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	write := func(v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			a.Error(err)
		}
	}
	switch {
	case r.Method == http.MethodPost:
		a.Lock()
		defer a.Unlock()
		name := strings.Split(r.URL.Path, "/")[6]
		i := slices.IndexFunc(a.pods, func(p map[string]any) bool { return nameOf(p) == name })
		old, next := a.pods[i], kubePod(name+"-next", "10.65.0.1", "rs")
		a.pods[i], a.evicted = next, append(a.evicted, name)
		a.events = append(a.events, map[string]any{"type": "DELETED", "object": old},
			map[string]any{"type": "ADDED", "object": next})
		close(a.changed)
		a.changed = make(chan struct{})
		w.WriteHeader(http.StatusCreated)
		write(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success"})
	case r.URL.Query().Get("watch") != "":
		from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
		if err != nil {
			a.Error(err)
		}
		w.(http.Flusher).Flush()
		for {
			a.Lock()
			events, changed := a.events[from:], a.changed
			a.Unlock()
			for _, e := range events {
				write(e)
			}
			w.(http.Flusher).Flush()
			from += len(events)
			select {
			case <-changed:
			case <-r.Context().Done():
				return
			}
		}
	default:
		a.Lock()
		defer a.Unlock()
		write(map[string]any{"apiVersion": "v1", "kind": "PodList", "items": a.pods,
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(len(a.events))}})
	}
}

// kubeconfig is a file that leads to the apiserver.
func (a *apiserver) kubeconfig() string {
	file := filepath.Join(a.TempDir(), "kubeconfig")
	b, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": a.url}}},
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x"}}}})
	if err = errors.Join(err, os.WriteFile(file, b, 0o600)); err != nil {
		a.Fatal(err)
	}
	return file
}

// coilsBlocks lays out one block as Coil had it, one for a node that is to come, one of a user and one of an egress.
func (f *fakeAgent) coilsBlocks() *skeinv1.Block {
	block := func(number uint64, prefix, reason string) *skeinv1.BlockView {
		return &skeinv1.BlockView{Block: &skeinv1.Block{Pool: "default", Number: number, Ipv4: prefix, Reason: reason,
			Index: 40 + number}}
	}
	old := block(1, "10.64.0.32/27", "as Coil did")
	f.lay(&skeinv1.BlocksRequest{}, &skeinv1.BlocksResponse{Blocks: []*skeinv1.BlockView{
		old, block(2, "10.64.0.64/27", "for node node9 (imported)"), block(3, "10.64.0.96/27", "as Coil did it, by hand"),
		block(4, "10.64.0.128/27", "egress internet/nat"),
	}})
	f.lay(&skeinv1.StaticsRequest{}, &skeinv1.StaticsResponse{})
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{})
	f.lay(&skeinv1.ReleaseBlockRequest{}, &skeinv1.BlockResponse{Block: old.GetBlock(), Index: 50})
	return old.GetBlock()
}

// released are the requests to release a block.
func (f *fakeAgent) released() (out []*skeinv1.ReleaseBlockRequest) {
	for _, r := range f.asked {
		if r, ok := r.(*skeinv1.ReleaseBlockRequest); ok {
			out = append(out, r)
		}
	}
	return out
}

func TestReplace(t *testing.T) {
	f := newFakeAgent(t)
	f.coilsBlocks()
	a := newAPIServer(t, kubePod("b", "10.64.0.34", "rs"), kubePod("a", "10.64.0.33", "rs"),
		kubePod("of-node9", "10.64.0.65", "rs"), kubePod("by-hand", "10.64.0.97", ""), kubePod("new", "10.65.0.9", ""))
	t.Setenv("KUBECONFIG", a.kubeconfig())
	command := []string{"import", "coil", "--replace", "--timeout", "20s"}
	f.showsGolden(t, "import-replace-dry", append(command, "--dry-run"))
	if len(a.evicted)+len(f.released()) > 0 {
		t.Fatalf("a dry run evicts %v and releases %v", a.evicted, f.released())
	}
	f.showsGolden(t, "import-replace", command)
	if want := []string{"a", "b"}; !slices.Equal(a.evicted, want) {
		t.Errorf("evicted %v, want %v", a.evicted, want)
	}
	want := &skeinv1.ReleaseBlockRequest{Pool: "default", Prefix: "10.64.0.32/27"}
	if got := f.released(); len(got) != 1 || !proto.Equal(got[0], want) {
		t.Errorf("released %v, want %v", got, want)
	}
	f.lay(&skeinv1.BlocksRequest{}, &skeinv1.BlocksResponse{})
	f.showsGolden(t, "import-replace-again", command, append(command, "-o", "json"))
}

func TestReplaceAsJSON(t *testing.T) {
	f := newFakeAgent(t)
	f.coilsBlocks()
	a := newAPIServer(t, kubePod("a", "10.64.0.33", "rs"))
	t.Setenv("KUBECONFIG", a.kubeconfig())
	f.showsGolden(t, "import-replace-json", []string{"import", "coil", "--replace", "-o", "json"})
}

func TestReplaceIsRefused(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	f := newFakeAgent(t)
	old := f.coilsBlocks()
	a := newAPIServer(t, kubePod("a", "10.64.0.33", "rs"), kubePod("tool", "10.64.0.34", ""))
	fails := func(want string, args ...string) {
		t.Helper()
		_, _, err := f.skein(t, append([]string{"import", "coil", "--replace", "--config", "nowhere.yaml"}, args...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
	fails("nowhere.yaml")
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.WriteFile(bad, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	fails("(by --kubeconfig): ", "--kubeconfig", bad)
	file := a.kubeconfig()
	fails("without a controller, so that they would not come back: pod web/tool (10.64.0.34 on node1)",
		"--kubeconfig", file)
	if len(a.evicted)+len(f.released()) > 0 {
		t.Errorf("it evicts %v and releases %v", a.evicted, f.released())
	}
	// What nobody can release is told before a pod is evicted for it.
	f.lay(&skeinv1.StaticsRequest{}, &skeinv1.StaticsResponse{Addresses: []*skeinv1.StaticAddress{
		{Pool: "default", Ipv4: "10.64.0.50", Namespace: "mail", Pod: "postfix-0"}}})
	fails("it holds the static address 10.64.0.50 of mail/postfix-0; take that away", "--kubeconfig", file)
	_, beside, err := f.skein(t, "import", "coil", "--replace", "--kubeconfig", file, "--dry-run")
	if err != nil || !strings.Contains(beside, "note: block 10.64.0.32/27 of pool default stays reserved") {
		t.Errorf("%v\n%s", err, beside)
	}
	f.lay(&skeinv1.StaticsRequest{}, &skeinv1.StaticsResponse{})
	f.lay(&skeinv1.EgressesRequest{},
		&skeinv1.EgressesResponse{Egresses: []*skeinv1.EgressSummary{{Egress: &skeinv1.Egress{
			Namespace: "internet", Name: "nat", Endpoints: []*skeinv1.EgressAddress{{Ipv4: "10.64.0.51"}}}}}})
	fails("it holds the address 10.64.0.51 of egress internet/nat", "--kubeconfig", file)
	if len(a.evicted)+len(f.released()) > 0 {
		t.Errorf("it evicts %v and releases %v", a.evicted, f.released())
	}
	// A block that is not the import's any more by the time its pods are gone stays.
	g := &globals{runDir: f.run, output: "table"}
	b, err := g.coilBlocks(t.Context(), "")
	if err != nil || len(b) != 1 {
		t.Fatal(b, err)
	}
	old.Index, old.Reason = 99, "load balancers"
	err = g.releaseSame(t.Context(), b[0])
	if err == nil || !strings.Contains(err.Error(), "its reservation by event 41 has changed") || len(f.released()) > 0 {
		t.Errorf("%v, released %v", err, f.released())
	}
}

func TestKubeconfigOfReplace(t *testing.T) {
	g := &globals{config: filepath.Join(t.TempDir(), "skein.yaml")}
	fails := func(environment, want string) {
		t.Helper()
		t.Setenv("KUBECONFIG", environment)
		if _, err := g.cluster(""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	fails("", "no kubeconfig is named: give --kubeconfig FILE")
	fails("/a:/b", "KUBECONFIG names several files, /a:/b: give one")
	fails("/no/such", "kubeconfig /no/such (by KUBECONFIG): open /no/such")
	if err := os.WriteFile(g.config, []byte("kubernetes: {kubeconfig: /of/agent, node: n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	fails("/no/such", "/of/agent (by kubernetes.kubeconfig of the configuration)")
}
