package wireguard

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/lag"
)

var errWaits = errors.New("the packet waits for the next handshake")

// unlessStalled runs a round. It repeats one that failed while this process was not scheduled for longer than an answer
// may take: such a round says nothing about the windows of crossing.
func unlessStalled(t *testing.T, round func(*testing.T) error) {
	for range 5 {
		stood := lag.Stood(2 * time.Millisecond)
		t.Cleanup(func() { stood() })
		err := round(t)
		gap := stood()
		switch {
		case err == nil:
			return
		case gap <= answerWithin:
			t.Fatal(err)
		}
		t.Logf("does not count: %v, but the machine stood still for %s", err, gap)
	}
	t.Fatal("no round without a stall")
}

// An answer that is long on its way is waited for: a try of ours meanwhile would take the keys from us that it has
// made, and come to the other side right behind it, where it is passed over.
func TestTryWhileTheAnswerIsUnderWay(t *testing.T) { unlessStalled(t, tryWhileTheAnswerIsUnderWay) }

func tryWhileTheAnswerIsUnderWay(t *testing.T) error {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	write := make(chan func() error, 1) // what the device's goroutine runs, once
	written, once := make(chan error, 1), sync.Once{}
	verbose := &device.Logger{Errorf: device.DiscardLogf, Verbosef: func(format string, _ ...any) {
		if strings.Contains(format, "Sending handshake response") {
			once.Do(func() { written <- (<-write)() }) // in the goroutine that is going to make the answer
		}
	}}
	bind := newMeshBind()
	link := newQuietTUN(b.TUN(), device.DefaultMTU)
	da, db := device.NewDevice(a.TUN(), newMeshBind(), quiet), device.NewDevice(link, bind, verbose)
	defer da.Close()
	defer db.Close()
	keyA, portA := wire(t, db, da)
	middle := newJam(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(portA)))
	middle.lead(t, da, db)
	d := &userspaceDevice{dev: db, up: true, tun: link, first: newHurrier(db, bind, &link.handled)}
	defer d.first.close()
	op := Op{Peer: &PeerOp{Action: Update, Key: dataplane.Key(keyA), Endpoint: middle.forB}}
	write <- func() error { return d.Write([]Op{op}) }
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	b.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
	patience := time.After(4 * time.Second) // the library's own retry comes after five
	for _, in := range []chan []byte{a.Inbound, b.Inbound} {
		select {
		case <-in:
		case <-patience:
			return errWaits
		}
	}
	middle.mu.Lock()
	defer middle.mu.Unlock()
	if middle.ofB > 0 {
		return errors.New("the answer did not leave: there was a handshake of the other side's")
	}
	return nil
}

// A try repeats the initiation that stands: of two different ones the first's answer would be useless, and on a way
// slower than the pause between tries each next one would come before the answer to the last.
func TestTryRepeatsWhatStands(t *testing.T) { unlessStalled(t, tryRepeatsWhatStands) }

func tryRepeatsWhatStands(t *testing.T) error {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	bind := newMeshBind()
	link := newQuietTUN(a.TUN(), device.DefaultMTU)
	da, db := device.NewDevice(link, bind, quiet), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	defer da.Close()
	defer db.Close()
	_, portA := wire(t, db, da)
	middle := newJam(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(portA)))
	keyB := middle.lead(t, da, db)
	d := &userspaceDevice{dev: da, up: true, tun: link, first: newHurrier(da, bind, &link.handled)}
	defer d.first.close()
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
	op := Op{Peer: &PeerOp{Action: Update, Key: keyB, Endpoint: middle.forA}}
	if err := d.Write([]Op{op}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Inbound:
	case <-time.After(4 * time.Second): // the library's own retry comes after five
		return errWaits
	}
	if started := middle.started(); len(started) != 1 || started[0] < 2 {
		return fmt.Errorf("initiations, by how often they were sent: %v; want one, and that again", started)
	}
	return nil
}

