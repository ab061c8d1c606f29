// Package testenv tells tests what this machine can do, and makes a missing ability loud: where
// everything must run (CI, SKEIN_REQUIRE_ALL=1) it fails the test, elsewhere it skips with the reason.
package testenv

import (
	"os"
	"testing"
)

// NeedRoot asks for root, which network namespaces, raw sockets and TUN devices need.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, "needs root: network namespaces, raw sockets and TUN devices")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		Missing(t, "needs /dev/net/tun: "+err.Error())
	}
}

// Missing ends the test: failed where every tier is required, skipped elsewhere.
func Missing(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" || os.Getenv("SKEIN_REQUIRE_ALL") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// OpenFiles counts the file descriptors of this process.
func OpenFiles(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
