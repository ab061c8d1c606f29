package consensus

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
)

const (
	dialMost  = 15 * time.Second // of one dial; Raft waits no longer than peerTimeout for it
	dialAgain = time.Second      // after one that failed while nobody waits for it, then doubling
	dialRare  = time.Minute
	dialsMost = 4 // looks at what there is within one request: another request may have taken a stream, or it has ended
)

// outgoing lets Raft's transport dial over the control net. Nothing comes in by it: see inbound.
//
// Raft dials when it needs a stream, and gives up after peerTimeout. Between followers that would be in an election, in
// which hosts with too much to do would never get one, since each election began its dials anew. So a dial goes on when
// Raft waits no longer, and each server that may be needed has a stream that stands ready.
type outgoing struct {
	self    identity.ID
	dialer  Dialer
	replica *Replica
	ctx     context.Context // ends with Close
	end     context.CancelFunc

	mu    sync.Mutex
	peers map[identity.ID]*standing
}

// standing is what there is of streams to one server. The mutex of outgoing guards it.
type standing struct {
	wanted bool          // a stream shall stand ready
	open   int           // streams that Raft has
	spare  *outConn      // one that it has not asked for
	dial   chan struct{} // closed when the dial under way ends; nil: there is none
	err    error         // of the last dial
	fails  int           // dials in a row that brought no stream that Raft could use
	again  *time.Timer   // the next dial that nobody waits for; nil: none is due
}

func newOutgoing(self identity.ID, dialer Dialer, replica *Replica) *outgoing {
	l := &outgoing{self: self, dialer: dialer, replica: replica, peers: map[identity.ID]*standing{}}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// Dial gives a stream to a server. Raft dials whom its configuration names; a revoked node stays there until a leader
// has taken it out, and gets nothing more meanwhile.
func (l *outgoing) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, err := identity.ParseID(string(address))
	if err != nil {
		return nil, fmt.Errorf("dial Raft peer: %w", err)
	}
	if err := l.check(id); err != nil {
		return nil, err
	}
	ctx := l.ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	for range dialsMost {
		c, pending := l.take(id)
		if c != nil {
			if c.ready() {
				l.used(id)
				return c, nil
			}
			c.Close()
			continue
		}
		select {
		case <-pending:
			if err := l.failed(id); err != nil {
				return nil, err
			}
		case <-ctx.Done():
			if l.ctx.Err() != nil {
				return nil, net.ErrClosed
			}
			return nil, fmt.Errorf("dial node %s: it takes longer than %s", id, timeout)
		}
	}
	return nil, fmt.Errorf("dial node %s: each stream ended at once", id) // Raft knows when to try again
}

// take gives the stream that stands ready, or else what ends with the dial that is under way then.
func (l *outgoing) take(id identity.ID) (c *outConn, pending <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.peer(id)
	if c := p.spare; c != nil {
		p.spare = nil
		p.open++
		return c, nil
	}
	l.begin(id, p)
	return nil, p.dial
}

func (l *outgoing) used(id identity.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peer(id).fails = 0
}

// failed is why there is no stream after a dial; nil: there may be one.
func (l *outgoing) failed(id identity.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.peer(id); p.spare == nil {
		return p.err
	}
	return nil
}

// keep has a stream to each of these servers stand ready, and none to any other.
func (l *outgoing) keep(ids []identity.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	want := map[identity.ID]bool{}
	for _, id := range ids {
		if id != l.self {
			want[id] = true
			l.peer(id)
		}
	}
	for id, p := range l.peers {
		p.wanted = want[id]
		l.settle(id, p)
	}
}

// settle dials where a stream is missing and not due later, and closes one that nobody wants. The caller has the lock.
func (l *outgoing) settle(id identity.ID, p *standing) {
	switch {
	case !p.wanted && p.spare != nil:
		c := p.spare
		p.spare = nil
		go c.Conn.Close()
	case p.wanted && p.open == 0 && p.spare == nil && p.again == nil:
		l.begin(id, p)
	case !p.wanted && p.again != nil:
		p.again.Stop()
		p.again = nil
	}
}

