package api

import (
	"context"
	"errors"
	"fmt"
	"net"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

// callerKey finds in a request's context who has connected to the API's socket: a *unix.Ucred.
type callerKey struct{}

// WithCaller notes who has connected. The kernel says so, of the moment of connecting, in the agent's own user
// namespace.
func WithCaller(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return ctx
	}
	var who *unix.Ucred
	if e := raw.Control(func(fd uintptr) {
		who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET,
			unix.SO_PEERCRED)
	}); e != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, who)
}

// NeedRoot refuses all but root. The socket's mode lets in root and its group, who may give commands; what shows the
// agent's memory is not for the group. A caller that nobody knows is not root.
func NeedRoot(ctx context.Context, what string) error {
	who, ok := ctx.Value(callerKey{}).(*unix.Ucred)
	switch {
	case !ok || who == nil:
		return connect.NewError(connect.CodePermissionDenied,
			errors.New(what+" is for root alone, and the caller is unknown: "+
				"connect to the agent's unix socket"))
	case who.Uid != 0:
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("%s is for root alone, "+
			"since it shows memory of the agent, which holds keys; you are user %d: run it as root", what, who.Uid))
	}
	return nil
}
