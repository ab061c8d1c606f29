package redteam

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/events"
)

// lateAfter is how long a leader may hold events back: twelve seconds by design, and what the machine takes besides.
const lateAfter = 15 * time.Second

// send passes a message on to a node that follows mallory.
type send func(*skeinv1.SubscribeResponse) error

// broken is the leader of a site that was broken into. Until it is told to lie it passes on what a server sends it, as
// an honest one does; then lie goes on with the stream, which has reached an index.
type broken struct {
	skeinv1connect.UnimplementedClusterServiceHandler
	field *Field
	lie   func(ctx context.Context, feed <-chan *skeinv1.SubscribeResponse, at uint64, out send) error

	mu     sync.Mutex
	told   chan struct{}
	left   chan struct{}       // closed when a stream has ended that was lied to
	served int                 // streams
	shown  *skeinv1.Checkpoint // the last that was passed on
	lied   bool                // something was sent since it was told to
	why    error               // why it has stopped to lie
}

func newBroken(f *Field) *broken {
	return &broken{field: f, told: make(chan struct{}), left: make(chan struct{})}
}

func (b *broken) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewClusterServiceHandler(b))
	return mux
}

// Subscribe passes the events on.
func (b *broken) Subscribe(ctx context.Context, r *skeinv1.SubscribeRequest,
	out *connect.ServerStream[skeinv1.SubscribeResponse]) error {
	select {
	case <-b.told: // it lies once
		return connect.NewError(connect.CodeUnavailable, errors.New("no more"))
	default:
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := b.field.mallory.cluster(relayNode).Subscribe(ctx,
		&skeinv1.SubscribeRequest{After: r.GetAfter(), Checkpoints: true})
	if err != nil {
		return err
	}
	defer s.Close()
	feed := make(chan *skeinv1.SubscribeResponse, 1024)
	go func() {
		defer close(feed)
		for s.Receive() {
			select {
			case feed <- proto.CloneOf(s.Msg()):
			case <-ctx.Done():
				return
			}
		}
	}()
	b.mu.Lock()
	b.served++
	b.mu.Unlock()
	for at := r.GetAfter(); ; {
		select {
		case m, ok := <-feed:
			if !ok {
				return s.Err()
			}
			if m.GetHeartbeat().GetIndex() > at { // its events come first
				continue
			}
			if n := len(m.GetBatch().GetEvents()); n > 0 {
				at = m.GetBatch().GetBase() + uint64(n)
			}
			if err := out.Send(m); err != nil {
				return err
			}
			if c := m.GetCheckpoint(); c != nil {
				b.mu.Lock()
				b.shown = c
				b.mu.Unlock()
			}
		case <-b.told:
			err := b.lie(ctx, feed, at, func(m *skeinv1.SubscribeResponse) error {
				err := out.Send(m)
				b.mu.Lock()
				b.lied = b.lied || err == nil
				b.mu.Unlock()
				return err
			})
			if err == nil {
				<-ctx.Done() // whether to go on is the follower's to say
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.why = err
			select {
			case <-b.left:
			default:
				close(b.left)
			}
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// errNotLied is an attempt that was not made: nothing false was sent.
var errNotLied = errors.New("mallory has not lied")

// failed is why an attempt was not made.
func (b *broken) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lied {
		return nil
	}
	return errors.Join(errNotLied, b.why)
}

// checkpoint is a word for a state as servers write it, with a signature by mallory.
func (f *Field) checkpoint(server string, state *events.State) *skeinv1.Checkpoint {
	hash := state.Hash()
	c := &skeinv1.Checkpoint{Server: server, Index: state.Index(), Hash: hash[:], Time: time.Now().UnixNano(),
		Leader: f.id(relayNode).String()}
	var b []byte
	for _, text := range []string{"skein checkpoint v1", f.members.GetCluster().GetId(), c.GetServer(),
		string(c.GetHash()), c.GetLeader()} {
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(text))), text...)
	}
	b = binary.BigEndian.AppendUint64(b, c.GetIndex())
	c.Signature = f.mallory.key.Sign(binary.BigEndian.AppendUint64(b, uint64(c.GetTime())))
	return c
}

// forgedReason is why forged events say that a node is revoked.
const forgedReason = "forged"

// made is an event that nobody agreed on, and the state that it leads to from an index.
func (f *Field) made(ctx context.Context, at uint64) (*skeinv1.Event, *events.State, error) {
	r, err := f.mallory.cluster(relayNode).ReadState(ctx, &skeinv1.ReadStateRequest{At: at})
	if err != nil {
		return nil, nil, fmt.Errorf("mallory reads the state: %w", err)
	}
	state, err := events.FromProto(r.GetState())
	if err != nil {
		return nil, nil, err
	}
	e := &skeinv1.Event{Index: at + 1, Time: state.Time(), Schema: 1, Body: &skeinv1.Event_NodeRevoked{
		NodeRevoked: &skeinv1.NodeRevoked{NodeId: f.prey.id(), Reason: forgedReason}}}
	return e, state, state.Fold(e)
}

// misled judges that a node has applied what no server has agreed on, or does not go on as it should.
func misled(s Seen) string {
	for _, r := range s.After.GetRevoked() {
		if r.GetReason() == forgedReason {
			return "a node takes a member for revoked that nobody has revoked"
		}
	}
	return lost(s)
}

// following starts a node of mallory's site anew and waits until it has the events from the impostor. A stream that is
// not up in time goes by the relay as well, which nobody leads to the impostor. Where that way is the first to be up,
// the node has the events from mallory's agent: it is started once more.
func (f *Field) following(ctx context.Context, node string, b *broken) (i *impostor, err error) {
	if err := f.inSites(ctx); err != nil {
		return nil, err
	}
	if i, err = f.impersonate(node); err != nil {
		return nil, err
	}
	i.rpc = b.handler()
	err = i.begin()
	for tries, passed := 0, false; err == nil && !passed; tries++ {
		if tries == 5 {
			err = fmt.Errorf("%s has the events from mallory's agent after %d starts, not from the impostor", node,
				tries)
			break
		}
		if err = f.restart(ctx, node); err != nil {
			break
		}
		err = until(ctx, 5*patience, func() error {
			s, err := f.api(node).Status(ctx, &skeinv1.StatusRequest{})
			b.mu.Lock()
			passed = b.served > 0
			b.mu.Unlock()
			if err == nil && (s.GetEventsFrom() != f.mallory.id() || !s.GetEventsByLeader()) {
				err = fmt.Errorf("%s has the events from %q, not from mallory", node, s.GetEventsFromName())
			}
			return err
		})
	}
	if err != nil {
		i.close()
		return nil, err
	}
	return i, nil
}

// commit has an admin make a token, and returns the index of that.
func (f *Field) commit(ctx context.Context) (uint64, error) {
	if _, err := f.token(ctx, 1); err != nil {
		return 0, err
	}
	s, err := f.log(ctx)
	return s.GetIndex(), err
}

// reaches waits until a node has applied an index, and tells how long that took. It gives up after within.
func (f *Field) reaches(ctx context.Context, node string, index uint64, within time.Duration) (time.Duration, error) {
	began := time.Now()
	err := until(ctx, within, func() error {
		s, err := f.api(node).Status(ctx, &skeinv1.StatusRequest{})
		if err == nil && s.GetIndex() < index {
			err = fmt.Errorf("%s is at index %d, %d is agreed", node, s.GetIndex(), index)
		}
		return err
	})
	return time.Since(began), err
}

// lying has a node follow mallory, who lies to it as try says. A node that left mallory before that, since it heard
// nothing in time on a busy machine for instance, was not lied to: it is had to follow anew.
func lying(to string, lie func(*Field, *broken), try func(context.Context, *Field, *broken) (Seen, error),
) func(context.Context, *Field) (Seen, error) {
	return func(ctx context.Context, f *Field) (seen Seen, err error) {
		for range 3 {
			b := newBroken(f)
			lie(f, b)
			i, err2 := f.following(ctx, to, b)
			if err2 != nil {
				return seen, errors.Join(err2, err)
			}
			seen, err = try(ctx, f, b)
			i.close()
			if !errors.Is(err, errNotLied) {
				break
			}
		}
		return seen, err
	}
}

// passesOn has mallory lie to a node of its site that follows it. It then shows what that node has in its log, and
// whether it goes on: it must get what is agreed afterwards from somebody else.
func passesOn(name, to string, guard Guard, lie func(*Field, *broken)) Attempt {
	try := func(ctx context.Context, f *Field, b *broken) (seen Seen, err error) {
		close(b.told)
		index, err := f.commit(ctx)
		if err != nil {
			return seen, err
		}
		select {
		case <-b.left:
		case <-time.After(2 * patience):
			seen.Lost = append(seen.Lost, to+" goes on following who lies to it")
		case <-ctx.Done():
			return seen, ctx.Err()
		}
		if err := b.failed(); err != nil {
			return seen, err
		}
		r, err := f.api(to).State(ctx, &skeinv1.StateRequest{})
		if seen.After = r.GetState(); err != nil {
			return seen, err
		}
		if _, err := f.reaches(ctx, to, index, 3*patience); err != nil {
			seen.Lost = append(seen.Lost, "what is agreed: "+err.Error())
		}
		return seen, nil
	}
	return Attempt{Name: name, From: Member, Guard: guard, Judge: misled, Try: lying(to, lie, try)}
}

// heldBackEvents judges that a node was without an event for longer than a leader may hold it back.
func heldBackEvents(s Seen) string {
	if s.Believed > lateAfter {
		return fmt.Sprintf("a node is without an event for %s", s.Believed.Round(time.Second))
	}
	return ""
}

// holdsBack has mallory pass events on honestly for a while, then late, if at all, for some time before an event is
// agreed on.
func holdsBack(name string, honestly, before time.Duration, lie func(*Field, *broken)) Attempt {
	try := func(ctx context.Context, f *Field, b *broken) (seen Seen, err error) {
		pause.For(ctx, honestly)
		close(b.told)
		pause.For(ctx, before)
		index, err := f.commit(ctx)
		if err != nil {
			return seen, err
		}
		var late error
		if seen.Believed, late = f.reaches(ctx, mate, index, lateAfter+patience); late != nil {
			seen.Refusal = late.Error()
		} else {
			seen.Refusal = fmt.Sprintf("the node has the event %s later", seen.Believed.Round(100*time.Millisecond))
		}
		return seen, cmp.Or(ctx.Err(), b.failed())
	}
	return Attempt{Name: name, From: Member, Guard: Fresh, Judge: heldBackEvents, Try: lying(mate, lie, try)}
}

// siteEvents are attempts with the log's events as a site's leaders pass them on.
func siteEvents() []Attempt {
	forgery := func(named func(*Field) string) func(*Field, *broken) {
		return func(f *Field, b *broken) {
			b.lie = func(ctx context.Context, _ <-chan *skeinv1.SubscribeResponse, at uint64, out send) error {
				e, state, err := f.made(ctx, at)
				if err != nil {
					return err
				}
				return out(&skeinv1.SubscribeResponse{Checkpoint: f.checkpoint(named(f), state),
					Body: &skeinv1.SubscribeResponse_Batch{Batch: &skeinv1.Batch{Base: at, Events: []*skeinv1.Event{e}}}})
			}
		}
	}
	// With the checkpoint of a server for what was really agreed.
	other := func(change func(*skeinv1.Batch, *skeinv1.Event)) func(*Field, *broken) {
		return func(f *Field, b *broken) {
			b.lie = func(ctx context.Context, feed <-chan *skeinv1.SubscribeResponse, at uint64, out send) error {
				e, _, err := f.made(ctx, at)
				if err != nil {
					return err
				}
				for m := range feed {
					if batch := m.GetBatch(); batch != nil {
						change(batch, e)
						return out(m)
					}
				}
				return errors.New("nothing was agreed")
			}
		}
	}
	whole := func(f *Field, b *broken) {
		b.lie = func(ctx context.Context, _ <-chan *skeinv1.SubscribeResponse, at uint64, out send) error {
			_, state, err := f.made(ctx, at)
			if err != nil {
				return err
			}
			return out(&skeinv1.SubscribeResponse{Checkpoint: f.checkpoint(f.id(relayNode).String(), state),
				Body: &skeinv1.SubscribeResponse_Snapshot{Snapshot: state.Proto()}})
		}
	}
	// The last checkpoint again and again.
	frozen := func(_ *Field, b *broken) {
		b.lie = func(ctx context.Context, _ <-chan *skeinv1.SubscribeResponse, at uint64, out send) error {
			b.mu.Lock()
			last := &skeinv1.SubscribeResponse{Checkpoint: b.shown, Body: &skeinv1.SubscribeResponse_Heartbeat_{
				Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{Index: at}}}
			b.mu.Unlock()
			for pause.For(ctx, time.Second) {
				if err := out(last); err != nil {
					return err
				}
			}
			return ctx.Err()
		}
	}
	// All that a server sends, at half the speed.
	slow := func(_ *Field, b *broken) {
		b.lie = func(ctx context.Context, feed <-chan *skeinv1.SubscribeResponse, _ uint64, out send) error {
			for m := range feed {
				if err := out(m); err != nil {
					return err
				}
				if !pause.For(ctx, 2*time.Second) {
					return ctx.Err()
				}
			}
			return nil
		}
	}
	return append(subscriptions(),
		// By then the node has asked a server how far the log is, and does so again in half a minute at the earliest.
		holdsBack("hold events back with an old checkpoint", 6*time.Second, 0, frozen),
		long(holdsBack("pass events on later and later", 0, 18*time.Second, slow)),
		passesOn("pass on an event of its own making, with a checkpoint in a server's name", mate, Proven,
			forgery(func(f *Field) string { return f.id(relayNode).String() })),
		passesOn("pass on an event of its own making, with a checkpoint in its own name", mate, Proven,
			forgery(func(f *Field) string { return f.mallory.id() })),
		passesOn("pass on a whole state of its own making", mate, Proven, whole),
		passesOn("pass on another event with a server's checkpoint", pal, Proven,
			other(func(b *skeinv1.Batch, e *skeinv1.Event) { b.Events[0] = e })),
		passesOn("pass on an event that no version knows, to stop the node", pal, Proven,
			other(func(b *skeinv1.Batch, e *skeinv1.Event) { e.Body, e.Schema = nil, 1<<20; b.Events[0] = e })),
		passesOn("pass on all events but the first", pal, Proven,
			other(func(b *skeinv1.Batch, _ *skeinv1.Event) { b.Events = b.Events[1:] })),
	)
}

func long(a Attempt) Attempt { a.Long = true; return a }

// subscribes asks a node for the events, and notes which came.
func (p *person) subscribes(ctx context.Context, at string, seen *Seen) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	defer p.conns.Close()
	s, err := p.cluster(at).Subscribe(ctx, &skeinv1.SubscribeRequest{After: p.field.members.GetIndex()})
	if err != nil {
		seen.Refusal = err.Error()
		return
	}
	defer s.Close()
	if s.Receive() {
		seen.Given = append(seen.Given, "the log's events from "+at)
	} else if s.Err() != nil {
		seen.Refusal = s.Err().Error()
	}
}

