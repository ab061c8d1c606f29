package events

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// with is an egress with changes.
func with(e *skeinv1.Egress, change func(*skeinv1.Egress)) *skeinv1.Egress {
	change(e)
	return e
}

func out(change func(*skeinv1.Egress)) *skeinv1.Egress {
	return with(egress("web/out", "192.0.2.0/24", 2), change)
}

func TestDefineEgressIsRefused(t *testing.T) {
	w := newEgresses(t)
	w.must(createPool(pool("six", 1, "fd06::/124")))
	w.must(createPool(pool("tiny", 1, "10.67.0.0/29")))
	drained := pool("drained", 1, "10.66.0.0/28")
	w.must(createPool(drained))
	w.must(allocate("b", "drained", 1))
	w.must(drainPool("drained"))
	w.must(allocate("a", "default", 1))                     // 10.64.0.0/30
	w.must(keep("public", "203.0.113.14", "web", "zero-0")) // and 3fff:1::e
	w.must(imports(false, []*skeinv1.Pool{pool("coil", 1, "10.70.0.0/28")},
		importBlock("coil", "10.70.0.2/31", "gone", "")))
	w.must(define(egress("db/out", "198.51.100.0/24", 1, "203.0.113.4"))) // its endpoint is 10.64.0.4
	many := func(n int, format string) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf(format, i/256, i%256))
		}
		return all
	}
	type e = skeinv1.Egress
	for _, c := range []struct {
		e     *e
		code  Code
		words string // in this order, separated by |
	}{
		{nil, InvalidArgument, "carries no egress"},
		{out(func(e *e) { e.Namespace = "" }), InvalidArgument, "needs a namespace"},
		{out(func(e *e) { e.Name = "" }), InvalidArgument, "needs a name"},
		{out(func(e *e) { e.Name = strings.Repeat("x", 64) }), InvalidArgument, "has 64 characters: at most 63"},
		{out(func(e *e) { e.Name = "Out" }), InvalidArgument, `name "Out": use lower-case`},
		{out(func(e *e) { e.Namespace = "a/b" }), InvalidArgument, `namespace "a/b": use lower-case`},
		{out(func(e *e) { e.Namespace = "-a" }), InvalidArgument, "letter or digit at both ends"},
		{out(func(e *e) { e.Replicas = 0 }), InvalidArgument, "0 replicas|1 to 64"},
		{out(func(e *e) { e.Replicas = 65 }), InvalidArgument, "65 replicas|1 to 64"},
		{out(func(e *e) { e.Gateways = nil }), InvalidArgument, "names no label"},
		{out(func(e *e) { e.Gateways = map[string]string{"a b": "c"} }), InvalidArgument, `gateways: label "a b"`},
		{out(func(e *e) {
			for i := range 17 {
				e.Gateways[fmt.Sprint("k", i)] = ""
			}
		}), InvalidArgument, "names 18 labels of its gateways: at most 16"},
		{out(func(e *e) { e.LeaseMillis = 499 }), InvalidArgument, "lease of 499 ms|500 to 86400000|default of 1200"},
		{out(func(e *e) { e.LeaseMillis = 86_400_001 }), InvalidArgument, "lease of 86400001 ms"},
		{out(func(e *e) { e.Destinations = nil }), InvalidArgument, "has no destination"},
		{out(func(e *e) { e.Destinations = many(1025, "11.%d.%d.0/24") }), InvalidArgument, "1025 destinations are too " +
			"many; use up to 1024"},
		{out(func(e *e) { e.Destinations = []string{"192.0.2.1"} }), InvalidArgument, `"192.0.2.1" is not a prefix`},
		{out(func(e *e) { e.Destinations = []string{"::ffff:192.0.2.0/120"} }), InvalidArgument, "is not a prefix"},
		{out(func(e *e) { e.Destinations = []string{"192.0.2.1/24"} }), InvalidArgument, "host bits set; write 192.0.2.0/24"},
		{out(func(e *e) { e.Destinations = []string{"192.0.2.0/24", "192.0.2.0/24"} }), InvalidArgument,
			"192.0.2.0/24 is there twice"},
		{out(func(e *e) { e.Destinations = []string{"2001:db8::/32", "2001:0db8::/32"} }), InvalidArgument,
			"2001:db8::/32 is there twice"},
		{out(func(e *e) { e.Destinations = []string{"169.254.169.254/32"} }), InvalidArgument, "169.254.0.0/16 (link-local)"},
		{out(func(e *e) { e.Destinations = []string{"fe80::/64"} }), InvalidArgument, "(link-local)"},
		{out(func(e *e) { e.Destinations = []string{"224.0.0.0/3"} }), InvalidArgument, "(multicast)"},
		{out(func(e *e) { e.Destinations = []string{"ff02::1/128"} }), InvalidArgument, "(multicast)"},
		{out(func(e *e) { e.Destinations = []string{"127.0.0.0/8"} }), InvalidArgument, "(loopback)"},
		{out(func(e *e) { e.Destinations = []string{"::1/128"} }), InvalidArgument, "(loopback)"},
		{out(func(e *e) { e.Destinations = []string{"0.0.0.0/1"} }), InvalidArgument, "overlaps 0.0.0.0/8|or the default " +
			"route"},
		{out(func(e *e) { e.Destinations = []string{"10.0.0.0/8"} }), InvalidArgument, "overlaps|of pool|which is in the " +
			"mesh|or the default route"},
		{out(func(e *e) { e.Destinations = []string{"10.64.0.16/30"} }), InvalidArgument, "overlaps 10.64.0.0/26 of pool " +
			"default"},
		{out(func(e *e) { e.Destinations = []string{"10.4.9.0/24"} }), InvalidArgument, "overlaps the overlay 10.4.0.0/16"},
		{out(func(e *e) { e.Destinations = []string{"fd00::/8"} }), InvalidArgument, "overlaps|in the mesh"},
		{out(func(e *e) { e.Destinations = []string{"192.0.2.0/24", "2001:db8::/32"}; e.Pool = "four" }), FailedPrecondition,
			"IPv6 destinations|pool four, which is IPv4"},
		{out(func(e *e) { e.Pool = "six" }), FailedPrecondition, "IPv4 destinations|pool six, which is IPv6"},
		{out(func(e *e) { e.Pool = "no" }), NotFound, `pool "no" does not exist`},
		{out(func(e *e) { e.Pool = "drained" }), FailedPrecondition, "pool drained is being drained"},
		{out(func(e *e) { e.Pool = "tiny"; e.Replicas = 9 }), ResourceExhausted, "needs 5 blocks of pool tiny|there are 4 " +
			"to give now|skein pool extend tiny"},
		{out(func(e *e) { e.Addresses = egress("a/b", "", 1, "203.0.113.0").Addresses }), InvalidArgument,
			"1 addresses for 2 replicas"},
		{with(egress("web/out", "192.0.2.0/24", 1, "203.0.113.0"), func(e *e) { e.Addresses[0].Ipv4 = "" }), InvalidArgument,
			"slot 0 has no IPv4 address"},
		{egress("web/out", "192.0.2.0/24 2001:db8::/48", 1, "203.0.113.0"), InvalidArgument, "slot 0 has no IPv6 address"},
		{egress("web/out", "192.0.2.0/24", 1, "203.0.113.0,3fff:1::"), InvalidArgument, "IPv6 address 3fff:1::, and the " +
			"egress has no IPv6 destination"},
		{with(egress("web/out", "192.0.2.0/24", 1, "x"), func(e *e) { e.Addresses[0].Ipv4 = "203.0.113.0/32" }),
			InvalidArgument, "is not an IPv4 address"},
		{with(egress("web/out", "192.0.2.0/24", 1, "x"), func(e *e) { e.Addresses[0].Ipv4 = "::ffff:203.0.113.0" }),
			InvalidArgument, "is not an IPv4 address"},
		{egress("web/out", "192.0.2.0/24", 2, "203.0.113.0", "203.0.113.0"), InvalidArgument, "203.0.113.0 is there twice"},
		{egress("web/out", "192.0.2.0/24", 1, "203.0.114.0"), FailedPrecondition, "203.0.114.0 lies in no pool"},
		{egress("web/out", "192.0.2.0/24", 1, "203.0.113.4"), AlreadyExists, "203.0.113.4 is the source address of slot " +
			"db/out#0"},
		{egress("web/out", "192.0.2.0/24", 1, "10.64.0.4"), AlreadyExists, "10.64.0.4 is the tunnel endpoint of slot " +
			"db/out#0"},
		{egress("web/out", "192.0.2.0/24", 1, "203.0.113.14"), AlreadyExists, "203.0.113.14 is kept for pod web/zero-0"},
		{egress("web/out", "2001:db8::/48", 1, "3fff:1::e"), AlreadyExists, "3fff:1::e is kept for pod web/zero-0"},
		{egress("web/out", "192.0.2.0/24", 1, "10.64.0.1"), FailedPrecondition, "block 10.64.0.0/30 of pool default " +
			"belongs to node a"},
		{egress("web/out", "192.0.2.0/24", 1, "10.66.0.4"), FailedPrecondition, "10.66.0.4|pool drained is being drained"},
		{egress("web/out", "192.0.2.0/24", 1, "10.70.0.3"), FailedPrecondition, "10.70.0.3: block 10.70.0.2/31 of pool " +
			"coil is kept for node gone"},
		{out(func(e *e) { e.Probes = many(9, "icmp:192.0.%d.%d") }), InvalidArgument, "9 probes are too many; use up to 8"},
		{out(func(e *e) { e.Probes = []string{"udp:192.0.2.1"} }), InvalidArgument,
			`probe "udp:192.0.2.1" is not valid; write icmp:ADDRESS`},
		{out(func(e *e) { e.Probes = []string{"tcp:192.0.2.1"} }), InvalidArgument, "is not valid; write"},
		{out(func(e *e) { e.Probes = []string{"tcp:192.0.2.1:0"} }), InvalidArgument, "is not valid; write"},
		{out(func(e *e) { e.Probes = []string{"tcp:192.0.2.1:65536"} }), InvalidArgument, "is not valid; write"},
		{out(func(e *e) { e.Probes = []string{"icmp:host"} }), InvalidArgument, "is not valid; write"},
		{out(func(e *e) { e.Probes = []string{"icmp:192.0.2.1", "icmp:192.0.2.1"} }), InvalidArgument,
			"icmp:192.0.2.1 is there twice"},
		{out(func(e *e) { e.Probes = []string{"icmp:192.0.3.1"} }), InvalidArgument, "lies in none of its destinations"},
		{out(func(e *e) { e.Destinations = []string{"0.0.0.0/0"}; e.Probes = []string{"icmp:169.254.0.1"} }), InvalidArgument,
			"(link-local)"},
		{out(func(e *e) { e.Destinations = []string{"0.0.0.0/0"}; e.Probes = []string{"icmp:10.64.0.9"} }), InvalidArgument,
			"lies in pool default"},
		{out(func(e *e) { e.Destinations = []string{"0.0.0.0/0"}; e.Probes = []string{"tcp:10.4.0.1:80"} }), InvalidArgument,
			"lies in the overlay"},
		{egress("db/out", "192.0.2.0/24", 1), AlreadyExists, "egress db/out exists with other properties"},
	} {
		w.refused(define(c.e), c.code, strings.Split(c.words, "|")...)
	}
	w.must(define(out(func(e *e) {
		e.Destinations, e.LeaseMillis, e.Probes = many(1024, "11.%d.%d.0/24"), 500, many(8, "icmp:11.0.%d.%d")
	})))
}

