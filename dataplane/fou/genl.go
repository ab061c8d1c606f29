package fou

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/genetlink"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// fouConn speaks with the kernel's FoU listeners (linux/fou.h) of one network namespace.
type fouConn struct {
	*genetlink.Conn
	family genetlink.Family
}

// dialFoU opens a connection in a network namespace; 0 is the calling thread's.
func dialFoU(ns netns.NsHandle) (*fouConn, error) {
	c, err := genetlink.Dial(&mdlayher.Config{NetNS: int(ns)})
	if err != nil {
		return nil, fmt.Errorf("opening generic netlink: %w", err)
	}
	f, err := c.GetFamily(netlink.FOU_GENL_NAME)
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("asking for FoU: %w", err)
	}
	return &fouConn{c, f}, nil
}

// listener is a UDP port whose packets the kernel opens.
type listener struct {
	family int // 0: IPv4, 1: IPv6
	port   uint16
	proto  uint8
}

var addressFamilies = [2]uint8{unix.AF_INET, unix.AF_INET6}

func ourListener(family int) listener {
	return listener{family, dataplane.FoUPort, protocols[family]}
}

func (c *fouConn) list() (out []listener, err error) {
	nlcount.Sent(1)
	m, err := c.Execute(genetlink.Message{Header: genetlink.Header{Command: netlink.FOU_CMD_GET, Version: c.family.Version}}, c.family.ID,
		mdlayher.Request|mdlayher.Dump)
	if err != nil {
		return nil, fmt.Errorf("reading FoU listeners: %w", err)
	}
	for _, one := range m {
		l, err := decodeListener(one.Data)
		if err != nil {
			return nil, fmt.Errorf("reading FoU listeners: %w", err)
		}
		out = append(out, l)
	}
	return out, nil
}

func decodeListener(b []byte) (l listener, err error) {
	d, err := mdlayher.NewAttributeDecoder(b)
	if err != nil {
		return l, err
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		switch d.Type() {
		case netlink.FOU_ATTR_PORT:
			l.port = d.Uint16()
		case netlink.FOU_ATTR_AF:
			if d.Uint8() == unix.AF_INET6 {
				l.family = 1
			}
		case netlink.FOU_ATTR_IPPROTO:
			l.proto = d.Uint8()
		}
	}
	return l, d.Err()
}

func (c *fouConn) do(command uint8, l listener) error {
	e := mdlayher.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	e.Uint16(netlink.FOU_ATTR_PORT, l.port)
	e.Uint8(netlink.FOU_ATTR_AF, addressFamilies[l.family])
	if command == netlink.FOU_CMD_ADD {
		e.Uint8(netlink.FOU_ATTR_IPPROTO, l.proto)
		e.Uint8(netlink.FOU_ATTR_TYPE, netlink.FOU_ENCAP_DIRECT)
	}
	data, err := e.Encode()
	if err != nil {
		return err
	}
	nlcount.Sent(1)
	_, err = c.Execute(genetlink.Message{Header: genetlink.Header{Command: command, Version: c.family.Version}, Data: data}, c.family.ID,
		mdlayher.Request|mdlayher.Acknowledge)
	return err
}

func (c *fouConn) add(l listener) error {
	err := c.do(netlink.FOU_CMD_ADD, l)
	switch {
	case errors.Is(err, unix.EADDRINUSE), errors.Is(err, unix.EALREADY):
		return fmt.Errorf("listening for FoU on UDP port %d (IPv%d): %w: another program has the port in this network namespace; stop it", l.port, 4+2*l.family, err)
	case err != nil:
		return fmt.Errorf("listening for FoU on UDP port %d (IPv%d): %w", l.port, 4+2*l.family, err)
	}
	return nil
}

func (c *fouConn) remove(l listener) error {
	if err := c.do(netlink.FOU_CMD_DEL, l); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("ending the FoU listener on UDP port %d (IPv%d): %w", l.port, 4+2*l.family, err)
	}
	return nil
}

// removeListeners ends our listeners of a namespace, which a former run with the kernel driver left.
func removeListeners(ns netns.NsHandle) error {
	c, err := dialFoU(ns)
	if err != nil {
		return nil // no FoU, no listeners
	}
	defer c.Close()
	have, err := c.list()
	if err != nil {
		return err
	}
	for _, l := range have {
		if l == ourListener(l.family) {
			err = errors.Join(err, c.remove(l))
		}
	}
	return err
}