// subscriptions are attempts to have the events from a leader of a site.
func subscriptions() []Attempt {
	asks := func(name, at string, from Place, guard Guard, who func(*Field) (*person, error)) Attempt {
		return Attempt{Name: name, From: from, Guard: guard, Judge: given,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				if err := f.inSites(ctx); err != nil {
					return seen, err
				}
				p, err := who(f)
				if err == nil {
					p.subscribes(ctx, at, &seen)
				}
				return seen, err
			}}
	}
	mallory := func(f *Field) (*person, error) {
		return f.person(f.mallory.key, f.mallory.wg, f.mallory.ns, true), nil
	}
	return []Attempt{
		asks("subscribe at the leader of another site", victim, Member, Passing, mallory),
		asks("subscribe at a node that leads no site", mate, Member, Passing, mallory),
		asks("subscribe at a site's leader with an identity of its own", victim, Stranger, Roster, strangerInTunnel),
		asks("subscribe at a site's leader", victim, Revoked, Roster, exileInTunnel),
		asks("subscribe at the leader that is its host, with a member's key", victim, Pod, PodSources, memberInPod),
		{Name: "subscribe at its site's leader many times", From: Member, Guard: Passing,
			Try: func(ctx context.Context, f *Field) (Seen, error) { return f.manyStreams(ctx) }, Judge: bounded("streams")},
		{Name: "be kept in a leader's subscription that was open when it was revoked", From: Revoked, Guard: Passing,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				if err := f.inSites(ctx); err != nil {
					return Seen{}, err
				}
				return f.keepSubscription(ctx, victim, "home")
			}, Judge: given},
	}
}

