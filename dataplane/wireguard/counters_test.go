package wireguard

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// The counters that are read where the library keeps them are those of its text: of a peer with a session, of one that
// was never heard of, and of one without an endpoint.
func TestCountersAreThoseOfTheText(t *testing.T) {
	a, b := newEnd(t, "10.0.0.1"), newEnd(t, "10.0.0.2")
	defer a.Close()
	defer b.Close()
	a.meets(t, b, b.at(t))
	b.meets(t, a, a.at(t))
	for i, at := range []netip.AddrPort{{}, netip.MustParseAddrPort("[fe80::1%lo]:7"),
		netip.MustParseAddrPort("192.0.2.9:51820")} {
		op := PeerOp{Action: Add, Key: dataplane.Key{byte(1 + i)}, Endpoint: at}
		if err := a.Write([]Op{{Peer: &op}}); err != nil {
			t.Fatal(err)
		}
	}
	if !talk(a, b) {
		t.Fatal("the two ends have no session")
	}
	count, err := newCounters(a.dev)
	if err != nil {
		t.Fatal(err)
	}
	var got, want []dataplane.PeerStatus
	for deadline := time.Now().Add(10 * time.Second); ; { // until no packet passes meanwhile
		if _, want, err = a.Read(); err != nil {
			t.Fatal(err)
		}
		got = count.read()
		_, after, err := a.Read()
		if err != nil {
			t.Fatal(err)
		}
		if slices.Equal(want, after) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("packets go on passing:\n%v\n%v", want, after)
		}
	}
	if len(want) != 4 || !slices.Equal(got, want) {
		t.Errorf("counters:\n%v\ntext:\n%v", got, want)
	}
	i := slices.IndexFunc(got, func(s dataplane.PeerStatus) bool {
		return s.PublicKey == dataplane.Key(b.key.PublicKey())
	})
	if i < 0 || got[i].RxBytes == 0 || got[i].TxBytes == 0 || got[i].LastHandshake.IsZero() || got[i].Endpoint != b.at(t) {
		t.Errorf("of the peer with a session: %v", got)
	}
}

// A reading by the text, as it was, and of the fields.
func BenchmarkCounters(b *testing.B) {
	for _, by := range []string{"text", "fields"} {
		b.Run(by, func(b *testing.B) {
			d := newBenchDevice(b, 200)
			defer d.Close()
			if by == "fields" {
				var err error
				if d.count, err = newCounters(d.dev); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, all, err := d.Status(); err != nil || len(all) != 200 {
					b.Fatal(len(all), err)
				}
			}
		})
	}
}

// newBenchDevice has peers with two prefixes each.
func newBenchDevice(b *testing.B, peers int) *userspaceDevice {
	e := newEnd(b, "10.0.0.1")
	var ops []Op
	for i := range peers {
		ops = append(ops, Op{Peer: &PeerOp{Action: Add, Key: dataplane.Key{byte(i), byte(i >> 8), 1},
			Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 51820),
			Gain: []netip.Prefix{
				netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, 14: byte(i >> 8), 15: byte(i)}), 128),
			}}})
	}
	if err := e.Write(ops); err != nil {
		b.Fatal(err)
	}
	return e.userspaceDevice
}
