package agent

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Bounds of the TLS port. Whoever is turned away at a bound may try again; members do, with a growing pause.
const (
	doorHandshakes    = 256 // under way at a time, from all sources
	doorReserve       = 256 // more, for sources that have few under way
	doorFew           = 4
	doorPerSource     = 64 // under way from one source: a whole site may come from one address
	doorRate          = 50 // new connections a second from one source
	doorBurst         = 200
	doorJoins         = 128  // joins under way at a time, of those that are past the handshake
	doorJoinsReserve  = 128  // more, for sources with fewer than doorFew: a few addresses keep nobody out
	doorJoinsSource   = 32   // of one source
	doorSources       = 1024 // remembered before those that are quiet are forgotten
	doorSourcesAtMost = 1 << 16
)

var (
	errDoorFull   = errors.New("too many handshakes are under way")
	errDoorSource = errors.New("too many handshakes are under way from this source")
	errDoorRate   = errors.New("this source connects too often")
)

// door decides which connections may begin a handshake, so that no source can take all of the processor or all of the
// places. A source is an IPv4 address or an IPv6 /64; at the control net's port each address, of which a node has one.
type door struct {
	mu      sync.Mutex
	open    int
	joins   int
	sources map[netip.Prefix]*visitor
	refused uint64
}

type visitor struct {
	open   int
	joins  int
	tokens float64
	at     time.Time
}

// enter lets a connection in, or says why not. Who was let in must leave when the handshake has ended.
func (d *door) enter(now time.Time, from netip.Addr) (leave func(), err error) {
	return d.enterAs(now, sourceOf(from))
}

// enterAs is enter for a source that the caller tells.
func (d *door) enterAs(now time.Time, source netip.Prefix) (leave func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.sources[source]
	if v == nil {
		if d.sources == nil {
			d.sources = map[netip.Prefix]*visitor{}
		}
		if len(d.sources) >= doorSources {
			d.forget(now)
		}
		v = &visitor{tokens: doorBurst, at: now}
		if len(d.sources) < doorSourcesAtMost {
			d.sources[source] = v
		}
	}
	v.refill(now)
	switch {
	case v.tokens < 1:
		err = errDoorRate
	case v.open >= doorPerSource:
		err = errDoorSource
	case d.open >= doorHandshakes && v.open >= doorFew, d.open >= doorHandshakes+doorReserve:
		err = errDoorFull
	}
	if err != nil {
		d.refused++
		return nil, err
	}
	v.tokens--
	v.open++
	d.open++
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		v.open--
		d.open--
	}, nil
}

// join lets one in who shows a token or asks, which anybody may do past the handshake, and holds 64 KiB and a place for
// ten seconds. It is false when there are too many; else leave must be called at its end.
func (d *door) join(from netip.Addr) (leave func(), ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.sources[sourceOf(from)]
	if v == nil {
		v = &visitor{} // of so many sources that not all are remembered
	}
	full := d.joins >= doorJoins && v.joins >= doorFew || d.joins >= doorJoins+doorJoinsReserve
	if full || v.joins >= doorJoinsSource {
		d.refused++
		return nil, false
	}
	d.joins++
	v.joins++
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.joins--
		v.joins--
	}, true
}

func (v *visitor) refill(now time.Time) {
	v.tokens = min(v.tokens+now.Sub(v.at).Seconds()*doorRate, doorBurst)
	v.at = now
}

// forget drops the sources that nothing is known against. The caller holds mu.
func (d *door) forget(now time.Time) {
	for source, v := range d.sources {
		if v.refill(now); v.open == 0 && v.joins == 0 && v.tokens >= doorBurst {
			delete(d.sources, source)
		}
	}
}

// stats tells how many handshakes are under way and how many connections were turned away.
func (d *door) stats() (open int, refused uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.open, d.refused
}

func sourceOf(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := 64
	if a.Is4() {
		bits = 32
	}
	p, _ := a.Prefix(bits) // fails only for an invalid address, and then all such share one place
	return p
}

// remote is a connection's source address.
func remote(c net.Conn) netip.Addr {
	a, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return a.AddrPort().Addr()
}

// turnAway closes a connection at once: nothing of it shall stay in the kernel.
func turnAway(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
