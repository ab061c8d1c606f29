package wireguard

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/simtime"
)

var (
	directly = netip.MustParseAddrPort("192.0.2.1:51820")
	byRelay  = netip.MustParseAddrPort("127.0.0.1:40000")
)

// initiationsFor makes what wireguard-go sends to begin a handshake, each later than the one before.
func initiationsFor(t testing.TB, from, to wgtypes.Key) func() []byte {
	t.Helper()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	d := device.NewDevice(tuntest.NewChannelTUN().TUN(), newMeshBind(), quiet)
	t.Cleanup(d.Close)
	if err := d.SetPrivateKey(device.NoisePrivateKey(from)); err != nil {
		t.Fatal(err)
	}
	peer, err := d.NewPeer(device.NoisePublicKey(to.PublicKey()))
	if err != nil {
		t.Fatal(err)
	}
	var macs device.CookieGenerator
	macs.Init(device.NoisePublicKey(to.PublicKey()))
	var last []byte
	return func() []byte {
		for {
			m, err := d.CreateMessageInitiation(peer)
			if err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			if err := binary.Write(&b, binary.LittleEndian, m); err != nil {
				t.Fatal(err)
			}
			macs.AddMacs(b.Bytes())
			if last != nil && !later(t, b.Bytes(), last, to) {
				continue // the clock that it carries is coarse
			}
			last = b.Bytes()
			return last
		}
	}
}

func later(t testing.TB, a, b []byte, to wgtypes.Key) bool {
	t.Helper()
	x := identitiesOf(to)
	_, stampA, okA := read(a, x.private)
	_, stampB, okB := read(b, x.private)
	if !okA || !okB {
		t.Fatal("an initiation of wireguard-go's cannot be read")
	}
	return stampA.After(stampB)
}

// identitiesOf are those that the holder of a private key knows.
func identitiesOf(key wgtypes.Key, peers ...wgtypes.Key) *identities {
	x := newIdentities()
	x.learn(opsOf(key, peers...))
	return x
}

func opsOf(key wgtypes.Key, peers ...wgtypes.Key) []Op {
	private := dataplane.Key(key)
	ops := []Op{{PrivateKey: &private}}
	for _, p := range peers {
		ops = append(ops, Op{Peer: &PeerOp{Action: Add, Key: dataplane.Key(p.PublicKey()), Endpoint: byRelay}})
	}
	return ops
}

// An initiation tells who sent it, wherever it comes from; one that its sender has not made for us tells nothing.
func TestInitiationTellsItsSender(t *testing.T) {
	ours, theirs, other := newKey(t), newKey(t), newKey(t)
	x := identitiesOf(ours, theirs)
	next := initiationsFor(t, theirs, ours)
	want := party{key: dataplane.Key(theirs.PublicKey())}
	first := next()
	for _, from := range []netip.AddrPort{directly, byRelay} {
		if who, ok := x.initiator(first, from); !ok || who != want {
			t.Errorf("from %s: it is of %v, %t", from, who, ok)
		}
	}
	stranger := party{key: dataplane.Key(other.PublicKey())}
	if who, ok := x.initiator(initiationsFor(t, other, ours)(), byRelay); !ok || who != stranger {
		t.Errorf("a stranger at a peer's endpoint is %v, %t", who, ok)
	}
	if who, ok := x.initiator(initiationsFor(t, theirs, other)(), byRelay); ok {
		t.Errorf("one for somebody else is of %v", who)
	}
	second := next()
	for at := 8; at < len(second)-32; at += 20 { // any byte but the index and the MACs
		forged := bytes.Clone(second)
		forged[at] ^= 1
		macs := device.CookieGenerator{}
		macs.Init(device.NoisePublicKey(ours.PublicKey()))
		macs.AddMacs(forged) // anybody can
		if who, ok := x.initiator(forged, byRelay); ok {
			t.Errorf("one with byte %d changed is of %v", at, who)
		}
	}
	if _, ok := x.initiator(second, directly); !ok {
		t.Error("the next one is not the peer's")
	}
	if _, ok := x.initiator(first, directly); ok {
		t.Error("one that was recorded earlier counts")
	}
}

// Where no more are read, and where our own key is not known, an initiation is whose endpoint it came from.
func TestUnreadInitiationIsOfItsEndpoint(t *testing.T) {
	ours, theirs := newKey(t), newKey(t)
	p := initiationsFor(t, theirs, ours)()
	flooded := identitiesOf(ours, theirs)
	flooded.reads = rate.NewLimiter(0, 0)
	for _, c := range []struct {
		x    *identities
		from netip.AddrPort
		want party
	}{
		{flooded, byRelay, party{key: dataplane.Key(theirs.PublicKey())}},
		{flooded, directly, party{at: directly}},
		{newIdentities(), directly, party{at: directly}},
	} {
		if who, ok := c.x.initiator(p, c.from); !ok || who != c.want {
			t.Errorf("from %s it is of %v, %t; want %v", c.from, who, ok, c.want)
		}
	}
}

