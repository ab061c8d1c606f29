package gossip

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// simNet is a control net in memory: seeded loss and delay, partitions, on the bubble's clock.
type simNet struct {
	mu       sync.Mutex
	rng      *rand.Rand
	inbox    int // packets that wait at a node at most; 0: 4096
	nodes    map[identity.ID]*simNode
	loss     float64
	minDelay time.Duration
	maxDelay time.Duration
	side     map[identity.ID]int // partitions: only equal sides talk
	mute     func(from, to identity.ID) bool
	packets  int
	bytes    int
	// dials under way now, and the most there were
	dials, mostDials int
	refuse           bool     // dials of nodes that are not there fail at once
	verified         sync.Map // signatures known to be good: each node of a process need not check them again
}

func newSimNet(seed uint64) *simNet {
	return &simNet{
		rng: rand.New(rand.NewPCG(seed, 1)), nodes: make(map[identity.ID]*simNode), side: make(map[identity.ID]int),
		minDelay: 5 * time.Millisecond, maxDelay: 40 * time.Millisecond,
	}
}

// simRoster is shared by the nodes that get it.
type simRoster struct {
	mu sync.Mutex
	m  map[identity.ID]ed25519.PublicKey
}

func newRoster(keys ...*identity.Key) *simRoster {
	r := &simRoster{m: make(map[identity.ID]ed25519.PublicKey)}
	for _, k := range keys {
		r.m[k.ID()] = k.Public()
	}
	return r
}

func (r *simRoster) Key(id identity.ID) (ed25519.PublicKey, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.m[id]
	return k, ok
}

func (r *simRoster) Members() (ids []identity.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.m {
		ids = append(ids, id)
	}
	return ids
}

func (r *simRoster) add(k *identity.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m[k.ID()] = k.Public()
}

func (r *simRoster) remove(id identity.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.m, id)
}

// simNode is one node's place in the net; it implements Transport and net.Listener.
type simNode struct {
	net     *simNet
	key     *identity.Key
	packets chan Packet
	sent    atomic.Int64 // packets
	bytes   atomic.Int64
	streams chan net.Conn
	closed  chan struct{}
	once    sync.Once
	g       *Gossip
}

type simConn struct {
	net.Conn
	peer identity.ID
}

func (c simConn) Peer() identity.ID { return c.peer }

func (s *simNet) join(key *identity.Key) *simNode {
	n := &simNode{net: s, key: key, packets: make(chan Packet, cmp.Or(s.inbox, 4096)), streams: make(chan net.Conn),
		closed: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes[key.ID()] = n
	return n
}

// route decides what happens to a message: the receiver, after which delay, or not at all.
func (s *simNet) route(from, to identity.ID, lossy bool) (*simNode, time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok := s.nodes[to]
	if !ok || s.side[from] != s.side[to] || s.mute != nil && s.mute(from, to) {
		return nil, 0, false
	}
	if lossy && s.rng.Float64() < s.loss {
		return nil, 0, false
	}
	return n, s.minDelay + time.Duration(s.rng.Int64N(int64(s.maxDelay-s.minDelay)+1)), true
}

func (n *simNode) SendPacket(to identity.ID, b []byte) error {
	if len(b) > defaultPacketBytes {
		panic(fmt.Sprintf("packet of %d bytes", len(b)))
	}
	n.net.mu.Lock()
	n.net.packets++
	n.net.bytes += len(b)
	n.net.mu.Unlock()
	n.sent.Add(1)
	n.bytes.Add(int64(len(b)))
	peer, delay, ok := n.net.route(n.key.ID(), to, true)
	if !ok {
		return nil
	}
	time.AfterFunc(delay, func() {
		select {
		case peer.packets <- Packet{From: n.key.ID(), Data: b, At: time.Now()}:
		default:
		}
	})
	return nil
}

// sent is how many packets all nodes have sent.
func (s *simNet) sent() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.packets
}

func (s *simNet) refuses() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refuse
}

func (s *simNet) dialing(change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dials += change
	s.mostDials = max(s.mostDials, s.dials)
}

