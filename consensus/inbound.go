package consensus

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
)

// inbound receives the requests of other servers' Raft. The library's transport does not tell by which stream a request
// came, and believes the sender that the request names: a node that may open a stream could append entries in the
// leader's name. So each peer has a transport of its own, and the sender of each request is checked against the
// identity that the stream has proved.
type inbound struct {
	self   identity.ID
	in     net.Listener
	config raft.NetworkTransportConfig // of each peer's transport, apart from its streams
	sender func(identity.ID) error     // returns why a node may not send requests now; nil: it may
	log    *slog.Logger
	rpcs   chan raft.RPC
	done   chan struct{} // closed by Close

	beating   sync.WaitGroup // heartbeats that Raft is handling; Close waits for them
	mu        sync.Mutex
	heartbeat func(raft.RPC)
	peers     map[identity.ID]*peerStreams
	open      map[*inConn]bool // Close closes them, since the library would leave them open
	closed    bool
}

func newInbound(self identity.ID, in net.Listener, sender func(identity.ID) error, config raft.NetworkTransportConfig,
	log *slog.Logger) *inbound {
	return &inbound{self: self, in: in, sender: sender, config: config, log: log, rpcs: make(chan raft.RPC),
		done:  make(chan struct{}),
		peers: make(map[identity.ID]*peerStreams), open: make(map[*inConn]bool)}
}

// serve accepts streams until the listener is closed.
func (n *inbound) serve() {
	for {
		c, err := n.in.Accept()
		if err != nil {
			return
		}
		id, ok := peerOf(c)
		if !ok {
			err = errors.New("the other end is not known")
		} else {
			err = n.sender(id)
		}
		if err != nil {
			n.log.Warn("refused a Raft connection", "node", id, "error", err)
			c.Close()
			continue
		}
		n.hand(c, id)
	}
}

// hand gives a stream to its peer's transport. The first stream of a peer makes the transport.
func (n *inbound) hand(c net.Conn, id identity.ID) {
	s := &inConn{Conn: c, n: n, peer: id}
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		c.Close()
		return
	}
	n.open[s] = true
	p := n.peers[id]
	if p == nil {
		p = &peerStreams{self: n.self, in: make(chan net.Conn), closed: make(chan struct{})}
		n.peers[id] = p
		config := n.config
		config.Stream = p
		p.transport = raft.NewNetworkTransportWithConfig(&config)
		p.transport.SetHeartbeatHandler(func(r raft.RPC) { n.dispatch(id, r, n.handleHeartbeat) })
		go n.pass(id, p.transport)
	}
	n.mu.Unlock()
	select {
	case p.in <- s:
	case <-p.closed:
		s.Close()
	}
}

// pass gives one peer's requests to Raft.
func (n *inbound) pass(id identity.ID, t *raft.NetworkTransport) {
	for {
		select {
		case r := <-t.Consumer():
			n.dispatch(id, r, n.queue)
		case <-n.done:
			return
		}
	}
}

// dispatch gives a request to Raft if its sender may send it. It answers any other request with an error, and closes
// the peer's streams.
func (n *inbound) dispatch(id identity.ID, r raft.RPC, to func(raft.RPC)) {
	err := n.sender(id)
	if err == nil {
		err = checkClaim(id, r.Command)
	}
	if err != nil {
		n.log.Warn("refused a Raft request", "node", id, "request", fmt.Sprintf("%T", r.Command), "error", err)
		r.Respond(nil, err)
		n.drop(id) // nothing else of this peer is handled
		return
	}
	to(r)
}

func (n *inbound) queue(r raft.RPC) {
	select {
	case n.rpcs <- r:
	case <-n.done:
	}
}

// handleHeartbeat handles a heartbeat at once, ahead of requests that wait for the disk.
func (n *inbound) handleHeartbeat(r raft.RPC) {
	n.mu.Lock()
	f := n.heartbeat
	if n.closed {
		f = nil
	}
	if f != nil {
		n.beating.Add(1)
	}
	n.mu.Unlock()
	if f == nil {
		n.queue(r)
		return
	}
	defer n.beating.Done()
	f(r)
}

// checkClaim compares the sender that a request names with the proved one. Both of its names must be set: for a missing
// one the library would read older fields.
func checkClaim(id identity.ID, command any) error {
	r, ok := command.(raft.WithRPCHeader)
	if !ok {
		return fmt.Errorf("%T names no sender", command)
	}
	for _, name := range [][]byte{r.GetRPCHeader().ID, r.GetRPCHeader().Addr} {
		if string(name) != id.String() {
			return fmt.Errorf("it is sent in the name of %.40q", name)
		}
	}
	return nil
}

// drop closes a peer's streams.
func (n *inbound) drop(id identity.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.open {
		if c.peer == id {
			c.Conn.Close()
		}
	}
}

func (n *inbound) setHeartbeat(f func(raft.RPC)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.heartbeat = f
}

// Close receives nothing more, and waits until Raft has handled the heartbeats that it has: they may write a term, and
// the library does not wait for them when it shuts down.
func (n *inbound) Close() error {
	defer n.beating.Wait() // without mu
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	close(n.done)
	err := n.in.Close()
	for _, p := range n.peers {
		p.transport.Close()
	}
	for c := range n.open {
		c.Conn.Close()
	}
	return err
}

// peerStreams are the streams that one peer opened.
type peerStreams struct {
	self      identity.ID
	in        chan net.Conn
	once      sync.Once
	closed    chan struct{}
	transport *raft.NetworkTransport
}

func (p *peerStreams) Accept() (net.Conn, error) {
	select {
	case c := <-p.in:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Dial is never called: requests to a peer go by the transport that outgoing serves.
func (p *peerStreams) Dial(raft.ServerAddress, time.Duration) (net.Conn, error) {
	return nil, errors.New("streams that come in are for answers alone")
}

func (p *peerStreams) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *peerStreams) Addr() net.Addr { return nodeAddr(p.self) }

// inConn is an accepted stream. It ends when the other end may no longer send requests.
type inConn struct {
	net.Conn
	n    *inbound
	peer identity.ID
}

func (c *inConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if err := c.n.sender(c.peer); err != nil {
		return 0, err
	}
	return n, nil
}

func (c *inConn) Close() error {
	c.n.mu.Lock()
	delete(c.n.open, c)
	c.n.mu.Unlock()
	return c.Conn.Close()
}
