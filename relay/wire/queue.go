package wire

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// batchBytes is at most four TLS records: few enough that a control frame hardly waits, and enough that
	// the taker need not fight for the queue's lock with those who flood it.
	batchBytes = 64 << 10
	// quantum is what a flow may send per round; a full-sized packet fits.
	quantum = 2 << 10
	// maxAge ends a packet's wait: later than this a copy has been sent or nobody wants it any more.
	maxAge = time.Second
	// A flow whose packets have waited longer than the queue's standing for as long as patience has more than its way
	// can carry: a longer queue would not carry more, only later.
	patience = 100 * time.Millisecond
	// smallPacket is the buffer of nearly all packets. Larger ones have a class of their own.
	smallPacket = 2 << 10
	// controlBytes bounds the control frames that wait for one session.
	controlBytes = 256 << 10
)

// packet waits in a queue.
type packet struct {
	next    *packet
	at      time.Duration // when it was queued
	channel byte
	kind    FrameType   // 0: data
	other   identity.ID // of another kind: the second node in the frame
	n       int
	buf     []byte
}

// PacketPool lends packet buffers in two sizes, and batches to write.
type PacketPool struct {
	small, large, batches sync.Pool
	Budget
}

func (pp *PacketPool) get(n int) *packet {
	pool, size := &pp.small, smallPacket
	if n > smallPacket {
		pool, size = &pp.large, maxFrame
	}
	pp.Used.Add(int64(size))
	if p, _ := pool.Get().(*packet); p != nil {
		return p
	}
	return &packet{buf: make([]byte, size)}
}

func (pp *PacketPool) put(p *packet) {
	p.next = nil
	pp.Used.Add(-int64(len(p.buf)))
	if len(p.buf) == smallPacket {
		pp.small.Put(p)
	} else {
		pp.large.Put(p)
	}
}

// batch lends a buffer for take.
func (pp *PacketPool) batch() *[]byte {
	if b, _ := pp.batches.Get().(*[]byte); b != nil {
		return b
	}
	b := make([]byte, 0, batchBytes+maxFrame)
	return &b
}

// done takes a batch back.
func (pp *PacketPool) done(b *[]byte) {
	if cap(*b) <= 4*maxFrame {
		pp.batches.Put(b)
	}
}

// flow is the packets of one node in a lane.
type flow struct {
	id         identity.ID
	head, tail *packet
	bytes      int // memory held
	deficit    int
	late       time.Duration // since when packets have left later than standing; 0: the last one did not
	prev, next *flow         // ring of the lane's flows that have packets
}

// lane serves its flows in turn (deficit round robin), so that one who floods costs others little.
// When it is full, the oldest packet of the longest flow is dropped.
type lane struct {
	flows    map[identity.ID]*flow
	turn     *flow // whose turn it is
	fattest  *flow // approximately: kept at pushes, and pops take from all alike
	spare    *flow // empty ones, as many as there once were at a time
	packets  int
	bytes    int
	maxCount int
	maxBytes int
}

// Queue is what waits for one session: control frames, packets of the control net, WireGuard's packets.
// Many push, one takes.
type Queue struct {
	mu       sync.Mutex
	pool     *PacketPool
	control  []byte
	lanes    [2]lane // urgent, bulk
	closed   bool
	sealed   bool // takes no more packets
	standing time.Duration
	taken    uint64 // bytes
	granted  uint64 // up to which byte packets may be taken; control frames always may

	sleeping  atomic.Bool
	wake      chan struct{}
	dropped   atomic.Uint64 // packets
	sent      atomic.Uint64 // packets
	sentBytes atomic.Uint64
}

const (
	laneUrgent = 0
	laneBulk   = 1
)

// NewQueue makes a queue of so many of WireGuard's packets and bytes, and a quarter as many of the control net's, whose
// memory is pool's. standing is how long packets may wait for more than a moment.
func NewQueue(pool *PacketPool, maxPackets, maxBytes int, standing time.Duration) *Queue {
	q := &Queue{pool: pool, standing: standing, wake: make(chan struct{}, 1), granted: unlimited}
	for i := range q.lanes {
		q.lanes[i] = lane{flows: map[identity.ID]*flow{}, maxCount: maxPackets, maxBytes: maxBytes}
	}
	// The control net needs little; a quarter keeps a flood on its channels from holding much.
	q.lanes[laneUrgent].maxCount, q.lanes[laneUrgent].maxBytes = max(maxPackets/4, 16), max(maxBytes/4, 2*maxFrame)
	return q
}

