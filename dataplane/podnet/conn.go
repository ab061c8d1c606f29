package podnet

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// conn is an rtnetlink socket in one network namespace.
type conn struct {
	c    *netlink.Conn
	sent int // messages
}

// dial opens a socket in the namespace; nil: the calling thread's. Only the socket's creation happens inside, on a
// locked thread that returns to its own namespace at once.
func dial(ns *os.File) (*conn, error) {
	cfg := &netlink.Config{}
	if ns != nil {
		cfg.NetNS = int(ns.Fd())
	}
	c, err := netlink.Dial(unix.NETLINK_ROUTE, cfg)
	switch {
	case errors.Is(err, unix.EPERM) && ns != nil:
		return nil, fmt.Errorf("entering the pod's network namespace %s: %w: this needs CAP_SYS_ADMIN", ns.Name(), err)
	case err != nil:
		return nil, fmt.Errorf("opening an rtnetlink socket: %w", err)
	}
	_ = c.SetOption(netlink.ExtendedAcknowledge, true) // old kernels lack these two options
	_ = c.SetOption(netlink.GetStrictCheck, true)
	return &conn{c: c}, nil
}

func (c *conn) close() { _ = c.c.Close() }

// do sends all requests in one system call and returns the answers to each. The kernel also executes the requests
// after a failed one; the error is the first one.
func (c *conn) do(reqs ...request) ([][]netlink.Message, error) {
	msgs := make([]netlink.Message, len(reqs))
	for i, r := range reqs {
		msgs[i] = r.m
	}
	c.sent += len(reqs)
	nlcount.Sent(len(reqs))
	if _, err := c.c.SendMessages(msgs); err != nil {
		return nil, fmt.Errorf("%s: %w", reqs[0].what, err)
	}
	answers := make([][]netlink.Message, len(reqs))
	var first error
	for i, r := range reqs {
		got, err := c.c.Receive()
		if err != nil && first == nil {
			if errors.Is(err, unix.EPERM) {
				err = fmt.Errorf("%w: this needs CAP_NET_ADMIN", err)
			}
			first = fmt.Errorf("%s: %w", r.what, err)
		}
		answers[i] = got
	}
	return answers, first
}

// await repeats the request until the answer satisfies ok or the deadline has passed.
func (c *conn) await(deadline time.Time, r request, ok func(netlink.Message) bool) {
	const first, last = 500 * time.Microsecond, 16 * time.Millisecond
	for pause := first; ; pause = min(2*pause, last) { // each request takes the lock that the worker needs
		answers, err := c.do(r)
		if err == nil && len(answers[0]) == 1 && ok(answers[0][0]) || time.Now().After(deadline) {
			return
		}
		time.Sleep(pause)
	}
}

// dump repeats the request until the kernel reports that nothing changed during its answer.
func (c *conn) dump(r request) ([]netlink.Message, error) {
	const tries = 10
	var got []netlink.Message
	for range tries {
		answers, err := c.do(r)
		if errors.Is(err, unix.ENOENT) { // no such table yet
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		got = answers[0]
		if !interrupted(got) {
			break
		}
	}
	return got, nil // objects that change during the read may be missing; all others are complete
}

func interrupted(ms []netlink.Message) bool {
	return slices.ContainsFunc(ms, func(m netlink.Message) bool { return m.Header.Flags&netlink.DumpInterrupted != 0 })
}

// link reads one link; ok is false when there is none.
func (c *conn) link(r request) (l link, ok bool, err error) {
	answers, err := c.do(r)
	if errors.Is(err, unix.ENODEV) {
		return link{}, false, nil
	}
	if err != nil {
		return link{}, false, err
	}
	if len(answers[0]) == 1 {
		l, ok = decodeLink(answers[0][0])
	}
	if !ok {
		return link{}, false, fmt.Errorf("%s: the kernel's answer is not understood", r.what)
	}
	return l, true, nil
}

// routes reads both families of a table; index: only of this link, if not 0.
func (c *conn) routes(table, index int) ([]route, error) {
	var out []route
	for _, f := range []byte{unix.AF_INET, unix.AF_INET6} {
		ms, err := c.dump(dumpRoutes(f, table, index))
		if rtnl.Lacks(err) { // a kernel without IPv6
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("table %d: %w", table, err)
		}
		for _, m := range ms {
			// Old kernels send every table and link, and those without IPv6 answer with IPv4.
			if r, ok := decodeRoute(m); ok && r.table == table && (index == 0 || r.index == index) && family(r.dst.Addr()) == f {
				out = append(out, r)
			}
		}
	}
	return out, nil
}
