package fou

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

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

func ourListener(family int, port uint16) listener { return listener{family, port, protocols[family]} }

// ourListeners are those that a Spec asks for.
func ourListeners(s Spec) (out []listener) {
	for i, on := range []bool{s.IPv4, s.IPv6} {
		for _, port := range s.Ports.Taken() {
			if on {
				out = append(out, ourListener(i, port))
			}
		}
	}
	return out
}

// leftListeners are those of a namespace that are ours and not wanted any more. Ours are those that this process has
// opened, and those that a former one may have left: at the default port, or at the port before the last change. What
// comes to one that stays is taken out of its tunnel, and no rule of ours asks who sent it.
func leftListeners(have, want, last []listener, p dataplane.FoUPorts) (out []listener) {
	for _, l := range have {
		former := l == ourListener(l.family, l.port) && (l.port == dataplane.FoUPort || p.Gone != 0 && l.port == p.Gone)
		if !slices.Contains(want, l) && (former || slices.Contains(last, l)) {
			out = append(out, l)
		}
	}
	return out
}

func (c *fouConn) list() (out []listener, err error) {
	nlcount.Sent(1)
	m, err := c.Execute(genetlink.Message{Header: genetlink.Header{Command: netlink.FOU_CMD_GET,
		Version: c.family.Version}}, c.family.ID, mdlayher.Request|mdlayher.Dump)
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
	_, err = c.Execute(genetlink.Message{Header: genetlink.Header{Command: command, Version: c.family.Version},
		Data: data}, c.family.ID, mdlayher.Request|mdlayher.Acknowledge)
	return err
}

func (c *fouConn) add(l listener) error {
	err := c.do(netlink.FOU_CMD_ADD, l)
	switch {
	case errors.Is(err, unix.EADDRINUSE), errors.Is(err, unix.EALREADY):
		return fmt.Errorf("listening for FoU on UDP port %d (IPv%d): %w: another program has the port in this network "+
			"namespace; stop it", l.port, 4+2*l.family, err)
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

// removeListeners ends our listeners of a namespace at these ports, which a former run with the kernel driver left.
func removeListeners(ns netns.NsHandle, ports []uint16) error {
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
		if slices.Contains(ports, l.port) && l == ourListener(l.family, l.port) {
			err = errors.Join(err, c.remove(l))
		}
	}
	return err
}
