package kerneltest

import (
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// NativeWireGuard says whether this machine's kernel makes a WireGuard link, in a namespace made for the
// question.
func NativeWireGuard() bool {
	result := make(chan bool, 1)
	go func() { // the thread, and the namespace with it, ends with the goroutine
		runtime.LockOSThread()
		h, err := netns.New()
		if err != nil {
			result <- false
			return
		}
		defer h.Close()
		a := netlink.NewLinkAttrs()
		a.Name = "sktry"
		result <- netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: a}) == nil
	}()
	return <-result
}
