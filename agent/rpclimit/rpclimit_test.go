package rpclimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

func newTestRPCLimit(next http.Handler, servers ...identity.ID) *Limit {
	refused := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refused"}, []string{"procedure", "why"})
	return New(next, func(id identity.ID) bool {
		for _, s := range servers {
			if s == id {
				return true
			}
		}
		return false
	}, refused)
}

func TestAMemberAsksAtItsOwnRateAndNobodyElses(t *testing.T) {
	server, hostile, honest := identity.ID{1}, identity.ID{2}, identity.ID{3}
	l := newTestRPCLimit(nil, server)
	now := time.Unix(1000, 0)
	flood := func(id identity.ID, path string, n int) (in int, last *errBusy) {
		for range n {
			leave, busy := l.enter(now, id, path, false)
			if busy != nil {
				last = busy
				continue
			}
			in++
			leave()
		}
		return in, last
	}
	for path, b := range bounds {
		in, busy := flood(hostile, path, 2*b.burst)
		if in != b.burst || busy == nil || busy.why != "rate" || busy.retry <= 0 || busy.retry > time.Second {
			t.Errorf("%s: %d of %d let in, want %d; then %v", path, in, 2*b.burst, b.burst, busy)
		}
		if in, busy := flood(honest, path, b.burst/2); busy != nil || in != b.burst/2 {
			t.Errorf("%s: an honest member is refused beside it: %v", path, busy)
		}
		if path == skeinv1connect.ClusterServiceProposeProcedure {
			if in, busy := flood(server, path, 10*b.burst); busy != nil || in != 10*b.burst {
				t.Errorf("a server that forwards everybody's commands is refused: %v", busy)
			}
		}
	}
	if in, busy := flood(hostile, "/skein.v1.ClusterService/Invented", 100); in != other.burst || busy == nil {
		t.Errorf("%d calls of a procedure that does not exist", in)
	}
	if _, busy := l.enter(now, hostile, "/another/invention", false); busy == nil {
		t.Error("each invented name has an account of its own")
	}
	now = now.Add(time.Second) // whoever comes when it was told to is let in
	for path, b := range bounds {
		if in, _ := flood(hostile, path, 1); in != 1 {
			t.Errorf("%s: refused a second later, at %g a second", path, float64(b.perSecond))
		}
	}
}

func TestCallsAtOnceAreBounded(t *testing.T) {
	l := newTestRPCLimit(nil)
	now := time.Unix(1000, 0)
	for path, b := range bounds {
		var leaves []func()
		enter := func(id identity.ID) bool {
			leave, busy := l.enter(now, id, path, false)
			if busy == nil {
				leaves = append(leaves, leave)
			} else if busy.why != "at once" || busy.retry != busyRetry {
				t.Errorf("%s: %v", path, busy)
			}
			return busy == nil
		}
		one := 0
		for range b.atOnce + 1 {
			if enter(identity.ID{9}) {
				one++
			}
		}
		all := one
		for i := range 200 {
			if enter(identity.ID{10, byte(i)}) {
				all++
			}
		}
		want := one + 200
		if b.inAll > 0 {
			want = b.inAll
		}
		if one != b.atOnce || all != want {
			t.Errorf("%s: %d at once of one member, want %d; %d of all, want %d", path, one, b.atOnce, all, want)
		}
		for _, leave := range leaves {
			leave()
		}
		if leaves = nil; !enter(identity.ID{11}) {
			t.Errorf("%s: refused when all have left", path)
		}
	}
}

func TestLargeRequestsAreFew(t *testing.T) {
	l := newTestRPCLimit(nil)
	now, path := time.Unix(1000, 0), skeinv1connect.ClusterServiceProposeProcedure
	one, all := 0, 0
	for i := range 10 {
		if _, busy := l.enter(now, identity.ID{1}, path, true); busy == nil {
			one++
		} else if busy.why != "large" {
			t.Error(busy)
		}
		if _, busy := l.enter(now, identity.ID{2, byte(i)}, path, true); busy == nil {
			all++
		}
	}
	for i := range 20 {
		if _, busy := l.enter(now, identity.ID{3, byte(i)}, path, true); busy == nil {
			all++
		}
	}
	if one != largeAtOnce || one+all != largeInAll {
		t.Errorf("%d of one member, %d in all", one, one+all)
	}
	if _, busy := l.enter(now, identity.ID{1}, path, false); busy != nil {
		t.Errorf("a small one is refused: %v", busy)
	}
}

func TestQuietCallersAreForgotten(t *testing.T) {
	l := newTestRPCLimit(nil)
	now := time.Unix(1000, 0)
	id := func(i int) identity.ID { return identity.ID{byte(i >> 8), byte(i), 1} }
	for i := range mostCallers {
		leave, _ := l.enter(now, id(i), skeinv1connect.ClusterServiceHolderProcedure, false)
		if i != 7 {
			leave()
		}
	}
	now = now.Add(time.Minute)
	if _, busy := l.enter(now, identity.ID{255, 255}, skeinv1connect.ClusterServiceHolderProcedure, false); busy != nil ||
		len(l.callers) != 2 {
		t.Errorf("%d callers are remembered, want the one that has a call under way and the new one; %v",
			len(l.callers), busy)
	}
}