// manyStreams opens streams at the victim, which leads the member's site, each by a connection of its own, and counts
// those that the victim goes on serving once all are open.
func (f *Field) manyStreams(ctx context.Context) (seen Seen, err error) {
	const streams = 6
	if err := f.inSites(ctx); err != nil {
		return seen, err
	}
	p, err := f.siteOf(ctx, "many", "home")
	if err != nil {
		return seen, err
	}
	if err := f.refresh(ctx); err != nil {
		return seen, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var open []*connect.ServerStreamForClient[skeinv1.SubscribeResponse]
	for range streams {
		again := f.person(p.key, p.wg, p.ns, false)
		if err := until(ctx, 2*patience, func() error {
			s, err := again.cluster(victim).Subscribe(ctx, &skeinv1.SubscribeRequest{After: f.members.GetIndex()})
			if err != nil {
				return err
			}
			if !s.Receive() {
				return cmp.Or(s.Err(), errors.New("the stream ends"))
			}
			open = append(open, s)
			return nil
		}); err != nil {
			return seen, fmt.Errorf("stream %d of %d does not begin: %w", len(open)+1, streams, err)
		}
	}
	if _, err := f.commit(ctx); err != nil {
		return seen, err
	}
	served := make(chan bool, streams)
	for _, s := range open {
		go func() {
			got := false
			for s.Receive() { // until time is over, or the victim ends it
				for _, e := range s.Msg().GetBatch().GetEvents() {
					got = got || e.GetTokenCreated() != nil
				}
			}
			served <- got
		}()
	}
	pause.For(ctx, 2*time.Second)
	cancel()
	for range open {
		if <-served {
			seen.Count++
		}
	}
	seen.Bound = 1
	if seen.Count == 0 {
		err = errors.New("no stream brings what is agreed")
	}
	return seen, err
}
