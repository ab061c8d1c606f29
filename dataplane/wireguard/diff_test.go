package wireguard

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/golden"
)

var equal = cmp.Options{cmpopts.EquateComparable(netip.Prefix{}, netip.AddrPort{}), cmpopts.EquateEmpty()}

func key(n byte) dataplane.Key { return dataplane.Key{n, 1} }

func peer(endpoint string, ips ...string) dataplane.Peer {
	p := dataplane.Peer{}
	if endpoint != "" {
		p.Endpoint = netip.MustParseAddrPort(endpoint)
	}
	for _, ip := range ips {
		p.AllowedIPs = append(p.AllowedIPs, netip.MustParsePrefix(ip))
	}
	return p
}

func deviceOf(peers map[dataplane.Key]dataplane.Peer) State {
	s, _ := Want(dataplane.WireGuard{PrivateKey: key(99), Port: 51820, Mark: 0x20, Peers: peers})
	return s
}

func TestDiff(t *testing.T) {
	type peers = map[dataplane.Key]dataplane.Peer
	withPSK := peer("192.0.2.2:51820", "10.4.0.2/32")
	withPSK.PresharedKey, withPSK.Keepalive = key(7), 25*time.Second
	cases := []struct {
		name         string
		actual, want State
		o            Options
	}{
		{"new-device", State{}, deviceOf(peers{key(2): withPSK, key(3): peer("", "10.4.0.3/32", "fd00::3/128")}), Options{}},
		{"unchanged", deviceOf(peers{key(2): withPSK}), deviceOf(peers{key(2): withPSK}), Options{Prune: true}},
		{"endpoint-switch", deviceOf(peers{key(2): peer("192.0.2.2:51820", "10.4.0.2/32")}),
			deviceOf(peers{key(2): peer("127.0.0.1:4000", "10.4.0.2/32")}), Options{Prune: true}},
		{"keepalive-unknown-stays", deviceOf(peers{key(2): withPSK}),
			deviceOf(peers{key(2): {PresharedKey: key(7), Keepalive: dataplane.KeepaliveAsItIs, Endpoint: withPSK.Endpoint,
				AllowedIPs: withPSK.AllowedIPs}}), Options{Prune: true}},
		{"endpoint-unknown-stays", deviceOf(peers{key(2): peer("192.0.2.2:51820", "10.4.0.2/32")}),
			deviceOf(peers{key(2): peer("", "10.4.0.2/32")}), Options{Prune: true}},
		{"roamed-peer-when-repair", deviceOf(peers{key(2): peer("203.0.113.2:9", "10.4.0.2/32")}),
			deviceOf(peers{key(2): peer("192.0.2.2:51820", "10.4.0.2/32")}), Options{Prune: true, KeepEndpoints: true}},
		{"allowed-ip-added", deviceOf(peers{key(2): peer("", "10.4.0.2/32")}),
			deviceOf(peers{key(2): peer("", "10.4.0.2/32", "10.100.0.0/27")}), Options{Prune: true}},
		{"allowed-ip-lost", deviceOf(peers{key(2): peer("", "10.4.0.2/32", "10.100.0.0/27")}),
			deviceOf(peers{key(2): peer("", "10.4.0.2/32")}), Options{Prune: true}},
		{"allowed-ip-moves", deviceOf(peers{key(2): peer("", "10.4.0.2/32", "10.100.0.0/27"),
			key(3): peer("", "10.4.0.3/32")}),
			deviceOf(peers{key(2): peer("", "10.4.0.2/32"), key(3): peer("", "10.4.0.3/32", "10.100.0.0/27")}),
			Options{Prune: true}},
		{"allowed-ips-swap", deviceOf(peers{key(2): peer("", "10.1.0.0/24"), key(3): peer("", "10.2.0.0/24")}),
			deviceOf(peers{key(2): peer("", "10.2.0.0/24"), key(3): peer("", "10.1.0.0/24")}), Options{Prune: true}},
		{"a-part-moves", deviceOf(peers{key(2): peer("", "10.1.0.0/24"), key(3): peer("", "10.4.0.3/32")}),
			deviceOf(peers{key(2): peer("", "10.1.0.0/25"), key(3): peer("", "10.1.0.128/25", "10.4.0.3/32")}),
			Options{Prune: true}},
		{"key-rotated", deviceOf(peers{key(2): peer("192.0.2.2:51820", "10.4.0.2/32")}),
			deviceOf(peers{key(4): peer("192.0.2.2:51820", "10.4.0.2/32")}), Options{Prune: true}},
		{"peer-gone", deviceOf(peers{key(2): peer("", "10.4.0.2/32"), key(3): peer("", "10.4.0.3/32")}),
			deviceOf(peers{key(3): peer("", "10.4.0.3/32")}), Options{Prune: true}},
		{"peer-gone-before-complete", deviceOf(peers{key(2): peer("", "10.4.0.2/32", "10.100.0.0/27")}),
			deviceOf(peers{key(3): peer("", "10.4.0.3/32", "10.100.0.0/27")}), Options{}},
		{"preshared-key-off", deviceOf(peers{key(2): withPSK}),
			deviceOf(peers{key(2): peer("192.0.2.2:51820", "10.4.0.2/32")}), Options{Prune: true}},
		{"device-changed", State{PrivateKey: key(1), Port: 1, Mark: 1}, deviceOf(nil), Options{Prune: true}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			ops := Diff(c.want, c.actual, c.o)
			var lines []string
			for _, op := range ops {
				lines = append(lines, op.String())
			}
			golden.Lines(t, c.name, lines)
			if again := Diff(c.want, c.actual.Apply(ops), c.o); len(again) > 0 {
				t.Errorf("not settled after one round: %v", again)
			}
		})
	}
}