// PushControl queues a control frame that add appends. It is refused when too many wait already.
func (q *Queue) PushControl(add func([]byte) []byte) bool {
	q.mu.Lock()
	ok := !q.closed && len(q.control) < controlBytes
	if ok {
		n := len(q.control)
		q.control = add(q.control)
		q.pool.Used.Add(int64(len(q.control) - n))
	}
	q.mu.Unlock()
	q.Kick()
	return ok
}

// Push queues a copy of a packet and drops the oldest when full. It is false when the queue is sealed or closed.
// The caller kicks when its burst ends.
func (q *Queue) Push(now time.Duration, node identity.ID, channel byte, payload []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.Add(now, node, channel, payload)
}

// Add is Push for a caller that holds the lock over a burst.
func (q *Queue) Add(now time.Duration, node identity.ID, channel byte, payload []byte) bool {
	return q.AddKind(now, 0, identity.ID{}, node, channel, payload)
}

// AddKind is Add for a packet that travels in another frame than data: other is the second node in it.
func (q *Queue) AddKind(now time.Duration, kind FrameType, other, node identity.ID, channel byte, payload []byte) bool {
	if q.sealed {
		return false
	}
	p := q.pool.get(len(payload))
	p.at, p.channel, p.kind, p.other, p.n = now, channel, kind, other, copy(p.buf, payload)
	l := &q.lanes[laneBulk]
	if channel != ChannelWireGuard {
		l = &q.lanes[laneUrgent]
	}
	l.push(node, p)
	for most := min(l.maxBytes, q.pool.allow()); l.packets > l.maxCount || l.bytes > most; {
		f := l.fattest
		if f == nil || f.head == nil {
			f = l.flows[node]
		}
		q.dropped.Add(1)
		q.pool.put(l.pop(f))
	}
	return true
}

// Kick wakes the taker if it sleeps.
func (q *Queue) Kick() {
	if q.sleeping.CompareAndSwap(true, false) {
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
}

// Lock lets the caller add a burst.
func (q *Queue) Lock() { q.mu.Lock() }

// Unlock ends what Lock began.
func (q *Queue) Unlock() { q.mu.Unlock() }

// Waiting tells how many of WireGuard's packets wait. The caller holds the lock.
func (q *Queue) Waiting() int { return q.lanes[laneBulk].packets }

// Sealed tells whether the queue takes no more packets. The caller holds the lock.
func (q *Queue) Sealed() bool { return q.sealed }

// Limited tells whether what is taken is limited by a window. The caller holds the lock.
func (q *Queue) Limited() bool { return q.granted != unlimited }

// Dropped counts the packets that were dropped.
func (q *Queue) Dropped() uint64 { return q.dropped.Load() }

// Sent counts the packets that were taken to be written.
func (q *Queue) Sent() uint64 { return q.sent.Load() }

// SentBytes counts their bytes.
func (q *Queue) SentBytes() uint64 { return q.sentBytes.Load() }

// next waits until something is queued and returns a batch of whole frames, of about limit bytes, to be given back to
// the pool. It is nil at the end.
func (q *Queue) next(limit int, now func() time.Duration) *[]byte {
	for {
		if batch := q.gather(limit, now); batch == nil || len(*batch) > 0 {
			return batch
		}
		<-q.wake
	}
}

// gather is take that does not wait: its batch is empty when nothing is queued.
func (q *Queue) gather(limit int, now func() time.Duration) *[]byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	batch := q.pool.batch()
	b := (*batch)[:0]
	if len(q.control) > 0 {
		b = append(b, q.control...)
		q.dropControl()
	}
	if q.granted > q.taken {
		t, room := now(), int(min(uint64(limit), q.granted-q.taken))
		// Half a batch for the control net while WireGuard's packets wait; neither starves.
		b = q.drain(laneUrgent, b, len(b)+room/2, t)
		b = q.drain(laneBulk, b, max(len(b), room), t)
		b = q.drain(laneUrgent, b, max(len(b), room), t)
	}
	q.taken += uint64(len(b))
	*batch = b
	if len(b) == 0 {
		q.sleeping.Store(true)
		q.pool.batches.Put(batch)
		return &nothing
	}
	return batch
}

// nothing is the empty batch.
var nothing []byte

// dropControl forgets the control frames. The caller holds mu.
func (q *Queue) dropControl() {
	q.pool.Used.Add(-int64(len(q.control)))
	if q.control = q.control[:0]; cap(q.control) > smallPacket {
		q.control = nil
	}
}

// Grant lets packets be taken up to a byte.
func (q *Queue) Grant(granted uint64) {
	q.mu.Lock()
	q.granted = granted
	q.mu.Unlock()
	q.Kick()
}

