package hold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// MaxPackets is the most packets that are queued: 1.6 s of 10,000 packets a second.
const MaxPackets = 16384

// Numbers of linux/netfilter/nfnetlink_queue.h and linux/netfilter.h.
const (
	subsystem  = 3 // NFNL_SUBSYS_QUEUE
	msgPacket  = 0
	msgVerdict = 1
	msgConfig  = 2

	packetHeader  = 1 // NFQA_PACKET_HDR: id, protocol, hook
	verdictHeader = 2
	attrMark      = 3

	configCommand = 1
	configParams  = 2
	configMaxLen  = 3
	configMask    = 4
	configFlags   = 5

	commandBind = 1
	copyMeta    = 1
	flagGSO     = 1 << 2 // large packets stay whole

	accept = 1 // NF_ACCEPT
)

const (
	receiveBuffer = 64 << 20 // bytes: messages about MaxPackets packets, of about 2 kB each with the kernel's overhead
	batch         = 256      // verdicts per system call
	quiet         = 5 * time.Millisecond
)

// ErrClosed is returned by methods of a closed queue.
var ErrClosed = errors.New("the queue of held packets is closed")

// Queue is an open queue.
type Queue struct {
	c     *nfnl.Conn
	queue uint16
	log   *slog.Logger
	done  chan struct{} // the reader has ended

	mu      sync.Mutex
	waiting []packet // by arrival
	all     bool     // all packets are released
	passing map[uint32]bool
	w       nfnl.Writer
	closed  bool
	broken  error
}

type packet struct{ id, mark uint32 }

// Open takes over a queue of the network namespace at path; "" is the calling thread's own. It fails if another
// process has the queue.
func Open(path string, queue uint16, log *slog.Logger) (*Queue, error) {
	c, err := nfnl.DialPath(path, receiveBuffer)
	if err != nil {
		return nil, fmt.Errorf("queue %d for held packets: %w", queue, err)
	}
	q := &Queue{c: c, queue: queue, log: log, done: make(chan struct{}), passing: map[uint32]bool{}}
	if err := q.configure(); err != nil {
		c.Close()
		return nil, fmt.Errorf("taking over queue %d for held packets: %w", queue, err)
	}
	go q.read()
	return q, nil
}

func (q *Queue) configure() error {
	var w nfnl.Writer
	for seq, add := range []func(){
		func() { w.Bytes(configCommand, []byte{commandBind, 0, 0, 0}) },
		func() {
			w.Bytes(configParams, []byte{0, 0, 0, 0, copyMeta})
			w.Uint32(configMaxLen, MaxPackets)
			w.Uint32(configMask, flagGSO)
			w.Uint32(configFlags, flagGSO)
		},
	} {
		w.B = w.B[:0]
		w.Begin(subsystem, msgConfig, unix.NLM_F_ACK, uint32(seq), unix.AF_UNSPEC, q.queue)
		add()
		w.End()
		if err := q.c.Send(w.B); err != nil {
			return err
		}
		if err := q.acknowledged(uint32(seq)); err != nil {
			return err
		}
	}
	return q.c.Option(unix.NETLINK_NO_ENOBUFS)
}

func (q *Queue) acknowledged(seq uint32) error {
	b := make([]byte, 1<<16)
	for {
		got, err := q.c.Receive(b)
		if err != nil {
			return err
		}
		for m := range nfnl.Messages(got) {
			errno, ok := m.Err()
			switch {
			case !ok || m.Seq != seq:
				q.note(m) // packets may arrive as soon as the queue is bound
			case errno == unix.EPERM || errno == unix.EBUSY:
				return fmt.Errorf("%w: another process has it, or this one lacks CAP_NET_ADMIN", errno)
			case errno != 0:
				return errno
			default:
				return nil
			}
		}
	}
}

// read records packets until the queue is closed.
func (q *Queue) read() {
	defer close(q.done)
	b := make([]byte, 1<<16)
	for {
		got, err := q.c.Receive(b)
		q.mu.Lock()
		if err != nil && q.closed {
			q.drain(b)
			q.mu.Unlock()
			return
		}
		if err != nil {
			q.broken = fmt.Errorf("reading queue %d of held packets: %w", q.queue, err)
			q.mu.Unlock()
			q.log.Error("held packets are lost: their queue cannot be read", "queue", q.queue, "error", err)
			return
		}
		for m := range nfnl.Messages(got) {
			q.note(m)
		}
		err = q.flush()
		closed := q.closed
		q.mu.Unlock()
		if err != nil {
			q.log.Error("a released packet stays in its queue", "queue", q.queue, "error", err)
		}
		if closed {
			_ = q.c.Deadline(time.Now().Add(quiet))
		}
	}
}

