package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Transfer sends bytes over one TCP connection from each place to each other, through the overlay, and
// waits until the receivers have them all. It fails when that takes longer than within.
func (l *Lab) Transfer(ctx context.Context, within time.Duration, t Transfer) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var errs []error
	for _, f := range t.From {
		for _, to := range t.To {
			if f == to {
				continue
			}
			start := time.Now()
			if err := l.transfer(ctx, f, to, t.Bytes); err != nil {
				errs = append(errs, pairError{f, to, fmt.Errorf("%d bytes from %s to %s did not arrive within %s: %w", t.Bytes, f,
					to, within, err)})
				continue
			}
			l.progress("%d bytes from %s to %s in %s", t.Bytes, f, to, round(time.Since(start)))
		}
	}
	return errors.Join(errs...)
}

func (l *Lab) transfer(ctx context.Context, from, to string, size int) error {
	_, sender, err := l.place(from)
	if err != nil {
		return err
	}
	_, receiver, err := l.place(to)
	if err != nil {
		return err
	}
	dst, err := l.target(to)
	if err != nil {
		return err
	}
	var listener net.Listener
	if err := fabric.In(receiver, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(dst, 0).String())
		return err
	}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer func() { stop(); listener.Close() }()
	sent, arrived := make(chan error, 1), make(chan struct{})
	go func() { sent <- send(ctx, sender, listener.Addr().String(), size, arrived) }()
	got, err := receive(ctx, listener)
	close(arrived)
	if serr := <-sent; err == nil {
		err = serr
	}
	if err == nil && got != int64(size) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("%d bytes arrived: %w", got, err)
	}
	return nil
}

// send ends the stream behind what it sends, and closes the socket when all has arrived: one that is closed before is
// reset by the kernel as soon as a few packets in a row are lost (tcp_orphan_retries in ip-sysctl).
func send(ctx context.Context, ns, to string, size int, arrived <-chan struct{}) error {
	var c net.Conn
	deadline, _ := ctx.Deadline()
	if err := fabric.In(ns, func() (err error) {
		c, err = net.DialTimeout("tcp", to, time.Until(deadline))
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := io.CopyN(c, zeros{}, int64(size)); err != nil {
		return err
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		return err
	}
	select {
	case <-arrived:
	case <-ctx.Done():
	}
	return nil
}

// zeros is a source that does not end.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func receive(ctx context.Context, l net.Listener) (int64, error) {
	c, err := l.Accept()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, c)
}
