package plainwg

import (
	"errors"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/tun"
)

// batch is how many packets pass between a device and its links at a time.
const batch = 4

// headroom is before each packet that is read from the link; a device leaves as much before what it writes.
const headroom = 16

// link shares one TUN link between devices, by the destination of what the kernel sends there.
type link struct {
	dev    tun.Device
	ways   atomic.Pointer[[]way]
	reader sync.WaitGroup
}

type way struct {
	prefix netip.Prefix
	to     *tap
}

func newLink(dev tun.Device) *link {
	l := &link{dev: dev}
	l.ways.Store(&[]way{})
	l.reader.Go(l.read)
	return l
}

func (l *link) close() error {
	err := l.dev.Close()
	l.reader.Wait()
	return err
}

// setWays leads packets to devices. No two prefixes overlap.
func (l *link) setWays(ways []way) { l.ways.Store(&ways) }

func (l *link) read() {
	n := l.dev.BatchSize()
	packets, sizes := make([][]byte, n), make([]int, n)
	for i := range packets {
		packets[i] = make([]byte, headroom+1<<16)
	}
	for {
		n, err := l.dev.Read(packets, sizes, headroom)
		for i := range n {
			b := packets[i][headroom : headroom+sizes[i]]
			if to := l.to(b); to != nil {
				to.enqueue(b)
			}
		}
		if err != nil && !errors.Is(err, tun.ErrTooManySegments) {
			return
		}
	}
}

// to is the device that a packet goes to; nil: none.
func (l *link) to(b []byte) *tap {
	dst, ok := destination(b)
	if !ok {
		return nil
	}
	for _, w := range *l.ways.Load() {
		if w.prefix.Contains(dst) {
			return w.to
		}
	}
	return nil
}

func destination(b []byte) (netip.Addr, bool) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[16:20])), true
	case len(b) >= 40 && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[24:40])), true
	}
	return netip.Addr{}, false
}

// tap is a device's share of the link, or, without a link, nothing: such a device takes no packets and has none to
// send.
type tap struct {
	l       *link
	mtu     int
	packets chan []byte
	events  chan tun.Event
	closed  chan struct{}
	once    sync.Once
}

func newTap(l *link, mtu int) *tap {
	return &tap{l: l, mtu: mtu, packets: make(chan []byte, waiting), events: make(chan tun.Event),
		closed: make(chan struct{})}
}

func (t *tap) enqueue(b []byte) {
	select {
	case t.packets <- append([]byte(nil), b...):
	default: // the device is behind, as a full queue of a link is
	}
}

// Read waits for packets that the kernel sends.
func (t *tap) Read(packets [][]byte, sizes []int, offset int) (int, error) {
	n, open := drain(t.packets, t.closed, len(packets), func(i int, b []byte) { sizes[i] = copy(packets[i][offset:], b) })
	if !open {
		return 0, os.ErrClosed
	}
	return n, nil
}

// Write gives the kernel what a peer has sent.
func (t *tap) Write(packets [][]byte, offset int) (int, error) {
	if t.l == nil {
		return len(packets), nil
	}
	return t.l.dev.Write(packets, offset)
}

// Close ends reading; the link stays.
func (t *tap) Close() error {
	t.once.Do(func() { close(t.closed); close(t.events) })
	return nil
}

func (t *tap) File() *os.File           { return nil }
func (t *tap) MTU() (int, error)        { return t.mtu, nil }
func (t *tap) Name() (string, error)    { return "plain", nil }
func (t *tap) Events() <-chan tun.Event { return t.events }
func (t *tap) BatchSize() int           { return batch }

var _ tun.Device = (*tap)(nil)
