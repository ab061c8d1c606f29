package agent

import (
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/internal/testns"
)

// TestWireGuardsPortIsReserved has the kernel give sockets that ask for any port one of four, of which WireGuard's is
// one: none of the agent's own sockets gets it before the device does.
func TestWireGuardsPortIsReserved(t *testing.T) {
	const port, link = 51820, "skein0"
	n := testns.New(t, "port")
	n.Sysctl("net.ipv4.ip_local_port_range", "51818 51821")
	a := &Agent{}
	n.Must("hold the port", func() (err error) {
		if a.reserved, err = reservePort(port, link); err != nil {
			return err
		}
		given := 0
		for { // until there is none left
			c, err := net.ListenUDP("udp4", nil)
			if err != nil {
				break
			}
			defer c.Close()
			if given++; c.LocalAddr().(*net.UDPAddr).Port == port {
				t.Errorf("a socket that asked for any port was given WireGuard's")
			}
		}
		if given != 3 {
			t.Errorf("%d ports were given, want 3", given)
		}
		if _, err := reservePort(port, link); err == nil || !strings.Contains(err.Error(), "taken by another program") {
			t.Errorf("a port that is taken: %v", err)
		}
		a.releasePort()
		a.releasePort()
		device, err := net.ListenUDP("udp", &net.UDPAddr{Port: port})
		if err != nil {
			return err
		}
		defer device.Close()
		former := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: link}, PeerName: "peer"}
		if err := netlink.LinkAdd(former); err != nil {
			return err
		}
		if c, err := reservePort(port, link); c != nil || err != nil {
			t.Errorf("where a former run's link has the port: %v, %v; want neither", c, err)
		}
		return nil
	})
}
