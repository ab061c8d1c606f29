package hop

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/tun"
)

// Device is a TUN device whose reader gets packets for others' destinations wrapped, and to which wrapped ones are
// written. Without a table it is the device itself. The table may be changed at any time.
type Device struct {
	tun.Device
	table     atomic.Pointer[Table]
	wrapped   atomic.Uint64
	tooLarge  atomic.Uint64
	unwrapped [verdicts]atomic.Uint64
	refusedOf atomic.Uint32 // address of the node that brought the last refused packet
}

// Counts are packets since the device was opened.
type Counts struct {
	Wrapped   uint64 // sent to the next node
	Unwrapped uint64 // brought by another node
	Refused   uint64 // dropped: no guard allows that node to bring a packet from there
	Malformed uint64 // dropped: not what their headers say, or cut into fragments
	Congested uint64 // dropped: the way was congested, and their senders know no other sign
	TooLarge  uint64 // dropped: no room for another header
	// RefusedOf is the overlay address of the node that brought the last refused one; invalid: not known.
	RefusedOf netip.Addr
}

// NewDevice wraps a device.
func NewDevice(d tun.Device) *Device { return &Device{Device: d} }

// Set puts another table in use; nil: none.
func (d *Device) Set(t *Table) { d.table.Store(t) }

// Counts reads the counters.
func (d *Device) Counts() Counts {
	of := func(v verdict) uint64 { return d.unwrapped[v].Load() }
	c := Counts{Wrapped: d.wrapped.Load(), TooLarge: d.tooLarge.Load(), Unwrapped: of(inside), Refused: of(refused),
		Malformed: of(malformed), Congested: of(marked)}
	if at := d.refusedOf.Load(); at != 0 {
		c.RefusedOf = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, at)))
	}
	return c
}

// Read reads packets of the link, and wraps those that others pass on. One that is dropped has size 0, which
// wireguard-go skips. ICMP redirects are dropped: the kernel sends them since packets leave by the link that they
// came by, and they would have their receiver send to a node that is not a peer of it.
func (d *Device) Read(packets [][]byte, sizes []int, offset int) (int, error) {
	n, err := d.Device.Read(packets, sizes, offset)
	t := d.table.Load() // now, since Read may have waited for long
	if t == nil {
		return n, err
	}
	wrapped, tooLarge := 0, 0
	for i := range n {
		p := packets[i][offset:]
		if redirects(p[:sizes[i]]) {
			sizes[i] = 0
			continue
		}
		via, ok := t.next(p[:sizes[i]])
		switch size := sizes[i] + overhead; {
		case !ok:
		case size > len(p) || size > maxPacket:
			sizes[i] = 0
			tooLarge++
		default:
			copy(p[overhead:size], p[:sizes[i]]) // the link puts them all at the same place
			t.wrap(p[:size], via)
			sizes[i] = size
			wrapped++
		}
	}
	add(&d.wrapped, wrapped)
	add(&d.tooLarge, tooLarge)
	return n, err
}

const maxPacket = 0xffff // bytes that an IPv4 header can tell

// Write writes packets to the link; wrapped ones for this host without their outer header, or not at all. It uses the
// slice packets: a packet that was unwrapped begins further behind in its buffer, and the others follow without gaps.
func (d *Device) Write(packets [][]byte, offset int) (int, error) {
	t := d.table.Load()
	if t == nil {
		return d.Device.Write(packets, offset)
	}
	var counts [verdicts]int
	left := packets[:0]
	for _, p := range packets {
		n, v := t.unwrap(p[offset:])
		counts[v]++
		switch v {
		case pass:
			left = append(left, p)
		case inside:
			left = append(left, p[overhead:overhead+offset+n])
		case refused:
			d.refusedOf.Store(binary.BigEndian.Uint32(p[offset+12:]))
		}
	}
	for v := inside; v < verdicts; v++ {
		add(&d.unwrapped[v], counts[v])
	}
	if len(left) == 0 {
		return 0, nil
	}
	return d.Device.Write(left, offset)
}

// add leaves a counter alone that has nothing to count: several goroutines write.
func add(c *atomic.Uint64, n int) {
	if n > 0 {
		c.Add(uint64(n))
	}
}