// drain releases packets that arrived before the deadline of Close and were not yet read, since this process was
// delayed.
func (q *Queue) drain(b []byte) {
	for q.all {
		got, err := q.c.Waiting(b)
		if err != nil || got == nil {
			return // the socket is closed, or empty
		}
		for m := range nfnl.Messages(got) {
			q.note(m)
		}
		if err := q.flush(); err != nil {
			q.log.Error("a released packet stays in its queue", "queue", q.queue, "error", err)
			return
		}
	}
}

// note queues one packet, or adds its verdict to the next ones sent.
func (q *Queue) note(m nfnl.Message) {
	if m.Type != subsystem<<8|msgPacket {
		return
	}
	p, ok := decode(m.Attributes())
	switch {
	case !ok:
	case q.all || q.passing[p.mark]:
		q.pass(p)
	default:
		q.waiting = append(q.waiting, p)
	}
}

func decode(attributes []byte) (p packet, ok bool) {
	for typ, v := range nfnl.Attributes(attributes) {
		switch {
		case typ == packetHeader && len(v) >= 4:
			p.id, ok = binary.BigEndian.Uint32(v), true
		case typ == attrMark && len(v) == 4:
			p.mark = binary.BigEndian.Uint32(v)
		}
	}
	return p, ok
}

// pass adds the verdict that releases a packet, without its mark.
func (q *Queue) pass(p packet) {
	q.w.Begin(subsystem, msgVerdict, 0, 0, unix.AF_UNSPEC, q.queue)
	var v [8]byte
	binary.BigEndian.PutUint32(v[:], accept)
	binary.BigEndian.PutUint32(v[4:], p.id)
	q.w.Bytes(verdictHeader, v[:])
	if p.mark != 0 {
		q.w.Uint32(attrMark, 0)
	}
	q.w.End()
}

func (q *Queue) flush() error {
	if len(q.w.B) == 0 {
		return nil
	}
	err := q.c.Send(q.w.B)
	q.w.B = q.w.B[:0]
	if err != nil {
		return fmt.Errorf("accepting packets of queue %d: %w", q.queue, err)
	}
	return nil
}

// Waiting is the number of queued packets.
func (q *Queue) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// Release releases all packets in order of arrival, and later ones at once. It returns how many were queued.
func (q *Queue) Release() (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.all = true
	return q.release(func(packet) bool { return true })
}

// Accept is Release for the packets with one mark.
func (q *Queue) Accept(mark uint32) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.passing[mark] = true
	return q.release(func(p packet) bool { return p.mark == mark })
}

// Keep reverts Accept: packets with the mark that arrive from now on are queued.
func (q *Queue) Keep(mark uint32) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.passing, mark)
}

func (q *Queue) release(goes func(packet) bool) (n int, err error) {
	if q.closed {
		return 0, ErrClosed
	}
	var errs []error
	stay := q.waiting[:0]
	for _, p := range q.waiting {
		if !goes(p) {
			stay = append(stay, p)
			continue
		}
		q.pass(p)
		if n++; n%batch == 0 {
			errs = append(errs, q.flush())
		}
	}
	q.waiting = stay
	return n, errors.Join(append(errs, q.flush(), q.broken)...)
}

// Close closes the queue and drops queued packets. After Release it continues to release arriving packets until none
// has arrived for 5 ms; the rule must have been removed before.
func (q *Queue) Close() error {
	q.mu.Lock()
	if q.closed {
		q.mu.Unlock()
		return nil
	}
	q.closed = true
	released := q.all
	n := len(q.waiting)
	q.waiting = nil
	q.mu.Unlock()
	if released {
		_ = q.c.Deadline(time.Now().Add(quiet))
		select {
		case <-q.done:
		case <-time.After(time.Second): // the rule still exists: its packets are dropped from here on
		}
	}
	err := q.c.Close()
	<-q.done
	if n > 0 {
		q.log.Warn("packets that waited for a slot are dropped", "queue", q.queue, "packets", n)
	}
	return err
}