func TestEgressIsKeptInOneForm(t *testing.T) {
	w := newEgresses(t)
	e := egress("web/out", "2001:DB8::/32 10.20.0.0/16 0.0.0.0/0 192.0.2.0/24 10.20.30.0/24 2001:db8:1:2::/64 11.0.0.0/9",
		2)
	e.Probes = []string{"tcp:[2001:DB8:0::1]:443", "icmp:192.0.2.1"}
	e.Endpoints, e.CreatedIndex = egress("a/b", "", 1, "10.64.0.63").Addresses, 7 // the leader's, whatever is asked for
	have := w.must(define(e)).GetEgress()
	// A default route does not cover the private prefix, for which clients look first.
	if d := strings.Join(have.GetDestinations(), " "); d != "0.0.0.0/0 10.20.0.0/16 2001:db8::/32" {
		t.Errorf("destinations %s", d)
	}
	if p := strings.Join(have.GetProbes(), " "); p != "tcp:[2001:db8::1]:443 icmp:192.0.2.1" {
		t.Errorf("probes %s", p)
	}
	if a := addressesOf(have.GetEndpoints()); a != "10.64.0.0,fd02:: 10.64.0.1,fd02::1" {
		t.Errorf("endpoints %s", a)
	}
	if have.GetPool() != "default" || have.GetCreatedAt() != w.now.UnixNano() ||
		have.GetCreatedIndex() != have.GetChangedIndex() || have.GetCreatedIndex() != w.s.Index() {
		t.Errorf("have %v at %d", have, w.s.Index())
	}
	if evs, a, err := w.propose(define(e)); err != nil || len(evs) != 0 || a.GetEgress() != have {
		t.Errorf("the same again gives %v %v %v", evs, a, err)
	}
	if use, ok := w.s.EgressAddressAt(endpointAddr(have.GetEndpoints()[1])); !ok ||
		use != (EgressUse{"web", "out", 1, false}) {
		t.Errorf("the endpoint is %v", use)
	}
}

