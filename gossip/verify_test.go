package gossip

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// signed is a valid record of node 0 with one thing changed.
func signed(t testing.TB, change func(*skeinv1.Record)) *skeinv1.SignedRecord {
	t.Helper()
	r := simRecord("dc")
	r.NodeId, r.Epoch, r.Seq = simKey(0).ID().String(), 3, 7
	if change != nil {
		change(r)
	}
	s, err := Sign(simKey(0), r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestVerify(t *testing.T) {
	candidate := func(typ skeinv1.CandidateType, a string) func(*skeinv1.Record) {
		return func(r *skeinv1.Record) {
			r.Candidates = []*skeinv1.Candidate{{Type: typ, Address: a}}
		}
	}
	srflx, forced := skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, skeinv1.CandidateType_CANDIDATE_TYPE_FORCED
	routes := func(p ...string) func(*skeinv1.Record) {
		return func(r *skeinv1.Record) { r.NodeAddresses = p }
	}
	outcomes := func(n int, address ...byte) func(*skeinv1.Record) {
		return func(r *skeinv1.Record) {
			for range n {
				r.Outcomes = append(r.Outcomes, &skeinv1.PairOutcome{Address: address, Lost: 1})
			}
		}
	}
	for name, c := range map[string]struct {
		change func(*skeinv1.Record)
		want   error
		text   string
	}{
		"as published":    {},
		"IPv6 candidate":  {change: candidate(srflx, "[2001:db8::1]:51820")},
		"forced DNS name": {change: candidate(forced, "home.example.net:51820")},
		"private routes": {change: routes("10.1.0.0/16", "192.168.7.4/32", "100.64.0.0/10", "fd00:1::/64",
			"172.31.0.0/16")},
		"internal IP as prefix":   {change: func(r *skeinv1.Record) { r.InternalIp = "10.0.0.4/24" }},
		"outcomes":                {change: outcomes(8, 198, 51, 100, 7)},
		"9 outcomes":              {change: outcomes(9, 198, 51, 100, 7), want: ErrMalformed, text: "9 outcomes"},
		"outcome without address": {change: outcomes(1), want: ErrMalformed},
		"outcome with loopback":   {change: outcomes(1, 127, 0, 0, 1), want: ErrAddress},
		"64 candidates":           {change: func(r *skeinv1.Record) { r.Candidates = manyCandidates(64) }},
		"65 candidates": {change: func(r *skeinv1.Record) { r.Candidates = manyCandidates(65) }, want: ErrTooLarge,
			text: "65 candidates"},
		"64 KiB of candidates": {change: func(r *skeinv1.Record) { r.Candidates = manyCandidates(3000) },
			want: ErrTooLarge, text: "the limit is 8192"},
		"candidate without port": {change: candidate(srflx, "198.51.100.7"), want: ErrMalformed},
		"candidate port 0":       {change: candidate(srflx, "198.51.100.7:0"), want: ErrMalformed},
		"candidate DNS name":     {change: candidate(srflx, "home.example.net:51820"), want: ErrMalformed},
		"candidate loopback":     {change: candidate(srflx, "127.0.0.1:51820"), want: ErrAddress},
		"candidate multicast":    {change: candidate(srflx, "[ff02::1]:51820"), want: ErrAddress},
		"candidate unspecified":  {change: candidate(srflx, "0.0.0.0:51820"), want: ErrAddress},
		"candidate broadcast":    {change: candidate(srflx, "255.255.255.255:51820"), want: ErrAddress},
		"candidate with a zone":  {change: candidate(srflx, "[fe80::1%eth0]:51820"), want: ErrAddress},
		"mapped candidate":       {change: candidate(srflx, "[::ffff:198.51.100.7]:51820"), want: ErrAddress},
		"forced with a space":    {change: candidate(forced, "a b:1"), want: ErrMalformed},
		"default route IPv4":     {change: routes("0.0.0.0/0"), want: ErrAddress, text: "not private"},
		"default route IPv6":     {change: routes("::/0"), want: ErrAddress},
		"half of everything":     {change: routes("0.0.0.0/1"), want: ErrAddress},
		"public route":           {change: routes("203.0.113.0/24"), want: ErrAddress, text: "203.0.113.0/24"},
		"more than 10/8":         {change: routes("10.0.0.0/7"), want: ErrAddress},
		"mapped route":           {change: routes("::ffff:10.0.0.0/104"), want: ErrAddress},
		"route with host bits":   {change: routes("10.0.0.1/8"), want: ErrMalformed, text: "want 10.0.0.0/8"},
		"route that is none":     {change: routes("ten"), want: ErrMalformed},
		"relay without port": {change: func(r *skeinv1.Record) {
			r.Relay = &skeinv1.RelayOffer{Addresses: []string{"relay"}}
		}, want: ErrMalformed},
		"relay link to nobody": {change: func(r *skeinv1.Record) { r.RelayLinks = []*skeinv1.RelayLink{{NodeId: "x"}} },
			want: ErrMalformed},
		"STUN on loopback": {change: func(r *skeinv1.Record) { r.StunAddresses = []string{"[::1]:3478"} },
			want: ErrAddress},
		"internal IP that is no": {change: func(r *skeinv1.Record) { r.InternalIp = "here" }, want: ErrMalformed},
		"short WireGuard key":    {change: func(r *skeinv1.Record) { r.WireguardKey = []byte{1} }, want: ErrMalformed},
		"long site":              {change: func(r *skeinv1.Record) { r.Site = strings.Repeat("s", 254) }, want: ErrMalformed},
		"terminal codes": {change: func(r *skeinv1.Record) { r.Site = "\x1b[2J" }, want: ErrMalformed,
			text: "U+001B"},
		"terminal codes in label": {change: func(r *skeinv1.Record) { r.Labels = map[string]string{"a": "\x07"} },
			want: ErrMalformed},
		"nameless label":     {change: func(r *skeinv1.Record) { r.Labels = map[string]string{"": "a"} }, want: ErrMalformed},
		"long state hash":    {change: func(r *skeinv1.Record) { r.StateHash = make([]byte, 33) }, want: ErrMalformed},
		"keepalive of a day": {change: func(r *skeinv1.Record) { r.PersistentKeepalive = 86400 }, want: ErrMalformed},
		"epoch at the end":   {change: func(r *skeinv1.Record) { r.Epoch = 1<<64 - 1 }, want: ErrMalformed},
		"node ID in capitals": {change: func(r *skeinv1.Record) { r.NodeId = strings.ToUpper(simKey(0).ID().String()) },
			want: ErrMalformed},
		"64 relay links": {change: func(r *skeinv1.Record) { r.RelayLinks = manyLinks(64) }},
		"65 relay links": {change: func(r *skeinv1.Record) { r.RelayLinks = manyLinks(65) }, want: ErrMalformed,
			text: "65 relay_links"},
		"64 labels": {change: func(r *skeinv1.Record) { r.Labels = manyLabels(64) }},
		"65 labels": {change: func(r *skeinv1.Record) { r.Labels = manyLabels(65) }, want: ErrMalformed,
			text: "65 labels"},
		"16 STUN addresses": {change: func(r *skeinv1.Record) { r.StunAddresses = many(16, "203.0.113.%d:3478") }},
		"17 STUN addresses": {change: func(r *skeinv1.Record) { r.StunAddresses = many(17, "203.0.113.%d:3478") },
			want: ErrMalformed, text: "17 of stun_addresses"},
		"17 relay addresses": {change: func(r *skeinv1.Record) {
			r.Relay = &skeinv1.RelayOffer{Addresses: many(17, "203.0.113.%d:7443")}
		}, want: ErrMalformed, text: "17 of relay address"},
		"32 routes": {change: routes(many(32, "10.7.%d.0/24")...)},
		"33 routes": {change: routes(many(33, "10.7.%d.0/24")...), want: ErrMalformed,
			text: "33 node_addresses"},
		"internal IP loopback":     {change: func(r *skeinv1.Record) { r.InternalIp = "127.0.0.1" }, want: ErrAddress},
		"internal IP unspecified":  {change: func(r *skeinv1.Record) { r.InternalIp = "::" }, want: ErrAddress},
		"internal IP multicast":    {change: func(r *skeinv1.Record) { r.InternalIp = "224.0.0.1" }, want: ErrAddress},
		"internal IP with a zone":  {change: func(r *skeinv1.Record) { r.InternalIp = "fe80::1%eth0" }, want: ErrAddress},
		"transport mode with text": {change: func(r *skeinv1.Record) { r.TransportMode = "\x1b[2J" }, want: ErrMalformed},
		"seq at the end":           {change: func(r *skeinv1.Record) { r.Seq = 1<<64 - 1 }, want: ErrMalformed},
		"another's node ID": {change: func(r *skeinv1.Record) { r.NodeId = simKey(1).ID().String() },
			want: ErrSignature},
		"a stranger's record": {change: func(r *skeinv1.Record) { r.NodeId = simKey(9).ID().String() },
			want: ErrUnknownNode},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := Verify(signed(t, c.change), newRoster(simKey(0), simKey(1)))
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			if err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %q does not say %q", err, c.text)
			}
			if err == nil && r.GetNodeId() != simKey(0).ID().String() {
				t.Errorf("record of node %s", r.GetNodeId())
			}
		})
	}
}