func (n *simNode) Dial(ctx context.Context, to identity.ID, alpn string) (net.Conn, error) {
	if alpn != identity.ALPNGossip {
		return nil, fmt.Errorf("dialled ALPN %s", alpn)
	}
	n.net.dialing(1)
	defer n.net.dialing(-1)
	peer, delay, ok := n.net.route(n.key.ID(), to, false)
	if !ok && n.net.refuses() {
		return nil, errors.New("the relay says that it is not there")
	}
	if !ok {
		<-ctx.Done() // a partition swallows
		return nil, ctx.Err()
	}
	select {
	case <-time.After(2 * delay):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	ours, theirs := net.Pipe()
	select {
	case peer.streams <- simConn{theirs, n.key.ID()}:
		return simConn{ours, to}, nil
	case <-peer.closed:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (n *simNode) Accept() (net.Conn, error) {
	select {
	case c := <-n.streams:
		return c, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}
func (n *simNode) Close() error   { n.once.Do(func() { close(n.closed) }); return nil }
func (n *simNode) Addr() net.Addr { return &net.UDPAddr{} }

// verify is checkSignature, done once per record and process.
func (s *simNet) verify(r *skeinv1.SignedRecord, id identity.ID, roster Roster) error {
	if _, ok := roster.Key(id); !ok {
		return &RefusedError{Node: id, Reason: ErrUnknownNode}
	}
	h := sha256.New()
	h.Write(r.GetRecord())
	h.Write(r.GetSignature())
	sum := [32]byte(h.Sum(nil))
	if _, ok := s.verified.Load(sum); ok {
		return nil
	}
	err := checkSignature(r, id, roster)
	if err == nil {
		s.verified.Store(sum, true)
	}
	return err
}

func simKey(i int) *identity.Key {
	seed := make([]byte, 32)
	binary.BigEndian.PutUint64(seed, uint64(i)+1)
	return identity.KeyFromSeed(seed)
}

func gossipKeys(primary byte, accepted ...byte) *skeinv1.GossipKeys {
	k := &skeinv1.GossipKeys{Primary: make([]byte, 32)}
	k.Primary[0] = primary
	for _, a := range accepted {
		old := make([]byte, 32)
		old[0] = a
		k.Accepted = append(k.Accepted, old)
	}
	return k
}

func simRecord(site string) *skeinv1.Record {
	return &skeinv1.Record{
		Site: site, WireguardKey: make([]byte, 32), Version: "test", NatType: skeinv1.NatType_NAT_TYPE_FULL_CONE,
		Candidates: []*skeinv1.Candidate{
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: "192.168.1.10:51820", Priority: 100, Source: "interface"},
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "198.51.100.7:51820", Priority: 200, Source: "stun"},
		},
		Labels: map[string]string{"topology.kubernetes.io/region": "r1"},
	}
}

// sim is a mesh of running nodes.
type sim struct {
	t      testing.TB
	net    *simNet
	roster *simRoster
	nodes  []*simNode
}

// newSim starts n nodes that share a roster, with a first record each.
func newSim(t testing.TB, n int, seed uint64) *sim {
	s := &sim{t: t, net: newSimNet(seed), roster: newRoster()}
	for i := range n {
		s.roster.add(simKey(i))
	}
	for i := range n {
		s.start(i, Config{})
	}
	return s
}

// start runs node i, and has it publish a record.
func (s *sim) start(i int, c Config) *simNode {
	s.t.Helper()
	n := s.startSilent(i, c)
	if err := n.g.Publish(simRecord(fmt.Sprintf("site-%d", i))); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// startSilent runs node i; fields of c that are set win over the simulation's own.
func (s *sim) startSilent(i int, c Config) *simNode {
	s.t.Helper()
	n := s.net.join(simKey(i))
	c.Self, c.Key, c.Transport, c.Streams, c.Packets, c.verify = n.key.ID(), n.key, n, n, n.packets, s.net.verify
	if c.Roster == nil {
		c.Roster = s.roster
	}
	if c.Keys == nil {
		c.Keys = gossipKeys(1)
	}
	if c.Epoch == 0 {
		c.Epoch = 1
	}
	g, err := Start(c)
	if err != nil {
		s.t.Fatal(err)
	}
	n.g = g
	for len(s.nodes) <= i {
		s.nodes = append(s.nodes, nil)
	}
	s.nodes[i] = n
	return n
}

// stop ends node i as a crash would.
func (s *sim) stop(i int) {
	n := s.nodes[i]
	s.net.mu.Lock()
	delete(s.net.nodes, n.key.ID())
	s.net.mu.Unlock()
	n.g.stop(false)
	s.nodes[i] = nil
}

// end stops everything and lets what is under way run out, which the bubble demands.
func (s *sim) end() {
	var wg sync.WaitGroup
	for _, n := range s.nodes {
		if n != nil {
			wg.Go(func() { n.g.stop(false) })
		}
	}
	wg.Wait()
	time.Sleep(time.Minute)
}

// within waits on the bubble's clock for a condition and returns how long it took.
func (s *sim) within(d time.Duration, what string, ok func() bool) time.Duration {
	s.t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > d {
			s.explain()
			s.t.Fatalf("not within %s: %s", d, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return time.Since(start)
}

// explain logs what the first nodes think, for a test that failed.
func (s *sim) explain() {
	for i, n := range s.nodes[:min(len(s.nodes), 8)] {
		if n != nil {
			h := n.g.Hash()
			s.t.Logf("node %d %s: hash %x, %d records, %d alive, %+v", i, n.key.ID(), h[:4], len(n.g.Records()),
				n.g.aliveCount(), n.g.Stats())
		}
	}
}

// agreed: all the given nodes hold the records of all of them, the same.
func (s *sim) agreed(nodes []*simNode) func() bool {
	return func() bool {
		for _, n := range nodes {
			if n.g.Hash() != nodes[0].g.Hash() || len(n.g.Records()) < len(nodes) {
				return false
			}
		}
		return true
	}
}

// meshed: each of the given nodes sees the others alive.
func (s *sim) meshed(nodes []*simNode) func() bool {
	return func() bool {
		for _, n := range nodes {
			for _, m := range nodes {
				if !n.g.Alive(m.key.ID()) {
					return false
				}
			}
		}
		return true
	}
}

// sees: every given node holds that site in the record of the node.
func sees(nodes []*simNode, of identity.ID, site string) func() bool {
	return func() bool {
		for _, n := range nodes {
			if n.g.Records()[of].Record.GetSite() != site {
				return false
			}
		}
		return true
	}
}

// aliveCount is how many nodes the pools see alive, those in both counted once or twice.
func (g *Gossip) aliveCount() (n int) {
	for _, p := range g.pools() {
		n += p.alive.count()
	}
	return n
}