func TestMergeDestinations(t *testing.T) {
	for in, want := range map[string]string{
		"::/0 0.0.0.0/0": "0.0.0.0/0 ::/0",
		"192.0.2.128/25 192.0.2.0/24 192.0.2.0/25":            "192.0.2.0/24",
		"192.0.2.0/25 192.0.2.128/25":                         "192.0.2.0/25 192.0.2.128/25", // as it was written
		"0.0.0.0/0 10.0.0.0/8 10.1.0.0/16 9.0.0.0/8":          "0.0.0.0/0 10.0.0.0/8",
		"8.0.0.0/6 10.1.0.0/16 11.0.0.0/8":                    "8.0.0.0/6 10.1.0.0/16", // 8.0.0.0/6 itself is not private
		"::/0 fd01::/16 fd01:2::/32 2001:db8::/32":            "::/0 fd01::/16",
		"172.16.0.0/12 172.20.0.0/16 172.32.0.0/16 1.0.0.0/8": "1.0.0.0/8 172.16.0.0/12 172.32.0.0/16",
	} {
		have, err := readDestinations(egressRef{"a", "b"}, strings.Fields(in))
		if err != nil || strings.Trim(fmt.Sprint(have), "[]") != want {
			t.Errorf("%s gives %v, %v; want %s", in, have, err, want)
		}
	}
}

