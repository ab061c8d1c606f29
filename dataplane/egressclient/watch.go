package egressclient

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// Timing of repair.
const (
	repairEvery = 200 * time.Millisecond // at most so often, where somebody keeps changing what is ours
	retryFirst  = 500 * time.Millisecond
	retryLast   = 30 * time.Second
	resync      = 5 * time.Minute // for notifications that were lost without a word
)

// Notification groups of rtnetlink, as RTMGRP bits.
const groups = 1<<(unix.RTNLGRP_LINK-1) |
	1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
	1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
	1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)

// Repaired is what became of one look after a foreign change, or of a try after a failed Apply.
type Repaired struct {
	Writes int // 0: all was as it shall be
	Notes  []string
	Err    error // it is tried again
}

// wakeUp has Watch look again.
func (c *Client) wakeUp() {
	select {
	case c.dirty <- struct{}{}:
	default:
	}
}

// Watch repairs what others change, until ctx ends or the Client is closed. told hears of every look that wrote or
// failed. The first repair follows the kernel's notice at once, others at a limited rate.
func (c *Client) Watch(ctx context.Context, told func(Repaired)) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: groups, NetNS: int(c.ns)})
	var tables *netlink.Conn
	if err == nil {
		if tables, err = c.filter.listen(); err != nil {
			_ = conn.Close()
		}
	}
	c.mu.Unlock()
	if err != nil {
		return fmt.Errorf("no notifications from the network namespace %s: %w", c.opts.NetNS, err)
	}
	c.wakeUp()             // what changed until now was not told
	const buffer = 1 << 20 // bytes; what overflows is made good by reading everything
	_ = conn.SetReadBuffer(buffer)
	var listeners sync.WaitGroup
	listeners.Go(func() {
		c.listen(conn, c.concerns)
	})
	listeners.Go(func() {
		c.listen(tables, func(m netlink.Message, _ string, _ bool) bool { return c.filter.is(m) })
	})
	defer func() {
		_, _ = conn.Close(), tables.Close()
		listeners.Wait()
	}()
	c.repairLoop(ctx, told)
	return ctx.Err()
}

func (c *Client) repairLoop(ctx context.Context, told func(Repaired)) {
	every := time.NewTicker(resync)
	defer every.Stop()
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	backoff := time.Duration(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.dirty:
		case <-retry.C:
		case <-every.C:
		}
		m, ok := c.repair()
		if !ok {
			return
		}
		pause := repairEvery
		switch {
		case m.Err != nil:
			backoff = min(max(2*backoff, retryFirst), retryLast)
			retry.Reset(backoff)
			pause = backoff
		case backoff > 0:
			backoff = 0
			retry.Reset(time.Hour)
		}
		if m.Err != nil || m.Writes > 0 {
			told(m)
		}
		if m.Err == nil && m.Writes == 0 {
			pause /= 10 // looking is cheap
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// repair is one look; ok is false when the Client is closed.
func (c *Client) repair() (m Repaired, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return m, false
	}
	if c.spec == nil {
		return m, true
	}
	m.Writes, m.Notes, m.Err = c.reconcile()
	return m, true
}

// listen marks what notifications are about until the connection is closed.
func (c *Client) listen(conn *netlink.Conn, concerns func(m netlink.Message, uplink string, host bool) bool) {
	for {
		msgs, err := conn.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS): // some were lost
			c.wakeUp()
			continue
		case errors.Is(err, os.ErrClosed), errors.Is(err, unix.EBADF):
			return
		case err != nil:
			c.wakeUp()
			return
		}
		nlcount.Heard(len(msgs))
		uplink, host := c.watched()
		for _, m := range msgs {
			if concerns(m, uplink, host) {
				c.wakeUp()
				break
			}
		}
	}
}

func (c *Client) watched() (uplink string, host bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.spec == nil {
		return "", false
	}
	return c.spec.Uplink, c.spec.Host
}

// concerns says whether a notification may be about something of ours. Our own writes are not told apart: a look that
// finds nothing is cheap.
func (c *Client) concerns(m netlink.Message, uplink string, host bool) bool {
	n := c.opts.Numbers
	const head = 12 // of struct rtmsg and struct fib_rule_hdr
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) < unix.SizeofIfInfomsg {
			return false
		}
		name := strings.TrimRight(string(attribute(m.Data[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME)), "\x00")
		return name == uplink || tunnelName(name)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return host
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if len(m.Data) < head {
			return false
		}
		table := number(attribute(m.Data[head:], unix.RTA_TABLE))
		return table == n.ClientNarrowTable() || table == n.ClientWideTable() || flowTable(table)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		if len(m.Data) < head {
			return false
		}
		const fraPriority = 6
		p := number(attribute(m.Data[head:], fraPriority))
		return p >= n.FirstRule && p <= n.LastRule()
	}
	return false
}

func number(b []byte) int {
	if len(b) < 4 {
		return 0
	}
	return int(binary.NativeEndian.Uint32(b))
}

// attribute returns the first attribute of this type, nil if there is none or the bytes are no attributes.
func attribute(b []byte, kind uint16) []byte {
	const head, typeMask = 4, 0x3fff
	for len(b) >= head {
		n := int(binary.NativeEndian.Uint16(b))
		if n < head || n > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&typeMask == kind {
			return b[head:n]
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}
