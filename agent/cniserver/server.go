package cniserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// SocketName is the socket's file in the agent's run directory.
const SocketName = "cni.sock"

// Allocator gives addresses (package ipam).
type Allocator interface {
	Assign(ctx context.Context, r ipam.Request) (ipam.Lease, error)
	Release(key podnet.Key, reason string) (ipam.Lease, bool)
	Lookup(key podnet.Key) (ipam.Lease, bool)
	Leases() []ipam.Lease
	Ready() error // whether a pod that asks for nothing special could get an address now
}

// Network makes links (package podnet). Its methods run on a locked thread in the namespace that the agent works in.
type Network interface {
	Add(a podnet.Attachment) (podnet.Link, error)
	Del(netns string, k podnet.Key) error
	Check(a podnet.Attachment) error
	CheckNetNS(path string) error
	// Has tells whether the host's end of an attachment is there.
	Has(k podnet.Key) (bool, error)
}

// Egresses lead packets of pods into tunnels (package egress). What does not work it tells itself: no pod fails for it.
type Egresses interface {
	// AddPod has a pod use the egresses that its annotations name, once its link is there.
	AddPod(ctx context.Context, a podnet.Attachment, annotations map[string]string) []*skeinv1.EgressOfClient
	// DelPod ends that, before the link goes; there may be nothing.
	DelPod(ctx context.Context, k podnet.Key)
	// CheckPod says what is not as AddPod made it.
	CheckPod(k podnet.Key) error
}

// Condition is what STATUS goes by, beside addresses and rights.
type Condition struct {
	// NoAdd says why no ADD can succeed now; empty: one can.
	NoAdd string
	// Limited says why pods that run may be cut off as well.
	Limited string
}

// Config is what a Server needs.
type Config struct {
	Allocator Allocator
	Network   Network
	Egresses  Egresses                            // nil: none
	MTU       func() uint32                       // of the mesh, bytes
	Condition func(ctx context.Context) Condition // nil: all is well
	// Ready is closed once the agent's data plane stands after its start, which pods wait for a while; nil: it stands.
	Ready <-chan struct{}
	// Facts tells what is known of a pod besides what its runtime says; nil: nothing. An error: the pod cannot be started
	// now.
	Facts   func(ctx context.Context, namespace, pod string) (part.PodFacts, error)
	NoteDir string                                             // where the plugin leaves notes while nobody answers
	Done    func(verb string, code uint32, took time.Duration) // told of each request; code 0: success; may be nil
	Log     *slog.Logger
	Threads int // that talk to the kernel at a time; 0: 16
}

// Bounds of a Server.
const (
	defaultThreads = 16
	readyPatience  = 10 * time.Second // for an agent that has just started; most need a second
	maxRequest     = 4 << 20          // bytes; the longest is GC's list
	undoTimeout    = 20 * time.Second // for taking back what a request made whose caller went away
	notesEvery     = 30 * time.Second // between looks for notes: a plugin may have missed the agent's start by a moment
	stopGrace      = 5 * time.Second  // for requests under way when the agent ends
	compressMin    = 1 << 30          // bytes: answers stay on this host
)

// Server answers plugins. Make it with New.
type Server struct {
	cfg     Config
	keys    keyLock
	threads chan struct{}
}

var _ skeinv1connect.CNIServiceHandler = (*Server)(nil)

// New makes a Server, which answers once Serve or Handler is called.
func New(cfg Config) *Server {
	if cfg.Threads == 0 {
		cfg.Threads = defaultThreads
	}
	if cfg.Condition == nil {
		cfg.Condition = func(context.Context) Condition { return Condition{} }
	}
	if cfg.Done == nil {
		cfg.Done = func(string, uint32, time.Duration) {}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Server{cfg: cfg, threads: make(chan struct{}, cfg.Threads)}
}

// Listen opens a socket for root only. Requests wait there until Serve takes them.
func Listen(socket string) (net.Listener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove a stale CNI socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on the CNI socket: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("restrict the CNI socket to root: %w", err)
	}
	return l, nil
}

// Serve reads the plugin's notes and then answers requests until stop is called, which closes l and lets requests under
// way end. ctx ending makes them undo what they did.
func (s *Server) Serve(ctx context.Context, l net.Listener) (stop func()) {
	if err := s.ReadNotes(ctx); err != nil {
		s.cfg.Log.Warn("cannot act on some notes of the CNI plugin", "error", err)
	}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewCNIServiceHandler(s, connect.WithReadMaxBytes(maxRequest),
		connect.WithCompressMinBytes(compressMin)))
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true) // gRPC
	srv := &http.Server{Handler: mux, Protocols: protocols, ReadHeaderTimeout: 5 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	go srv.Serve(l)
	looking, enough := context.WithCancel(ctx)
	go s.watchNotes(looking)
	return func() {
		enough()
		grace, cancel := context.WithTimeout(context.Background(), stopGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			srv.Close()
		}
	}
}

// answer runs one request for one attachment and reports it. The attachment is nobody else's until f returns.
func (s *Server) answer(ctx context.Context, verb string, a *skeinv1.CNIAttachment,
	f func(context.Context, podnet.Key) error) error {
	began := time.Now()
	key := podnet.Key{ContainerID: a.GetContainerId(), Interface: a.GetInterface()}
	err := cni.CheckNames(key)
	if err == nil {
		err = s.keys.with(ctx, key, func() error { return f(ctx, key) })
	}
	return s.report(verb, key, began, err)
}

// report tells metrics and log of a request, and gives its error the form that the plugin reads.
func (s *Server) report(verb string, key podnet.Key, began time.Time, err error) error {
	took := time.Since(began)
	if err == nil {
		s.cfg.Done(verb, 0, took)
		s.cfg.Log.Debug("CNI request", "verb", verb, "container", key.ContainerID, "interface", key.Interface, "took", took)
		return nil
	}
	e := asCNI(err)
	s.cfg.Done(verb, e.GetCode(), took)
	s.cfg.Log.Warn("CNI request failed", "verb", verb, "container", key.ContainerID, "interface", key.Interface, "code",
		e.GetCode(), "error", e.GetMessage(), "details", e.GetDetails(), "took", took)
	return asConnect(e)
}
