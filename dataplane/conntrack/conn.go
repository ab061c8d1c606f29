package conntrack

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// Batch is how many entries one system call writes.
const Batch = 128

// Of linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h.
const (
	subsystem = 1 // NFNL_SUBSYS_CTNETLINK
	msgNew    = 0
	msgGet    = 1
	msgDelete = 2
)

const (
	receiveBuffer = 8 << 20 // bytes
	readBytes     = 1 << 16
)

// Conn is the connection table of one network namespace.
type Conn struct {
	c   *nfnl.Conn
	w   nfnl.Writer
	seq uint32
	buf []byte
}

// Open opens the table of a network namespace, given by its file descriptor; 0 is the calling thread's.
func Open(ns int) (*Conn, error) { return opened(nfnl.Dial(ns, receiveBuffer)) }

// OpenPath opens the table of the network namespace at path; "" is the calling thread's.
func OpenPath(path string) (*Conn, error) { return opened(nfnl.DialPath(path, receiveBuffer)) }

func opened(c *nfnl.Conn, err error) (*Conn, error) {
	if err != nil {
		return nil, fmt.Errorf("connection table: %w", err)
	}
	return &Conn{c: c, buf: make([]byte, readBytes)}, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return c.c.Close() }

// begin adds a message to those that exchange sends next.
func (c *Conn) begin(typ uint8, flags uint16, family uint8) {
	c.seq++
	c.w.Begin(subsystem, typ, flags, c.seq, family, 0)
}

// exchange sends what was added since the message first, and gives heard what the kernel says of these messages, until
// it answers the last, or has sent all of a dump. An error of heard ends it; what is left is then answered to nobody.
func (c *Conn) exchange(first uint32, heard func(nfnl.Message, unix.Errno) error) error {
	b := c.w.B
	c.w.B = b[:0]
	if err := c.c.Send(b); err != nil {
		return err
	}
	for {
		b, err := c.c.Receive(c.buf)
		if err != nil {
			return err
		}
		for m := range nfnl.Messages(b) {
			errno, answer := m.Err()
			switch {
			case m.Seq-first > c.seq-first: // to an exchange that was broken off
				continue
			case errno == unix.EPERM:
				return fmt.Errorf("%w: this needs CAP_NET_ADMIN", errno)
			}
			if err := heard(m, errno); err != nil {
				return err
			}
			if answer && m.Seq == c.seq {
				return nil
			}
		}
	}
}

// ask sends the one message that was begun, and gives each the entries that come.
func (c *Conn) ask(each func(*Flow) error) error {
	c.w.End()
	var f Flow
	return c.exchange(c.seq, func(m nfnl.Message, errno unix.Errno) error {
		switch {
		case errno != 0:
			return errno
		case m.Type != subsystem<<8|msgNew:
			return nil
		}
		f = Decode(m.Attributes())
		return each(&f)
	})
}

// Dump gives each all entries, of both families; a Flow is good until each returns. An error of each ends the dump, and
// with it the Conn: it is only good for Close then.
func (c *Conn) Dump(each func(*Flow) error) error {
	c.begin(msgGet, unix.NLM_F_DUMP, unix.AF_UNSPEC)
	return c.ask(each)
}

// Get reads the entry that has t as either of its directions; there is false, without an error, when there is none.
func (c *Conn) Get(t Tuple) (f Flow, there bool, err error) {
	c.begin(msgGet, unix.NLM_F_ACK, t.family())
	t.encode(&c.w, ctaTupleOrig)
	err = c.ask(func(got *Flow) error {
		f, there = *got, true
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return Flow{}, false, nil
	}
	return f, there, err
}

// Create makes entries whose source is translated to where Reply leads: to its destination, and to its port there, or
// its identifier. It tells by index which the kernel refused. After an error it is not known what became of the others.
func (c *Conn) Create(flows []Flow) (refused map[int]unix.Errno, err error) {
	return c.write(len(flows), func(i int, ack uint16) {
		c.begin(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL|ack, flows[i].Original.family())
		flows[i].Encode(&c.w)
	})
}

// Key names the entry that has a tuple as either of its directions.
type Key struct {
	Tuple
	Zone uint16
	ID   uint32 // an entry with another one stays; 0: any goes
}

// Delete deletes entries. It tells by index which it could not delete: with ENOENT those that are not there.
func (c *Conn) Delete(keys []Key) (refused map[int]unix.Errno, err error) {
	return c.write(len(keys), func(i int, ack uint16) {
		k := keys[i]
		c.begin(msgDelete, ack, k.family())
		k.encode(&c.w, ctaTupleOrig)
		encodeZone(&c.w, k.Zone)
		if k.ID != 0 {
			c.w.Uint32(ctaID, k.ID)
		}
	})
}

// write sends n messages, a batch in one system call. The kernel takes them in order, and answers those that it
// refuses; the last of each batch asks for an answer.
func (c *Conn) write(n int, add func(i int, ack uint16)) (refused map[int]unix.Errno, err error) {
	refused = map[int]unix.Errno{}
	for from := 0; from < n; from += Batch {
		to, first := min(from+Batch, n), c.seq+1
		for i := from; i < to; i++ {
			ack := uint16(0)
			if i == to-1 {
				ack = unix.NLM_F_ACK
			}
			add(i, ack)
			c.w.End()
		}
		if err := c.exchange(first, func(m nfnl.Message, errno unix.Errno) error {
			if errno != 0 {
				refused[from+int(m.Seq-first)] = errno
			}
			return nil
		}); err != nil {
			return refused, err
		}
	}
	return refused, nil
}