// Blocks for endpoints come by the pool's own rule, those around source addresses are reserved, and all of them go back
// with the egress.
func TestEgressTakesAndReturnsBlocks(t *testing.T) {
	w := newEgresses(t)
	w.must(allocate("a", "four", 1)) // 10.65.0.0/31
	e := egress("web/out", "192.0.2.0/24", 3, "203.0.113.5", "203.0.113.4", "203.0.113.9")
	e.Pool = "four"
	have := w.must(define(e)).GetEgress()
	if a := addressesOf(have.GetEndpoints()); a != "10.65.0.2 10.65.0.3 10.65.0.4" {
		t.Errorf("endpoints %s", a)
	}
	if r := reserved(w.s); r != "10.65.0.2/31 (egress web/out) 10.65.0.4/31 (egress web/out) 203.0.113.4/31 (egress "+
		"web/out) 203.0.113.8/31 (egress web/out)" {
		t.Errorf("reserved %s", r)
	}
	// One more slot gets what is left of the last block, the next one a new block.
	more := egress("web/out", "", 5)
	w.refused(setEgress(more, "replicas"), InvalidArgument, "3 addresses for 5 replicas")
	have = w.must(setEgress(more, "replicas", "addresses")).GetEgress()
	if a := addressesOf(have.GetEndpoints()); a != "10.65.0.2 10.65.0.3 10.65.0.4 10.65.0.5 10.65.0.6" {
		t.Errorf("endpoints %s", a)
	}
	if r := reserved(
		w.s); r != "10.65.0.2/31 (egress web/out) 10.65.0.4/31 (egress web/out) 10.65.0.6/31 (egress web/out)" {
		t.Errorf("reserved %s", r)
	}
	for i := range uint32(5) {
		w.assign("web/out", i, "b")
	}
	w.must(setEgress(egress("web/out", "", 1), "replicas"))
	evs, _, err := w.propose(endDraining("out", 4, 0))
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, v := range evs {
		kinds = append(kinds, strings.Fields(brief(v))[0])
	}
	if have := strings.Join(kinds, " "); have != "SlotReleased SlotReleased SlotReleased SlotReleased EgressChanged "+
		"BlockReleased BlockReleased" {
		t.Errorf("events %s", have)
	}
	if r := reserved(w.s); r != "10.65.0.2/31 (egress web/out)" || owners(w.s, "web/out") != "b" ||
		len(w.s.SlotsOf(id("b"))) != 1 {
		t.Errorf("reserved %s, owners %s", r, owners(w.s, "web/out"))
	}
	w.must(removeEgress("web/out"))
	if r := reserved(w.s); r != "" || len(w.s.Egresses()) != 0 || len(w.s.SlotsOf(id("b"))) != 0 {
		t.Errorf("reserved %s, egresses %v", r, w.s.Egresses())
	}
	// What rested longest comes last: 0 belongs to a, and 1 to 3 were given back.
	e = egress("web/out", "192.0.2.0/24", 10)
	e.Pool = "four"
	if a := addressesOf(w.must(define(e)).GetEgress().GetEndpoints()); !strings.HasPrefix(a, "10.65.0.8 10.65.0.9 "+
		"10.65.0.10 ") || !strings.HasSuffix(a, " 10.65.0.4 10.65.0.5") {
		t.Errorf("endpoints %s", a)
	}
}

// Endpoints pass what is taken in a block of the egress: its own source addresses, also those that come with the same
// command, and addresses that are kept for pods.
func TestEndpointsPassWhatIsTaken(t *testing.T) {
	w := newEgresses(t)
	w.must(define(egress("web/out", "192.0.2.0/24", 1)))
	w.must(keep("", "10.64.0.2", "web", "x-0"))
	have := w.must(setEgress(egress("web/out", "", 3, "10.64.0.1", "203.0.113.4", "10.64.0.7"), "replicas",
		"addresses")).GetEgress()
	if a := addressesOf(have.GetEndpoints()); a != "10.64.0.0,fd02:: 10.64.0.3,fd02::3 10.64.0.8,fd02::8" {
		t.Errorf("endpoints %s", a)
	}
	if r := reserved(w.s); r != "10.64.0.0/30 (egress web/out) 10.64.0.4/30 (egress web/out) 10.64.0.8/30 (egress "+
		"web/out) 203.0.113.4/31 (egress web/out)" {
		t.Errorf("reserved %s", r)
	}
	w.refused(setEgress(egress("web/out", "", 3, "10.64.0.1", "10.64.0.3", "10.64.0.7"), "addresses"), AlreadyExists,
		"10.64.0.3 is the tunnel endpoint of slot web/out#1")
}

// A block rests after it was an egress's as after any other use.
func TestEgressBlocksRest(t *testing.T) {
	w := newPools(t)
	p := pool("default", 1, "10.64.0.0/30")
	p.CooldownSeconds = 3600
	w.must(createPool(p))
	w.must(define(egress("web/out", "192.0.2.0/24", 4)))
	w.must(removeEgress("web/out"))
	w.refused(define(egress("web/out", "192.0.2.0/24", 1)), ResourceExhausted, "pool default has no block to give now",
		"rest after use")
	w.refused(define(egress("web/out", "192.0.2.0/24", 1, "10.64.0.1")), FailedPrecondition, "10.64.0.1", "rests until")
	w.later(3600e9)
	w.must(define(egress("web/out", "192.0.2.0/24", 1)))
}