func genState(t *rapid.T, name string) State {
	peers := map[dataplane.Key]dataplane.Peer{}
	ips := rapid.Permutation(prefixes()).Draw(t, name+" order")
	n := rapid.IntRange(0, 6).Draw(t, name+" peers")
	for range n {
		p := dataplane.Peer{PresharedKey: key(rapid.ByteRange(0, 2).Draw(t, "psk")),
			Keepalive: time.Duration(rapid.IntRange(0, 2).Draw(t, "keepalive")) * time.Second,
			Endpoint:  netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(rapid.IntRange(1, 3).Draw(t, "port")))}
		take := min(rapid.IntRange(0, 4).Draw(t, "ips"), len(ips))
		p.AllowedIPs, ips = slices.Clone(ips[:take]), ips[take:]
		peers[key(rapid.ByteRange(1, 8).Draw(t, "key"))] = p
	}
	s, _ := Want(dataplane.WireGuard{PrivateKey: key(rapid.ByteRange(0, 2).Draw(t, "private")),
		Port: rapid.IntRange(1, 2).Draw(t, "port"), Mark: 0x20, Peers: peers})
	return s
}

func prefixes() (out []netip.Prefix) {
	for i := range 12 {
		out = append(out, netip.MustParsePrefix(fmt.Sprintf("10.%d.0.0/24", i)))
	}
	return append(out, netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("fd00::1/128"))
}

func TestApplyingTheDiffGivesWhatIsWanted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := genState(t, "actual"), genState(t, "want")
		if d := cmp.Diff(b, a.Apply(Diff(b, a, Options{Prune: true})), equal); d != "" {
			t.Fatalf("-want +got:\n%s", d)
		}
		// In batches, as the kernel gets it, it is the same.
		s := a
		for _, batch := range Batches(Diff(b, a, Options{Prune: true})) {
			s = s.Apply(batch)
		}
		if d := cmp.Diff(b, s, equal); d != "" {
			t.Fatalf("in batches, -want +got:\n%s", d)
		}
	})
}

func TestNothingIsTakenBeforeEverySourceHasSpoken(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := genState(t, "actual"), genState(t, "want")
		after := a.Apply(Diff(b, a, Options{}))
		held := map[netip.Prefix]bool{}
		for _, p := range after.Peers {
			for _, ip := range p.AllowedIPs {
				held[ip] = true
			}
		}
		for k, p := range a.Peers {
			if _, ok := after.Peers[k]; !ok {
				t.Fatalf("peer %s is gone", k.Short())
			}
			for _, ip := range p.AllowedIPs {
				if !held[ip] {
					t.Fatalf("nobody has %s any more", ip)
				}
			}
		}
		for k, p := range b.Peers {
			for _, ip := range p.AllowedIPs {
				if !slices.Contains(after.Peers[k].AllowedIPs, ip) {
					t.Fatalf("%s did not get %s", k.Short(), ip)
				}
			}
		}
	})
}

