package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// refusing is an apiserver that refuses everything with a status, and says when to come again. It tells of each
// request.
func refusing(t *testing.T, status int, after, body string, asked chan<- time.Time) *apiserver {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case asked <- time.Now():
		case <-r.Context().Done():
		}
		w.Header().Set("Retry-After", after)
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}))
	t.Cleanup(s.Close)
	a, err := newAPIServer(&rest.Config{Host: s.URL, TLSClientConfig: rest.TLSClientConfig{CAData: authority(s)}})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// What the apiserver refuses is known after one request, with the time after which it may be asked again.
func TestARefusalIsKnownAtOnce(t *testing.T) {
	const asAPI = `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"slow down",` +
		`"reason":"TooManyRequests","details":{"retryAfterSeconds":1},"code":429}`
	for what, c := range map[string]struct {
		status      int
		after, body string
		is          func(error) bool
		want        time.Duration
	}{
		"by a filter":        {429, "3", "Too many requests.", apierrors.IsTooManyRequests, 3 * time.Second},
		"by the API":         {429, "3", asAPI, apierrors.IsTooManyRequests, 3 * time.Second},
		"starting":           {503, "2", "starting", apierrors.IsServiceUnavailable, 2 * time.Second},
		"broken":             {500, "2", "oops", apierrors.IsInternalError, 2 * time.Second},
		"for half a century": {429, "1576800000", "never", apierrors.IsTooManyRequests, mostRetryAfter},
	} {
		t.Run(what, func(t *testing.T) {
			asked := make(chan time.Time, 99)
			a := refusing(t, c.status, c.after, c.body, asked)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := a.annotate(ctx, &Node{Name: "n", UID: "u"}, "a", "b")
			if !c.is(err) || retryAfter(err) != c.want {
				t.Errorf("%v, %T: to come again after %s, want %s", err, err, retryAfter(err), c.want)
			}
			if len(asked) != 1 {
				t.Errorf("%d requests", len(asked))
			}
		})
	}
}

func TestAWatchComesAgainWhenItIsAskedTo(t *testing.T) {
	const after = 3 * time.Second // longer than the first waits of the reflector's own
	asked, told := make(chan time.Time), make(chan string, 99)
	a := refusing(t, http.StatusTooManyRequests, "3", "later", asked)
	store := newMirror(func(o metav1.Object) namespace { return slimNamespace(o) }, func() {})
	h := &health{report: func(_, message, _ string) { told <- message }}
	beside(t, func() { a.watch(t.Context(), namespaceResource, "", store, h) })
	first := next(t, "a request", asked)
	if message := next(t, "a report", told); message == "" {
		t.Error("no problem is told")
	}
	if gap := next(t, "another request", asked).Sub(first); gap < after {
		t.Errorf("asked to come after %s, it comes after %s", after, gap)
	}
}

// Whatever an apiserver says with its refusal, what is made of it is a refusal with the time to wait.
func FuzzRefusal(f *testing.F) {
	for _, seed := range []string{"", "Too many requests", `{"kind":"Status","details":{"retryAfterSeconds":7}}`,
		`{"kind":"Status","code":200,"status":"Success"}`} {
		f.Add(429, []byte(seed), 3)
	}
	f.Fuzz(func(t *testing.T, code int, body []byte, seconds int) {
		code, seconds = 400+int(uint(code)%200), int(uint(seconds)%300)
		var s metav1.Status
		if err := json.Unmarshal(refusal(code, body, seconds), &s); err != nil || s.Kind != "Status" ||
			s.Status != metav1.StatusFailure || int(s.Code) != code || s.Details == nil ||
			int(s.Details.RetryAfterSeconds) != seconds {
			t.Errorf("%+v, %v", s, err)
		}
	})
}
