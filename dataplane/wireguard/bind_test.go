package wireguard

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/testenv"
)

// A Bind that has sent to IPv4 sends to the right IPv6 address after it, whatever the order. It needs
// an address other than ::1, which the kernel takes :: for.
func TestBindSendsToBothFamilies(t *testing.T) {
	testenv.NeedRoot(t)
	b := newMeshBind()
	var sinks [2]*net.UDPConn
	if err := inNewNamespace(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP("fd00::5"), Mask: net.CIDRMask(128, 128)},
			Flags: unix.IFA_F_NODAD}
		if err := errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, addr)); err != nil {
			return err
		}
		for i, addr := range []string{"127.0.0.1:0", "[fd00::5]:0"} {
			if sinks[i], err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr))); err != nil {
				return err
			}
		}
		if err := usable(sinks[1]); err != nil {
			return err
		}
		_, _, err = b.Open(0)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	buf := make([]byte, 100)
	for n := range 40 {
		sink := sinks[n%2]
		ep, err := b.ParseEndpoint(sink.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Send([][]byte{fmt.Appendf(nil, "%d", n)}, ep); err != nil {
			t.Fatal(err)
		}
		sink.SetReadDeadline(time.Now().Add(5 * time.Second))
		size, err := sink.Read(buf)
		if err != nil || string(buf[:size]) != fmt.Sprint(n) {
			t.Fatalf("packet %d to %s: %q, %v", n, ep.DstToString(), buf[:size], err)
		}
	}
	for _, s := range sinks {
		s.Close()
	}
}

// usable waits until a new IPv6 address carries packets: the kernel adds its route a moment later.
func usable(c *net.UDPConn) error {
	buf := make([]byte, 10)
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		if _, err := c.WriteTo([]byte("hello"), c.LocalAddr()); err != nil {
			continue
		}
		c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := c.Read(buf); err == nil {
			return nil
		}
	}
	return errors.New("the address does not come up")
}

// inNewNamespace runs fn on a thread of its own in a new network namespace; its sockets live on there.
func inNewNamespace(fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- fn()
	}()
	return <-done
}

// Two devices that start at the same moment have a session at once. With the library's Bind a quarter
// of the rounds fail.
func TestDevicesThatStartTogether(t *testing.T) {
	rounds, tolerated := 40, 2
	if os.Getenv("SKEIN_WANT_KERNEL") != "" {
		rounds = 4 // in the emulated guest, which is for the kernel's part
	}
	late := 0
	for range rounds {
		tunA, tunB, stop := pair(t)
		ping := tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
		pong := tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
		var together sync.WaitGroup
		together.Go(func() { tunA.Outbound <- ping })
		together.Go(func() { tunB.Outbound <- pong })
		together.Wait()
		patience := time.After(3 * time.Second) // the library's own retry comes after five
		ok := true
		for _, in := range []chan []byte{tunA.Inbound, tunB.Inbound} {
			select {
			case <-in:
			case <-patience:
				ok = false
			}
		}
		if !ok {
			late++
		}
		stop()
	}
	if late > tolerated {
		t.Errorf("in %d of %d rounds the session did not come at once", late, rounds)
	}
}

// A device that starts between consuming the other's initiation and answering it cannot answer any more, whichever
// of the two has the lower index; about one start in three thousand was so.
func TestDeviceThatStartsWhileItAnswers(t *testing.T) {
	higher := map[bool]int{}
	for round := 0; (higher[true] == 0 || higher[false] == 0) && round < 40; round++ {
		stood := lag.Stood(2 * time.Millisecond)
		t.Cleanup(func() { stood() })
		a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
		bind := newMeshBind()
		var theirs, ours uint32
		held := func() bool { // our initiation has been made, and is held back
			bind.cross.mu.Lock()
			defer bind.cross.mu.Unlock()
			for _, m := range bind.cross.parties {
				theirs = m.theirs.index
				return !m.held.IsZero()
			}
			return false
		}
		once := sync.Once{}
		starts := &device.Logger{Errorf: device.DiscardLogf, Verbosef: func(format string, _ ...any) {
			if !strings.Contains(format, "Received handshake initiation") {
				return
			}
			once.Do(func() { // in the goroutine that is going to answer
				a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
				for deadline := time.Now().Add(5 * time.Second); !held() && time.Now().Before(deadline); {
					runtime.Gosched()
				}
			})
		}}
		quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
		da, db := device.NewDevice(a.TUN(), bind, starts), device.NewDevice(b.TUN(), newMeshBind(), quiet)
		wire(t, da, db)
		b.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
		patience := time.After(3 * time.Second) // the library's own retry comes after five
		late := false
		for _, in := range []chan []byte{a.Inbound, b.Inbound} {
			select {
			case <-in:
			case <-patience:
				late = true
			}
		}
		bind.cross.mu.Lock()
		for _, m := range bind.cross.parties {
			ours = m.ours.index
		}
		bind.cross.mu.Unlock()
		da.Close()
		db.Close()
		if gap := stood(); gap > yieldAfter/2 { // what happens within the windows of crossing cannot be told then
			t.Logf("round %d does not count: the machine stood still for %s", round, gap)
			continue
		}
		if late {
			t.Errorf("round %d: the session did not come at once", round)
		}
		if ours == 0 || theirs == 0 {
			t.Errorf("round %d: the device did not start while it answered", round)
		}
		higher[ours > theirs]++
	}
	if higher[true] == 0 || higher[false] == 0 {
		t.Errorf("rounds by whether ours had the higher index: %v, want both", higher)
	}
}

