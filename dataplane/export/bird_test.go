package export_test

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/route"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/internal/testns"
)

// document is where the configuration of the host stands; the router's is its counterpart.
const document = "../../docs/routing-export.md"

const router = `
router id 192.0.2.2;
protocol device { }
protocol bgp skein {
	local 192.0.2.2 as 64513;
	neighbor 192.0.2.1 as 64512;
	ipv4 { import all; export none; };
	ipv6 { import all; export none; };
}
`

// example is the first block of BIRD's configuration in the document.
func example(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```bird\n(.*?)```").FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s has no configuration of BIRD", document)
	}
	return string(m[1])
}

// bird runs BIRD in a namespace until the test ends, and returns a function that asks it.
func bird(t *testing.T, n *testns.NS, config string) func(...string) string {
	t.Helper()
	program, err := exec.LookPath("bird")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/bird"); err != nil {
			testenv.Missing(t, "needs BIRD 2 (Debian: bird2): .ci/setup installs it")
		}
	}
	dir, err := os.MkdirTemp("", "skbird") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.WriteFile(at("conf"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	c := exec.Command(program, "-f", "-c", at("conf"), "-s", at("ctl"), "-P", at("pid"))
	c.Stderr = &said
	n.Must("start BIRD", c.Start)
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("BIRD in %s:\n%s", n.Name, said.String())
		}
	})
	return func(words ...string) string {
		out, err := exec.Command(filepath.Join(filepath.Dir(program), "birdc"), append([]string{"-s", at("ctl")},
			words...)...).CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out)
	}
}

// prefixes are those that BIRD's answer names at the beginning of a line.
func prefixes(answer string) (out []netip.Prefix) {
	for line := range strings.Lines(answer) {
		if words := strings.Fields(line); len(words) > 0 {
			if p, err := netip.ParsePrefix(words[0]); err == nil {
				out = append(out, p)
			}
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return out
}

// One BIRD reads table 119 and announces it to another, as the document says.
func TestBIRDAnnouncesBlocks(t *testing.T) {
	pfx := netip.MustParsePrefix
	host, far := testns.New(t, "host"), testns.New(t, "router")
	testns.Link(host, far, "up0", []netip.Prefix{pfx("192.0.2.1/24"), pfx("2001:db8::1/64")},
		[]netip.Prefix{pfx("192.0.2.2/24"), pfx("2001:db8::2/64")})

	apply := func(blocks ...netip.Prefix) {
		t.Helper()
		host.Must("apply", func() error {
			r, err := route.NewReconciler("none", dataplane.Numbers{}) // no tunnel is needed here
			if err != nil {
				return err
			}
			defer r.Close()
			_, _, err = r.Reconcile(dataplane.Spec{Link: dataplane.Link{Name: "none", MTU: dataplane.MTU},
				Pods: dataplane.Pods{Blocks: blocks}, Complete: true})
			if errors.Is(err, route.ErrNoLink) {
				return nil
			}
			return err
		})
	}
	apply(pfx("10.64.0.0/27"), pfx("10.65.0.9/32"), pfx("fd64::/123"))
	here, there := bird(t, host, example(t)), bird(t, far, router)
	expect := func(want ...netip.Prefix) {
		t.Helper()
		const limit = 30 * time.Second // BGP waits some seconds before it connects; BIRD reads the table every second
		var got []netip.Prefix
		for start := time.Now(); time.Since(start) < limit; time.Sleep(50 * time.Millisecond) {
			if got = prefixes(there("show", "route")); slices.Equal(got, want) {
				t.Logf("after %s", time.Since(start).Round(10*time.Millisecond))
				return
			}
		}
		t.Fatalf("the router has %v, want %v\nhost:\n%s\n%s\nrouter:\n%s\n%s", got, want, here("show", "protocols", "all"),
			here("show", "route", "all"), there("show", "protocols", "all"), there("show", "route", "all"))
	}
	expect(pfx("10.64.0.0/27"), pfx("10.65.0.9/32"), pfx("fd64::/123"))
	all := there("show", "route", "all")
	for _, hop := range []string{"BGP.next_hop: 192.0.2.1", "BGP.next_hop: 2001:db8::1"} {
		if !strings.Contains(all, hop) {
			t.Errorf("%s is missing in\n%s", hop, all)
		}
	}
	apply(pfx("10.64.0.0/27"), pfx("fd64::/123"), pfx("fd64::20/123"))
	expect(pfx("10.64.0.0/27"), pfx("fd64::/123"), pfx("fd64::20/123"))
	apply()
	expect()
}
