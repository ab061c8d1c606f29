package kube

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/skeinmesh/skein/agent/part"
)

// silent is an apiserver whose watches say nothing and do not end. It tells of each that is asked for.
func silent(t *testing.T, watched chan<- *http.Request) *httptest.Server {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Get("watch") == "" {
			fmt.Fprint(w, `{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[]}`)
			return
		}
		if r.URL.Query().Get("sendInitialEvents") != "" {
			http.Error(w, "an apiserver that does not know of this", http.StatusBadRequest)
			return
		}
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		select {
		case watched <- r:
		case <-r.Context().Done():
		}
		<-r.Context().Done()
	}))
	t.Cleanup(s.Close)
	return s
}

// authority is the certificate by which a server is known, as PEM.
func authority(s *httptest.Server) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// next is what comes within a deadline.
func next[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: nothing within 20s", what)
		panic("not reached")
	}
}

// beside runs a function that the end of the test's context ends, and waits for that: it must not write into a
// directory that is being removed, nor log for a test that is over.
func beside(t *testing.T, run func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		run()
	}()
	t.Cleanup(func() { <-ended })
}

func TestAWatchThatHangsBeginsAnew(t *testing.T) {
	watched := make(chan *http.Request)
	s := silent(t, watched)
	a, err := newAPIServer(&rest.Config{Host: s.URL, TLSClientConfig: rest.TLSClientConfig{CAData: authority(s)}})
	if err != nil {
		t.Fatal(err)
	}
	a.atMost = 100 * time.Millisecond
	store := newMirror(func(o metav1.Object) namespace { return slimNamespace(o) }, func() {})
	h := &health{report: func(subject, message, _ string) { t.Logf("%s: %s", subject, message) }}
	beside(t, func() { a.watch(t.Context(), namespaceResource, "", store, h) })
	for i := range 3 {
		r := next(t, "a watch", watched)
		if text := r.URL.Query().Get("timeoutSeconds"); text < "100" || text > "150" || len(text) != 3 {
			t.Errorf("watch %d asks to end after %q seconds, want 100 to 150", i, text)
		}
	}
}

// quietHost takes a part's reports.
type quietHost struct {
	part.Host
	reports chan string
}

func (h quietHost) Serves() <-chan struct{} { return nil }
func (h quietHost) FreshBoot() bool         { return false }

func (h quietHost) Report(subject string, _ part.Severity, message, _ string) {
	if message != "" {
		select {
		case h.reports <- subject + ": " + message:
		default:
		}
	}
}

func TestATokenThatIsReplacedIsUsed(t *testing.T) {
	watched := make(chan *http.Request)
	s := silent(t, watched)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	withToken := func(token string) string {
		b, err := json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Config", "current-context": "x",
			"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{
				"server": s.URL, "certificate-authority-data": authority(s)}}},
			"users":    []any{map[string]any{"name": "x", "user": map[string]any{"token": token}}},
			"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x", "user": "x"}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	write(withToken("first"))
	p := New(Config{Kubeconfig: file, Node: "n1", Dir: t.TempDir()})
	p.every = 10 * time.Millisecond
	host := quietHost{reports: make(chan string, 1)}
	if err := p.Open(host, prometheus.NewRegistry()); err != nil {
		t.Fatal(err)
	}
	beside(t, func() { p.Run(t.Context()) })
	comes := func(token string) {
		t.Helper()
		for seen := map[string]bool{}; len(seen) < 3; { // namespaces, nodes, pods
			r := next(t, "a watch with the token "+token, watched)
			_, _ = io.Copy(io.Discard, r.Body)
			if r.Header.Get("Authorization") == "Bearer "+token {
				seen[r.URL.Path] = true
			}
		}
	}
	comes("first")
	write("rubbish: [")
	t.Log(next(t, "a report of the rubbish", host.reports))
	write(withToken("second"))
	comes("second")
}

func TestSomeErrorsSpeakOfAllWrites(t *testing.T) {
	for what, c := range map[string]struct {
		code int
		all  bool
	}{
		"overloaded": {429, true}, "broken": {500, true}, "away": {503, true}, "no right": {403, false},
		"not valid": {422, false}, "gone": {404, false}, "another one": {409, false},
	} {
		if all := refusesAll(statusError(c.code)); all != c.all {
			t.Errorf("%s: %v", what, all)
		}
	}
	if refusesAll(nil) {
		t.Error("a success refuses")
	}
}

// What shows the log has ten seconds from the apiserver's return until it is true: watches begin anew well before.
func TestAnApiserverThatReturnsIsHeardSoon(t *testing.T) {
	for range 100 { // by chance
		for b, i := backoff, 0; i < 20; i++ {
			if wait := b.Step(); wait > 6*time.Second {
				t.Fatalf("try %d is %s after the one before", i+2, wait)
			}
		}
	}
}
