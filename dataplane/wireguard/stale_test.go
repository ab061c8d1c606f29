package wireguard

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
)

// A device that removes a peer forgets the session. The peer goes on sending with that session for 15 seconds, also
// after the device was given the peer once more. A keepalive from the device begins a new session at once; the agent
// has it sent (agent/handshakes.go).
func TestPeerThatWasDroppedAndIsBack(t *testing.T) {
	quiet := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	a, b := tuntest.NewChannelTUN(), tuntest.NewChannelTUN()
	da, db := device.NewDevice(a.TUN(), newMeshBind(), quiet), device.NewDevice(b.TUN(), newMeshBind(), quiet)
	defer da.Close()
	defer db.Close()
	wire(t, db, da)
	send := func() { a.Outbound <- tuntest.Ping(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")) }
	arrives := func(within time.Duration) bool {
		select {
		case <-b.Inbound:
			return true
		case <-time.After(within):
			return false
		}
	}
	send()
	if !arrives(5 * time.Second) {
		t.Fatal("no session at first")
	}
	shown, err := db.IpcGet()
	if err != nil {
		t.Fatal(err)
	}
	_, peers, err := decode([]byte(shown), true)
	if err != nil || len(peers) != 1 {
		t.Fatal(err, peers)
	}
	key := peers[0].PublicKey
	again := func(more string) {
		t.Helper()
		for _, config := range []string{
			fmt.Sprintf("public_key=%x\nremove=true\n", key[:]),
			fmt.Sprintf("public_key=%x\nendpoint=%s\nallowed_ip=10.0.0.2/32\n%s", key[:], peers[0].Endpoint, more),
		} {
			if err := db.IpcSet(config); err != nil {
				t.Fatal(err)
			}
		}
	}
	again("")
	send()
	if arrives(300 * time.Millisecond) {
		t.Fatal("the session outlived the peer: nothing is shown")
	}
	again("persistent_keepalive_interval=25\n")
	for deadline := time.Now().Add(5 * time.Second); ; {
		send()
		if arrives(100 * time.Millisecond) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it still sends with the session of before")
		}
	}
}
