package replace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// object is a pod as the apiserver has it.
func object(name, version string) map[string]any {
	return map[string]any{"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"namespace": "a", "name": name, "uid": "uid-" + name, "resourceVersion": version},
		"status":   map[string]any{"podIPs": []any{map[string]any{"ip": "10.64.0.33"}}}}
}

// behind is the client of an apiserver that a test stands in for.
func behind(t *testing.T, answer http.HandlerFunc) Kubernetes {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	d, err := dynamic.NewForConfig(&rest.Config{Host: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	return Kubernetes{d}
}

func write(t *testing.T, w io.Writer, v any) {
	if err := json.NewEncoder(w).Encode(v); err != nil {
		t.Error(err)
	}
}

func refuse(t *testing.T, w http.ResponseWriter, code int, reason, message string) {
	w.WriteHeader(code)
	write(t, w, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason,
		"message": message})
}

func TestPodsAreReadInPages(t *testing.T) {
	const all = 1201
	requests, expire := 0, true
	k := behind(t, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		requests++
		from, _ := strconv.Atoi(q.Get("continue"))
		if from == 1000 && expire {
			expire = false
			refuse(t, w, http.StatusGone, "Expired", "the continue token has expired")
			return
		}
		limit, _ := strconv.Atoi(q.Get("limit"))
		if limit != pageSize || r.URL.Path != "/api/v1/pods" {
			t.Errorf("%s", r.URL)
		}
		meta, items := map[string]any{"resourceVersion": "77"}, []any{}
		for i := from; i < min(from+limit, all); i++ {
			items = append(items, object(fmt.Sprint(i), "5"))
		}
		if from+limit < all {
			meta["continue"] = fmt.Sprint(from + limit)
		}
		write(t, w, map[string]any{"apiVersion": "v1", "kind": "PodList", "metadata": meta, "items": items})
	})
	have := map[string]int{}
	version, err := k.Pods(t.Context(), func() { clear(have) }, func(p Pod) { have[p.UID]++ })
	if err != nil || version != "77" || len(have) != all || requests != 6 {
		t.Errorf("%d pods of version %s by %d requests: %v", len(have), version, requests, err)
	}
}

func TestWatchGoesOnWhereItWas(t *testing.T) {
	watches := 0
	k := behind(t, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		watches++
		if want := []string{"7", "9", "10"}[watches-1]; q.Get("resourceVersion") != want || q.Get("watch") != "true" {
			t.Errorf("watch %d: %s, want version %s", watches, r.URL, want)
		}
		switch watches {
		case 1:
			write(t, w, map[string]any{"type": "ADDED", "object": object("x", "8")})
			write(t, w, map[string]any{"type": "BOOKMARK", "object": object("", "9")})
		case 2:
			write(t, w, map[string]any{"type": "DELETED", "object": object("x", "10")})
		default:
			write(t, w, map[string]any{"type": "ERROR", "object": map[string]any{"apiVersion": "v1", "kind": "Status",
				"status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}})
		}
	})
	var got []string
	changes := k.Watch(t.Context(), "7")
	for end := time.After(20 * time.Second); ; {
		var c Change
		ok := false
		select {
		case c, ok = <-changes:
		case <-end:
			t.Fatalf("no end within 20s: %q", got)
		}
		if !ok {
			break
		}
		got = append(got, fmt.Sprintf("%s %t %v", c.Pod.Name, c.Gone, c.Err))
	}
	want := []string{" false <nil>", "x false <nil>", " false <nil>", "x true <nil>", " false <nil>",
		" false " + ErrExpired.Error()}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestWatchThatIsForbiddenEnds(t *testing.T) {
	k := behind(t, func(w http.ResponseWriter, _ *http.Request) { refuse(t, w, 403, "Forbidden", "no \x1b[2Jright") })
	var last error
	for c := range k.Watch(t.Context(), "7") {
		last = c.Err
	}
	for _, want := range []string{"watch pods: no [2Jright: ", "create of pods/eviction", "--kubeconfig"} {
		if last == nil || !strings.Contains(last.Error(), want) {
			t.Errorf("%v does not say %q", last, want)
		}
	}
}

func TestEvictionNamesThePodByItsUID(t *testing.T) {
	k := behind(t, func(w http.ResponseWriter, r *http.Request) {
		var e struct {
			APIVersion, Kind string
			DeleteOptions    struct{ Preconditions struct{ UID string } }
		}
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil || e.DeleteOptions.Preconditions.UID != "uid-x" ||
			e.APIVersion != "policy/v1" || e.Kind != "Eviction" || r.Method != http.MethodPost ||
			r.URL.Path != "/api/v1/namespaces/a/pods/x/eviction" {
			t.Errorf("%s %s %+v %v", r.Method, r.URL, e, err)
		}
		w.WriteHeader(http.StatusCreated)
		write(t, w, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success"})
	})
	if err := k.Evict(t.Context(), pod("a/x", "n")); err != nil {
		t.Error(err)
	}
}

func TestEvictionIsRefused(t *testing.T) {
	answer := func(code int, reason, message string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { refuse(t, w, code, reason, message) }
	}
	conflict := func(uid string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				refuse(t, w, 409, "Conflict", "another pod")
				return
			}
			if f := r.URL.Query().Get("fieldSelector"); f != "metadata.name=x" {
				t.Errorf("it asks for %s", f)
			}
			o := object("x", "5")
			o["metadata"].(map[string]any)["uid"] = uid
			write(t, w, map[string]any{"apiVersion": "v1", "kind": "PodList", "metadata": map[string]any{}, "items": []any{o}})
		}
	}
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   error // of this type; nil: one that would meet other pods too
		says   string
	}{
		"a budget":             {answer(429, "TooManyRequests", "a \x1b[31mbudget"), &LaterError{}, "a [31mbudget"},
		"an overloaded one":    {answer(503, "ServiceUnavailable", "busy"), &LaterError{}, "busy"},
		"gone":                 {answer(404, "NotFound", "no such pod"), ErrGone, ""},
		"another of that name": {conflict("other"), ErrGone, ""},
		"two writers":          {conflict("uid-x"), &LaterError{}, "another pod"},
		"too late":             {answer(504, "Timeout", "late"), &UnheardError{}, "create pods/eviction: "},
		"cut off": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
			&UnheardError{}, "reaches the apiserver"},
		"two budgets":    {answer(500, "InternalError", "more than one"), &RefusedError{}, "more than one"},
		"no right":       {answer(403, "Forbidden", "no"), nil, "create pods/eviction: no: the kubeconfig's user"},
		"no credentials": {answer(401, "Unauthorized", "who?"), nil, "credentials are not valid any more"},
	} {
		err := behind(t, c.answer).Evict(t.Context(), pod("a/x", "n"))
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want …%s…", name, err, c.says)
			continue
		}
		switch {
		case c.want == nil:
			if errors.Is(err, ErrGone) || strings.HasPrefix(fmt.Sprintf("%T", err), "*replace.") {
				t.Errorf("%s: it is %T", name, err)
			}
		case reflect.TypeOf(err) != reflect.TypeOf(c.want):
			t.Errorf("%s: it is %T, want %T", name, err, c.want)
		}
	}
}

