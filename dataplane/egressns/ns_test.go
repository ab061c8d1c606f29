package egressns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testenv"
)

func TestPacketsLeaveWithTheSlotsSource(t *testing.T) {
	s := newScene(t)
	if w := s.apply(aSpec()); w == 0 {
		t.Error("nothing was written")
	}
	if w := s.apply(aSpec()); w != 0 {
		t.Errorf("the same again took %d messages", w)
	}
	for _, x := range []struct{ client, target, source netip.Addr }{{client4, target4, source4},
		{client6, target6, source6}} {
		c := s.socket(x.client)
		s.silent("before the lease", c, x.target)
		s.grant(0, 10*time.Second)
		if got := s.seen(c, x.target); got != x.source.String() {
			t.Errorf("the target sees %s, want %s", got, x.source)
		}
		if err := s.n.Drop(0); err != nil {
			t.Fatal(err)
		}
		s.silent("after the lease", c, x.target)
	}
	c := s.counters()
	if k := c.Slots[0]; k.SentPackets == 0 || k.ReceivedPackets == 0 || k.SentBytes == 0 || k.ReceivedBytes == 0 ||
		c.Slots[1].SentPackets != 0 {
		t.Errorf("counters of the slots: %+v", c.Slots)
	}
	if c.Dropped.Lease == 0 || c.Conntrack == 0 || c.ConntrackMax == 0 {
		t.Errorf("counters: %+v", c)
	}
}

// TestRulesAndRoutesAreTheSeeds compares the output of commands with the seed document, except for the rule's
// protocol.
func TestRulesAndRoutesAreTheSeeds(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	const rules = "0: from all lookup local 2000: from all iif eth0 lookup 118 proto 30 32766: from all lookup main " +
		"32767: from all lookup default"
	const rules6 = "0: from all lookup local 2000: from all iif eth0 lookup 118 proto 30 32766: from all lookup main"
	for _, x := range []struct {
		family       string
		client       netip.Addr
		rules, route string
	}{
		{"-4", client4, rules, fmt.Sprintf("%s dev %s proto 30", client4, s.n.driver.Link(end4, client4))},
		{"-6", client6, rules6, fmt.Sprintf("%s dev %s proto 30 metric 1024 pref medium", client6,
			s.n.driver.Link(end6, client6))},
	} {
		gotRules, gotRoutes := s.printed(x.family)
		if gotRules != x.rules {
			t.Errorf("rules: %s\nwant:  %s", gotRules, x.rules)
		}
		if gotRoutes != x.route {
			t.Errorf("table 118: %s\nwant:      %s", gotRoutes, x.route)
		}
	}
	if s.n.Driver() == fou.Kernel && s.n.driver.Link(end4, client4) != "fou4_0a141e28" {
		t.Errorf("the tunnel is %s, the seed's fou4_0a141e28", s.n.driver.Link(end4, client4))
	}
}

// printed returns the rules and table 118 in the format of ip; in the kernel tier, where the command is missing, it
// formats them itself.
func (s *scene) printed(family string) (rules, routes string) {
	s.t.Helper()
	fields := func(text string) string { return strings.Join(strings.Fields(text), " ") }
	if _, err := exec.LookPath("ip"); err == nil {
		return fields(s.inside("ip", family, "rule")), fields(s.inside("ip", family, "route", "show", "table", "118"))
	}
	f, more := netlink.FAMILY_V4, ""
	if family == "-6" {
		f, more = netlink.FAMILY_V6, " metric 1024 pref medium"
	}
	rs, err := s.n.links.in.One().RuleList(f)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, r := range rs {
		table := map[int]string{255: "local", 254: "main", 253: "default"}[r.Table]
		line := fmt.Sprintf("%d: from all lookup %s ", max(r.Priority, 0), table)
		if table == "" {
			line = fmt.Sprintf("%d: from all iif %s lookup %d proto %d ", r.Priority, r.IifName, r.Table, r.Protocol)
		}
		rules += line
	}
	all, err := s.n.links.in.Routes(f, dataplane.GatewayTable)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, r := range all {
		l, err := s.n.links.in.One().LinkByIndex(r.LinkIndex)
		if err != nil {
			s.t.Fatal(err)
		}
		routes += fmt.Sprintf("%s dev %s proto %d%s ", r.Dst.IP, l.Attrs().Name, r.Protocol, more)
	}
	return fields(rules), fields(routes)
}

// droppedFor sends until the counter has grown.
func (s *scene) droppedFor(what string, read func(Counters) uint64, send func()) {
	s.t.Helper()
	before := read(s.counters())
	eventually(s.t, what+" is dropped and counted", func() bool {
		send()
		return read(s.counters()) > before
	})
}

