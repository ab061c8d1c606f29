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
	dialAgain = time.Second      // after a failed dial that nobody waits for; doubles with each failure
	dialRare  = time.Minute
	dialsMost = 4 // tries of one request: another request may have taken the stream, or it has ended
)

// outgoing lets Raft's transport dial over the control net. Streams of other servers come in by inbound.
//
// Raft dials when it needs a stream, and gives up after peerTimeout. Followers need streams to each other only in an
// election. On overloaded hosts they would never get one, since each election would dial anew. So a dial continues
// after Raft has given up, and a stream is kept ready to each server that may need one.
type outgoing struct {
	self    identity.ID
	dialer  Dialer
	replica *Replica
	ctx     context.Context // ends with Close
	end     context.CancelFunc

	mu    sync.Mutex
	peers map[identity.ID]*standing
}

// standing holds the streams to one server. The mutex of outgoing guards it.
type standing struct {
	wanted bool          // a stream is to be kept ready
	open   int           // streams that Raft uses
	spare  *outConn      // the stream that is ready; nil: there is none
	dial   chan struct{} // closed when the current dial ends; nil: there is none
	err    error         // of the last dial
	fails  int           // dials in a row that gave Raft no usable stream
	again  *time.Timer   // starts the next dial that nobody waits for; nil: none is due
}

func newOutgoing(self identity.ID, dialer Dialer, replica *Replica) *outgoing {
	l := &outgoing{self: self, dialer: dialer, replica: replica, peers: map[identity.ID]*standing{}}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// Dial returns a stream to a server. Raft dials the nodes in its configuration. A revoked node stays there until a
// leader has removed it, and gets no stream meanwhile.
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
		c, pending := l.acquire(id)
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
	return nil, fmt.Errorf("dial node %s: each stream ended at once", id) // Raft decides when to try again
}

// acquire returns the stream that is ready, or a channel that is closed when the current dial ends. It begins that dial
// if there is none.
func (l *outgoing) acquire(id identity.ID) (c *outConn, pending <-chan struct{}) {
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

// failed returns why a dial gave no stream; nil: there may be one.
func (l *outgoing) failed(id identity.ID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.peer(id); p.spare == nil {
		return p.err
	}
	return nil
}

// keep keeps a stream ready to each of these servers, and to no other.
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
		l.maintain(id, p)
	}
}

// maintain dials if a wanted stream is missing and no later dial is due, and closes a ready stream that is not wanted.
// The caller holds the lock.
func (l *outgoing) maintain(id identity.ID, p *standing) {
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

// begin starts a dial unless one is in progress. The caller holds the lock.
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

// later schedules another dial, if a stream is wanted. The caller holds the lock.
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
		l.maintain(id, p)
	}
}

// lost forgets a ready stream that has ended.
func (l *outgoing) lost(c *outConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.peers[c.peer]
	if p == nil || p.spare != c {
		return // Raft has taken it and notices the end itself
	}
	p.spare = nil
	c.Conn.Close()
	l.later(c.peer, p) // the other end has stopped, or refuses streams of this server
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

// Close ends dials and closes the streams that are ready; Raft closes those that it uses.
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

// outConn is a stream that this server opened. It writes nothing to a node that was revoked since.
type outConn struct {
	net.Conn
	layer *outgoing
	peer  identity.ID
	ended chan error // the error with which watch's read ended
	once  sync.Once
}

var errSpoke = errors.New("the other end spoke before it was asked")

// watch notices when a ready stream ends. The other end sends nothing by it, so any data or error is the end, except
// for the deadline that ready sets.
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

// ready ends the watch, and reports whether the stream is still open.
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
			l.maintain(c.peer, p)
		}
	})
	return c.Conn.Close()
}
