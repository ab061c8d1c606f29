package agent

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/internal/testenv"
)

// socketAgent is an agent of which nothing runs but its API, on a real socket that everybody may connect to.
func socketAgent(t *testing.T) (*Agent, *world, func(dial dialer) skeinv1connect.AgentServiceClient) {
	t.Helper()
	h, far := newHost(t, "home1"), newHost(t, "cloud1")
	w := newWorld(t, h, far)
	a := newTestAgent(h, w.state)
	a.opts.Version = "v1"
	a.replica = newReplica(t, w)
	run, err := os.MkdirTemp("", "skein-") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	a.cfg.RunDir = run
	stop, err := a.serveAPI(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	socket := filepath.Join(run, config.SocketName)
	if err := errors.Join(os.Chmod(run, 0o755), os.Chmod(socket, 0o666)); err != nil {
		t.Fatal(err)
	}
	return a, w, func(dial dialer) skeinv1connect.AgentServiceClient {
		tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn,
			error) {
			return dial(socket)
		}}
		t.Cleanup(tr.CloseIdleConnections)
		return skeinv1connect.NewAgentServiceClient(&http.Client{Transport: tr}, "http://skein")
	}
}

type dialer func(socket string) (net.Conn, error)

func asSelf(socket string) (net.Conn, error) { return net.Dial("unix", socket) }

// asUser connects as another user, from a thread that ends with it.
func asUser(uid int) dialer {
	return func(socket string) (c net.Conn, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			if _, _, e := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
				err = e
				return
			}
			c, err = net.Dial("unix", socket)
		}()
		<-done
		return c, err
	}
}

// profile takes one, whole.
func takeProfile(ctx context.Context, c skeinv1connect.AgentServiceClient, r *skeinv1.ProfileRequest) (node string,
	data []byte, err error) {
	s, err := c.Profile(ctx, r)
	if err != nil {
		return "", nil, err
	}
	defer s.Close()
	for s.Receive() {
		node += s.Msg().GetNode()
		data = append(data, s.Msg().GetData()...)
	}
	return node, data, s.Err()
}

func TestProfiles(t *testing.T) {
	testenv.NeedRoot(t)
	_, _, client := socketAgent(t)
	c := client(asSelf)
	kinds := map[string]bool{"allocs": false, "block": true, "cpu": true, "goroutine": false, "heap": false, "mutex": true,
		"threadcreate": false, "trace": true} // and whether each is taken over some seconds
	_, _, err := takeProfile(t.Context(), c, &skeinv1.ProfileRequest{Kind: "x"})
	if want := "allowed: " + strings.Join(slices.Sorted(maps.Keys(kinds)), ", "); err == nil ||
		!strings.HasSuffix(err.Error(), want) {
		t.Errorf("error %v, want the kinds: %s", err, want)
	}
	for kind, over := range kinds {
		r := &skeinv1.ProfileRequest{Kind: kind}
		if over {
			r.Seconds = 1
		}
		node, data, err := takeProfile(t.Context(), c, r)
		if err != nil || node != "home1" {
			t.Errorf("%s: node %q, %v", kind, node, err)
			continue
		}
		if kind == "trace" {
			if !bytes.HasPrefix(data, []byte("go 1.")) {
				t.Errorf("trace begins with %.16q", data)
			}
			continue
		}
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			t.Errorf("%s: not what pprof reads: %v", kind, err)
			continue
		}
		if text, err := io.ReadAll(z); err != nil || !bytes.Contains(text, []byte("nanoseconds")) &&
			!bytes.Contains(text, []byte("count")) {
			t.Errorf("%s: %d bytes without a unit, %v", kind, len(text), err)
		}
	}
}

func TestProfileIsForRootAlone(t *testing.T) {
	testenv.NeedRoot(t)
	_, _, client := socketAgent(t)
	other := client(asUser(65534))
	if _, err := other.Usage(t.Context(), &skeinv1.UsageRequest{}); err != nil {
		t.Fatalf("who may use the socket may ask what the agent costs: %v", err)
	}
	_, data, err := takeProfile(t.Context(), other, &skeinv1.ProfileRequest{Kind: "heap"})
	if connect.CodeOf(err) != connect.CodePermissionDenied || len(data) > 0 ||
		!strings.Contains(err.Error(), "user 65534") {
		t.Errorf("%d bytes, %v: want permission denied, and for whom", len(data), err)
	}
	if err := api.NeedRoot(t.Context(), "a profile"); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("somebody unknown: %v, want permission denied", err)
	}
}

func TestBadProfiles(t *testing.T) {
	testenv.NeedRoot(t)
	_, _, client := socketAgent(t)
	for _, r := range []*skeinv1.ProfileRequest{{}, {Kind: "cmdline"}, {Kind: "heap", Seconds: 1},
		{Kind: "cpu", Seconds: 61}, {Kind: "cpu", Seconds: 1 << 31}} {
		_, data, err := takeProfile(t.Context(), client(asSelf), r)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || len(data) > 0 {
			t.Errorf("%v: %d bytes, %v, want an invalid argument", r, len(data), err)
		}
	}
}

// TestOneProfileAtATime: the second is refused while the first runs, and the turn is free when the first's client has
// gone.
func TestOneProfileAtATime(t *testing.T) {
	testenv.NeedRoot(t)
	_, _, client := socketAgent(t)
	first, second := client(asSelf), client(asSelf)
	ctx, cancel := context.WithCancel(t.Context())
	s, err := first.Profile(ctx, &skeinv1.ProfileRequest{Kind: "cpu", Seconds: 60})
	if err != nil || !s.Receive() {
		t.Fatalf("the first: %v, %v", err, s.Err())
	}
	if _, _, err := takeProfile(t.Context(), second,
		&skeinv1.ProfileRequest{Kind: "heap"}); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("the second: %v, want resource exhausted", err)
	}
	cancel()
	s.Close()
	for deadline := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		_, _, err := takeProfile(t.Context(), second, &skeinv1.ProfileRequest{Kind: "goroutine"})
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the first one's client has gone: %v", err)
		}
	}
}

// TestNoProfileElsewhere: neither the port of metrics and health nor what other nodes may ask leads to a profile.
func TestNoProfileElsewhere(t *testing.T) {
	a, _, _ := socketAgent(t)
	a.metrics = newMetrics(a)
	for name, h := range map[string]http.Handler{"metrics": a.metrics.Handler(), "control net": a.rpcMux()} {
		for _, path := range []string{
			"/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/profile", "/debug/vars",
			skeinv1connect.AgentServiceProfileProcedure, skeinv1connect.AgentServiceUsageProcedure,
		} {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader("{}")))
				if w.Code != http.StatusNotFound {
					t.Errorf("%s: %s %s: status %d, want 404", name, method, path, w.Code)
				}
			}
		}
	}
}
