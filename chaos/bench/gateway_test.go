package bench

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/internal/testns"
)

// BenchmarkClients installs so many clients in a gateway's network namespace at once, and then one more, again and
// again.
func BenchmarkClients(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for range b.N {
				installClients(b, n)
			}
		})
	}
}

func installClients(b *testing.B, n int) {
	host := testns.New(b, "gw")
	dir, err := os.MkdirTemp("", "sk")
	if err != nil {
		b.Fatal(err)
	}
	file := filepath.Join(dir, "netns")
	defer func() {
		if err := egressns.Remove(file); err != nil {
			b.Error(err)
		}
		os.RemoveAll(dir)
	}()
	var ns *egressns.NS
	host.Must("open the gateway", func() (err error) {
		ns, err = egressns.Open(egressns.Options{File: file, Egress: "out/bench", Driver: "auto"})
		return err
	})
	defer ns.Close()
	apply := func(clients int) (writes int, took time.Duration) {
		spec := gatewayOf(clients)
		host.Must("apply", func() error {
			began := time.Now()
			w, notes, err := ns.Apply(spec)
			writes, took = w, time.Since(began)
			if err == nil && len(notes) > 0 {
				err = fmt.Errorf("%s", strings.Join(notes, "; "))
			}
			return err
		})
		return writes, took
	}
	apply(0)
	before := resident(b)
	_, setup := apply(n)
	b.ReportMetric(float64(setup.Microseconds())/1000, "setup-ms")
	b.ReportMetric(float64(resident(b)-before), "memory-bytes")
	const more = 20
	var took sample
	written := 0
	for i := range more {
		w, d := apply(n + i + 1)
		took.add(d, "one more")
		written += w
	}
	b.ReportMetric(float64(took.quantile(50).Microseconds())/1000, "one-more-ms")
	b.ReportMetric(float64(written)/more, "one-more-writes")
	if w, _ := apply(n + more); w != 0 {
		b.Errorf("the same again took %d messages", w)
	}
}

// gatewayOf is the Spec of a gateway with so many dual-stack clients in one slot.
func gatewayOf(clients int) dataplane.GatewaySpec {
	s := dataplane.GatewaySpec{
		Egress: "out/bench", MTU: 1420, Complete: true,
		Local4: netip.MustParseAddr("169.254.101.1"), Local6: netip.MustParseAddr("fd73:6b65:696e:6567::1"),
		Slots: []dataplane.GatewaySlot{{Endpoint4: netip.MustParseAddr("10.64.255.1"),
			Endpoint6: netip.MustParseAddr("fd00:64::ffff:1"),
			Source4:   netip.MustParseAddr("198.18.2.210"), Source6: netip.MustParseAddr("2001:db8:2::d2")}},
		Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		Inside:       []netip.Prefix{netip.MustParsePrefix("10.64.0.0/16"), netip.MustParsePrefix("fd00:64::/64")},
	}
	for i := range clients {
		v6 := netip.MustParseAddr("fd00:64::").As16()
		v6[14], v6[15] = byte(i>>8), byte(i)
		s.Clients = append(s.Clients, dataplane.GatewayClient{IPv4: netip.AddrFrom4([4]byte{10, 64, byte(i >> 8), byte(i)}),
			IPv6: netip.AddrFrom16(v6)})
	}
	return s
}

// resident is what this process holds, in bytes, after a collection of garbage.
func resident(b *testing.B) int {
	b.Helper()
	runtime.GC()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		b.Fatal(err)
	}
	return pages * os.Getpagesize()
}
