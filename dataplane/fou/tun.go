package fou

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Memory of a batch on its way from a TUN device, in bytes. A frame of 64 KiB grows when it is cut: at the smallest
// segments that Linux makes by default (48 bytes) it triples.
const (
	frameBytes = vnetBytes + 0xffff
	roomBytes  = 288 << 10
	// enough is where a batch stops reading on: another frame of any usual kind still has room.
	enough  = 64 << 10
	packets = 256
)

// batches are lent to whoever has something to read: a device that waits has none, so that many cost little. It is one
// for the process because namespaces share it.
var batches = sync.Pool{New: func() any {
	return &batch{frame: make([]byte, frameBytes), memory: make([]byte, roomBytes), packets: make([][]byte, 0, packets)}
}}

// batch is what was read at once.
type batch struct {
	frame   []byte
	memory  []byte
	used    int
	packets [][]byte
	broken  int // frames
}

func (b *batch) room(n int) []byte {
	if n > len(b.memory)-b.used {
		return nil
	}
	out := b.memory[b.used : b.used+n : b.used+n]
	b.used += n
	return out
}

func (b *batch) each(p []byte) { b.packets = append(b.packets, p) }

func (b *batch) clear() {
	clear(b.packets)
	b.packets, b.used, b.broken = b.packets[:0], 0, 0
}

// tunDevice is a TUN device that this process holds.
type tunDevice struct {
	name   string
	index  int
	family int
	ends   tunnelEnds // of a client's tunnel; a gateway's device has no far end of its own, and a catch-all neither
	file   *os.File
	raw    syscall.RawConn
	gone   atomic.Bool // nobody reads it any more

	started bool // of who reconciles

	reading *batch
	readErr error
	read    func(fd uintptr) bool

	mu       sync.Mutex // of what writes
	iovecs   []unix.Iovec
	writeErr error
	write    func(fd uintptr) bool
}

// openTUN makes a TUN device that stays, or takes one that a former run left; called inside its namespace.
func openTUN(c *rtnl.Conn, d device) (*tunDevice, error) {
	fd, err := rtnl.TUN(d.Name, unix.IFF_VNET_HDR)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("opening the TUN device %s: %w: another process holds it; stop that process", d.Name, err)
	case err != nil:
		return nil, fmt.Errorf("making the TUN device %s: %w", d.Name, err)
	}
	t := &tunDevice{name: d.Name}
	if t.index, err = t.prepare(c, fd); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("making the TUN device %s: %w", d.Name, err)
	}
	t.file = os.NewFile(uintptr(fd), d.Name)
	if t.raw, err = t.file.SyscallConn(); err != nil {
		t.file.Close()
		return nil, err
	}
	t.read, t.write = t.tryRead, t.tryWrite
	d.Index = t.index
	if err := set(c, d); err != nil {
		t.file.Close()
		return nil, err
	}
	return t, nil
}

func (t *tunDevice) prepare(c *rtnl.Conn, fd int) (index int, err error) {
	const tcp, udp = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6, unix.TUN_F_USO4 | unix.TUN_F_USO6
	if unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, tcp|udp) != nil { // UDP since Linux 6.2
		if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, tcp); err != nil {
			return 0, err
		}
	}
	l, err := c.One().LinkByName(t.name)
	if err != nil {
		return 0, err
	}
	// No link-local address: the kernel would send what belongs to it into the tunnel. Fails where IPv6 is off.
	const none = 1 // IN6_ADDR_GEN_MODE_NONE
	_ = c.One().LinkSetIP6AddrGenMode(l, none)
	return l.Attrs().Index, unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1)
}

// receive waits for packets and returns a batch that must be given back. The error is final.
func (t *tunDevice) receive() (*batch, error) {
	err := t.raw.Read(t.read)
	b := t.reading
	t.reading = nil
	if err == nil {
		err = t.readErr
	}
	if err != nil {
		if b != nil {
			giveBack(b)
		}
		return nil, err
	}
	return b, nil
}

func giveBack(b *batch) {
	b.clear()
	batches.Put(b)
}

// tryRead reads all that is there, up to what a batch takes.
func (t *tunDevice) tryRead(fd uintptr) bool {
	if t.reading == nil {
		t.reading = batches.Get().(*batch)
	}
	b := t.reading
	for b.used < enough && len(b.packets) < packets {
		n, err := unix.Read(int(fd), b.frame)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN && len(b.packets)+b.broken == 0:
			t.reading = nil
			giveBack(b)
			return false
		case err == unix.EAGAIN:
			return true
		case err != nil:
			t.readErr = fmt.Errorf("reading %s: %w", t.name, err)
			return true
		}
		if split(b.frame[:n], b.room, b.each) != nil {
			b.broken++
		}
	}
	return true
}

// send writes one frame in pieces. It may be called by several goroutines.
func (t *tunDevice) send(pieces [][]byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.iovecs = t.iovecs[:0]
	for _, p := range pieces {
		v := unix.Iovec{Base: &p[0]}
		v.SetLen(len(p))
		t.iovecs = append(t.iovecs, v)
	}
	err := t.raw.Write(t.write)
	clear(t.iovecs)
	if err == nil {
		err = t.writeErr
	}
	return err
}

func (t *tunDevice) tryWrite(fd uintptr) bool {
	for {
		_, _, errno := unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&t.iovecs[0])), uintptr(len(t.iovecs)))
		switch errno {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		case 0:
			t.writeErr = nil
		default:
			t.writeErr = errno
		}
		return true
	}
}
