package kerneltest

import (
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// NativeWireGuard says whether this machine's kernel makes a WireGuard link, in a namespace made for the
// question.
func NativeWireGuard() bool {
	return try(func() error {
		a := netlink.NewLinkAttrs()
		a.Name = "sktry"
		return netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: a})
	})
}

// NativeNetem says whether this machine's kernel makes a link faulty, in a namespace made for the question.
func NativeNetem() bool {
	return try(func() error {
		const lo = 1 // the first link of every namespace
		q := netlink.QdiscAttrs{LinkIndex: lo, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
		return netlink.QdiscAdd(netlink.NewNetem(q, netlink.NetemQdiscAttrs{Latency: 1000}))
	})
}

// try says whether f succeeds in a new network namespace.
func try(f func() error) bool {
	result := make(chan bool, 1)
	go func() { // the thread, and the namespace with it, ends with the goroutine
		runtime.LockOSThread()
		h, err := netns.New()
		if err != nil {
			result <- false
			return
		}
		defer h.Close()
		result <- f() == nil
	}()
	return <-result
}
