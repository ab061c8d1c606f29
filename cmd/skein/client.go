package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"syscall"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
)

// client talks to the agent on this host.
func (g *globals) client() skeinv1connect.AgentServiceClient {
	socket := g.socket()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	return skeinv1connect.NewAgentServiceClient(&http.Client{Transport: transport}, "http://skein")
}

// show prints what the agent answered: as JSON when that was asked for, else as people writes it.
func (g *globals) show(c *cobra.Command, answer proto.Message, err error, people func(io.Writer)) error {
	switch {
	case err != nil:
		return g.plain(err)
	case g.output == "json":
		return printProto(c.OutOrStdout(), answer)
	}
	people(c.OutOrStdout())
	return nil
}

// plain turns an API error into what a user can act on.
func (g *globals) plain(err error) error {
	var e *connect.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no agent answers on %s: start one with `skein up`, or name its --run-dir", g.socket())
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to use %s: run as root", g.socket())
	case errors.As(err, &e):
		return errors.New(e.Message())
	}
	return err
}