// Blocks that a user reserved stay reserved, and a block goes back only with the last address in it, whoever has that.
func TestBlocksWithSeveralUses(t *testing.T) {
	w := newEgresses(t)
	w.must(reserve("public", "203.0.113.0/31", "gateways"))
	w.must(define(egress("web/out", "192.0.2.0/24", 1, "203.0.113.0")))
	w.must(define(egress("db/out", "192.0.2.0/24", 2, "203.0.113.2", "203.0.113.8")))
	w.must(define(egress("db/two", "192.0.2.0/24", 1, "203.0.113.3")))
	w.must(keep("", "203.0.113.9", "web", "zero-0"))
	w.must(removeEgress("web/out"))
	w.must(removeEgress("db/out"))
	if r := reserved(w.s); r != "10.64.0.8/30 (egress db/two) 203.0.113.0/31 (gateways) 203.0.113.2/31 (egress db/out) "+
		"203.0.113.8/31 (egress db/out)" {
		t.Errorf("reserved %s", r)
	}
	w.must(removeEgress("db/two"))
	w.must(unkeep("", "203.0.113.9", false))
	if r := reserved(w.s); r != "203.0.113.0/31 (gateways)" {
		t.Errorf("reserved %s", r)
	}
	w.must(keep("", "203.0.113.9", "web", "zero-0"))
	w.must(define(egress("web/out", "192.0.2.0/24", 1, "203.0.113.8")))
	// the block was made for it, and is still used
	if evs, _, err := w.propose(unkeep("", "203.0.113.9", false)); err != nil || len(evs) != 1 {
		t.Fatalf("released by %v, %v", evs, err)
	}
	if r := reserved(w.s); !strings.Contains(r, "203.0.113.8/31 (static addresses)") {
		t.Errorf("reserved %s", r)
	}
	w.must(removeEgress("web/out"))
	if r := reserved(w.s); r != "203.0.113.0/31 (gateways)" {
		t.Errorf("reserved %s", r)
	}
}

// What belongs to an egress is nobody else's.
func TestOthersAreRefusedWhatAnEgressHas(t *testing.T) {
	w := newEgresses(t)
	e := egress("web/out", "0.0.0.0/0 10.20.0.0/16 2001:db8::/48", 1, "203.0.113.4,3fff:1::7")
	e.Probes = []string{"icmp:192.0.2.1"}
	w.must(define(e)) // its endpoint is 10.64.0.0, its block is 0 of the pool
	w.refused(keep("", "203.0.113.4", "web", "x"), AlreadyExists, "203.0.113.4 is the source address of slot web/out#0")
	w.refused(keep("", "203.0.113.7", "web", "x"), AlreadyExists, "3fff:1::7 is the source address of slot web/out#0")
	w.refused(keep("", "10.64.0.0", "web", "x"), AlreadyExists, "10.64.0.0 is the tunnel endpoint of slot web/out#0")
	w.refused(claim("a", "", "10.64.0.0", "web", "x"), AlreadyExists, "10.64.0.0 is the tunnel endpoint of slot web/out#0")
	w.must(giveUp("a", "", "10.64.0.0")) // what nobody has is given up already
	w.refused(release("", "default", 0), FailedPrecondition, "block 10.64.0.0/30 of pool default holds addresses of "+
		"egress web/out")
	w.refused(release("", "public", 2), FailedPrecondition, "block 203.0.113.4/31 of pool public holds addresses of "+
		"egress web/out")
	w.refused(imports(false, nil, importBlock("public", "203.0.113.4/31", "a", "")), FailedPrecondition,
		"it belongs to nobody (reserved: egress web/out) here")
	w.refused(removePool("public"), FailedPrecondition, "egresses have addresses in it (web/out)")
	w.refused(removePool("default"), FailedPrecondition, "egresses have addresses in it (web/out)")
	w.must(removePool("four"))
	w.refused(createPool(pool("q", 1, "10.20.5.0/28")), FailedPrecondition, "10.20.5.0/28 overlaps the destination "+
		"10.20.0.0/16 of egress web/out")
	w.refused(extendPool("default", "10.16.0.0/13,fd09::/109"), FailedPrecondition, "overlaps the destination "+
		"10.20.0.0/16 of egress web/out")
	w.refused(createPool(pool("q", 1, "2001:db8::/124")), FailedPrecondition, "overlaps the destination 2001:db8::/48")
	w.refused(createPool(pool("q", 1, "192.0.2.0/28")), FailedPrecondition, "holds icmp:192.0.2.1, which egress web/out "+
		"probes")
	w.refused(imports(false, []*skeinv1.Pool{pool("q", 1, "10.20.5.0/28")}), FailedPrecondition,
		"overlaps the destination 10.20.0.0/16 of egress web/out")
	w.must(createPool(pool("q", 1, "198.51.100.0/28"))) // the default route leaves it out
}