func TestSlim(t *testing.T) {
	yes := true
	o := &unstructured.Unstructured{Object: object("x", "5")}
	if p, want := slim(o), (Pod{Namespace: "a", Name: "x", UID: "uid-x",
		Addresses: []netip.Addr{netip.MustParseAddr("10.64.0.33")}}); !reflect.DeepEqual(p, want) {
		t.Errorf("%+v", p)
	}
	o.Object["spec"] = map[string]any{"nodeName": "n1", "hostNetwork": true}
	o.Object["status"] = map[string]any{"phase": "Running",
		"podIPs": []any{map[string]any{"ip": "::ffff:10.64.0.33"}, map[string]any{"ip": "x"}, "y",
			map[string]any{"ip": "fd64::21"}},
		"conditions": []any{map[string]any{"type": "PodScheduled", "status": "True"},
			map[string]any{"type": "Ready", "status": "True"}}}
	m := o.Object["metadata"].(map[string]any)
	m["annotations"] = map[string]any{"kubernetes.io/config.mirror": "hash"}
	m["ownerReferences"] = []any{map[string]any{"kind": "Other", "name": "o", "uid": "1"},
		map[string]any{"kind": "ReplicaSet", "name": "rs", "uid": "2", "controller": yes}}
	want := Pod{Namespace: "a", Name: "x", UID: "uid-x", Node: "n1", HostNetwork: true, Static: true, Ready: true,
		Controller: Controller{"ReplicaSet", "rs", "2"},
		Addresses:  []netip.Addr{netip.MustParseAddr("10.64.0.33"), netip.MustParseAddr("fd64::21")}}
	if p := slim(o); !reflect.DeepEqual(p, want) {
		t.Errorf("%+v\nwant %+v", p, want)
	}
	m["deletionTimestamp"] = "2026-01-02T03:04:05Z"
	if slim(o).Ready {
		t.Error("one that is about to end is ready")
	}
	for _, rubbish := range []map[string]any{{},
		{"status": "x", "spec": 1, "metadata": map[string]any{"ownerReferences": "y"}},
		{"status": map[string]any{"podIPs": "z", "conditions": 1, "phase": 2}}} {
		if p := slim(&unstructured.Unstructured{Object: rubbish}); p.Ready || len(p.Addresses) > 0 {
			t.Errorf("rubbish: %+v", p)
		}
	}
}
