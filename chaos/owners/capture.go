package owners

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Watch says what is captured and what it means.
type Watch struct {
	NetNS string                // name of the observer's namespace
	Link  string                // there
	Port  uint16                // packets to this port count, others do not
	Slots map[netip.Addr]string // slot by the source address of its packets
	Nodes map[[6]byte]string    // node by the address of its link
}

// WatchOf says what a host of a lab sees of egresses whose gateways are in its network, and lists their slots. Of the
// egresses one at most may have no addresses, and one slot: then the gateways' own addresses mean it.
func WatchOf(ctx context.Context, l *lab.Lab, host string, port uint16, gateways []string,
	refs []lab.Ref) (w Watch, slots []string, err error) {
	w = Watch{NetNS: fabric.HostNS(l.Spec.Name, host), Link: fabric.HostLink, Port: port, Slots: map[netip.Addr]string{},
		Nodes: map[[6]byte]string{}}
	var own []netip.Addr
	for _, g := range gateways {
		info, err := l.Node(g)
		if err != nil {
			return w, nil, err
		}
		own = append(own, info.Host.Addr, info.Host.Addr6)
		if err := fabric.In(info.Namespace, func() error {
			link, err := net.InterfaceByName(fabric.HostLink)
			if err == nil {
				w.Nodes[[6]byte(link.HardwareAddr)] = g
			}
			return err
		}); err != nil {
			return w, nil, fmt.Errorf("node %s: %w", g, err)
		}
	}
	for _, ref := range refs {
		e, err := l.Egress(ctx, ref)
		if err != nil {
			return w, nil, err
		}
		addresses := e.GetEgress().GetAddresses()
		for i := range e.GetEgress().GetReplicas() {
			slots = append(slots, SlotName(ref, i))
			if len(addresses) == 0 {
				for _, a := range own {
					w.Slots[a] = SlotName(ref, i)
				}
				continue
			}
			for _, text := range []string{addresses[i].GetIpv4(), addresses[i].GetIpv6()} {
				if addr, err := netip.ParseAddr(text); err == nil {
					w.Slots[addr] = SlotName(ref, i)
				}
			}
		}
	}
	return w, slots, nil
}

// SlotName is namespace/name#number.
func SlotName(ref lab.Ref, number uint32) string { return fmt.Sprintf("%s#%d", ref, number) }

const (
	captureBuffer = 16 << 20 // bytes
	headersOnly   = 256      // bytes that are read of each frame
	captureTick   = 100 * time.Millisecond
	clockTurned   = time.Minute // a packet's time so far from now is of a wall clock that was turned
)

// Capture takes down who sends the packets of slots.
type Capture struct {
	watch Watch
	began time.Time // all times count from here by the monotonic clock
	fd    int
	done  chan struct{}
	stop  chan struct{}

	mu      sync.Mutex
	runs    map[string]*Spells // by slot
	packets int
	lost    int // that the kernel had no room for
	err     error
}

// Open begins to capture. Every packet to the port from a slot's address counts from now on.
func Open(w Watch) (*Capture, error) {
	c := &Capture{watch: w, began: time.Now(), fd: -1, done: make(chan struct{}), stop: make(chan struct{}),
		runs: map[string]*Spells{}}
	err := fabric.In(w.NetNS, func() error {
		link, err := net.InterfaceByName(w.Link)
		if err != nil {
			return fmt.Errorf("link %s: %w", w.Link, err)
		}
		// With protocol 0 nothing arrives until the socket is bound to its link.
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		tick := unix.NsecToTimeval(int64(captureTick))
		if err := errors.Join(
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, captureBuffer),
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick),
		); err != nil {
			return fmt.Errorf("packet socket: %w", err)
		}
		return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: link.Index})
	})
	if err != nil {
		if c.fd >= 0 {
			unix.Close(c.fd)
		}
		return nil, fmt.Errorf("observe %s: %w", w.NetNS, err)
	}
	go c.read()
	return c, nil
}

func networkOrder(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

func (c *Capture) read() {
	defer close(c.done)
	b, control := make([]byte, headersOnly), make([]byte, 128)
	for {
		select {
		case <-c.stop:
			return
		default:
		}
		n, cn, _, from, err := unix.Recvmsg(c.fd, b, control, 0)
		switch {
		case err == unix.EAGAIN || err == unix.EINTR:
			continue
		case err == unix.ENETDOWN: // the link went down and may come back
			continue
		case err != nil:
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
			return
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if f, ok := Decode(b[:n]); ok {
			c.note(f, steady(arrived(control[:cn]), c.began.Add(time.Since(c.began))))
		}
	}
}

// arrived is the kernel's time of a packet.
func arrived(control []byte) time.Time {
	list, err := unix.ParseSocketControlMessage(control)
	if err == nil {
		for _, m := range list {
			if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_TIMESTAMPNS && len(m.Data) >= 16 {
				return time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
			}
		}
	}
	return time.Now()
}

// steady is a packet's time by the kernel, or the time at which it is read when somebody turned the kernel's clock
// meanwhile.
func steady(at, now time.Time) time.Time {
	if at.Sub(now).Abs() > clockTurned {
		return now
	}
	return at
}

func (c *Capture) note(f Frame, at time.Time) {
	slot, ok := c.watch.Slots[f.Source]
	if !ok || f.Port != c.watch.Port {
		return
	}
	node, ok := c.watch.Nodes[f.MAC]
	if !ok {
		node = net.HardwareAddr(f.MAC[:]).String()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs[slot] == nil {
		c.runs[slot] = &Spells{}
	}
	c.runs[slot].Add(node, at)
	c.packets++
}

// Seen is what was captured so far.
type Seen struct {
	Spells  map[string][]Spell // by slot
	Packets int
	Lost    int // packets that this observer missed
}

// Seen tells what was captured; the error is why nothing more is.
func (c *Capture) Seen() (Seen, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if st, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil {
		c.lost += int(st.Drops) // reading sets it to 0
	}
	s := Seen{Spells: map[string][]Spell{}, Packets: c.packets, Lost: c.lost}
	for slot, r := range c.runs {
		s.Spells[slot] = r.List()
	}
	return s, c.err
}

// Close ends the capture.
func (c *Capture) Close() {
	close(c.stop)
	<-c.done
	unix.Close(c.fd)
}
