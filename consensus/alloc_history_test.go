package consensus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// request is what one client wanted once: one request ID of one issuer, sent once or several times, to whichever nodes.
type request struct {
	id      string
	issuer  identity.ID
	client  int
	ask     ask
	objects []string // whose histories it belongs to
	command *skeinv1.Command

	mu   sync.Mutex
	sent []sending
	seen map[string]any // by a look: each object's state
}

// sending is one way of a request through a node. Its call and return are places in the order of all.
type sending struct {
	call, ret int64
	answer    *skeinv1.Answer
	err       error
}

func (s sending) refused() events.Code { return events.CodeOf(s.err) }

// recorder keeps what clients asked and learned.
type recorder struct {
	order    atomic.Int64
	mu       sync.Mutex
	requests []*request
}

func (r *recorder) begin(issuer identity.ID, client int, a ask, objects []string, c *skeinv1.Command) *request {
	q := &request{id: NewRequestID(), issuer: issuer, client: client, ask: a, objects: objects, command: proto.CloneOf(c)}
	q.command.RequestId = q.id
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests = append(r.requests, q)
	return q
}

// send proposes the request through a node, and notes what came of it.
func (r *recorder) send(ctx context.Context, q *request, n *Client) error {
	s := sending{call: r.order.Add(1)}
	s.answer, s.err = n.proposeFor(ctx, q.issuer, q.command)
	s.ret = r.order.Add(1)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sent = append(q.sent, s)
	return s.err
}

// outcome is what a request came to: the sendings that were answered, refused, and neither.
func (q *request) outcome() (answered, refused []sending, unknown int) {
	for _, s := range q.sent {
		switch {
		case s.err == nil:
			answered = append(answered, s)
		case s.refused() != "":
			refused = append(refused, s)
		default:
			unknown++
		}
	}
	return answered, refused, unknown
}

// named is what an answer says was done. A repeated answer shows what it is about as it is now, so that the rest may
// differ.
func named(a *skeinv1.Answer) *skeinv1.Answer {
	out := &skeinv1.Answer{RequestId: a.GetRequestId(), Index: a.GetIndex(), Grant: a.GetGrant()}
	for _, b := range a.GetBlocks() {
		out.Blocks = append(out.Blocks, &skeinv1.Block{Pool: b.GetPool(), Number: b.GetNumber(), Ipv4: b.GetIpv4(),
			Ipv6: b.GetIpv6(), Index: b.GetIndex()})
	}
	if v := a.GetStatic(); v != nil {
		out.Static = &skeinv1.StaticAddress{Pool: v.GetPool(), Ipv4: v.GetIpv4(), Ipv6: v.GetIpv6(), Index: v.GetIndex()}
	}
	if v := a.GetPool(); v != nil {
		out.Pool = &skeinv1.Pool{Name: v.GetName(), CreatedIndex: v.GetCreatedIndex()}
	}
	return out
}

// operations are what a request adds to the history of each of its objects. decided is the time of its events; 0 if it
// has none. A refusal is an operation of its own, since another sending of the request may be decided later and then
// do something; so is one that nobody was told of, which may take effect at any time and so never returns.
func (q *request) operations(decided int64) (out []porcupine.Operation, err error) {
	answered, refused, unknown := q.outcome()
	a := q.ask
	first := int64(math.MaxInt64)
	for _, s := range q.sent {
		first = min(first, s.call)
	}
	for _, s := range refused {
		out = append(out, porcupine.Operation{ClientId: q.client, Input: a, Call: s.call,
			Output: got{refused: s.refused()}, Return: s.ret})
	}
	a.at = decided
	switch {
	case len(answered) > 0:
		g, last := got{}, int64(math.MaxInt64)
		for _, s := range answered {
			last = min(last, s.ret)
			if !proto.Equal(named(s.answer), named(answered[0].answer)) {
				err = fmt.Errorf("request %s (%s) was answered twice and not alike:\n%v\n%v", q.id, describe(a, g),
					answered[0].answer, s.answer)
			}
		}
		for _, b := range answered[0].answer.GetBlocks() {
			g.blocks = g.blocks.with(int(b.GetNumber()))
		}
		out = append(out, porcupine.Operation{ClientId: q.client, Input: a, Call: first, Output: g, Return: last})
	case unknown > 0 || decided > 0:
		out = append(out, porcupine.Operation{ClientId: q.client, Input: a, Call: first, Output: got{unknown: true},
			Return: math.MaxInt64})
	}
	return out, err
}