func TestChangeEgress(t *testing.T) {
	w := newEgresses(t)
	e := egress("web/out", "192.0.2.0/24", 2, "203.0.113.4", "203.0.113.5")
	e.LeaseMillis = 2000
	w.must(define(e))
	w.must(define(egress("db/out", "192.0.2.0/24", 1, "203.0.113.0")))
	w.assign("web/out", 0, "a")
	for _, c := range []struct {
		c     *skeinv1.Command
		code  Code
		words string
	}{
		{setEgress(egress("web/no", "", 1), "replicas"), NotFound, `egress web/no does not exist: there are db/out, web/out`},
		{setEgress(e, "pool"), InvalidArgument, `field "pool" cannot be set; those that can are addresses, destinations`},
		{setEgress(e, "endpoints"), InvalidArgument, `field "endpoints" cannot be set`},
		{setEgress(e, "nonsense"), InvalidArgument, `field "nonsense" cannot be set`},
		{setEgress(egress("web/out", "", 0), "replicas"), InvalidArgument, "0 replicas"},
		{setEgress(egress("web/out", "", 3), "replicas"), InvalidArgument, "2 addresses for 3 replicas"},
		{setEgress(egress("web/out", "192.0.2.0/24 2001:db8::/48", 0), "destinations"), InvalidArgument,
			"slot 0 has no IPv6 address"},
		{setEgress(egress("web/out", "10.4.0.0/24", 0), "destinations"), InvalidArgument, "overlaps the overlay"},
		{setEgress(egress("web/out", "", 0, "203.0.113.4", "203.0.113.0"), "addresses"), AlreadyExists,
			"203.0.113.0 is the source address of slot db/out#0"},
		{setEgress(&skeinv1.Egress{Namespace: "web", Name: "out"}, "gateways"), InvalidArgument, "names no label"},
	} {
		w.refused(c.c, c.code, c.words)
	}
	before := w.s.Egress("web", "out")
	for _, same := range []*skeinv1.Command{setEgress(e), setEgress(e, "addresses", "destinations", "gateways",
		"lease_millis")} {
		if evs, a, err := w.propose(same); err != nil || len(evs) != 0 || a.GetEgress() != before {
			t.Fatalf("no change gives %v %v %v", evs, a, err)
		}
	}
	slot := w.s.Slot("web", "out", 0)
	w.assign("web/out", 1, "c")
	after := w.must(setEgress(egress("web/out", "198.51.100.0/24 192.0.2.0/25", 0, "203.0.113.4", "203.0.113.7"),
		"destinations", "addresses", "lease_millis")).GetEgress()
	if have := strings.Join(after.GetDestinations(), " "); have != "192.0.2.0/25 198.51.100.0/24" ||
		after.GetLeaseMillis() != 0 {
		t.Errorf("have %v", after)
	}
	if addressesOf(after.GetEndpoints()) != addressesOf(before.GetEndpoints()) ||
		after.GetCreatedIndex() != before.GetCreatedIndex() || after.GetChangedIndex() <= before.GetChangedIndex() {
		t.Errorf("%v became %v", before, after)
	}
	// The owner stays, with the lease of its epoch, unless the slot's source address is another.
	if have := w.s.Slot("web", "out", 0); have != slot || have.GetLeaseMillis() != 2000 {
		t.Errorf("the slot is %v", have)
	}
	if have := w.s.Slot("web", "out", 1); have.GetNodeId() != "" || have.GetReason() != "it gets another source address" ||
		have.GetFormerLeaseMillis() != 2000 {
		t.Errorf("the other slot is %v", have)
	}
	if v := w.assign("web/out", 0, "b"); v.GetLeaseMillis() != 1200 || v.GetFormerLeaseMillis() != 2000 {
		t.Errorf("moved, the slot is %v", v)
	}
	for addr, want := range map[string]string{"203.0.113.5": "", "203.0.113.4": "the source address of slot web/out#0",
		"203.0.113.7": "the source address of slot web/out#1"} {
		have := ""
		if use, ok := w.s.EgressAddressAt(netip.MustParseAddr(addr)); ok {
			have = use.String()
		}
		if have != want {
			t.Errorf("%s is %q, want %q", addr, have, want)
		}
	}
	if r := reserved(w.s); !strings.Contains(r, "203.0.113.4/31 (egress web/out)") ||
		!strings.Contains(r, "203.0.113.6/31 (egress web/out)") {
		t.Errorf("reserved %s", r)
	}
	w.refused(removeEgress("web/no"), NotFound, "egress web/no does not exist")
}

// A node that has as much as it may is still revoked by one entry of the log, which holds 65,536 events.
func TestRevocationFitsIntoAnEntry(t *testing.T) {
	const others = 3 // the server's role, the node, gossip's key
	if n := MaxNodeBlocks + MaxStatics + MaxGrants + MaxSlots + others; n > 65_536 {
		t.Fatalf("%d events", n)
	}
}

