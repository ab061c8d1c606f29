package reflexive

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/pion/stun/v3"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
)

// retransmit is when a question is sent, counted from its start: a lost packet costs a fraction of the whole.
var retransmit = [...]time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, 700 * time.Millisecond}

// errUnsupported is the answer of a server that cannot do a filtering test.
var errUnsupported = errors.New("the STUN server does not offer this test")

// asker matches answers with questions. Its owner feeds it what its socket receives.
type asker struct {
	send func(to netip.AddrPort, b []byte) error

	mu      sync.Mutex
	waiting map[stunmsg.TxID]*question
	echoes  map[stunmsg.TxID]chan struct{} // our own requests that a NAT may turn round
	gifts   map[stunmsg.TxID]chan struct{} // answers that others were asked to send, from wherever
}

type question struct {
	to     netip.AddrPort
	want   stunmsg.Want
	answer chan stunmsg.Response // holds one
}

func newAsker(send func(netip.AddrPort, []byte) error) *asker {
	return &asker{
		send:    send,
		waiting: make(map[stunmsg.TxID]*question),
		echoes:  make(map[stunmsg.TxID]chan struct{}),
		gifts:   make(map[stunmsg.TxID]chan struct{}),
	}
}

// deliver takes a datagram; what answers no question under way, or comes from where it may not, is dropped.
func (a *asker) deliver(from netip.AddrPort, b []byte) {
	if a.idle() {
		return
	}
	r, err := stunmsg.DecodeResponse(b, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
	if errors.Is(err, stunmsg.ErrNoAnswer) {
		a.came(a.echoes, r.Tx)
	}
	if err != nil {
		return
	}
	a.came(a.gifts, r.Tx)
	a.mu.Lock()
	defer a.mu.Unlock()
	q := a.waiting[r.Tx]
	if q == nil || !q.due(r) {
		return
	}
	select {
	case q.answer <- r:
	default: // an earlier copy is there
	}
}

func (a *asker) idle() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.waiting) == 0 && len(a.echoes) == 0 && len(a.gifts) == 0
}

// listen waits for one of our own requests to come back in; the channel is closed when it does.
func (a *asker) listen(tx stunmsg.TxID) (heard <-chan struct{}, stop func()) {
	return a.expect(a.echoes, tx)
}

// await waits for an answer that somebody else was asked to send.
func (a *asker) await(tx stunmsg.TxID) (heard <-chan struct{}, stop func()) {
	return a.expect(a.gifts, tx)
}

func (a *asker) expect(m map[stunmsg.TxID]chan struct{}, tx stunmsg.TxID) (<-chan struct{}, func()) {
	c := make(chan struct{})
	a.mu.Lock()
	m[tx] = c
	a.mu.Unlock()
	return c, func() {
		a.mu.Lock()
		delete(m, tx)
		a.mu.Unlock()
	}
}

func (a *asker) came(m map[stunmsg.TxID]chan struct{}, tx stunmsg.TxID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := m[tx]; c != nil {
		close(c)
		delete(m, tx)
	}
}

// due says whether an answer comes from where it may. A server that ignores the wish answers from where it was asked.
func (q *question) due(r stunmsg.Response) bool {
	switch {
	case r.From == q.to:
		return true
	case r.Code != 0:
		return false
	case q.want == stunmsg.OtherPort || q.want == stunmsg.SilentPort:
		return r.From.Addr() == q.to.Addr()
	case q.want == stunmsg.OtherAddress:
		return r.From.Addr() != q.to.Addr()
	default:
		return false
	}
}

// ask sends a binding request until it is answered or ctx ends. The second result is the round-trip time.
func (a *asker) ask(ctx context.Context, to netip.AddrPort, w stunmsg.Want) (stunmsg.Response, time.Duration, error) {
	q := &question{to: to, want: w, answer: make(chan stunmsg.Response, 1)}
	var tx stunmsg.TxID
	_, _ = rand.Read(tx[:])
	b, err := stunmsg.EncodeRequest(tx, w)
	if err != nil {
		return stunmsg.Response{}, 0, err
	}
	a.mu.Lock()
	a.waiting[tx] = q
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.waiting, tx)
		a.mu.Unlock()
	}()

	start := time.Now()
	var sent time.Time
	var sendErr error
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := 0; ; {
		select {
		case r := <-q.answer:
			return r, time.Since(sent), check(r, q)
		case <-timer.C:
			sent = time.Now()
			sendErr = a.send(to, b)
			if i++; i < len(retransmit) {
				timer.Reset(time.Until(start.Add(retransmit[i])))
			}
		case <-ctx.Done():
			if sendErr != nil {
				return stunmsg.Response{}, 0, fmt.Errorf("ask STUN server %s: %w", to, sendErr)
			}
			return stunmsg.Response{}, 0, fmt.Errorf("ask STUN server %s: no answer: %w", to, ctx.Err())
		}
	}
}

func check(r stunmsg.Response, q *question) error {
	switch {
	case r.Code == stun.CodeUnknownAttribute, r.Code == 0 && q.want != stunmsg.Here && r.From == q.to:
		return errUnsupported
	case r.Code != 0:
		return fmt.Errorf("STUN server %s answered with error %d", q.to, r.Code)
	default:
		return nil
	}
}

// answerOf makes a test's outcome of ask's.
func answerOf(err error) Answer {
	switch {
	case err == nil:
		return Received
	case errors.Is(err, context.DeadlineExceeded):
		return Silent
	default:
		return NotTested
	}
}