// A packet that came before its peer's endpoint leaves as soon as the endpoint is known.
func TestPacketBeforeEndpoint(t *testing.T) {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	failed := make(chan struct{}, 10)
	noisy := &device.Logger{Verbosef: device.DiscardLogf, Errorf: func(string, ...any) {
		select {
		case failed <- struct{}{}:
		default:
		}
	}}
	bind := newMeshBind()
	link := newQuietTUN(a.TUN(), device.DefaultMTU)
	da, db := device.NewDevice(link, bind, noisy), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	defer da.Close()
	defer db.Close()
	keyB, portB := wire(t, da, db)
	if err := da.IpcSet(fmt.Sprintf("public_key=%x\nremove=true\npublic_key=%x\nallowed_ip=10.0.0.2/32\n", keyB[:],
		keyB[:])); err != nil {
		t.Fatal(err)
	}
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.1"))
	<-failed // no known endpoint for peer
	d := &userspaceDevice{dev: da, up: true, tun: link, first: newHurrier(da, bind, &link.handled)}
	defer d.first.close()
	op := Op{Peer: &PeerOp{Action: Update, Key: dataplane.Key(keyB),
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(portB))}}
	if err := d.Write([]Op{op}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Inbound:
	case <-time.After(3 * time.Second): // the library's own retry comes after five
		t.Error("the packet waits for the next handshake")
	}
}

// A first packet to a peer that does not know us yet arrives as soon as it does.
func TestPacketBeforeThePeerKnowsUs(t *testing.T) {
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	unknown := make(chan struct{}, 10)
	noisy := &device.Logger{Errorf: device.DiscardLogf, Verbosef: func(format string, _ ...any) {
		if strings.Contains(format, "invalid initiation") {
			unknown <- struct{}{}
		}
	}}
	bind := newMeshBind()
	link := newQuietTUN(b.TUN(), device.DefaultMTU)
	da, db := device.NewDevice(a.TUN(), newMeshBind(), quiet), device.NewDevice(link, bind, noisy)
	defer da.Close()
	defer db.Close()
	keyA, portA := wire(t, db, da)
	if err := db.IpcSet("replace_peers=true\n"); err != nil {
		t.Fatal(err)
	}
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
	select {
	case <-unknown:
	case <-time.After(5 * time.Second):
		t.Fatal("no initiation came")
	}
	d := &userspaceDevice{dev: db, up: true, tun: link, first: newHurrier(db, bind, &link.handled)}
	defer d.first.close()
	op := Op{Peer: &PeerOp{Action: Add, Key: dataplane.Key(keyA),
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(portA)),
		Gain:     []netip.Prefix{netip.MustParsePrefix("10.0.0.2/32")}}}
	if err := d.Write([]Op{op}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-b.Inbound:
	case <-time.After(3 * time.Second): // the library's own retry comes after five
		t.Error("the packet waits for the next handshake")
	}
}

func pair(t *testing.T) (a, b *tuntest.ChannelTUN, stop func()) {
	t.Helper()
	a, b = tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	da, db := device.NewDevice(a.TUN(), newMeshBind(), quiet), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	wire(t, da, db)
	return a, b, func() { da.Close(); db.Close() }
}

// wire makes two devices each other's peer, on loopback, and tells how the second is reached.
func wire(t *testing.T, da, db *device.Device) (publicB wgtypes.Key, portB int) {
	t.Helper()
	ka, kb := newKey(t), newKey(t)
	ports := map[*device.Device]int{}
	for d, k := range map[*device.Device]wgtypes.Key{da: ka, db: kb} {
		if err := d.IpcSet(fmt.Sprintf("private_key=%x\nlisten_port=0\n", k[:])); err != nil {
			t.Fatal(err)
		}
		if err := d.Up(); err != nil {
			t.Fatal(err)
		}
		text, err := d.IpcGet()
		if err != nil {
			t.Fatal(err)
		}
		var port int
		for line := range strings.Lines(text) {
			if _, err := fmt.Sscanf(line, "listen_port=%d", &port); err == nil {
				ports[d] = port
			}
		}
	}
	for _, side := range []struct {
		d     *device.Device
		key   wgtypes.Key
		port  int
		allow string
	}{{da, kb.PublicKey(), ports[db], "10.0.0.2/32"}, {db, ka.PublicKey(), ports[da], "10.0.0.1/32"}} {
		if err := side.d.IpcSet(fmt.Sprintf("public_key=%x\nendpoint=127.0.0.1:%d\nallowed_ip=%s\n", side.key[:], side.port,
			side.allow)); err != nil {
			t.Fatal(err)
		}
	}
	return kb.PublicKey(), ports[db]
}

func newKey(t testing.TB) wgtypes.Key {
	t.Helper()
	k, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}