// stuckCluster answers ReadState when it is told to.
type stuckCluster struct {
	skeinv1connect.UnimplementedClusterServiceHandler
	began chan struct{}
	end   chan struct{}
}

func (s stuckCluster) ReadState(ctx context.Context,
	_ *skeinv1.ReadStateRequest) (*skeinv1.ReadStateResponse, error) {
	s.began <- struct{}{}
	<-s.end
	return &skeinv1.ReadStateResponse{}, nil
}

func TestARefusedCallerIsToldWhenToComeAgain(t *testing.T) {
	cluster := stuckCluster{began: make(chan struct{}, 16), end: make(chan struct{})}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewClusterServiceHandler(cluster))
	l := newTestRPCLimit(mux)
	caller := identity.ID{5}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.ServeHTTP(w, r.WithContext(consensus.WithPeer(r.Context(), caller)))
	}))
	defer srv.Close()
	client := skeinv1connect.NewClusterServiceClient(srv.Client(), srv.URL)
	done := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := client.ReadState(t.Context(), &skeinv1.ReadStateRequest{})
			done <- err
		}()
		<-cluster.began
	}
	_, err := client.ReadState(t.Context(), &skeinv1.ReadStateRequest{})
	var e *connect.Error
	if !errors.As(err, &e) || e.Code() != connect.CodeResourceExhausted || !strings.Contains(e.Message(),
		"try again in 100ms") {
		t.Fatalf("a third whole state at once: %v", err)
	}
	if d := consensus.RetryAfter(err); d != busyRetry || e.Meta().Get("Retry-After") != "1" {
		t.Errorf("it is told to wait %s, %q", d, e.Meta().Get("Retry-After"))
	}
	close(cluster.end)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if _, err := client.ReadState(t.Context(), &skeinv1.ReadStateRequest{}); err != nil {
		t.Errorf("after the others have ended: %v", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(l.refused)
	if m, err := registry.Gather(); err != nil || len(m) != 1 || len(m[0].GetMetric()) != 1 ||
		m[0].GetMetric()[0].GetCounter().GetValue() != 1 {
		t.Errorf("the metric counts %v, %v", m, err)
	}

	// A stream is refused likewise: by its own protocol, not by a bare HTTP status.
	var leaves []func()
	for range bounds[skeinv1connect.ClusterServiceSubscribeProcedure].atOnce {
		leave, busy := l.enter(time.Now(), caller, skeinv1connect.ClusterServiceSubscribeProcedure, false)
		if busy != nil {
			t.Fatal(busy)
		}
		leaves = append(leaves, leave)
	}
	stream, err := client.Subscribe(t.Context(), &skeinv1.SubscribeRequest{})
	if err == nil {
		stream.Receive()
		err = stream.Err()
	}
	if connect.CodeOf(err) != connect.CodeResourceExhausted || consensus.RetryAfter(err) != busyRetry {
		t.Errorf("one subscription too many: %v, to come again in %s", err, consensus.RetryAfter(err))
	}
	for _, leave := range leaves {
		leave()
	}
}

// docs/security.md has the numbers that hold.
func TestTheDocumentHasTheBoundsOfRPC(t *testing.T) {
	b, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for path, bound := range bounds {
		for line := range strings.Lines(string(b)) {
			head, text, _ := strings.Cut(strings.TrimPrefix(line, "| RPC: "), " |")
			if name, _, _ := strings.Cut(head, " ("); name != procedureName(path) {
				continue
			}
			rows++
			want := []string{fmt.Sprintf("%g a second after a burst of %d", float64(bound.perSecond), bound.burst),
				fmt.Sprintf("%d at once", bound.atOnce)}
			if bound.inAll > 0 {
				want = append(want, fmt.Sprintf("%d of all members", bound.inAll))
			}
			for _, w := range want {
				if !strings.Contains(text, w) {
					t.Errorf("%s: the document does not say %q: %s", path, w, text)
				}
			}
		}
	}
	if rows != 8 {
		t.Errorf("%d procedures have a row, want 8", rows)
	}
}

// A procedure without a line would share its bound with those that do not exist.
func TestEachProcedureHasABound(t *testing.T) {
	for _, file := range []protoreflect.FileDescriptor{skeinv1.File_skein_v1_cluster_proto,
		skeinv1.File_skein_v1_egress_proto} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				path := fmt.Sprintf("/%s/%s", service.FullName(), service.Methods().Get(j).Name())
				if _, ok := bounds[path]; !ok {
					t.Errorf("%s has no bound", path)
				}
			}
		}
	}
}
