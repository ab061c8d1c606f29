package rtnl

import (
	"cmp"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace opens the network namespace at path; "" is the calling thread's.
func Namespace(path string) (netns.NsHandle, error) {
	path = cmp.Or(path, "/proc/thread-self/ns/net")
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return ns, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	return ns, nil
}

// Inside runs f on a thread of its own in a network namespace.
func Inside(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() { // the thread is not unlocked: it ends with the goroutine
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("entering a network namespace: %w: this needs CAP_SYS_ADMIN", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// TUN opens a TUN device of the calling thread's network namespace, without waiting in reads, and makes it where there
// is none. The error is EBUSY where another process has it. flags are added to those of a device of bare IP packets.
func TUN(name string, flags uint16) (fd int, err error) {
	const path = "/dev/net/tun"
	fd, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("opening %s: %w: load the module tun, or give the container this device", path, err)
	}
	r, err := unix.NewIfreq(name)
	if err == nil {
		r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, r)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