// histories sorts the operations by object. decided tells the time of a request's events.
func (r *recorder) histories(decided map[string]int64) (map[string][]porcupine.Operation, error) {
	out := make(map[string][]porcupine.Operation)
	var all error
	for _, q := range r.requests {
		ops, err := q.operations(decided[q.id])
		all = errors.Join(all, err)
		for _, object := range q.objects {
			for _, op := range ops {
				if q.ask.do == look {
					if q.seen == nil || op.Output.(got).unknown {
						continue
					}
					op.Output = got{seen: q.seen[object]}
				}
				out[object] = append(out[object], op)
			}
		}
	}
	return out, all
}

// historyReport is what a checked history comes to.
type historyReport struct {
	Seed       uint64         `json:"seed"`
	Operations int            `json:"operations"`
	Unknown    int            `json:"unknown"`
	Refused    int            `json:"refused"`
	Sent       int            `json:"sent"`   // requests, repetitions included
	Events     int            `json:"events"` // in the log
	Faults     map[string]int `json:"faults"`
	Seconds    float64        `json:"checkSeconds"`
	Virtual    float64        `json:"virtualSeconds"`
}

// checkTimeout is for one object's history; one that takes longer proves nothing and fails.
const checkTimeout = 20 * time.Second

// checkHistories lets Porcupine look for an order of the operations that the model allows, and writes a history that
// has none, as a page to look at, into a directory that the failure names.
func checkHistories(t *testing.T, models map[string]porcupine.Model, histories map[string][]porcupine.Operation,
	r *historyReport) {
	t.Helper()
	began := time.Now()
	for _, object := range slices.Sorted(maps.Keys(models)) {
		ops := histories[object]
		if len(ops) < 10 {
			t.Errorf("the history of %s has %d operations only and says nothing", object, len(ops))
		}
		for _, op := range ops {
			r.Operations++
			if g := op.Output.(got); g.unknown {
				r.Unknown++
			} else if g.refused != "" {
				r.Refused++
			}
		}
		switch result, info := porcupine.CheckOperationsVerbose(models[object], ops, checkTimeout); result {
		case porcupine.Illegal:
			t.Errorf("the history of %s (%d operations) has no order that the model allows: open %s", object, len(ops),
				picture(t, object, r.Seed, models[object], info))
		case porcupine.Unknown:
			t.Errorf("the history of %s (%d operations) was not checked within %s", object, len(ops), checkTimeout)
		}
	}
	r.Seconds = time.Since(began).Seconds()
}

// picture writes Porcupine's page. SKEIN_TEST_HISTORIES names the directory; else it is a new one that stays.
func picture(t *testing.T, object string, seed uint64, m porcupine.Model, info porcupine.LinearizationInfo) string {
	t.Helper()
	dir, err := cmp.Or(os.Getenv("SKEIN_TEST_HISTORIES"), ""), error(nil)
	if dir == "" {
		dir, err = os.MkdirTemp("", "skein-history-")
	} else {
		err = os.MkdirAll(dir, 0o755)
	}
	path := filepath.Join(dir, fmt.Sprintf("%s-seed-%d.html", object, seed))
	if err == nil {
		err = porcupine.VisualizePath(m, info, path)
	}
	if err != nil {
		t.Error(err)
	}
	return path
}