func TestWhatIsDropped(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	s.grant(0, time.Minute)
	c := s.socket(client4)
	s.seen(c, target4)
	strangers := func(c Counters) uint64 { return c.Dropped.Strangers + c.Tunnels.DroppedStranger }

	outside := netip.MustParseAddr("198.51.100.1") // of Inside
	s.lead(outside, end4)
	s.droppedFor("a destination inside", func(c Counters) uint64 { return c.Dropped.Destination },
		func() { s.ask(c, outside, time.Millisecond) })

	spoofed := s.socket(second4)
	s.droppedFor("another source inside", strangers, func() { s.ask(spoofed, target4, time.Millisecond) })

	s.droppedFor("a tunnel in the tunnel", func(c Counters) uint64 { return c.Dropped.Nested }, func() {
		c.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(target4, dataplane.FoUPort))
	})
	// From an address that is not a client's, directly to the endpoint.
	s.droppedFor("a stranger's datagram", func(c Counters) uint64 { return c.Dropped.Strangers }, func() {
		spoofed.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(end4, dataplane.FoUPort))
	})
	// Packets to a slot's address that are not answers: from the LAN, without a request.
	var unasked *net.UDPConn
	s.target.Must("socket of the target", func() (err error) {
		unasked, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(target4, 0)))
		return err
	})
	defer unasked.Close()
	s.droppedFor("no answer", func(c Counters) uint64 { return c.Dropped.Strangers }, func() {
		unasked.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(source4, 9))
	})
	spec := aSpec()
	spec.Destinations = prefixes("203.0.113.0/24", "::/0")
	s.apply(spec)
	s.droppedFor("a destination that is none any more", func(c Counters) uint64 { return c.Dropped.Destination },
		func() { s.ask(c, target4, time.Millisecond) })
	s.apply(aSpec())
	s.seen(c, target4)
}

