package client

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// One relay that answers again and again, as if to earlier questions, does not displace the answers of the others.
func TestEachRelayIsHeardOnce(t *testing.T) {
	var q questions
	liar, honest, peer := identity.ID{1}, identity.ID{2}, identity.ID{3}
	here, elsewhere := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("198.51.100.200")
	answers := make(chan testimony, 2)
	for _, relay := range []identity.ID{liar, honest} {
		q.begin(link{relay, peer}, answers)
	}
	for range 3 {
		q.answer(liar, peer, []netip.Addr{elsewhere})
	}
	q.answer(honest, identity.ID{4}, []netip.Addr{elsewhere}) // of another node
	q.answer(honest, peer, []netip.Addr{here})
	if n := len(answers); n != 2 {
		t.Fatalf("%d answers are heard, want one of each relay", n)
	}
	if a, b := <-answers, <-answers; a.relay != liar || b.relay != honest || !slices.Contains(b.addrs, here) {
		t.Errorf("heard are %v and %v", a, b)
	}
	for _, relay := range []identity.ID{liar, honest} {
		q.end(link{relay, peer}, answers)
	}
	if len(q.waiting) > 0 {
		t.Errorf("%v still wait", q.waiting)
	}
}