func (l *outgoing) peer(id identity.ID) *standing {
	p := l.peers[id]
	if p == nil {
		p = &standing{}
		l.peers[id] = p
	}
	return p
}

// begin dials unless a dial is under way. The caller has the lock.
func (l *outgoing) begin(id identity.ID, p *standing) {
	if p.dial != nil {
		return
	}
	if p.again != nil {
		p.again.Stop()
		p.again = nil
	}
	done := make(chan struct{})
	p.dial = done
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, dialMost)
		defer cancel()
		var c net.Conn
		err := l.check(id)
		if err == nil {
			c, err = l.dialer.Dial(ctx, id, identity.ALPNRaft)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		p.dial, p.err = nil, err
		close(done)
		switch {
		case err != nil:
			l.later(id, p)
		case l.ctx.Err() != nil:
			c.Close()
		default:
			p.spare = &outConn{Conn: c, layer: l, peer: id}
			p.spare.watch()
		}
	}()
}

// later dials again after a while, if a stream is wanted then. The caller has the lock.
func (l *outgoing) later(id identity.ID, p *standing) {
	if l.ctx.Err() == nil && p.wanted && p.again == nil {
		p.again = time.AfterFunc(min(dialRare, dialAgain<<min(p.fails, 10)), func() { l.retry(id) })
	}
	p.fails++
}

func (l *outgoing) retry(id identity.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.peers[id]; p != nil && l.ctx.Err() == nil {
		p.again = nil
		l.settle(id, p)
	}
}

// lost forgets a stream that stood ready and ended.
func (l *outgoing) lost(c *outConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.peers[c.peer]
	if p == nil || p.spare != c {
		return // whoever took it sees for itself
	}
	p.spare = nil
	c.Conn.Close()
	l.later(c.peer, p) // the other end stopped, or takes none from here
}

func (l *outgoing) check(id identity.ID) error {
	if l.replica.State().Revoked(id) != nil {
		return fmt.Errorf("node %s was revoked", id)
	}
	return nil
}

func (l *outgoing) Accept() (net.Conn, error) {
	<-l.ctx.Done()
	return nil, net.ErrClosed
}

// Close ends dials and the streams that stand ready; those that Raft has are its own.
func (l *outgoing) Close() error {
	l.end()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.peers {
		if p.again != nil {
			p.again.Stop()
		}
		if p.spare != nil {
			p.spare.Conn.Close()
			p.spare = nil
		}
	}
	return nil
}

func (l *outgoing) Addr() net.Addr { return nodeAddr(l.self) }

// outConn is a stream that this server opened. It carries nothing more to a node that was revoked since.
type outConn struct {
	net.Conn
	layer *outgoing
	peer  identity.ID
	ended chan error // what a read of the stream ended with while it stood ready
	once  sync.Once
}

var errSpoke = errors.New("the other end spoke before it was asked")

// watch notices when a stream that stands ready ends: the other end has nothing to say by it.
func (c *outConn) watch() {
	c.ended = make(chan error, 1)
	go func() {
		var b [1]byte
		_, err := c.Conn.Read(b[:])
		if err == nil {
			err = errSpoke
		}
		c.ended <- err
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			c.layer.lost(c)
		}
	}()
}

// ready ends the watch, and tells whether the stream has not ended.
func (c *outConn) ready() bool {
	if c.Conn.SetReadDeadline(time.Unix(1, 0)) != nil {
		return false
	}
	return errors.Is(<-c.ended, os.ErrDeadlineExceeded) && c.Conn.SetReadDeadline(time.Time{}) == nil
}

func (c *outConn) Write(b []byte) (int, error) {
	if err := c.layer.check(c.peer); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *outConn) Close() error {
	c.once.Do(func() {
		l := c.layer
		l.mu.Lock()
		defer l.mu.Unlock()
		p := l.peers[c.peer]
		if p.open--; l.ctx.Err() == nil {
			l.settle(c.peer, p)
		}
	})
	return c.Conn.Close()
}
