package wireguard

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
)

// What agent/handshakes.go is for. A handshake carries the wall clock's time, and a peer refuses one that is not later
// than the last that it has seen. A host whose clock went back is refused until the clock has caught up; but it answers
// a handshake that the peer begins, and a keepalive that is new makes the peer begin one.
func TestClockThatWentBack(t *testing.T) {
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	var refused atomic.Int32
	listening := &device.Logger{Errorf: device.DiscardLogf, Verbosef: func(format string, _ ...any) {
		if strings.Contains(format, "handshake replay") {
			refused.Add(1)
		}
	}}
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	da, db := device.NewDevice(a.TUN(), newMeshBind(), quiet), device.NewDevice(b.TUN(), newMeshBind(), listening)
	defer db.Close()
	keyA, portA := wire(t, db, da)
	a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
	select {
	case <-b.Inbound:
	case <-time.After(5 * time.Second):
		t.Fatal("no session while the clocks are right")
	}
	config, err := da.IpcGet()
	if err != nil {
		t.Fatal(err)
	}
	da.Close()
	var late atomic.Bool
	defer time.AfterFunc(20*time.Second, func() { late.Store(true) }).Stop()
	begin, begun := make(chan struct{}), make(chan error, 1)
	go func() { // by the peer's own clock, which is right
		<-begin
		// It has a session of before, which nobody answers any more; after three minutes that is over.
		db.LookupPeer(device.NoisePublicKey(keyA)).ExpireCurrentKeypairs()
		begun <- db.IpcSet(fmt.Sprintf("public_key=%x\nupdate_only=true\npersistent_keepalive_interval=25\n", keyA[:]))
	}()
	synctest.Test(t, func(t *testing.T) { // its clock says 2000
		again := tuntest.NewChannelTUN()
		// This clock stands still, and so would the pauses of our own bind's.
		da := device.NewDevice(again.TUN(), conn.NewDefaultBind(), quiet)
		defer da.Close()
		if err := da.IpcSet(settings(config, portA)); err != nil {
			t.Fatal(err)
		}
		if err := da.Up(); err != nil {
			t.Fatal(err)
		}
		again.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"))
		for refused.Load() == 0 && !late.Load() {
			runtime.Gosched()
		}
		if refused.Load() == 0 {
			close(begin)
			t.Fatal("a handshake of the year 2000 was not refused")
		}
		close(begin)
		if err := <-begun; err != nil {
			t.Fatal(err)
		}
		for !met(t, da) && !late.Load() {
			runtime.Gosched()
		}
		if !met(t, da) {
			t.Error("no session although the peer began")
		}
	})
}

// settings are what a device showed, as it takes them.
func settings(shown string, port int) string {
	out := fmt.Sprintf("listen_port=%d\n", port)
	for line := range strings.Lines(shown) {
		key, _, _ := strings.Cut(line, "=")
		switch key {
		case "private_key", "public_key", "endpoint", "allowed_ip":
			out += line
		}
	}
	return out
}

// met tells whether a device has had a handshake.
func met(t *testing.T, d *device.Device) bool {
	t.Helper()
	text, err := d.IpcGet()
	if err != nil {
		t.Fatal(err)
	}
	_, peers, err := decode([]byte(text), true)
	if err != nil {
		t.Fatal(err)
	}
	return len(peers) == 1 && !peers[0].LastHandshake.IsZero()
}