func TestAssignSlot(t *testing.T) {
	w := newEgresses(t)
	e := egress("web/out", "192.0.2.0/24", 2)
	e.LeaseMillis = 5000
	w.must(define(e))
	w.must(changeNode("c", "", map[string]string{"site": "home"}))
	w.refused(assign("web/no", 0, "a", 0), NotFound, "egress web/no does not exist")
	w.refused(assign("web/out", 2, "a", 0), NotFound, "egress web/out has no slot 2: it has 2")
	w.refused(assign("web/out", 0, "no", 0), NotFound, "is not a member")
	w.refused(assign("web/out", 0, "c", 0), FailedPrecondition, "node c cannot have slot 0 of egress web/out: it lacks "+
		"a label")
	w.refused(assign("web/out", 0, "a", 7), FailedPrecondition, "slot web/out#0 is fenced: it is at epoch 0 with no "+
		"owner, and this command was decided at epoch 7")

	first := w.must(assign("web/out", 0, "a", 0)).GetSlot()
	want := &skeinv1.EgressSlot{Namespace: "web", Name: "out", NodeId: id("a"), Epoch: w.s.Index(),
		Since: w.now.UnixNano(), Reason: "chosen", LeaseMillis: 5000}
	if !proto.Equal(first, want) || w.s.Slot("web", "out", 0) != first {
		t.Fatalf("assigned: %v", first)
	}
	w.refused(assign("web/out", 0, "b", 0), FailedPrecondition, "slot web/out#0 is fenced", "with node a",
		"decided at epoch 0")
	w.refused(releaseSlot("web/out", 0, 0), FailedPrecondition, "slot web/out#0 is fenced")
	if evs, a, err := w.propose(assign("web/out", 0, "a", first.GetEpoch())); err != nil || len(evs) != 0 ||
		a.GetSlot() != first {
		t.Fatalf("the same again gives %v %v %v", evs, a, err)
	}
	moved := w.assign("web/out", 0, "b")
	want = &skeinv1.EgressSlot{Namespace: "web", Name: "out", NodeId: id("b"), FromNodeId: id("a"), Planned: true,
		Epoch: w.s.Index(), Since: w.now.UnixNano(),
		Reason: "chosen", LeaseMillis: 5000, FormerLeaseMillis: 5000}
	if !proto.Equal(moved, want) {
		t.Fatalf("moved: %v", moved)
	}
	w.must(setEgress(&skeinv1.Egress{Namespace: "web", Name: "out", LeaseMillis: 500}, "lease_millis"))
	if v := w.assign("web/out", 0, "a"); v.GetLeaseMillis() != 500 || v.GetFormerLeaseMillis() != 5000 {
		t.Fatalf("moved back: %v", v)
	}
	// that of the owner before the last may still run
	if v := w.assign("web/out", 0, "b"); v.GetFormerLeaseMillis() != 5000 {
		t.Fatalf("moved again: %v", v)
	}
	released := w.must(releaseSlot("web/out", 0, w.epoch("web/out", 0))).GetSlot()
	want = &skeinv1.EgressSlot{Namespace: "web", Name: "out", FromNodeId: id("b"), Epoch: w.s.Index(),
		Since: w.now.UnixNano(), Reason: "not chosen", FormerLeaseMillis: 5000}
	if !proto.Equal(released, want) {
		t.Fatalf("released: %v", released)
	}
	if evs, a, err := w.propose(releaseSlot("web/out", 0, released.GetEpoch())); err != nil || len(evs) != 0 ||
		a.GetSlot() != released {
		t.Fatalf("released again gives %v %v %v", evs, a, err)
	}
	if v := w.assign("web/out", 0, "a"); v.GetFromNodeId() != "" || v.GetPlanned() || v.GetFormerLeaseMillis() != 5000 {
		t.Fatalf("assigned after a release: %v", v)
	}
}

func TestDrainNode(t *testing.T) {
	w := newEgresses(t)
	w.must(define(egress("web/out", "192.0.2.0/24", 2)))
	w.assign("web/out", 0, "a")
	if n := w.must(drainNode("a", true)).GetNode(); !n.GetDraining() {
		t.Fatalf("have %v", n)
	}
	if owners(w.s, "web/out") != "a -" {
		t.Fatal("draining took the slot away; that is the slot controller's")
	}
	w.refused(assign("web/out", 1, "a", 0), FailedPrecondition, "node a cannot have slot 1 of egress web/out: it is "+
		"being drained")
	for _, same := range []bool{true, false, false} {
		evs, a, err := w.propose(drainNode("a", same))
		if want := map[bool]int{true: 0, false: 1}[same == a.GetNode().GetDraining() && len(evs) == 0]; err != nil ||
			a.GetNode().GetDraining() != same || len(evs) != want {
			t.Fatalf("draining %t gives %v %v %v", same, evs, a, err)
		}
	}
	w.must(changeNode("a", "", map[string]string{"site": "dc"}))
	w.must(drainNode("b", true))
	w.must(rotateKey("b", "another"))
	if !w.s.NodeByName("b").GetDraining() {
		t.Fatal("another change ends the draining")
	}
	w.assign("web/out", 1, "a")
	w.refused(drainNode("no", true), NotFound, "is not a member")
}