func (q *Queue) drain(which int, b []byte, limit int, now time.Duration) []byte {
	l := &q.lanes[which]
	for l.turn != nil {
		f := l.turn
		if f.overdue(now, q.standing) {
			q.dropped.Add(1)
			q.pool.put(l.pop(f))
			continue
		}
		size := HeaderSize + farPrefix + f.head.n
		if len(b) > 0 && len(b)+size > limit {
			break
		}
		if f.deficit < size {
			f.deficit += quantum
			l.turn = f.next
			continue
		}
		f.deficit -= size
		id := f.id
		p := l.pop(f)
		if p.kind == 0 {
			b = AppendData(b, id, p.channel, p.buf[:p.n])
		} else {
			b = AppendFar(b, p.kind, p.other, id, p.channel, p.buf[:p.n])
		}
		q.sent.Add(1)
		q.sentBytes.Add(uint64(p.n))
		q.pool.put(p)
	}
	return b
}

// overdue tells whether a flow's oldest packet has waited too long to be sent.
func (f *flow) overdue(now, standing time.Duration) bool {
	age := now - f.head.at
	if age <= standing {
		f.late = 0
		return false
	}
	if f.late == 0 {
		f.late = now
	}
	return age > maxAge || now-f.late > patience
}

// Forget drops what a node has queued here.
func (q *Queue) Forget(node identity.ID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.lanes {
		l := &q.lanes[i]
		for f := l.flows[node]; f != nil; f = l.flows[node] {
			q.pool.put(l.pop(f))
		}
	}
}

// Discard drops all that a closed queue holds.
func (q *Queue) Discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropControl()
	for i := range q.lanes {
		for l := &q.lanes[i]; l.turn != nil; {
			q.pool.put(l.pop(l.turn))
		}
	}
}

// Unsent is a packet that a queue which cannot send it gave back.
type Unsent struct {
	Node    identity.ID
	Channel byte
	Payload []byte
}

// Reclaim empties the queue of packets, and returns them in order per flow.
func (q *Queue) Reclaim() []Unsent {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []Unsent
	for i := range q.lanes {
		l := &q.lanes[i]
		for l.turn != nil {
			id := l.turn.id
			p := l.pop(l.turn)
			if p.kind != FrameForwarded { // others' packets are not this node's to send
				all = append(all, Unsent{id, p.channel, append([]byte(nil), p.buf[:p.n]...)})
			}
			q.pool.put(p)
		}
	}
	return all
}

// Held tells what waits, and the window that limits what is taken.
func (q *Queue) Held() (bytes, packets int, window uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	bytes = len(q.control)
	for i := range q.lanes {
		bytes += q.lanes[i].bytes
		packets += q.lanes[i].packets
	}
	if q.Limited() {
		window = q.granted - min(q.taken, q.granted)
	}
	return bytes, packets, window
}

// Seal has the queue take no more packets. Control frames still leave.
func (q *Queue) Seal() {
	q.mu.Lock()
	q.sealed = true
	q.mu.Unlock()
}

// close ends the taker. What is still queued can be reclaimed.
func (q *Queue) close() {
	q.mu.Lock()
	q.closed, q.sealed = true, true
	q.mu.Unlock()
	q.Kick()
}

func (l *lane) push(id identity.ID, p *packet) {
	f := l.flows[id]
	if f == nil {
		f = l.spare
		if f == nil {
			f = &flow{}
		} else {
			l.spare = f.next
		}
		*f = flow{id: id}
		l.flows[id] = f
		l.enter(f)
	}
	if f.tail == nil {
		f.head = p
	} else {
		f.tail.next = p
	}
	f.tail = p
	f.bytes += len(p.buf)
	l.bytes += len(p.buf)
	l.packets++
	if l.fattest == nil || f.bytes > l.fattest.bytes {
		l.fattest = f
	}
}

// pop takes the oldest packet of a flow, and the flow out of the lane when it was the last.
func (l *lane) pop(f *flow) *packet {
	p := f.head
	f.head = p.next
	p.next = nil
	f.bytes -= len(p.buf)
	l.bytes -= len(p.buf)
	l.packets--
	if f.head == nil {
		f.tail = nil
		l.leave(f)
		delete(l.flows, f.id)
		if l.fattest == f {
			l.fattest = nil
		}
		f.next, l.spare = l.spare, f
	}
	return p
}

// enter puts a flow at the end of the round.
func (l *lane) enter(f *flow) {
	if l.turn == nil {
		f.prev, f.next, l.turn = f, f, f
		return
	}
	last := l.turn.prev
	f.prev, f.next = last, l.turn
	last.next, l.turn.prev = f, f
}

func (l *lane) leave(f *flow) {
	if f.next == f {
		l.turn = nil
	} else {
		f.prev.next, f.next.prev = f.next, f.prev
		if l.turn == f {
			l.turn = f.next
		}
	}
	f.prev, f.next = nil, nil
}
