package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/profile"
	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
)

// apiGrace is how long a request that is being answered may hold up the end of the agent.
const apiGrace = 2 * time.Second

// serveAPI listens on the agent's socket until stop is called, which lets answers under way finish. The
// socket's file stays until the agent has ended; see Run.
func (a *Agent) serveAPI(ctx context.Context) (stop func(), err error) {
	path := filepath.Join(a.cfg.RunDir, config.SocketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove a stale socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	a.socketOpen = true
	if err := os.Chmod(path, 0o660); err != nil {
		l.Close()
		return nil, fmt.Errorf("API socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewAgentServiceHandler(a.services(), connect.WithReadMaxBytes(4<<20)))
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: profile.Deadline(mux), Protocols: protocols, ReadHeaderTimeout: 5 * time.Second,
		ConnContext: api.WithCaller,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	go srv.Serve(l)
	return func() {
		grace, cancel := context.WithTimeout(context.Background(), apiGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			srv.Close()
		}
	}, nil
}

// removeSocket tells `skein down` that the agent is gone.
func (a *Agent) removeSocket() {
	if a.socketOpen {
		os.Remove(filepath.Join(a.cfg.RunDir, config.SocketName))
	}
}

// propose hands a command to the cluster and waits until its effect is visible on this node.
func (a *Agent) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if a.client == nil {
		return nil, connect.NewError(connect.CodeUnavailable,
			errors.New("the agent has not joined a cluster yet; see `skein status`"))
	}
	ctx, cancel := context.WithTimeout(ctx, api.ProposeHold)
	defer cancel()
	if c.RequestId == "" { // one that is set makes a late copy of the command harmless: see agent/ipam/DESIGN.md
		c.RequestId = consensus.NewRequestID()
	}
	answer, err := a.client.Propose(ctx, c)
	if err != nil {
		return nil, api.Error(err)
	}
	if answer.GetIndex() > 0 {
		if err := a.replica.Wait(ctx, answer.GetIndex()-1); err != nil {
			return nil, api.Error(err)
		}
	}
	return a.replica.State().Complete(answer), nil // a leader of an earlier version answers a retry with names alone
}

func (s services) Down(ctx context.Context, r *skeinv1.DownRequest) (*skeinv1.DownResponse, error) {
	order := downOrder{purge: r.GetPurge(), done: make(chan error, 1)}
	select {
	case s.a.down <- order:
	case <-ctx.Done():
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the agent is stopping already"))
	}
	return &skeinv1.DownResponse{}, api.Error(<-order.done)
}
