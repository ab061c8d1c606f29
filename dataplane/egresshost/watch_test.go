package egresshost

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/testns"
)

// TestWhatOthersChangeIsHeardOf: each change of something that the Spec wants is told of, and the next Reconcile
// repairs it. Changes of other links, tables and rules are not told of.
func TestWhatOthersChangeIsHeardOf(t *testing.T) {
	host, inner, outside := testns.New(t, "host"), testns.New(t, "inner"), testns.New(t, "outside")
	testns.Link(host, inner, "sktest", nil, nil)
	testns.Link(host, outside, "up", []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}, nil)
	testns.Link(host, outside, "other", []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24")}, nil)
	spec := Spec{Routes: []dataplane.PodRoute{{Addr: netip.MustParseAddr("169.254.101.1"), Link: "sktest"}},
		Tunnel: "skein0", Uplinks: []string{"up"}}
	changes := make(chan struct{}, 1000)
	var r *Reconciler
	reconcile := func() (writes int) {
		t.Helper()
		host.Must("reconcile", func() (err error) { writes, err = r.Reconcile(spec); return err })
		return writes
	}
	host.Must("open", func() (err error) {
		if r, err = New(dataplane.Numbers{}); err != nil {
			return err
		}
		return r.Watch(func() { changes <- struct{}{} })
	})
	defer r.Close()
	reconcile()
	run := func(commands ...string) {
		t.Helper()
		for _, command := range commands {
			host.Must(command, func() error {
				words := strings.Fields(command)
				out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
				if err != nil {
					t.Log(string(out))
				}
				return err
			})
		}
	}
	forwarding := func(link, value string) { host.Sysctl("net.ipv4.conf."+link+".forwarding", value) }
	// heard waits for a notification after which something is to be repaired: those of our own writes come first.
	heard := func(what string) {
		t.Helper()
		for deadline := time.After(10 * time.Second); ; {
			select {
			case <-changes:
				if reconcile() > 0 {
					return
				}
			case <-deadline:
				t.Fatalf("%s: it was not heard of", what)
			}
		}
	}
	for what, wreck := range map[string]func(){
		"the route":      func() { run("ip route flush table 115") },
		"the rule":       func() { run("ip rule del pref 1999") },
		"the table":      func() { run("nft delete table inet skein_egress") },
		"the setting":    func() { forwarding("up", "0") },
		"the link's way": func() { run("ip link set sktest down", "ip link set sktest up") },
	} {
		wreck()
		heard(what)
	}
	// Of what is others' nothing is heard. The last notification is about something of ours, and all come in order.
	// Before it the kernel may still tell of our own links: it reports that one has its carrier up to a second later.
	ours := map[string]bool{"sktest": true, "up": true}
	heardOf, over := make(chan bool, 1000), false
	var l rtnl.Listener
	defer l.Close()
	host.Must("listen", func() error {
		return l.Routing(0, rtnl.Links|rtnl.Routes|rtnl.Rules|rtnl.Settings, func(ms []netlink.Message, err error) {
			for _, m := range ms {
				switch marker := rtnl.IsRoute(m) && rtnl.Table(m) == 115; {
				case over:
				case marker:
					over = true
					close(heardOf)
				case rtnl.IsLink(m) && ours[rtnl.LinkName(m)]:
				default:
					heardOf <- r.concerns(m)
				}
			}
		})
	})
	run("ip route add 192.0.2.0/24 dev up table 77", "ip rule add pref 1999 lookup 77", "ip link set other down",
		"ip link set other up", "ip addr add 203.0.113.9/24 dev other")
	forwarding("other", "1")
	run("ip route flush table 115")
	others := 0
	for concerns := range heardOf {
		if others++; concerns {
			t.Errorf("notification %d is others', and was heard of", others)
		}
	}
	if others < 5 {
		t.Errorf("only %d notifications came of what is others'", others)
	}
	heard("the route, once more")
	if out, err := exec.Command("ip", "-n", host.Name, "route", "show", "table", "115").CombinedOutput(); err != nil ||
		!strings.Contains(string(out), "169.254.101.1") {
		t.Errorf("table 115: %s, %v", out, err)
	}
}