// TestALeaseRunsOutByItself: forwarding ends without any process, and a late answer does not restart it.
func TestALeaseRunsOutByItself(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	c := s.socket(client4)
	s.grant(0, 5*time.Second)
	s.seen(c, target4)
	const lease = 700 * time.Millisecond
	begun := time.Now()
	ticket, err := s.n.Begin(0, lease)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.n.Grant(0, ticket); err != nil {
		t.Fatal(err)
	}
	last := time.Time{}
	for time.Since(begun) < lease+500*time.Millisecond {
		sent := time.Now()
		if s.ask(c, target4, 20*time.Millisecond) != "" {
			last = sent
		}
	}
	// 20: the jiffies of a guest with 100 in a second
	if d := last.Sub(begun); d < lease/2 || d > lease+20*time.Millisecond {
		t.Errorf("it ended %s after Begin, want %s", d, lease)
	}
	// An agent was paused between its request and the answer.
	late, err := s.n.Begin(0, 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ticket has run out", func() bool { return !s.lives(late) })
	if err := s.n.Grant(0, late); err != nil {
		t.Fatal(err)
	}
	s.silent("granted after its time", c, target4)
	s.grant(0, time.Minute)
	s.seen(c, target4)
	dropped, err := s.n.Begin(0, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.n.Drop(0); err != nil {
		t.Fatal(err)
	}
	s.silent("after Drop", c, target4)
	if err := s.n.Grant(0, dropped); !errors.Is(err, ErrTicket) {
		t.Errorf("a ticket that was dropped is granted: %v", err)
	}
	if err := s.n.Grant(1, ticket); !errors.Is(err, ErrTicket) {
		t.Errorf("another slot's ticket is granted: %v", err)
	}
	s.silent("after an answer that came behind Drop", c, target4)
}

// lives reports whether the kernel still has a ticket.
func (s *scene) lives(t Ticket) bool {
	s.t.Helper()
	s.n.leases.mu.Lock()
	defer s.n.leases.mu.Unlock()
	es, err := s.n.leases.t.Nft().GetSetElements(setOf(SetTickets))
	if err != nil {
		s.t.Fatal(err)
	}
	return slices.ContainsFunc(es, func(e nftables.SetElement) bool { return string(e.Key) == number(uint32(t)) })
}

func TestRenewingLosesNothing(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	c := s.socket(client4)
	s.grant(0, 5*time.Second)
	s.seen(c, target4)
	stop, done := make(chan struct{}), make(chan error, 1)
	renewals, longest := 0, time.Duration(0)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			begin := time.Now()
			ticket, err := s.n.Begin(0, 5*time.Second)
			if err == nil {
				err = s.n.Grant(0, ticket)
			}
			if err != nil {
				done <- err
				return
			}
			longest = max(longest, time.Since(begin))
			renewals++
		}
	}()
	lost := 0
	const packets = 2000
	for range packets {
		if s.ask(c, target4, 2*time.Second) == "" {
			lost++
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d renewals during %d packets, the slowest took %s", renewals, packets, longest)
	if lost > 0 || renewals < 100 {
		t.Errorf("%d of %d packets were lost over %d renewals", lost, packets, renewals)
	}
}

// TestARestartAdopts: the lease, the clients and the destinations stay, and nothing existing is removed before the
// Spec is complete.
func TestARestartAdopts(t *testing.T) {
	needCommands(t)
	s := newScene(t)
	s.apply(aSpec())
	c := s.socket(client4)
	s.grant(0, time.Minute)
	s.seen(c, target4)
	before := s.inside("nft", "list", "ruleset")
	s.open()
	strip := func(text string) string {
		var out []string
		for line := range strings.Lines(text) {
			if !strings.Contains(line, "packets") && !strings.Contains(line, "expires") {
				out = append(out, line)
			}
		}
		return strings.Join(out, "")
	}
	if after := s.inside("nft", "list", "ruleset"); strip(after) != strip(before) {
		t.Errorf("opening again changed the table:\n%s\nbefore:\n%s", after, before)
	}
	some := aSpec()
	some.Complete, some.Clients, some.Slots, some.Destinations = false, nil, nil, nil
	s.apply(some)
	if got := s.seen(c, target4); got != source4.String() { // by the lease of the former run
		t.Errorf("the target sees %s", got)
	}
	if w := s.apply(aSpec()); w != 0 {
		t.Errorf("what was there took %d messages", w)
	}
	none := aSpec()
	none.Clients = nil
	s.apply(none)
	s.silent("a client that is gone", c, target4)
	if got := s.inside("ip", "route", "show", "table", "118"); strings.TrimSpace(got) != "" {
		t.Errorf("table 118 still has %s", got)
	}
}

// TestAnAddressMovesToAnotherSlot: a pod's address is reused by a client of the other slot.
func TestAnAddressMovesToAnotherSlot(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	s.grant(0, time.Minute)
	s.grant(1, time.Minute)
	c := s.socket(client4)
	s.seen(c, target4)
	moved := aSpec()
	moved.Clients[0].Slot = 1
	moved.Clients[0].IPv6 = netip.Addr{}
	if w := s.apply(moved); w > 14 { // each slot has a device, which comes and goes with its clients
		t.Errorf("moving a client took %d messages", w)
	}
	s.lead(target4, otherEnd4)
	c = s.socket(client4)
	if got := s.seen(c, target4); got != local4.String() {
		t.Errorf("the target sees %s, want the namespace's own %s", got, local4)
	}
}

func TestDriftIsRepaired(t *testing.T) {
	needCommands(t)
	s := newScene(t)
	s.apply(aSpec())
	c := s.socket(client4)
	other := "add table inet other; add chain inet other x { type filter hook forward priority 5; }; add rule inet " +
		"other x counter accept"
	s.inside("nft", other)
	s.in(s.host, "nft", other)
	for _, damage := range [][]string{
		{"nft", "delete table inet skein"},
		{"nft", "flush chain inet skein skein_source"},
		{"nft", "insert rule inet skein skein_forward accept"},
		{"nft", "add chain inet skein own; add rule inet skein own drop; insert rule inet skein skein_forward jump own"},
		{"nft", "delete element inet skein skein_slot4 { 10.20.30.40 }"},
		{"nft", "flush map inet skein skein_granted"},
		{"ip", "rule", "del", "priority", "2000"},
		{"ip", "route", "flush", "table", "118"},
		{"ip", "route", "del", "default"},
		{"ip", "addr", "del", end4.String() + "/32", "dev", "eth0"},
		{"ip", "link", "set", "eth0", "down"},
		{"ip", "link", "set", "eth0", "mtu", "1300"},
	} {
		what := strings.Join(damage, " ")
		before := s.repaired.Load()
		s.inside(damage[0], damage[1:]...)
		eventually(t, "notice of: "+what, func() bool { return s.repaired.Load() > before })
		s.apply(aSpec())
		s.grant(0, time.Minute)
		if damage[0] == "ip" && strings.Contains(what, "down") { // the host's routes went with it
			s.hostRoutes()
		}
		if got := s.ask(c, target4, time.Second); got == "" {
			if s.seen(c, target4) == "" {
				t.Errorf("not repaired: %s", what)
			}
		}
	}
	for _, damage := range [][]string{
		{"ip", "addr", "flush", "dev", s.n.HostLink()},
		{"ip", "link", "set", s.n.HostLink(), "down"},
		{"ip", "link", "del", s.n.HostLink()},
	} {
		before := s.repaired.Load()
		s.in(s.host, damage[0], damage[1:]...)
		eventually(t, fmt.Sprint("notice of: ", damage), func() bool { return s.repaired.Load() > before })
		s.apply(aSpec())
		s.hostRoutes()
		if s.seen(c, target4) == "" {
			t.Errorf("not repaired: %q", damage)
		}
	}
	eventually(t, "quiet", func() bool { return s.apply(aSpec()) == 0 })
	for _, list := range []string{s.inside("nft", "list", "tables"), s.in(s.host, "nft", "list", "tables")} {
		if !strings.Contains(list, "table inet other") {
			t.Errorf("another's table is gone: %s", list)
		}
	}
	if list := s.in(s.host, "nft", "list", "tables"); strings.Contains(list, "skein") {
		t.Errorf("the host has a table of ours: %s", list)
	}
}

// Whatever obstructs Open, it returns an error and leaves nothing open, and succeeds once the obstruction is gone.
func TestOpenThatFails(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	if err := s.n.Close(); err != nil {
		t.Fatal(err)
	}
	s.n = nil
	for want, o := range map[string]Options{
		`driver "fast"`:   {File: s.file, Driver: "fast"},
		"not a directory": {File: s.file + "/below", Driver: wantDriver()},
	} {
		o.Egress = "internet/nat"
		s.host.Must("opening", func() error {
			before := testenv.OpenFiles(t)
			if n, err := Open(o); err == nil || n != nil || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), "internet/nat") {
				t.Errorf("got %v, %v; want %s", n, err, want)
			}
			if after := testenv.OpenFiles(t); after > before {
				t.Errorf("%d files are left open", after-before)
			}
			return nil
		})
	}
	s.open()
	s.apply(aSpec())
}

