package wireguard

import (
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"
)

// NewBind gives a wireguard-go device beside the mesh's own the same sockets: many packets per system call, both
// families. Handshakes pass as they come.
func NewBind() conn.Bind { return &meshBind{} }

// OpenTUN opens a TUN link for such a device. It is gone when the device is closed, or this process ends.
func OpenTUN(name string, mtu int) (tun.Device, error) {
	t, _, err := openTUN(name, mtu)
	if err != nil {
		return nil, err
	}
	if err := setUp(name); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}
