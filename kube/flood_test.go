package kube

import (
	"bufio"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	annotationtier "github.com/skeinmesh/skein/gossip/kube"
)

// A thousand changes of Nodes a second, each with a record as long as real ones, are taken in as they come.
func TestAThousandChangesASecond(t *testing.T) {
	const nodes, changes = 100, 5000
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "":
			http.Error(w, "an apiserver that does not know of this", http.StatusBadRequest)
			return
		case q.Get("watch") == "":
			fmt.Fprint(w, `{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[]}`)
			return
		}
		out := bufio.NewWriter(w)
		for i := range changes {
			fmt.Fprintf(out, `{"type":"MODIFIED","object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1",`+
				`"metadata":{"name":"n%d","uid":"u%d","resourceVersion":"%d","labels":{"topology.kubernetes.io/region":"r%d"},`+
				`"annotations":{%q:"%s%d"}}}}`+"\n", i%nodes, i%nodes, i+8, i, annotationtier.Annotation,
				strings.Repeat("A", 1000), i)
		}
		out.Flush()
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(s.Close)
	a, err := newAPIServer(&rest.Config{Host: s.URL, TLSClientConfig: rest.TLSClientConfig{CAData: authority(s)}})
	if err != nil {
		t.Fatal(err)
	}
	store := newMirror(slimNode, func() {})
	began := time.Now()
	h := &health{report: func(string, string, string) {}}
	beside(t, func() { a.watch(t.Context(), nodeResource, "", store, h) })
	last := fmt.Sprintf("r%d", changes-1)
	for {
		next(t, "a change of the Nodes", store.changed)
		if n, known := store.get(fmt.Sprintf("n%d", nodes-1)); known && n.Labels[regionLabel] == last {
			break
		}
	}
	took := time.Since(began)
	t.Logf("%d changes in %s: %.0f a second", changes, took.Round(time.Millisecond), changes/took.Seconds())
	if took > changes*time.Millisecond {
		t.Errorf("%d changes took %s", changes, took)
	}
}
