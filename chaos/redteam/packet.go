package redteam

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// datagram is an IP packet with UDP inside, whatever its source: sent raw, no kernel looks at it.
func datagram(from, to netip.AddrPort, payload []byte) []byte {
	udp := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(udp[0:], from.Port())
	binary.BigEndian.PutUint16(udp[2:], to.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(payload)))
	udp = append(udp, payload...)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	pseudo := slices.Concat(src, dst, []byte{0, unix.IPPROTO_UDP, byte(len(udp) >> 8), byte(len(udp))})
	sum := checksum(append(pseudo, udp...))
	if sum == 0 {
		sum = 0xffff // zero would mean that there is none
	}
	binary.BigEndian.PutUint16(udp[6:], sum)
	if from.Addr().Is4() {
		head := make([]byte, 20)
		head[0], head[8], head[9] = 0x45, 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint16(head[2:], uint16(20+len(udp)))
		copy(head[12:], src)
		copy(head[16:], dst)
		binary.BigEndian.PutUint16(head[10:], checksum(head))
		return append(head, udp...)
	}
	head := make([]byte, 8, 40)
	head[0], head[6], head[7] = 0x60, unix.IPPROTO_UDP, 64
	binary.BigEndian.PutUint16(head[4:], uint16(len(udp)))
	return slices.Concat(head, src, dst, udp)
}

// opening is the packet that opens a TCP connection over IPv4.
func opening(from, to netip.AddrPort) []byte {
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp[0:], from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[12], tcp[13] = 5<<4, 2 // five words, SYN
	binary.BigEndian.PutUint16(tcp[14:], 0xffff)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	pseudo := slices.Concat(src, dst, []byte{0, unix.IPPROTO_TCP, 0, byte(len(tcp))})
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	head := make([]byte, 20)
	head[0], head[8], head[9] = 0x45, 64, unix.IPPROTO_TCP
	binary.BigEndian.PutUint16(head[2:], uint16(len(head)+len(tcp)))
	copy(head[12:], src)
	copy(head[16:], dst)
	binary.BigEndian.PutUint16(head[10:], checksum(head))
	return append(head, tcp...)
}

// dialUDP opens a UDP socket in a namespace.
func dialUDP(ns string, to netip.AddrPort) (c net.Conn, err error) {
	err = fabric.In(ns, func() error {
		c, err = net.Dial("udp", to.String())
		return err
	})
	return c, err
}

// checksum is RFC 1071's.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// raw sends whole IP packets by a link of a namespace, to a host of its network or its gateway: the next hop's hardware
// address is looked up by sending it something ordinary first.
type raw struct {
	fd   int
	addr [2]unix.SockaddrLinklayer // IPv4, IPv6
}

// openRaw takes the link by which via is reached.
func openRaw(ns, link string, via netip.Addr) (*raw, error) {
	r := &raw{}
	err := fabric.In(ns, func() error {
		l, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		hardware, err := neighbour(l, via)
		if err != nil {
			return err
		}
		if r.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		for i, proto := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
			r.addr[i] = unix.SockaddrLinklayer{Protocol: proto>>8 | proto<<8, Ifindex: l.Index, Halen: uint8(len(hardware))}
			copy(r.addr[i].Addr[:], hardware)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("send raw packets from %s by %s: %w", ns, link, err)
	}
	return r, nil
}

func (r *raw) send(b []byte) error {
	which := 0
	if b[0]>>4 == 6 {
		which = 1
	}
	return unix.Sendto(r.fd, b, 0, &r.addr[which])
}

func (r *raw) close() { unix.Close(r.fd) }

// ear hears UDP datagrams that arrive at a host, whatever its own rules say of them afterwards, or at a socket of it.
type ear struct {
	mu    sync.Mutex
	froms []string
	bytes int
	conns []net.PacketConn
	done  sync.WaitGroup
}

// listen opens a socket on a port of a namespace; it hears what begins with mark. Empty: everything.
func listen(ns string, port int, mark string) (*ear, error) {
	e := &ear{}
	return e, e.at(ns, port, mark)
}

func (e *ear) at(ns string, port int, mark string) error {
	var c net.PacketConn
	if err := fabric.In(ns, func() (err error) {
		c, err = net.ListenPacket("udp", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		return fmt.Errorf("listen in %s: %w", ns, err)
	}
	e.conns = append(e.conns, c)
	e.done.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil || n < len(mark) || string(b[:len(mark)]) != mark {
				continue
			}
			at, _ := netip.ParseAddrPort(from.String())
			e.note(at.Addr().Unmap().String(), n)
		}
	})
	return nil
}

func (e *ear) note(from string, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.froms, e.bytes = append(e.froms, from), e.bytes+n
}

// heard are the sources so far, and the bytes.
func (e *ear) heard() ([]string, int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.froms), e.bytes
}

// wait returns when something was heard, or time is over.
func (e *ear) wait(ctx context.Context, d time.Duration) []string {
	_ = until(ctx, d, func() error {
		if l, _ := e.heard(); len(l) == 0 {
			return errors.New("nothing yet")
		}
		return nil
	})
	l, _ := e.heard()
	return l
}

func (e *ear) close() {
	for _, c := range e.conns {
		c.Close()
	}
	e.done.Wait()
}

// sniff tells of every IP packet that passes a namespace's links, both ways, while during runs.
func sniff(ns string, told func(packet []byte, out bool), during func() error) error {
	fd := -1
	if err := fabric.In(ns, func() (err error) {
		const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all)
		return err
	}); err != nil {
		return fmt.Errorf("capture in %s: %w", ns, err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}); err != nil {
		return err
	}
	stop := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		b := make([]byte, 65536)
		for {
			select {
			case <-stop:
				return
			default:
			}
			n, from, err := unix.Recvfrom(fd, b, 0)
			if l, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && n > 0 {
				told(b[:n], l.Pkttype == unix.PACKET_OUTGOING)
			}
		}
	})
	err := during()
	close(stop)
	all.Wait()
	return err
}

// udpOf reads the ends and the payload of a UDP packet without options.
func udpOf(b []byte) (from, to netip.AddrPort, payload []byte, ok bool) {
	var src, dst netip.Addr
	switch {
	case len(b) > 28 && b[0] == 0x45 && b[9] == unix.IPPROTO_UDP:
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		b = b[20:]
	case len(b) > 48 && b[0]>>4 == 6 && b[6] == unix.IPPROTO_UDP:
		src, dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		b = b[40:]
	default:
		return from, to, nil, false
	}
	return netip.AddrPortFrom(src, binary.BigEndian.Uint16(b)), netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:])),
		b[8:], true
}

// tcpOf reads the ends of a TCP packet of IPv4 without options.
func tcpOf(b []byte) (from, to netip.AddrPort, ok bool) {
	if len(b) < 40 || b[0] != 0x45 || b[9] != unix.IPPROTO_TCP {
		return from, to, false
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:16])), binary.BigEndian.Uint16(b[20:])),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:20])), binary.BigEndian.Uint16(b[22:])), true
}