// A node that is revoked gives up its slots in events before the one that revokes it.
func TestRevokedNodesHaveNoSlots(t *testing.T) {
	w := newEgresses(t)
	w.must(define(egress("web/out", "192.0.2.0/24", 3)))
	w.must(define(egress("db/out", "192.0.2.0/24", 1)))
	for i, node := range []string{"b", "c", "b"} {
		w.assign("web/out", uint32(i), node)
	}
	w.assign("db/out", 0, "b")
	var have []string
	for _, v := range w.s.SlotsOf(id("b")) {
		have = append(have, slotRef{egressRef{v.GetNamespace(), v.GetName()}, v.GetNumber()}.String())
	}
	if names := strings.Join(have, " "); names != "db/out#0 web/out#0 web/out#2" {
		t.Errorf("b has %s", names)
	}
	evs, _, err := w.propose(revoke(id("b")))
	if err != nil || len(evs) != 5 {
		t.Fatalf("revoked by %v, %v", evs, err)
	}
	for i, want := range []string{"SlotReleased", "SlotReleased", "SlotReleased", "NodeRevoked", "GossipKeyRotated"} {
		if !strings.HasPrefix(brief(evs[i]), want) {
			t.Errorf("event %d is %s, want %s", i, brief(evs[i]), want)
		}
	}
	if owners(w.s, "web/out")+owners(w.s, "db/out") != "- c --" || len(w.s.SlotsOf(id("b"))) != 0 {
		t.Errorf("owners %s, %s", owners(w.s, "web/out"), owners(w.s, "db/out"))
	}
}

// Servers of older versions stop what they could not fold, and hashes agree until it is there.
func TestOldServersStopEgresses(t *testing.T) {
	w := newPoolsOf(t, 2)
	w.must(createPool(pool("default", 2, "10.64.0.0/26")))
	w.refused(define(egress("web/out", "192.0.2.0/24", 1)), FailedPrecondition, "server a folds event schemas up to 2 "+
		"and this command needs 3: upgrade skein on a first")
	w.must(drainNode("b", true)) // an event of schema 1: older servers keep what they do not know of a node

	w = newEgresses(t)
	before := w.s.Hash()
	w.must(define(egress("web/out", "192.0.2.0/24", 1)))
	c := admit("old", "1", asServer)
	c.GetAdmitNode().Node.MaxSchema = 2
	w.refused(c, FailedPrecondition, "old folds event schemas up to 2, and the cluster has egresses, which need 3: "+
		"upgrade skein on old")
	if w.s.Hash() == before {
		t.Fatal("an egress is not in the hash")
	}
	w.must(removeEgress("web/out"))
	w.must(c)
	p := proto.CloneOf(w.s.Proto())
	p.Egresses, p.Slots = nil, nil
	if old := must(FromProto(p))(t); w.s.Hash() != old.Hash() {
		t.Fatal("an egress that is gone is in the hash")
	}
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func TestLimitsOfEgresses(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("default", 12, "10.64.0.0/16")))
	s := w.s
	step := func(c *skeinv1.Command) error {
		c.Time = w.now.UnixNano()
		evs, _, err := Decide(s, c)
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
		return err
	}
	big := pool("big", 0, "10.128.0.0/12")
	w.must(createPool(big))
	for i := range MaxSlots / MaxReplicas {
		e := egress(fmt.Sprintf("web/e%d", i), "192.0.2.0/24", MaxReplicas)
		e.Pool = "big"
		if err := step(define(e)); err != nil {
			t.Fatal(err)
		}
	}
	small := func(i int) *skeinv1.Command {
		e := egress(fmt.Sprintf("db/e%d", i), "192.0.2.0/24", 1)
		e.Pool = "big"
		return define(e)
	}
	if err := step(small(0)); CodeOf(err) != ResourceExhausted || !strings.Contains(err.Error(), "would have 8193, and "+
		"8192 are allowed") {
		t.Fatalf("too many slots: %v", err)
	}
	for i := range MaxSlots / MaxReplicas {
		if err := step(setEgress(egress(fmt.Sprintf("web/e%d", i), "", 1), "replicas")); err != nil {
			t.Fatal(err)
		}
		if err := step(endDraining(fmt.Sprintf("e%d", i), MaxReplicas-1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range MaxEgresses - MaxSlots/MaxReplicas {
		if err := step(small(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := step(small(5000)); CodeOf(err) != ResourceExhausted || !strings.Contains(err.Error(),
		"there are 1024 egresses already") {
		t.Fatalf("too many egresses: %v", err)
	}
	checkEgresses(t, s)
	var many []string
	for i := range MaxDestinations {
		many = append(many, fmt.Sprintf("11.%d.%d.0/24", i/256, i%256))
	}
	for i := range MaxAllDestinations / MaxDestinations {
		err := step(setEgress(&skeinv1.Egress{Namespace: "web", Name: fmt.Sprintf("e%d", i), Destinations: many},
			"destinations"))
		if last := i == MaxAllDestinations/MaxDestinations-1; last != (CodeOf(err) == ResourceExhausted) {
			t.Fatalf("destinations of egress %d: %v", i, err)
		}
	}
}
