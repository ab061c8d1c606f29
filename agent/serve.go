package agent

import (
	"context"
	"errors"
	"net/http"

	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/agent/rpclimit"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// serve starts what runs beside the loop.
func (a *Agent) serve(ctx context.Context) {
	go a.watchState(ctx)
	go a.followLinks(ctx)
	go a.follow(ctx)
	go a.serveRPC(ctx)
	go a.announceSchema(ctx)
	var able func(context.Context) error
	if a.pods != nil {
		able = a.pods.Able
		a.podsDone = make(chan struct{})
		l := a.pods.Listen()
		go func() {
			defer close(a.podsDone)
			a.pods.Run(ctx, l)
		}()
	}
	go a.podReady.Run(ctx, able, podready.LookEvery)
	if a.egresses != nil {
		a.egressDone = make(chan struct{})
		go func() {
			defer close(a.egressDone)
			a.egresses.Run(ctx)
		}()
	}
	if a.plain != nil {
		a.plainDone = make(chan struct{})
		go func() {
			defer close(a.plainDone)
			a.plain.Run(ctx)
		}()
	}
	if l := a.listener.Load(); l != nil {
		go l.Serve(ctx)
	}
	if a.socket != nil {
		go a.socket.Serve(a.prober.Handle)
	}
	if a.discovery != nil {
		go a.discovery.Run(ctx)
	}
}

// watchState wakes the loop for every change of the agreed state.
func (a *Agent) watchState(ctx context.Context) {
	for index := a.replica.State().Index(); ; index = a.replica.State().Index() {
		if a.replica.Wait(ctx, index) != nil {
			return
		}
		select {
		case a.decided <- struct{}{}:
		default:
		}
	}
}

// followLinks wakes the loop for every change of this host's links.
func (a *Agent) followLinks(ctx context.Context) {
	if err := a.links.Follow(ctx, a.wakeUp); err != nil {
		a.log.Warn("cannot watch links; they are read twice a second instead", "error", err)
	}
}

// rpcMux is all that other nodes may ask. The local API is not among it.
func (a *Agent) rpcMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle(a.rpcService().Handler())
	mux.Handle(a.egressService().Handler())
	return mux
}

// serveRPC answers the other nodes.
func (a *Agent) serveRPC(ctx context.Context) {
	srv := consensus.NewHTTPServer(rpclimit.New(a.rpcMux(), a.votes, a.metrics.RPCRefused), a.log)
	context.AfterFunc(ctx, func() { srv.Close() })
	if err := srv.Serve(consensus.PlainListener(a.control.Listen(identity.ALPNRPC))); err != nil &&
		!errors.Is(err, http.ErrServerClosed) && ctx.Err() == nil {
		a.report("rpc", failure, err.Error(), "restart the agent")
	}
}