func manyCandidates(n int) (out []*skeinv1.Candidate) {
	for i := range n {
		out = append(out, &skeinv1.Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST,
			Address: fmt.Sprintf("10.0.%d.%d:51820", i/256, i%256)})
	}
	return out
}

func many(n int, format string) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf(format, i))
	}
	return out
}

func manyLinks(n int) (out []*skeinv1.RelayLink) {
	for i := range n {
		out = append(out, &skeinv1.RelayLink{NodeId: simKey(i).ID().String()})
	}
	return out
}

func manyLabels(n int) map[string]string {
	out := map[string]string{}
	for _, k := range many(n, "label-%d") {
		out[k] = "x"
	}
	return out
}

func TestVerifySignature(t *testing.T) {
	roster := newRoster(simKey(0))
	good := signed(t, nil)
	for name, s := range map[string]*skeinv1.SignedRecord{
		"nothing":         nil,
		"no signature":    {Record: good.GetRecord()},
		"short signature": {Record: good.GetRecord(), Signature: good.GetSignature()[:63]},
		"changed record": {Record: signed(t, func(r *skeinv1.Record) { r.Site = "other" }).GetRecord(),
			Signature: good.GetSignature()},
		"changed signature": {Record: good.GetRecord(), Signature: append([]byte{good.GetSignature()[0] ^ 1},
			good.GetSignature()[1:]...)},
		"signed bare": {Record: good.GetRecord(), Signature: simKey(0).Sign(good.GetRecord())},
	} {
		want := ErrSignature
		if s == nil {
			want = ErrMalformed
		}
		if _, err := Verify(s, roster); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	// A roster whose key does not belong to the ID must not help.
	roster.m[simKey(0).ID()] = simKey(1).Public()
	forged := &skeinv1.SignedRecord{Record: good.GetRecord(),
		Signature: simKey(1).Sign(append([]byte(signatureContext), good.GetRecord()...))}
	for name, s := range map[string]*skeinv1.SignedRecord{"by the node's own key": good, "by the roster's": forged} {
		if _, err := Verify(s, roster); !errors.Is(err, ErrSignature) {
			t.Errorf("foreign key in the roster, signed %s: %v", name, err)
		}
	}
}

// Every refusal is counted under its reason and can be read afterwards.
func TestRefusalsAreVisible(t *testing.T) {
	g := bareGossip(newRoster(simKey(0), simKey(1)))
	refused := []*skeinv1.SignedRecord{
		signed(t, func(r *skeinv1.Record) { r.Candidates = manyCandidates(65) }),
		signed(t, func(r *skeinv1.Record) { r.Site = "\n" }),
		signed(t, func(r *skeinv1.Record) { r.NodeId = simKey(9).ID().String() }),
		signed(t, func(r *skeinv1.Record) { r.NodeId = simKey(1).ID().String() }),
		signed(t, func(r *skeinv1.Record) { r.NodeAddresses = []string{"8.8.8.0/24"} }),
	}
	n, errs := g.Merge(append(refused, signed(t, nil), signed(t, nil), signed(t, func(r *skeinv1.Record) { r.Epoch = 1 })))
	if n != 1 || len(errs) != len(refused) {
		t.Fatalf("%d taken, %d errors: %v", n, len(errs), errs)
	}
	s := g.Stats()
	if s.RefusedTooLarge != 1 || s.RefusedMalformed != 1 || s.RefusedUnknown != 1 || s.RefusedSignature != 1 ||
		s.RefusedAddress != 1 || s.Duplicates != 1 || s.Old != 1 || s.Accepted != 1 {
		t.Errorf("counts: %+v", s)
	}
	if r := s.LastRefusals[ErrAddress.Error()]; r.Node != simKey(0).ID() || !strings.Contains(r.Text, "8.8.8.0/24") {
		t.Errorf("last refusals: %+v", s.LastRefusals)
	}
}

// bareGossip holds records but speaks to nobody.
func bareGossip(r Roster) *Gossip {
	g := newGossip(Config{Self: simKey(100).ID(), Key: simKey(100), Roster: r, verify: checkSignature,
		PacketBytes: defaultPacketBytes, Log: discard()})
	g.wide.Store(newPool(g, false, ""))
	return g
}

func TestOwnIDIsAlwaysAMember(t *testing.T) {
	g := bareGossip(newRoster())
	if !g.roster.member(simKey(100).ID()) || g.roster.member(identity.ID{}) {
		t.Error("a node must always be a member to itself, and nobody else")
	}
}