// No allowed IP that stays in use is without an owner between two operations, and a peer that did not
// change is in none of them.
func TestAMoveLeavesNoHole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := genState(t, "actual"), genState(t, "want")
		ops := Diff(b, a, Options{Prune: true})
		before, after := owned(a), owned(b)
		s := a
		for _, op := range ops {
			if p := op.Peer; p != nil && cmp.Equal(a.Peers[p.Key], b.Peers[p.Key], equal) {
				if _, both := b.Peers[p.Key]; both {
					t.Fatalf("%s, which did not change: %s", p.Key.Short(), op)
				}
			}
			s = s.Apply([]Op{op})
			now := owned(s)
			for ip := range before {
				if after[ip] && !now[ip] {
					t.Fatalf("%s has no owner after %s", ip, op)
				}
			}
		}
	})
}

func owned(s State) map[netip.Prefix]bool {
	m := map[netip.Prefix]bool{}
	for _, p := range s.Peers {
		for _, ip := range p.AllowedIPs {
			m[ip] = true
		}
	}
	return m
}

func TestContestedPrefixStaysWithTheLowerKey(t *testing.T) {
	s, notes := Want(dataplane.WireGuard{Peers: map[dataplane.Key]dataplane.Peer{
		key(3): peer("", "10.4.0.2/32", "10.4.0.3/32"), key(2): peer("", "10.4.0.2/32"), key(4): peer("", "10.4.0.2/32")}})
	if len(s.Peers[key(2)].AllowedIPs) != 1 || len(s.Peers[key(3)].AllowedIPs) != 1 ||
		len(s.Peers[key(4)].AllowedIPs) != 0 {
		t.Errorf("peers: %v", s.Peers)
	}
	if len(notes) != 2 {
		t.Errorf("notes: %q", notes)
	}
}

func TestBatchesAreSmallAndInOrder(t *testing.T) {
	s := fleet(100)
	k := key(200)
	big := dataplane.Peer{}
	for i := range 600 {
		big.AllowedIPs = append(big.AllowedIPs,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(i / 256), byte(i)}), 32))
	}
	s.Peers[k] = big
	got := State{}
	for _, b := range Batches(Diff(s, State{}, Options{})) {
		peers, ips := 0, 0
		for _, op := range b {
			if op.Peer != nil {
				peers++
				ips += len(op.Peer.Gain) + len(op.Peer.Final)
			}
		}
		if peers > batchPeers || ips > batchAllowedIPs {
			t.Errorf("a message with %d peers and %d allowed IPs", peers, ips)
		}
		got = got.Apply(b)
	}
	if d := cmp.Diff(s, got, equal); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

// fleet is a device with n peers.
func fleet(n int) State {
	w := dataplane.WireGuard{PrivateKey: key(1), Port: 51820, Mark: 0x20, Peers: make(map[dataplane.Key]dataplane.Peer, n)}
	r := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		var k dataplane.Key
		for j := range k {
			k[j] = byte(r.Uint32())
		}
		w.Peers[k] = dataplane.Peer{PresharedKey: k,
			Endpoint:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i / 256), byte(i)}), 51820),
			Keepalive: 25 * time.Second,
			AllowedIPs: []netip.Prefix{
				netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4, byte(i / 256), byte(i)}), 32),
				netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 100, byte(i / 8), byte(i * 32)}), 27),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i / 256), 15: byte(i)}), 128),
			}}
	}
	s, _ := Want(w)
	return s
}

func BenchmarkDiff1000Peers(b *testing.B) {
	actual := fleet(1000)
	w := dataplane.WireGuard{PrivateKey: actual.PrivateKey, Port: actual.Port, Mark: actual.Mark,
		Peers: maps.Clone(actual.Peers)}
	k := sortedKeys(actual.Peers)[500]
	p := w.Peers[k]
	p.Endpoint = netip.MustParseAddrPort("203.0.113.1:1")
	w.Peers[k] = p
	b.ReportAllocs()
	for b.Loop() {
		want, _ := Want(w)
		if ops := Diff(want, actual, Options{Prune: true}); len(ops) != 1 {
			b.Fatal(len(ops))
		}
	}
}
