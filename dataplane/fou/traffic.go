package fou

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/mmsg"
)

// transmit brings what comes from a device to its tunnel, until the device is closed or deleted.
func (u *userspace) transmit(d *tunDevice) {
	defer d.gone.Store(true)
	var group [][]byte
	for {
		b, err := d.receive()
		if err != nil {
			return
		}
		u.unsent.Add(uint64(b.broken))
		t := u.table.Load()
		var l lane
		for _, p := range b.packets {
			next, ok := t.lane(d, p, u.seed)
			if !ok {
				u.unsent.Add(1)
				continue
			}
			if len(p) > next.mtu {
				u.unsent.Add(1)
				d.sendTooBig(p, next.mtu)
				continue
			}
			if next != l {
				u.pass(d, l, group)
				l, group = next, group[:0]
			}
			group = append(group, p)
		}
		u.pass(d, l, group)
		clear(group)
		group = group[:0]
		giveBack(b)
	}
}

// lane is what packets have in common that one system call can send.
type lane struct {
	writer  *mmsg.Writer
	sockets *sockets
	to      netip.AddrPort
	from    mmsg.Source
	mtu     int // of the tunnel, in bytes
}

// lane finds the way of a packet from a device.
func (t *table) lane(d *tunDevice, p []byte, seed uint32) (lane, bool) {
	s := t.sockets[d.family]
	six := p[0]>>4 == 6
	if s == nil || six != (d.family == 1) {
		return lane{}, false
	}
	at := d.ends
	if t.gateway {
		_, at.remote = addresses(p)
	}
	w, ok := t.tunnels[at]
	if !ok || w.device != d {
		return lane{}, false
	}
	l := lane{writer: t.writers[d.family], sockets: s, to: netip.AddrPortFrom(w.Remote, t.to),
		from: mmsg.Source{Addr: w.Local, Class: outerClass(class(p))}, mtu: w.MTU}
	if ports := t.ports[d.family]; w.SourcePortAuto && len(ports) > 0 {
		l.writer = ports[flow(p, seed)%uint32(len(ports))]
	}
	return l, true
}

// pass sends packets of one lane. One that is too big for the path is answered; others that cannot be sent are lost, as
// in any network.
func (u *userspace) pass(d *tunDevice, l lane, group [][]byte) {
	for len(group) > 0 {
		n, err := l.writer.Write(group, l.to, l.from)
		size := 0
		for _, p := range group[:n] {
			size += len(p)
		}
		u.txPackets.Add(uint64(n))
		u.txBytes.Add(uint64(size))
		group = group[n:]
		if err == nil || len(group) == 0 {
			return
		}
		if !errors.Is(err, unix.EMSGSIZE) {
			u.unsent.Add(uint64(len(group)))
			return
		}
		fits := len(group[0]) - 1
		if mtu := l.sockets.pathMTU(l.to); mtu > 0 {
			fits = min(fits, mtu-overheads[d.family])
		}
		d.sendTooBig(group[0], fits)
		rest := group[:0]
		for _, p := range group {
			if len(p) <= fits {
				rest = append(rest, p)
			}
		}
		u.unsent.Add(uint64(len(group) - len(rest)))
		group = rest
	}
}

// sendTooBig sends a packet's sender the size that fits.
func (t *tunDevice) sendTooBig(p []byte, mtu int) {
	if m := tooBig(p, mtu); m != nil {
		_ = t.send([][]byte{make([]byte, vnetBytes), m})
	}
}

// receive brings what comes from the tunnels of a family to its devices, until the socket is closed.
func (u *userspace) receive(family int, from *mmsg.Reader) {
	const pause = 50 * time.Millisecond // after an error of which no more is known
	m := &merger{}
	for {
		switch err := from.Read(); {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			u.log.Warn("FoU packets cannot be received; trying again", "error", err)
			time.Sleep(pause)
			continue
		}
		t := u.table.Load()
		var to *tunDevice
		for d, ok := from.Next(); ok; d, ok = from.Next() {
			p, device, mtu := u.accept(t, family, d)
			if device == nil {
				continue
			}
			if device == to && m.add(p, mtu) {
				continue
			}
			deliver(to, m)
			to = device
			m.add(p, mtu)
		}
		deliver(to, m)
	}
}

func deliver(d *tunDevice, m *merger) {
	if pieces := m.flush(); pieces != nil {
		_ = d.send(pieces) // a device that is down takes nothing
	}
}

// accept finds the device of a datagram with its tunnel's MTU, and the packet in it. It counts what it refuses.
func (u *userspace) accept(t *table, family int, d mmsg.Datagram) (packet []byte, device *tunDevice, mtu int) {
	p, ok := trim(d.Data, family)
	if !ok {
		u.malformed.Add(1)
		return nil, nil, 0
	}
	from := d.From.Addr()
	w, known := t.tunnels[tunnelEnds{d.To.Addr, from}]
	device, mtu = w.device, w.MTU
	if !known {
		if !t.gateway {
			device, mtu = t.any[family], minMTU6
		}
	}
	if device != nil && t.gateway {
		src, dst := addresses(p)
		if src.IsLinkLocalUnicast() && dst.IsMulticast() {
			return nil, nil, 0 // what the kernel says for itself on its tunnels: no stranger
		}
		if src != from {
			device = nil
		}
	}
	if device == nil {
		u.stranger.Add(1)
		return nil, nil, 0
	}
	if !decapsulate(p, d.To.Class) {
		u.malformed.Add(1)
		return nil, nil, 0
	}
	u.rxPackets.Add(1)
	u.rxBytes.Add(uint64(len(p)))
	return p, device, mtu
}
