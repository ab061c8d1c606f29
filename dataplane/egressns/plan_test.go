package egressns

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

func TestPlanLeavesOutWhatCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*dataplane.GatewaySpec)
		note    string
		clients int // addresses
	}{
		"as it should be": {func(*dataplane.GatewaySpec) {}, "", 2},
		"twice the same":  {func(s *dataplane.GatewaySpec) { s.Clients = append(s.Clients, s.Clients[0]) }, "", 2},
		"two slots": {func(s *dataplane.GatewaySpec) {
			s.Clients = append(s.Clients, dataplane.GatewayClient{IPv4: client4, Slot: 1})
		}, "named for slots 0 and 1", 2},
		"no such slot": {func(s *dataplane.GatewaySpec) { s.Clients[0].Slot = 7 }, "there is no slot 7", 0},
		"no endpoint": {func(s *dataplane.GatewaySpec) { s.Slots[0].Endpoint6 = netip.Addr{} },
			"has no endpoint", 1},
		"nothing to send with": {func(s *dataplane.GatewaySpec) {
			s.Slots[0].Source6, s.Local6 = netip.Addr{},
				netip.Addr{}
		}, "no source address", 1},
		"a client is an end": {func(s *dataplane.GatewaySpec) { s.Clients[0].IPv4 = end4 }, "is an endpoint", 1},
		"an address twice": {func(s *dataplane.GatewaySpec) { s.Slots[1].Source4 = source4 }, "slot 1 is left out: " +
			"its address", 2},
		"an endpoint twice":      {func(s *dataplane.GatewaySpec) { s.Slots[1].Endpoint4 = end4 }, "another slot's too", 2},
		"a slot twice":           {func(s *dataplane.GatewaySpec) { s.Slots[1].Number = 0 }, "named twice", 2},
		"a slot out of numbers":  {func(s *dataplane.GatewaySpec) { s.Slots[1].Number = 70000 }, "slot 70000 is left out", 2},
		"a slot below the first": {func(s *dataplane.GatewaySpec) { s.Slots[1].Number = -1 }, "slot -1 is left out", 2},
	} {
		t.Run(name, func(t *testing.T) {
			s := aSpec()
			c.change(&s)
			p, notes := newPlan(s)
			if all := strings.Join(notes, "\n"); !strings.Contains(all, c.note) || c.note == "" && all != "" {
				t.Errorf("notes %q, want %q", all, c.note)
			}
			if len(p.clients) != c.clients {
				t.Errorf("clients %v, want %d addresses", p.clients, c.clients)
			}
		})
	}
}

// TestDiff: from any state, the steps produce the wanted state, and a second Diff is empty; without prune nothing is
// removed.
func TestDiff(t *testing.T) {
	spec := rapid.Custom(func(t *rapid.T) dataplane.GatewaySpec {
		s := aSpec()
		s.Clients = nil
		for i := range rapid.IntRange(0, 6).Draw(t, "clients") {
			c := dataplane.GatewayClient{Slot: rapid.IntRange(0, 1).Draw(t, "slot")}
			c.IPv4 = netip.AddrFrom4([4]byte{10, 20, 0, byte(i + rapid.IntRange(0, 2).Draw(t, "offset"))})
			s.Clients = append(s.Clients, c)
		}
		if rapid.Bool().Draw(t, "narrow") {
			s.Destinations = prefixes("203.0.113.0/24")
		}
		s.Slots = s.Slots[:rapid.IntRange(1, 2).Draw(t, "slots")]
		s.Complete = rapid.Bool().Draw(t, "complete")
		return s
	})
	rapid.Check(t, func(t *rapid.T) {
		have := nftable.State{}
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			p, _ := newPlan(spec.Draw(t, "spec"))
			p = p.keep(have)
			before := maps.Clone(have.Sets[MapSlot4].Elements)
			w := want(p, byRemote, hold.Native)
			var err error
			if have, err = have.Apply(nftable.Diff(w, have, p.complete)); err != nil {
				t.Fatal(err)
			}
			if ops := nftable.Diff(w, have, p.complete); len(ops) > 0 {
				t.Fatalf("a second look finds %v", ops)
			}
			if p.complete {
				if d := cmp.Diff(w.State(), have, cmpopts.EquateEmpty(), cmpopts.EquateComparable(nftable.Range{})); d != "" {
					t.Fatal(d)
				}
				continue
			}
			for k := range before {
				if _, ok := have.Sets[MapSlot4].Elements[k]; !ok {
					a, _ := netip.AddrFromSlice([]byte(k))
					t.Fatalf("%s was taken away before all have spoken", a)
				}
			}
		}
	})
}

func TestProbeSource(t *testing.T) {
	for _, c := range []struct {
		slot      int
		four, six string
	}{{0, "169.254.102.1", "fd73:6b65:696e:6568::1"}, {248, "169.254.102.249", "fd73:6b65:696e:6568::f9"},
		{-1, "169.254.102.250", "fd73:6b65:696e:6568::fa"},
		{249, "invalid IP", "invalid IP"}, {-2, "invalid IP", "invalid IP"}} {
		if four, six := ProbeSource(c.slot, false).String(),
			ProbeSource(c.slot, true).String(); four != c.four || six != c.six {
			t.Errorf("slot %d: %s %s, want %s %s", c.slot, four, six, c.four, c.six)
		}
	}
}

// FuzzNotification parses arbitrary notifications.
func FuzzNotification(f *testing.F) {
	f.Add(uint16(unix.RTM_DELROUTE), append([]byte{2, 32, 0, 0, 118, 30, 0, 1, 0, 0, 0, 0}, 8, 0, 1, 0, 10, 20, 30, 40))
	f.Add(uint16(unix.RTM_NEWLINK), binary.NativeEndian.AppendUint32(make([]byte, 4), 7))
	l := &links{expected: expectation{uplink: 7, end: 7,
		clients: map[clientWay]bool{{dataplane.GatewayTable, client4}: true}}}
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		m := netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind)}, Data: data}
		l.concerned(m)
		l.endConcerned(m)
	})
}

// FuzzKeys parses keys and values of the table as the kernel or another program may have written them.
func FuzzKeys(f *testing.F) {
	f.Add(bytesOf(end4), slotKey(1))
	f.Add("", "")
	f.Fuzz(func(t *testing.T, key, val string) {
		if n, ok := toSlot(val); ok && slotKey(n) != val {
			t.Errorf("%x is slot %d, and again %x", val, n, slotKey(n))
		}
		have := nftable.State{There: true, Sets: map[string]nftable.SetState{}}
		for _, m := range []string{MapEndpoint4, MapSource6, MapSlot4} {
			have.Sets[m] = nftable.SetState{Elements: map[string]string{key: val, val: key}}
		}
		p := plan{}.keep(have)
		want(p, byRemote, holdNot)
		_ = fmt.Sprint(p.addresses(), p.tunnels())
	})
}

// byRemote names tunnels after their remote ends.
func byRemote(_, remote netip.Addr) string { return dataplane.FoULink(remote) }
