package announce

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"os"

	"github.com/mdlayher/socket"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// port is one link that we hear and speak on.
type port struct {
	name   string
	index  int
	mac    mac
	arp    *socket.Conn
	nd     *socket.Conn
	member *socket.Conn // makes the kernel a member of groups, so that switches send us their frames; nil without IPv6
	groups map[netip.Addr]bool
	done   chan struct{}
}

func big(v uint16) uint16 { return bits.ReverseBytes16(v) }

// openPort begins to hear; each frame goes to one of the two functions, from two goroutines.
func openPort(ns int, name string, index int, m mac, hear func(*port, message)) (*port, error) {
	p := &port{name: name, index: index, mac: m, groups: map[netip.Addr]bool{}, done: make(chan struct{})}
	filter, err := ndFilter()
	if err != nil {
		return nil, err
	}
	if p.arp, err = p.packets(ns, etherARP, nil); err != nil {
		return nil, err
	}
	if p.nd, err = p.packets(ns, etherIPv6, filter); err != nil {
		p.arp.Close()
		return nil, err
	}
	p.member, _ = socket.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0, "groups", &socket.Config{NetNS: ns})
	go p.read(p.arp, parseARP, hear)
	go p.read(p.nd, parseND, hear)
	return p, nil
}

func (p *port) packets(ns int, typ uint16, filter []bpf.RawInstruction) (*socket.Conn, error) {
	c, err := socket.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0, "neighbours", &socket.Config{NetNS: ns})
	if err != nil {
		return nil, fmt.Errorf("opening a packet socket: %w: this needs CAP_NET_RAW", err)
	}
	if filter != nil {
		err = c.SetBPF(filter)
	}
	if err == nil {
		err = c.Bind(&unix.SockaddrLinklayer{Protocol: big(typ), Ifindex: p.index})
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("listening on %s: %w", p.name, err)
	}
	return c, nil
}

func (p *port) read(c *socket.Conn, parse func([]byte) (message, bool), hear func(*port, message)) {
	b := make([]byte, 2048)
	for {
		n, _, err := c.Recvfrom(context.Background(), b, 0)
		select {
		case <-p.done:
			return
		default:
		}
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // the link went down: this is told once, and frames come again when it is up
			continue
		}
		if m, ok := parse(b[:n]); ok && m.from != p.mac {
			hear(p, m)
		}
	}
}

func (p *port) send(frame []byte) error {
	return p.arp.Sendto(context.Background(), frame, 0, &unix.SockaddrLinklayer{Ifindex: p.index})
}

// join makes the link's groups those of the addresses.
func (p *port) join(want map[netip.Addr]bool) {
	for g := range want {
		if !p.groups[g] {
			p.groups[g] = true
			p.membership(g, unix.PACKET_ADD_MEMBERSHIP, unix.IPV6_JOIN_GROUP)
		}
	}
	for g := range p.groups {
		if !want[g] {
			delete(p.groups, g)
			p.membership(g, unix.PACKET_DROP_MEMBERSHIP, unix.IPV6_LEAVE_GROUP)
		}
	}
}

// membership tells the link to take a group's frames, and the kernel to tell the switches. The second fails where the
// link has no IPv6; then a switch that does not look into multicast still brings them.
func (p *port) membership(group netip.Addr, packetOption, groupOption int) {
	m := groupMAC(group)
	mreq := unix.PacketMreq{Ifindex: int32(p.index), Type: unix.PACKET_MR_MULTICAST, Alen: uint16(len(m))}
	copy(mreq.Address[:], m[:])
	_ = p.nd.SetsockoptPacketMreq(unix.SOL_PACKET, packetOption, &mreq)
	if p.member == nil {
		return
	}
	if raw, err := p.member.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IPV6, groupOption, &unix.IPv6Mreq{Multiaddr: group.As16(),
				Interface: uint32(p.index)})
		})
	}
}

func (p *port) close() {
	close(p.done)
	p.arp.Close()
	p.nd.Close()
	if p.member != nil {
		p.member.Close()
	}
}
