// Package profile takes profiles of the agent's process, for root alone.
package profile

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"runtime/pprof"
	"runtime/trace"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
)

const (
	secondsAsDefault = 10 // when nobody says how many
	secondsMax       = 60
	// slack is what a client has beyond the profile's own time to read it, until it is cut off: others wait for
	// their turn.
	slack = 30 * time.Second
	chunk = 64 << 10 // bytes in a message

	// While a profile of blocking or mutexes is taken, one of so many nanoseconds of blocking is sampled, and one of so
	// many contentions.
	blockRate     = 10_000
	mutexFraction = 10
)

// method is how one kind of profile is taken: over some seconds, or at once.
type method struct {
	take func(ctx context.Context, w io.Writer, d time.Duration) error
	over bool // some seconds
}

// kinds are all of them. The agent registers no handler of net/http/pprof anywhere: only this leads to a
// profile.
var kinds = map[string]method{
	"cpu":          {writeCPU, true},
	"trace":        {writeTrace, true},
	"block":        {writeBlock, true},
	"mutex":        {writeMutex, true},
	"heap":         {writeHeap, false},
	"allocs":       {lookup("allocs"), false},
	"goroutine":    {lookup("goroutine"), false},
	"threadcreate": {lookup("threadcreate"), false},
}

// ProfileService takes profiles, one at a time.
type ProfileService struct {
	Name func() string // of this node
	Turn *sync.Mutex   // held while a profile is taken
	Log  *slog.Logger
}

// Profile streams a profile of this process to root.
func (s ProfileService) Profile(ctx context.Context, r *skeinv1.ProfileRequest,
	stream *connect.ServerStream[skeinv1.ProfileResponse]) error {
	if err := api.NeedRoot(ctx, "a profile"); err != nil {
		return err
	}
	kind, d, err := asked(r)
	if err != nil {
		return err
	}
	if !s.Turn.TryLock() {
		return connect.NewError(connect.CodeResourceExhausted,
			errors.New("another profile of this agent is being taken: "+
				"try again when it has ended, at most a minute from now"))
	}
	defer s.Turn.Unlock()
	s.Log.Info("a profile is taken", "kind", r.GetKind(), "seconds", d.Seconds())
	if err := stream.Send(&skeinv1.ProfileResponse{Node: s.Name()}); err != nil {
		return err
	}
	w := bufio.NewWriterSize(writer{stream}, chunk)
	if err := kind.take(ctx, w, d); err != nil {
		return api.Error(fmt.Errorf("take the %s profile: %w", r.GetKind(), err))
	}
	return w.Flush()
}

// asked judges a request.
func asked(r *skeinv1.ProfileRequest) (method, time.Duration, error) {
	kind, ok := kinds[r.GetKind()]
	bad := func(format string, args ...any) (method, time.Duration, error) {
		return method{}, 0, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
	}
	switch {
	case !ok:
		return bad("there is no profile %q; allowed: %s", r.GetKind(), strings.Join(slices.Sorted(maps.Keys(kinds)), ", "))
	case !kind.over && r.GetSeconds() > 0:
		return bad("a %s profile is taken at once: leave the seconds out", r.GetKind())
	case r.GetSeconds() > secondsMax:
		return bad("a profile of %d seconds is too long: at most %d are allowed; take several", r.GetSeconds(), secondsMax)
	case kind.over && r.GetSeconds() == 0:
		return kind, secondsAsDefault * time.Second, nil
	}
	return kind, time.Duration(r.GetSeconds()) * time.Second, nil
}

// writer sends what is written to it. After an error it takes no more: a profile's writer only stops when it is
// told to.
type writer struct {
	stream *connect.ServerStream[skeinv1.ProfileResponse]
}

func (w writer) Write(b []byte) (int, error) {
	if err := w.stream.Send(&skeinv1.ProfileResponse{Data: b}); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Deadline cuts off a client of Profile that does not read, so that it does not hold the only turn for ever.
func Deadline(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == skeinv1connect.AgentServiceProfileProcedure {
			c, far := http.NewResponseController(w), time.Now().Add(secondsMax*time.Second+slack)
			_ = c.SetWriteDeadline(far) // a server that has none serves no socket of ours
			defer c.SetWriteDeadline(time.Time{})
		}
		next.ServeHTTP(w, r)
	})
}

// pass waits for d; an error says that the client went away, or the agent ends.
func pass(ctx context.Context, d time.Duration) error {
	if !pause.For(ctx, d) {
		return ctx.Err()
	}
	return nil
}

func writeCPU(ctx context.Context, w io.Writer, d time.Duration) error {
	if err := pprof.StartCPUProfile(w); err != nil {
		return err
	}
	defer pprof.StopCPUProfile() // writes it
	return pass(ctx, d)
}

func writeTrace(ctx context.Context, w io.Writer, d time.Duration) error {
	if err := trace.Start(w); err != nil {
		return err
	}
	defer trace.Stop()
	return pass(ctx, d)
}

// writeBlock samples for d only; what former profiles of the kind saw is in the profile, too.
func writeBlock(ctx context.Context, w io.Writer, d time.Duration) error {
	runtime.SetBlockProfileRate(blockRate)
	err := pass(ctx, d)
	runtime.SetBlockProfileRate(0)
	return errors.Join(err, pprof.Lookup("block").WriteTo(w, 0))
}

// writeMutex is writeBlock for mutexes.
func writeMutex(ctx context.Context, w io.Writer, d time.Duration) error {
	was := runtime.SetMutexProfileFraction(mutexFraction)
	err := pass(ctx, d)
	runtime.SetMutexProfileFraction(was)
	return errors.Join(err, pprof.Lookup("mutex").WriteTo(w, 0))
}

// writeHeap collects first: the profile is as of the last collection.
func writeHeap(_ context.Context, w io.Writer, _ time.Duration) error {
	runtime.GC()
	return pprof.Lookup("heap").WriteTo(w, 0)
}

func lookup(name string) func(context.Context, io.Writer, time.Duration) error {
	return func(_ context.Context, w io.Writer, _ time.Duration) error { return pprof.Lookup(name).WriteTo(w, 0) }
}
