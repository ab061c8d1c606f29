package portmap

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/natpmp"
	"github.com/skeinmesh/skein/gossip/candidate/portmap/pcp"
)

// announcePort is where routers tell all hosts that they have started anew (RFC 6886 section 3.2.1, RFC 6887 section
// 14.1.1).
const announcePort = "5350"

// announcements hears routers that have lost their state, so that a mapping is asked for again at once. Whoever forges
// one makes this host ask its own router a question, at most every five seconds.
type announcements struct {
	conn    net.PacketConn // nil: the port could not be had; the checks every minute remain
	running sync.WaitGroup

	mu      sync.Mutex // guards what follows
	gateway netip.Addr
	wake    func()
	woken   time.Time
	later   *time.Timer // wakes for what was heard too soon after the last time
}

func listen(log *slog.Logger) *announcements {
	a := &announcements{}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // others on this host listen too
		}); cerr != nil {
			return cerr
		}
		return err
	}}
	conn, err := lc.ListenPacket(context.Background(), "udp4", ":"+announcePort)
	if err != nil {
		log.Info("routers that restart are noticed by asking them only", "error", err)
		return a
	}
	a.conn = conn
	a.running.Go(a.hear)
	return a
}

// follow says whose announcements count.
func (a *announcements) follow(gateway netip.Addr, wake func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gateway, a.wake = gateway, wake
}

func (a *announcements) hear() {
	b := make([]byte, 1500)
	for {
		n, from, err := a.conn.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if u, ok := from.(*net.UDPAddr); err == nil && ok {
			a.handle(b[:n], u.AddrPort().Addr().Unmap())
		}
	}
}

func (a *announcements) handle(b []byte, from netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if from != a.gateway || a.wake == nil || a.later != nil {
		return
	}
	if _, _, err := natpmp.DecodeAddress(b); err != nil {
		if _, err := pcp.DecodeAnnounce(b); err != nil {
			return
		}
	}
	// Whether it has really lost its state is not asked: a router that is asked anew has the mapping afterwards in any
	// case.
	if soon := announceGap - time.Since(a.woken); soon > 0 {
		a.later = time.AfterFunc(soon, func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.call()
		})
		return
	}
	a.call()
}

// call is called with mu held.
func (a *announcements) call() {
	a.later = nil
	if a.wake != nil {
		a.woken = time.Now()
		a.wake()
	}
}

func (a *announcements) close() {
	a.mu.Lock()
	a.wake = nil
	if a.later != nil {
		a.later.Stop()
	}
	a.mu.Unlock()
	if a.conn != nil {
		a.conn.Close()
		a.running.Wait()
	}
}