func TestRemoveLeavesNothing(t *testing.T) {
	needCommands(t)
	s := newScene(t)
	s.apply(aSpec())
	link, dir := s.n.HostLink(), strings.TrimSuffix(s.file, "/internet-nat")
	if files, err := Files(dir); err != nil || len(files) != 1 || files[0] != s.file {
		t.Errorf("files: %q, %v", files, err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the directory: %v, %v", st, err)
	}
	if err := s.n.Close(); err != nil {
		t.Fatal(err)
	}
	s.n = nil
	for range 2 { // the second finds nothing
		if err := Remove(s.file); err != nil {
			t.Fatal(err)
		}
	}
	if got := s.in(s.host, "ip", "-o", "link"); strings.Contains(got, link) || !strings.Contains(got, "lan0") {
		t.Errorf("links on the host: %s", got)
	}
	if files, err := Files(dir); err != nil || len(files) != 0 {
		t.Errorf("files: %q, %v", files, err)
	}
	if _, err := os.Stat(s.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
}

func TestHold(t *testing.T) {
	needCommands(t)
	s := newScene(t)
	s.apply(aSpec())
	if !s.n.Holds() {
		if err := s.n.Hold(0, true); !errors.Is(err, ErrNoQueue) {
			t.Errorf("a kernel without queues: %v", err)
		}
		testenv.Missing(t, "this kernel has no NFQUEUE for nftables")
	}
	s.grant(0, time.Minute)
	c := s.socket(client4)
	s.seen(c, target4)
	held := func() string {
		return s.inside("nft", "list", "set", "inet", "skein", SetHeld)
	}
	for range 2 {
		for _, slot := range []int{0, 1} {
			if err := s.n.Hold(slot, true); err != nil {
				t.Fatal(err)
			}
		}
		if got := held(); !strings.Contains(got, "0x00010000") || !strings.Contains(got, "0x00010001") {
			t.Errorf("on hold: %s", got)
		}
		if err := s.n.Hold(0, false); err != nil {
			t.Fatal(err)
		}
		if got := held(); strings.Contains(got, "0x00010000") || !strings.Contains(got, "0x00010001") {
			t.Errorf("one on hold: %s", got)
		}
	}
	if err := s.n.Hold(0, true); err != nil {
		t.Fatal(err)
	}
	if got := s.seen(c, target4); got != source4.String() { // with nobody at the queue
		t.Errorf("the target sees %s", got)
	}
	s.open()
	if got := held(); strings.Contains(got, "elements") {
		t.Errorf("a new run still holds: %s", got)
	}
}