// A message of ours tells by its MAC for whom it is, also when the peer's endpoint is another by then, or nobody's.
func TestRecipientIsToldByTheMAC(t *testing.T) {
	ours, theirs, other := newKey(t), newKey(t), newKey(t)
	x := identitiesOf(ours, theirs, other) // both had the same endpoint; the later one has it now
	p := initiationsFor(t, ours, theirs)()
	want := party{key: dataplane.Key(theirs.PublicKey())}
	for _, to := range []netip.AddrPort{byRelay, directly} {
		if who := x.recipient(p, to); who != want {
			t.Errorf("to %s: it is for %v", to, who)
		}
	}
	x.learn([]Op{{Peer: &PeerOp{Action: Remove, Key: dataplane.Key(theirs.PublicKey())}}})
	if who := x.recipient(p, directly); who != (party{at: directly}) {
		t.Errorf("for a peer that was removed: %v", who)
	}
	if x.learn([]Op{{Peer: &PeerOp{Action: Remove, Key: dataplane.Key(other.PublicKey())}}}); len(x.peers)+len(x.at) > 0 {
		t.Errorf("left of peers that were removed: %v, %v", x.peers, x.at)
	}
}

// Initiations that cross by different ways are told by whom they are with: the one with the lower index stands.
func TestCrossingByDifferentWays(t *testing.T) {
	ours, theirs := newKey(t), newKey(t)
	a, b := initiationsFor(t, ours, theirs), initiationsFor(t, theirs, ours)
	lower, higher := a(), b()
	for senderIndex(lower) > senderIndex(higher) {
		lower, higher = a(), b()
	}
	for name, test := range map[string]func(t *testing.T, c *crossing, sent *[]netip.AddrPort){
		"ours is lower": func(t *testing.T, c *crossing, sent *[]netip.AddrPort) {
			c.who.learn(opsOf(ours, theirs))
			if !c.leaves(lower, byRelay) || c.admit(higher, directly) {
				t.Fatal("not what the rule says")
			}
			time.Sleep(repeatAfter) // virtual
			synctest.Wait()
			if !slices.Equal(*sent, []netip.AddrPort{directly}) {
				t.Errorf("ours was sent again to %v, want where theirs came from", *sent)
			}
			if !c.admit(responseMessage(senderIndex(lower)), directly) {
				t.Error("the answer was dropped")
			}
		},
		"theirs is lower": func(t *testing.T, c *crossing, sent *[]netip.AddrPort) {
			c.who.learn(opsOf(theirs, ours))
			if !c.leaves(higher, byRelay) || !c.admit(lower, directly) {
				t.Fatal("not what the rule says")
			}
			if c.admit(responseMessage(senderIndex(higher)), directly) {
				t.Error("an answer to ours, which has yielded, was let in")
			}
			time.Sleep(insistFor) // virtual
			synctest.Wait()
			if len(*sent) > 0 {
				t.Errorf("ours was sent again to %v", *sent)
			}
		},
		"a copy that its sender has not made counts for nothing": func(t *testing.T, c *crossing, _ *[]netip.AddrPort) {
			c.who.learn(opsOf(theirs, ours))
			forged := bytes.Clone(lower)
			forged[8] ^= 1
			macs := device.CookieGenerator{}
			macs.Init(device.NoisePublicKey(theirs.PublicKey()))
			macs.AddMacs(forged)
			if !c.leaves(higher, byRelay) || !c.admit(forged, byRelay) {
				t.Fatal("not what the rule says")
			}
			if !c.admit(responseMessage(senderIndex(higher)), byRelay) {
				t.Error("the answer to ours was dropped")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			simtime.Test(t, func(t *testing.T) {
				var sent []netip.AddrPort
				test(t, newCrossing(func(_ []byte, at netip.AddrPort) { sent = append(sent, at) }), &sent)
			})
		})
	}
}

// BenchmarkInitiator reads an initiation, and BenchmarkRecipient finds one of a thousand peers by the MAC alone.
func BenchmarkInitiator(b *testing.B) {
	ours, theirs := newKey(b), newKey(b)
	x, p := identitiesOf(ours, theirs), initiationsFor(b, theirs, ours)()
	x.reads = rate.NewLimiter(rate.Inf, 0)
	for b.Loop() {
		if _, ok := x.initiator(p, directly); !ok {
			b.Fatal("it is not read")
		}
	}
}

func BenchmarkRecipient(b *testing.B) {
	ours := newKey(b)
	peers := make([]wgtypes.Key, 1000)
	for i := range peers {
		peers[i] = newKey(b)
	}
	x, p := identitiesOf(ours, peers...), initiationsFor(b, ours, peers[500])()
	for b.Loop() {
		x.recipient(p, directly)
	}
}
