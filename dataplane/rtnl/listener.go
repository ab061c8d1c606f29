package rtnl

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// Notification groups of rtnetlink, for Listener.Routing; several are added.
const (
	Links     = 1 << (unix.RTNLGRP_LINK - 1)
	Addresses = 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)
	Routes    = 1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1)
	Rules     = 1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)
	Settings  = 1<<(unix.RTNLGRP_IPV4_NETCONF-1) | 1<<(unix.RTNLGRP_IPV6_NETCONF-1) // forwarding and rp_filter of links
)

// listenBuffer is how many bytes of notifications may wait. What overflows is made good by reading everything.
const listenBuffer = 2 << 20

// Hear is given the notifications that came together, at least one. It runs on a goroutine of the socket's.
//
// An error says that some were lost, or, where it is ErrEnded, that no more will come: all that they may have been
// about has to be read again.
type Hear func(ms []netlink.Message, err error)

// When calls changed for notifications of which at least one concerns it, and when some were lost or no more will come.
func When(concerns func(netlink.Message) bool, changed func()) Hear {
	return func(ms []netlink.Message, err error) {
		if err != nil || slices.ContainsFunc(ms, concerns) {
			changed()
		}
	}
}

// ErrEnded says that the kernel gives no more notifications.
var ErrEnded = errors.New("the kernel sends no more notifications")

// errLost says that notifications came faster than they were read.
var errLost = errors.New("notifications were lost")

// Listener receives the kernel's notifications until Close. The zero value is ready.
type Listener struct {
	Log *slog.Logger // is told when there will be no more; nil: nobody is

	closed atomic.Bool // what receiving fails with then differs, and says nothing
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  []*netlink.Conn
}

// Routing hears of links, addresses, routes and rules in a network namespace, given by its file descriptor; 0 is the
// calling thread's.
func (l *Listener) Routing(ns int, groups uint32, hear Hear) error {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{NetNS: ns, Groups: groups})
	if err != nil {
		return fmt.Errorf("listening to rtnetlink's notifications: %w", err)
	}
	l.start(c, hear)
	return nil
}

// Tables hears of nftables' tables in a network namespace, given by its file descriptor; 0 is the calling thread's.
func (l *Listener) Tables(ns int, hear Hear) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: ns})
	if err == nil {
		if err = c.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
			err = errors.Join(err, c.Close())
		}
	}
	if err != nil {
		return fmt.Errorf("listening to nftables' notifications: %w", err)
	}
	l.start(c, hear)
	return nil
}

func (l *Listener) start(c *netlink.Conn, hear Hear) {
	_ = c.SetReadBuffer(listenBuffer) // without CAP_NET_ADMIN over the host's first namespace the kernel grants less
	l.mu.Lock()
	l.conns = append(l.conns, c)
	l.mu.Unlock()
	l.wg.Go(func() {
		for {
			ms, err := c.Receive()
			switch {
			case errors.Is(err, unix.ENOBUFS):
				hear(nil, errLost)
			case err != nil && l.closed.Load():
				return
			case err != nil:
				if l.Log != nil {
					l.Log.Warn("kernel notifications have ended: drift is found and repaired late", "error", err)
				}
				hear(nil, fmt.Errorf("%w: %w", ErrEnded, err))
				return
			case len(ms) > 0:
				nlcount.Heard(len(ms))
				hear(ms, nil)
			}
		}
	})
}

// Close ends it, and returns when nothing is heard any more.
func (l *Listener) Close() (err error) {
	l.closed.Store(true)
	l.mu.Lock()
	for _, c := range l.conns {
		err = errors.Join(err, c.Close())
	}
	l.conns = nil
	l.mu.Unlock()
	l.wg.Wait()
	return err
}
