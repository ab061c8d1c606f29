// Package testns gives tests network namespaces of their own, named sk…, gone when the test ends.
package testns

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/internal/netnsdir"
	"github.com/skeinmesh/skein/internal/testenv"
)

var count atomic.Int64

// NS is one namespace.
type NS struct {
	Name   string
	Handle netns.NsHandle
	t      testing.TB
}

// New makes a namespace with its loopback up.
func New(t testing.TB, hint string) *NS {
	t.Helper()
	testenv.NeedRoot(t)
	n := &NS{Name: fmt.Sprintf("sk%s-%d-%d", hint, os.Getpid(), count.Add(1)), t: t}
	done := make(chan error, 1)
	go func() { // the thread is not unlocked: it ends with the goroutine and takes the namespace's view along
		runtime.LockOSThread()
		unlock, err := netnsdir.Prepare(netnsdir.System, 0o755)
		if err == nil {
			n.Handle, err = netns.NewNamed(n.Name)
			unlock()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("making network namespace %s: %v", n.Name, err)
	}
	t.Cleanup(func() {
		n.Handle.Close()
		if err := netns.DeleteNamed(n.Name); err != nil {
			t.Errorf("removing network namespace %s: %v", n.Name, err)
		}
	})
	n.Do(func() {
		if lo, err := netlink.LinkByName("lo"); err != nil || netlink.LinkSetUp(lo) != nil {
			t.Errorf("setting lo up in %s: %v", n.Name, err)
		}
	})
	return n
}

// Do runs f on a thread inside the namespace. f must not call t.FailNow.
func (n *NS) Do(f func()) {
	n.t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(n.Handle); err != nil {
			done <- err
			return
		}
		f()
		done <- nil
	}()
	if err := <-done; err != nil {
		n.t.Fatalf("entering network namespace %s: %v", n.Name, err)
	}
}

// Must is Do for one call that may fail, and must not.
func (n *NS) Must(what string, f func() error) {
	n.t.Helper()
	var err error
	n.Do(func() { err = f() })
	if err != nil {
		n.t.Fatalf("%s in %s: %v", what, n.Name, err)
	}
}

// Sysctl writes a setting of the namespace; the name is in dots.
func (n *NS) Sysctl(name, value string) {
	n.t.Helper()
	n.Must("sysctl "+name, func() error {
		return os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0o644)
	})
}

// Link joins two namespaces with a veth pair, name at both ends, up, with these addresses.
func Link(a, b *NS, name string, addrsA, addrsB []netip.Prefix) {
	a.t.Helper()
	a.Must("veth "+name, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerNamespace: netlink.NsFd(b.Handle)})
	})
	a.Address(name, addrsA...)
	b.Address(name, addrsB...)
}

// Address gives a link addresses and sets it up.
func (n *NS) Address(link string, addrs ...netip.Prefix) {
	n.t.Helper()
	n.Must("addresses of "+link, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		for _, p := range addrs {
			a, err := netlink.ParseAddr(p.String())
			if err != nil {
				return err
			}
			if p.Addr().Is6() {
				const nodad = 0x02
				a.Flags = nodad
			}
			if err := netlink.AddrAdd(l, a); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(l)
	})
}
