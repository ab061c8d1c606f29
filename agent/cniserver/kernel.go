package cniserver

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// Kernel is package podnet in the calling thread's network namespace.
type Kernel struct {
	Table int // of the host's routes to pods; 0: the default one
}

var _ Network = Kernel{}

// Add is podnet.Add.
func (k Kernel) Add(a podnet.Attachment) (podnet.Link, error) {
	a.Table = k.Table
	return podnet.Add(a)
}

// Del is podnet.Del.
func (Kernel) Del(netns string, k podnet.Key) error { return podnet.Del(netns, k) }

// Check is podnet.Check. Where the MTU is 0 it is the host end's: the mesh's may have changed since, and only the ends
// of one link have to agree.
func (k Kernel) Check(a podnet.Attachment) error {
	a.Table = k.Table
	if a.MTU == 0 {
		a.MTU = 1420 // for a link that is gone any will do
		if l, err := netlink.LinkByName(podnet.HostLink(a.Key)); err == nil {
			a.MTU = l.Attrs().MTU
		}
	}
	return podnet.Check(a)
}

// CheckNetNS is podnet.CheckNetNS.
func (Kernel) CheckNetNS(path string) error { return podnet.CheckNetNS(path) }

// Has looks for the host's end by its name.
func (Kernel) Has(k podnet.Key) (bool, error) {
	name := podnet.HostLink(k)
	_, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for link %s: %w", name, err)
	}
	return true, nil
}

// kernel runs f on a thread of its own kind: locked, since podnet changes namespaces on it, and one of a bounded
// number, since a thousand pods that start at once would else have a thousand threads.
func (s *Server) kernel(ctx context.Context, f func() error) error {
	select {
	case s.threads <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.threads }()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return f()
}
