package egressclient

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
)

// loosen keeps a strict reverse path filter from dropping what comes in by the device for answers from other addresses: the
// way back leads into another tunnel. Where the filter is off or loose already nothing is written.
func loosen(ns netns.NsHandle, link string) (writes int, err error) {
	const strict, loose = "1", "2"
	done := make(chan error, 1)
	go func() { // the thread is not unlocked: it ends with the goroutine
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("entering the network namespace: %w", err)
			return
		}
		path := func(link string) string { return "/proc/sys/net/ipv4/conf/" + link + "/rp_filter" }
		own, err := readSetting(path(link))
		all, aerr := readSetting(path("all"))
		if err = errors.Join(err, aerr); err == nil && own != loose && all != loose && (own == strict || all == strict) {
			writes = 1
			err = os.WriteFile(path(link), []byte(loose), 0o644)
		}
		done <- err
	}()
	return writes, <-done
}

// readSetting is empty where there is no such setting.
func readSetting(path string) (string, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}