// A try beside a first packet that is making an initiation waits for it. It would forget that one, whose answer would
// then be useless, and send another, which the peer takes for a replay of it.
func TestTryBesideAFirstPacket(t *testing.T) {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	bind, link := newMeshBind(), newQuietTUN(a.TUN(), device.DefaultMTU)
	var write func() error
	once, written := sync.Once{}, make(chan error, 1)
	starting := &device.Logger{Errorf: device.DiscardLogf, Verbosef: func(format string, _ ...any) {
		if !strings.Contains(format, "Sending handshake initiation") {
			return
		}
		once.Do(func() { // in the goroutine that has the packet and is going to make the initiation
			done := make(chan struct{})
			go func() { written <- write(); close(done) }()
			select {
			case <-done:
			case <-time.After(300 * time.Millisecond): // it waits, as it should
			}
		})
	}}
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	da, db := device.NewDevice(link, bind, starting), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	defer da.Close()
	defer db.Close()
	keyB, portB := wire(t, da, db)
	d := &userspaceDevice{dev: da, up: true, tun: link, first: newHurrier(da, bind, &link.handled)}
	defer d.first.close()
	op := Op{Peer: &PeerOp{Action: Update, Key: dataplane.Key(keyB),
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(portB))}}
	write = func() error { return d.Write([]Op{op}) }
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
	select {
	case <-b.Inbound:
	case <-time.After(4 * time.Second): // the library's own retry comes after five
		t.Error("the packet waits for the next handshake")
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
}

// jam is a way between two devices that holds up what b sends for a moment, and lets it arrive all at once.
type jam struct {
	toA, toB netip.AddrPort
	sideA    *net.UDPConn // where a sends
	sideB    *net.UDPConn
	forA     netip.AddrPort
	forB     netip.AddrPort

	mu          sync.Mutex
	initiations map[uint32]int // of a
	ofB         int            // initiations of b
}

// started tells how often each of a's initiations was sent.
func (j *jam) started() []int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Collect(maps.Values(j.initiations))
}

// jamFor is longer than the first pause between two tries of a first handshake.
const jamFor = 600 * time.Millisecond

func newJam(t *testing.T, a netip.AddrPort) *jam {
	j := &jam{toA: a, initiations: map[uint32]int{}}
	for _, c := range []**net.UDPConn{&j.sideA, &j.sideB} {
		u, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { u.Close() })
		*c = u
	}
	j.forA = j.sideA.LocalAddr().(*net.UDPAddr).AddrPort()
	j.forB = j.sideB.LocalAddr().(*net.UDPAddr).AddrPort()
	return j
}

// lead leads a's way to b through j, and tells b's key.
func (j *jam) lead(t *testing.T, da, db *device.Device) dataplane.Key {
	t.Helper()
	read := func(d *device.Device) (State, []dataplane.PeerStatus) {
		text, err := d.IpcGet()
		if err != nil {
			t.Fatal(err)
		}
		s, peers, err := decode([]byte(text), true)
		if err != nil {
			t.Fatal(err)
		}
		return s, peers
	}
	s, _ := read(db)
	j.toB = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(s.Port))
	_, peers := read(da)
	if len(peers) != 1 {
		t.Fatalf("peers of a: %v", peers)
	}
	if err := da.IpcSet(fmt.Sprintf("public_key=%x\nupdate_only=true\nendpoint=%s\n", peers[0].PublicKey[:],
		j.sideA.LocalAddr())); err != nil {
		t.Fatal(err)
	}
	go j.pass(j.sideA, j.sideB, j.toB, 0)
	go j.pass(j.sideB, j.sideA, j.toA, jamFor)
	return peers[0].PublicKey
}

// pass carries what comes to one socket on from the other; the first packets together, some time after the first of
// them.
func (j *jam) pass(from, by *net.UDPConn, to netip.AddrPort, hold time.Duration) {
	var held [][]byte
	var release time.Time
	b := make([]byte, 2048)
	for {
		if len(held) > 0 {
			_ = from.SetReadDeadline(release)
		}
		n, err := from.Read(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			for _, p := range held {
				_, _ = by.WriteToUDPAddrPort(p, to)
			}
			held, hold = nil, 0
			_ = from.SetReadDeadline(time.Time{})
			continue
		}
		if from == j.sideA && isInitiation(b[:n]) {
			j.mu.Lock()
			j.initiations[senderIndex(b[:n])]++
			j.mu.Unlock()
		}
		if from == j.sideB && isInitiation(b[:n]) {
			j.mu.Lock()
			j.ofB++
			j.mu.Unlock()
		}
		switch {
		case err != nil:
			return
		case hold == 0:
			_, _ = by.WriteToUDPAddrPort(b[:n], to)
		default:
			if len(held) == 0 {
				release = time.Now().Add(hold)
			}
			held = append(held, bytes.Clone(b[:n]))
		}
	}
}

