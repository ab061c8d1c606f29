package admission

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Bounds of a port. Whoever is turned away at a bound may try again; members do, with a growing pause.
const (
	maxHandshakes  = 256 // under way at a time, from all sources
	reserve        = 256 // more, for sources that have few under way
	few            = 4   // under way or joining: such a source gets what is in reserve
	perSource      = 64  // under way from one source: a whole site may come from one address
	connectRate    = 50  // new connections a second from one source
	connectBurst   = 200
	maxJoins       = 128  // joins under way at a time, of those that are past the handshake
	joinsReserve   = 128  // more, for sources with fewer than few: a few addresses keep nobody out
	joinsPerSource = 32   // of one source
	forgetAbove    = 1024 // sources are remembered before those that are quiet are forgotten
	maxSources     = 1 << 16
)

var (
	errFull      = errors.New("too many handshakes are under way")
	errPerSource = errors.New("too many handshakes are under way from this source")
	errRate      = errors.New("this source connects too often")
)

// Limiter decides which connections may begin a handshake, so that no source can take all of the processor or all of
// the places. A source is an IPv4 address or an IPv6 /64; at the control net's port each address, of which a node has
// one.
type Limiter struct {
	mu      sync.Mutex
	open    int
	joins   int
	sources map[netip.Prefix]*origin
	refused uint64
}

// origin is what one source has.
type origin struct {
	open   int
	joins  int
	tokens float64
	at     time.Time
}

// Enter lets a connection in, or says why not. For one that was let in, leave must be called when its handshake has
// ended.
func (l *Limiter) Enter(now time.Time, from netip.Addr) (leave func(), err error) {
	return l.EnterAs(now, sourceOf(from))
}

// EnterAs is Enter for a source that the caller tells.
func (l *Limiter) EnterAs(now time.Time, source netip.Prefix) (leave func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.sources[source]
	if v == nil {
		if l.sources == nil {
			l.sources = map[netip.Prefix]*origin{}
		}
		if len(l.sources) >= forgetAbove {
			l.forget(now)
		}
		v = &origin{tokens: connectBurst, at: now}
		if len(l.sources) < maxSources {
			l.sources[source] = v
		}
	}
	v.refill(now)
	switch {
	case v.tokens < 1:
		err = errRate
	case v.open >= perSource:
		err = errPerSource
	case l.open >= maxHandshakes && v.open >= few, l.open >= maxHandshakes+reserve:
		err = errFull
	}
	if err != nil {
		l.refused++
		return nil, err
	}
	v.tokens--
	v.open++
	l.open++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		v.open--
		l.open--
	}, nil
}

// Join lets one in who shows a token or asks, which anybody may do past the handshake, and holds 64 KiB and a place for
// ten seconds. It is false when there are too many; else leave must be called at its end.
func (l *Limiter) Join(from netip.Addr) (leave func(), ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := l.sources[sourceOf(from)]
	if v == nil {
		v = &origin{} // of so many sources that not all are remembered
	}
	full := l.joins >= maxJoins && v.joins >= few || l.joins >= maxJoins+joinsReserve
	if full || v.joins >= joinsPerSource {
		l.refused++
		return nil, false
	}
	l.joins++
	v.joins++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.joins--
		v.joins--
	}, true
}

func (v *origin) refill(now time.Time) {
	v.tokens = min(v.tokens+now.Sub(v.at).Seconds()*connectRate, connectBurst)
	v.at = now
}

// forget drops the sources that nothing is known against. The caller holds mu.
func (l *Limiter) forget(now time.Time) {
	for source, v := range l.sources {
		if v.refill(now); v.open == 0 && v.joins == 0 && v.tokens >= connectBurst {
			delete(l.sources, source)
		}
	}
}

// Stats tells how many handshakes are under way and how many connections were turned away.
func (l *Limiter) Stats() (open int, refused uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open, l.refused
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

// reset closes a connection at once: nothing of it shall stay in the kernel.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
