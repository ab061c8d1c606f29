package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/types"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
)

// How long the agent may take. Kubelet gives a runtime four minutes for a sandbox and two for anything else
// (--runtime-request-timeout), so that what we say arrives before the runtime gives up; who asks for STATUS asks often.
const (
	addTimeout    = 60 * time.Second
	delTimeout    = 30 * time.Second
	checkTimeout  = 30 * time.Second
	gcTimeout     = 60 * time.Second
	statusTimeout = 5 * time.Second
)

// client asks the agent on a socket. Answers are short, so that compressing them would only cost time.
func client(socket string) skeinv1connect.CNIServiceClient {
	transport := &http.Transport{DisableCompression: true, DialContext: func(ctx context.Context, _,
		_ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	return skeinv1connect.NewCNIServiceClient(&http.Client{Transport: transport}, "http://skein",
		connect.WithAcceptCompression("gzip", nil, nil), connect.WithReadMaxBytes(maxInput))
}

// asComplaint turns what a call to the agent failed with into an error of the specification.
func asComplaint(err error, socket string, limit time.Duration) *types.Error {
	var e *connect.Error
	if errors.As(err, &e) {
		for _, d := range e.Details() {
			if v, verr := d.Value(); verr == nil {
				if c, ok := v.(*skeinv1.CNIError); ok && c.GetCode() != 0 {
					return complaint(c.GetCode(), c.GetMessage(), c.GetDetails())
				}
			}
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return complaint(CodeTryAgain, "no skein agent answers on "+socket, "start it (`skein up`, or its systemd unit) "+
			"and look at its log if it does not stay up; the runtime may then try again")
	case errors.Is(err, fs.ErrPermission):
		return complaint(uint32(types.ErrIOFailure), "no permission to use "+socket, "the container runtime must run as root")
	case errors.Is(err, context.DeadlineExceeded), connect.CodeOf(err) == connect.CodeDeadlineExceeded:
		return complaint(CodeTryAgain, fmt.Sprintf("the skein agent on %s did not answer within %s", socket, limit),
			"see `skein status` and the agent's log for what it waits for; the runtime may then try again")
	case goneAway(err):
		return complaint(CodeTryAgain, fmt.Sprintf("the skein agent on %s went away during the request", socket),
			"see why it stopped in its log; the runtime may then try again")
	}
	return complaint(CodeInternal, fmt.Sprintf("the skein agent on %s: %v", socket, err), "if plugin and agent are of "+
		"different versions, run `skein cni install` again")
}

// goneAway tells whether the agent ended before it had answered: no error of its own came, and the connection broke, in
// one of the many ways in which the HTTP client says so. Nobody else cancels a call of ours.
func goneAway(err error) bool {
	if connect.IsWireError(err) {
		return connect.CodeOf(err) == connect.CodeUnavailable
	}
	for _, sign := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed} {
		if errors.Is(err, sign) {
			return true
		}
	}
	code := connect.CodeOf(err)
	return code == connect.CodeUnavailable || code == connect.CodeCanceled || code == connect.CodeUnknown
}

// asStatus gives what keeps STATUS from an answer the code that STATUS has for it.
func asStatus(e *types.Error) *types.Error {
	if uint32(e.Code) == CodeTryAgain {
		e.Code = uint(CodeUnavailable)
	}
	return e
}