// TestNothingIsTriedBeforeAddressesAreLed: a peer that is another's next key is left alone until addresses are led to
// it. A try of ours beside the handshake that the other side begins would end the session that still carries packets.
func TestNothingIsTriedBeforeAddressesAreLed(t *testing.T) {
	e := newEnd(t, "10.0.0.1")
	defer e.Close()
	h := e.first
	next, plain := dataplane.Key{1}, dataplane.Key{2}
	ips := []netip.Prefix{netip.MustParsePrefix("10.0.0.2/32")}
	first, second := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.1:2")
	for _, step := range []struct {
		name string
		op   PeerOp
		want netip.AddrPort
	}{
		{"a next key", PeerOp{Action: Add, Key: next, Endpoint: first}, netip.AddrPort{}},
		{"its keepalive", PeerOp{Action: Update, Key: next, Keepalive: new(time.Duration)}, netip.AddrPort{}},
		{"its way changes", PeerOp{Action: Update, Key: next, Endpoint: second}, netip.AddrPort{}},
		{"addresses are led to it", PeerOp{Action: Update, Key: next, Gain: ips}, second},
		{"its way changes again", PeerOp{Action: Update, Key: next, Endpoint: first}, first},
		{"a peer with addresses", PeerOp{Action: Add, Key: plain, Endpoint: first, Gain: ips}, first},
		{"its addresses change", PeerOp{Action: Update, Key: plain, Gain: ips}, netip.AddrPort{}},
		{"its way changes, too", PeerOp{Action: Update, Key: plain, Endpoint: second}, second},
	} {
		h.changed([]Op{{Peer: &step.op}})
		h.mu.Lock()
		var have netip.AddrPort
		if tries := h.fresh[step.op.Key]; tries != nil {
			have = tries.endpoints[len(tries.endpoints)-1]
		}
		delete(h.fresh, step.op.Key)
		h.mu.Unlock()
		if have != step.want {
			t.Errorf("%s: tried at %s, want %s", step.name, have, step.want)
		}
	}
}

// TestAnotherKeyForgetsFormerHandshakes: an initiation right behind an answer is not sent, since there is a session. A
// device that has got another key meanwhile has none that it can send in, and would try again after five seconds.
func TestAnotherKeyForgetsFormerHandshakes(t *testing.T) {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	bind, link := newMeshBind(), newQuietTUN(a.TUN(), device.DefaultMTU)
	da, db := device.NewDevice(link, bind, quiet), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	defer da.Close()
	defer db.Close()
	public, port := wire(t, da, db)
	d := &userspaceDevice{dev: da, up: true, tun: link, first: newHurrier(da, bind, &link.handled)}
	defer d.first.close()
	arrives := func() {
		t.Helper()
		a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
		select {
		case <-b.Inbound:
		case <-time.After(4 * time.Second): // the library's own retry comes after five
			t.Fatal(errWaits)
		}
	}
	arrives()
	keyB, at := dataplane.Key(public), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(port))
	next := dataplane.Key(newKey(t))
	public = wgtypes.Key(next).PublicKey()
	if err := errors.Join(d.Write([]Op{{Peer: &PeerOp{Action: Update, Key: keyB, Endpoint: at}}}),
		db.IpcSet(fmt.Sprintf("public_key=%x\nallowed_ip=10.0.0.1/32\n", public[:]))); err != nil {
		t.Fatal(err)
	}
	who := party{key: keyB}
	bind.cross.mu.Lock()
	bind.cross.parties[who] = &meeting{theirs: initiation{at: time.Now(), index: 1, outcome: answered}}
	bind.cross.mu.Unlock()
	if err := d.Write([]Op{{PrivateKey: &next}}); err != nil {
		t.Fatal(err)
	}
	arrives()
}
