package hopnet

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// TestWithoutTheModule: status says what is missing and what to do, and the guards are there all the same; a kernel
// that has it is as the Spec says.
func TestWithoutTheModule(t *testing.T) {
	ns := testns.New(t, "hopnet")
	ns.Do(func() {
		// The addresses that ways have as sources. On lo the whole network of each would be this host's own.
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"}
		err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link))
		for _, a := range spec().Link.Addresses {
			x, e := netlink.ParseAddr(a.String())
			if e == nil {
				x.Flags = unix.IFA_F_NODAD // it is a source at once
				e = netlink.AddrAdd(link, x)
			}
			err = errors.Join(err, e)
		}
		if err != nil {
			t.Error(err)
			return
		}
		r, err := NewReconciler(true, dataplane.Numbers{})
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		s := spec()
		_, _, err = r.Reconcile(s)
		left, diffErr := r.Diff(s)
		if diffErr != nil {
			t.Error(diffErr)
		}
		if err == nil {
			if len(left) > 0 {
				t.Errorf("it differs by %q", left)
			}
		} else {
			for _, want := range []string{"module sit", "dataplane.wireguard: userspace"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not name %s", err, want)
				}
			}
			for _, line := range left {
				if strings.Contains(line, dataplane.DefaultNumbers().HopNftTable) {
					t.Errorf("left is %q", left)
				}
			}
		}
		if err := r.Purge(); err != nil {
			t.Error(err)
		}
		if left, err := r.Diff(dataplane.Spec{Complete: true}); err != nil || len(left) > 0 {
			t.Errorf("after Purge is left %q, %v", left, err)
		}
	})
}

// TestPlainRoutesAreReadAsTheyWereMade, also without the link.
func TestPlainRoutesAreReadAsTheyWereMade(t *testing.T) {
	ns := testns.New(t, "hopnet")
	ns.Do(func() {
		r, err := NewReconciler(true, dataplane.Numbers{})
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		for f, text := range map[int]string{4: "10.4.8.1/32", 6: "fd00:5::8/128"} {
			want := Route{Prefix: pfx(text), Plain: true}
			for range 2 { // the second time nothing is left to be done
				if err := r.apply(Op{Verb: AddRoute, Route: want}); err != nil {
					t.Errorf("%s: %v", want, err)
				}
			}
			if have, err := r.readRoutes(f, false, 0); err != nil || len(have) != 1 || have[0] != want {
				t.Errorf("made %s, read %v, %v", want, have, err)
			}
			if err := r.apply(Op{Verb: DelRoute, Route: want}); err != nil {
				t.Error(err)
			}
			if have, err := r.readRoutes(f, false, 0); err != nil || len(have) > 0 {
				t.Errorf("deleted %s, read %v, %v", want, have, err)
			}
		}
	})
}

// TestGuardsKeepTheirRules while sources come and go, and with the rules what these have counted.
func TestGuardsKeepTheirRules(t *testing.T) {
	ns := testns.New(t, "hopnet")
	ns.Do(func() {
		r, err := NewReconciler(true, dataplane.Numbers{})
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		source := func(last string) Source {
			return Source{From: addr("10.4.0.2"), First: addr("10.4.8.0"), Last: addr(last)}
		}
		six := Source{From: addr("10.4.0.2"), First: addr("fd00:5::"), Last: addr("fd00:5::ff")}
		handles := func() (out []uint64) {
			table := &nftables.Table{Name: r.n.HopNftTable, Family: nftables.TableFamilyINet}
			rules, err := r.guards.Nft().GetRules(table, &nftables.Chain{Table: table, Name: chainGuards})
			if err != nil {
				t.Error(err)
			}
			for _, rule := range rules {
				out = append(out, rule.Handle)
			}
			return out
		}
		var before []uint64
		for _, sources := range [][]Source{{source("10.4.8.3")}, {source("10.4.8.7"), six}, {six}, nil} {
			g := Guards{Self: addr("10.4.0.1"), Self6: addr("fd00::1"), Sources: sources}
			if err := r.setGuards(g); err != nil {
				t.Error(err)
			}
			if have, err := r.readGuards(g.Self, g.Self6); err != nil || !have.equal(g) {
				t.Errorf("wrote %v, read %v, %v", g, have, err)
			}
			if before == nil {
				before = handles()
			}
			if now := handles(); len(now) == 0 || !slices.Equal(now, before) {
				t.Errorf("with %d sources the rules %v became %v", len(sources), before, now)
			}
		}
		if have, err := r.readGuards(addr("10.4.0.9"), addr("fd00::1")); err != nil || have.Self == addr("10.4.0.9") {
			t.Errorf("those of another address were taken for %v, %v", have, err)
		}
	})
}
