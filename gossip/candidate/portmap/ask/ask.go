// Package ask exchanges one small request for one answer with a gateway over UDP.
//
// The socket is connected, so the kernel drops what comes from anybody but the gateway's port, and tells at once
// when nothing listens there. Source: RFC 6886 section 3.1, RFC 6887 section 8.1.
package ask

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/internal/sock"
)

// Both RFCs let a client ask again for over a minute. A router on the same link answers within milliseconds or not at
// all, and discovery does not wait for those who do not.
var retransmit = [...]time.Duration{0, 250 * time.Millisecond, 750 * time.Millisecond}

const (
	patience    = 1500 * time.Millisecond
	maxDatagram = 1500 // bytes; both protocols stay below
)

// ErrNoAnswer means that the gateway does not speak the protocol, or is away.
var ErrNoAnswer = errors.New("no answer")

// Gateway is whom to ask, and how to get there.
type Gateway struct {
	Addr  netip.AddrPort
	Local netip.Addr // the address that the answer is for
	Mark  uint32     // SO_MARK of the socket
}

// Do sends a request until accept takes an answer. What accept refuses is passed over: it is late, or garbled. When
// nothing better comes, its error is the outcome.
func Do(ctx context.Context, g Gateway, request []byte, accept func([]byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	d := net.Dialer{Control: sock.Mark(g.Mark), LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(g.Local, 0))}
	conn, err := d.DialContext(ctx, "udp", g.Addr.String())
	if err != nil {
		return fmt.Errorf("ask gateway %s: %w", g.Addr, err)
	}
	defer conn.Close()
	answers := make(chan datagram)
	go receive(ctx, conn, answers)

	silence := fmt.Errorf("gateway %s: %w", g.Addr, ErrNoAnswer)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := 0; ; {
		select {
		case <-timer.C:
			if _, err := conn.Write(request); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
				return fmt.Errorf("ask gateway %s: %w", g.Addr, err)
			}
			if i++; i < len(retransmit) {
				timer.Reset(retransmit[i] - retransmit[i-1])
			}
		case a := <-answers:
			switch {
			case errors.Is(a.err, syscall.ECONNREFUSED):
				return fmt.Errorf("gateway %s: %w: nothing listens there", g.Addr, ErrNoAnswer)
			case a.err != nil:
				return fmt.Errorf("ask gateway %s: %w", g.Addr, a.err)
			}
			err := accept(a.b)
			if err == nil {
				return nil
			}
			silence = fmt.Errorf("gateway %s: %w", g.Addr, err)
		case <-ctx.Done():
			return silence
		}
	}
}

type datagram struct {
	b   []byte
	err error
}

// receive ends with the first error; closing the socket is one.
func receive(ctx context.Context, conn net.Conn, out chan<- datagram) {
	for {
		b := make([]byte, maxDatagram)
		n, err := conn.Read(b)
		select {
		case out <- datagram{b[:n], err}:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}
