package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/internal/golden"
)

// fakeAgent answers on a socket as an agent does, with what a test has laid out, and keeps what it was asked.
type fakeAgent struct {
	skeinv1connect.UnimplementedAgentServiceHandler
	asked  []proto.Message
	answer map[string]proto.Message // by the request's message name
	err    error
	run    string
	drains []*skeinv1.DrainNodeResponse // the last one is for all that follow
	pools  []*skeinv1.PoolsResponse     // the same
	usages []*skeinv1.UsageResponse     // the same
	events []*skeinv1.Event
}

func newFakeAgent(t *testing.T) *fakeAgent {
	t.Helper()
	run, err := os.MkdirTemp("", "skein-cli-") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	f := &fakeAgent{answer: map[string]proto.Message{}, run: run}
	l, err := net.Listen("unix", filepath.Join(run, config.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewAgentServiceHandler(f))
	s := &http.Server{Handler: mux}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return f
}

// lay makes an answer the one to all requests of a type.
func (f *fakeAgent) lay(request, answer proto.Message) {
	f.answer[string(request.ProtoReflect().Descriptor().Name())] = answer
}

func answerTo[A proto.Message](f *fakeAgent, r proto.Message) (A, error) {
	var none A
	f.asked = append(f.asked, r)
	if f.err != nil {
		return none, f.err
	}
	a, ok := f.answer[string(r.ProtoReflect().Descriptor().Name())].(A)
	if !ok {
		return none, connect.NewError(connect.CodeUnimplemented, errors.New("no answer was laid out"))
	}
	return a, nil
}

func (f *fakeAgent) Nodes(context.Context, *skeinv1.NodesRequest) (*skeinv1.NodesResponse, error) {
	return &skeinv1.NodesResponse{Nodes: []*skeinv1.NodeView{
		{Node: &skeinv1.Node{Id: "b33ad742981917ca", Name: "home1"}},
		{Node: &skeinv1.Node{Id: "7ef4fee4c02da850", Name: "dc1"}},
	}}, nil
}

func (f *fakeAgent) Peers(_ context.Context, r *skeinv1.PeersRequest) (*skeinv1.PeersResponse, error) {
	return answerTo[*skeinv1.PeersResponse](f, r)
}

func (f *fakeAgent) Graph(_ context.Context, r *skeinv1.GraphRequest) (*skeinv1.GraphResponse, error) {
	return answerTo[*skeinv1.GraphResponse](f, r)
}

func (f *fakeAgent) CreatePool(_ context.Context, r *skeinv1.CreatePoolRequest) (*skeinv1.PoolResponse, error) {
	return answerTo[*skeinv1.PoolResponse](f, r)
}

func (f *fakeAgent) ChangePool(_ context.Context, r *skeinv1.ChangePoolRequest) (*skeinv1.PoolResponse, error) {
	return answerTo[*skeinv1.PoolResponse](f, r)
}

func (f *fakeAgent) RemovePool(_ context.Context, r *skeinv1.RemovePoolRequest) (*skeinv1.RemovePoolResponse, error) {
	return answerTo[*skeinv1.RemovePoolResponse](f, r)
}

func (f *fakeAgent) Pools(_ context.Context, r *skeinv1.PoolsRequest) (*skeinv1.PoolsResponse, error) {
	if n := len(f.pools); n > 0 {
		next := f.pools[0]
		f.pools = f.pools[min(1, n-1):]
		f.lay(r, next)
	}
	return answerTo[*skeinv1.PoolsResponse](f, r)
}

func (f *fakeAgent) Blocks(_ context.Context, r *skeinv1.BlocksRequest) (*skeinv1.BlocksResponse, error) {
	return answerTo[*skeinv1.BlocksResponse](f, r)
}

func (f *fakeAgent) ReserveBlock(_ context.Context, r *skeinv1.ReserveBlockRequest) (*skeinv1.BlockResponse, error) {
	return answerTo[*skeinv1.BlockResponse](f, r)
}

func (f *fakeAgent) ReleaseBlock(_ context.Context, r *skeinv1.ReleaseBlockRequest) (*skeinv1.BlockResponse, error) {
	return answerTo[*skeinv1.BlockResponse](f, r)
}

func (f *fakeAgent) ReserveAddress(_ context.Context,
	r *skeinv1.ReserveAddressRequest) (*skeinv1.StaticResponse, error) {
	return answerTo[*skeinv1.StaticResponse](f, r)
}

func (f *fakeAgent) ReleaseAddress(_ context.Context,
	r *skeinv1.ReleaseAddressRequest) (*skeinv1.StaticResponse, error) {
	return answerTo[*skeinv1.StaticResponse](f, r)
}

func (f *fakeAgent) Statics(_ context.Context, r *skeinv1.StaticsRequest) (*skeinv1.StaticsResponse, error) {
	return answerTo[*skeinv1.StaticsResponse](f, r)
}

func (f *fakeAgent) Who(_ context.Context, r *skeinv1.WhoRequest) (*skeinv1.WhoResponse, error) {
	return answerTo[*skeinv1.WhoResponse](f, r)
}

func (f *fakeAgent) Pods(_ context.Context, r *skeinv1.PodsRequest) (*skeinv1.PodsResponse, error) {
	return answerTo[*skeinv1.PodsResponse](f, r)
}

func (f *fakeAgent) Import(_ context.Context, r *skeinv1.ImportRequest) (*skeinv1.ImportResponse, error) {
	return answerTo[*skeinv1.ImportResponse](f, r)
}

func (f *fakeAgent) CreateEgress(_ context.Context, r *skeinv1.CreateEgressRequest) (*skeinv1.EgressResponse, error) {
	return answerTo[*skeinv1.EgressResponse](f, r)
}

func (f *fakeAgent) ChangeEgress(_ context.Context, r *skeinv1.ChangeEgressRequest) (*skeinv1.EgressResponse, error) {
	return answerTo[*skeinv1.EgressResponse](f, r)
}

func (f *fakeAgent) RemoveEgress(_ context.Context,
	r *skeinv1.RemoveEgressRequest) (*skeinv1.RemoveEgressResponse, error) {
	return answerTo[*skeinv1.RemoveEgressResponse](f, r)
}

func (f *fakeAgent) Egresses(_ context.Context, r *skeinv1.EgressesRequest) (*skeinv1.EgressesResponse, error) {
	return answerTo[*skeinv1.EgressesResponse](f, r)
}

func (f *fakeAgent) ShowEgress(_ context.Context, r *skeinv1.ShowEgressRequest) (*skeinv1.ShowEgressResponse, error) {
	return answerTo[*skeinv1.ShowEgressResponse](f, r)
}

func (f *fakeAgent) ExplainEgress(_ context.Context,
	r *skeinv1.ExplainEgressRequest) (*skeinv1.ExplainEgressResponse, error) {
	return answerTo[*skeinv1.ExplainEgressResponse](f, r)
}

func (f *fakeAgent) AttachEgress(_ context.Context,
	r *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error) {
	return answerTo[*skeinv1.AttachEgressResponse](f, r)
}

// DrainNode answers the calls one after the other when drains are laid out.
func (f *fakeAgent) DrainNode(_ context.Context, r *skeinv1.DrainNodeRequest) (*skeinv1.DrainNodeResponse, error) {
	if len(f.drains) > 1 {
		f.asked = append(f.asked, r)
		next := f.drains[0]
		f.drains = f.drains[1:]
		return next, nil
	}
	if len(f.drains) == 1 {
		f.asked = append(f.asked, r)
		return f.drains[0], nil
	}
	return answerTo[*skeinv1.DrainNodeResponse](f, r)
}

// Usage answers the calls one after the other.
func (f *fakeAgent) Usage(_ context.Context, r *skeinv1.UsageRequest) (*skeinv1.UsageResponse, error) {
	if len(f.usages) == 0 {
		return answerTo[*skeinv1.UsageResponse](f, r)
	}
	f.asked = append(f.asked, r)
	next := f.usages[0]
	if len(f.usages) > 1 {
		f.usages = f.usages[1:]
	}
	return next, nil
}

// Profile streams the text that was laid out, in two pieces, and then f.err.
func (f *fakeAgent) Profile(_ context.Context, r *skeinv1.ProfileRequest,
	s *connect.ServerStream[skeinv1.ProfileResponse]) error {
	a, err := answerTo[*skeinv1.ProfileResponse](&fakeAgent{answer: f.answer}, r)
	f.asked = append(f.asked, r)
	if err != nil {
		return errors.Join(f.err, err)
	}
	half := len(a.GetData()) / 2
	for _, m := range []*skeinv1.ProfileResponse{{Node: a.GetNode()}, {Data: a.GetData()[:half]},
		{Data: a.GetData()[half:]}} {
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return f.err
}

// skein runs a command against the fake agent; out is standard output, and what the command says beside it.
func (f *fakeAgent) skein(t *testing.T, args ...string) (out, beside string, err error) {
	t.Helper()
	var o, e bytes.Buffer
	root := newRoot()
	root.SetOut(&o)
	root.SetErr(&e)
	root.SetArgs(append([]string{"--run-dir", f.run}, args...))
	err = root.ExecuteContext(t.Context())
	return o.String(), e.String(), err
}

// showsGolden runs commands and compares all that they print, with the command before it, with a golden file.
func (f *fakeAgent) showsGolden(t *testing.T, name string, commands ...[]string) {
	t.Helper()
	var lines []string
	for _, args := range commands {
		out, beside, err := f.skein(t, args...)
		if err != nil {
			t.Fatalf("skein %s: %v", strings.Join(args, " "), err)
		}
		lines = append(lines, "$ skein "+strings.Join(args, " "))
		for l := range strings.Lines(beside + out) {
			l = strings.TrimSuffix(l, "\n")
			if n := utf8.RuneCountInString(l); n > tableWidth {
				t.Errorf("%d columns: %s", n, l)
			}
			lines = append(lines, l)
		}
	}
	golden.Lines(t, name, lines)
}

// Times look the same everywhere. It is set before anything runs: goroutines of several tests read it.
func init() { time.Local = time.UTC }

// ago is a time that tables show as the same age for an hour.
func ago(d time.Duration) int64 { return time.Now().Add(-d - time.Minute).UnixNano() }
