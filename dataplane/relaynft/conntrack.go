package relaynft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// conntrack looks up and deletes single flows of the kernel's connection table. The libraries at hand dump all of it
// for that.
type conntrack struct{ conn *netlink.Conn }

// Numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctSubsystem = 1
	ctGet       = 1
	ctDelete    = 2

	ctaTupleOrig = 1
	ctaStatus    = 3

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaProtoNum   = 1
	ctaSrcPort    = 2
	ctaDstPort    = 3

	ipsNAT = 1<<4 | 1<<5 // IPS_SRC_NAT, IPS_DST_NAT
)

func openConntrack(ns int) (*conntrack, error) {
	c, err := dial(ns)
	if err != nil {
		return nil, fmt.Errorf("opening the connection table's netlink socket: %w", err)
	}
	return &conntrack{c}, nil
}

func (c *conntrack) close() error { return c.conn.Close() }

// request asks about the entry that has the flow as either of its directions.
func (c *conntrack) request(typ uint8, f flow) ([]netlink.Message, error) {
	family, src, dst := byte(unix.AF_INET), uint16(1), uint16(2)
	if f.from.Addr().Is6() {
		family, src, dst = unix.AF_INET6, 3, 4
	}
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	e.Nested(ctaTupleOrig, func(e *netlink.AttributeEncoder) error {
		e.Nested(ctaTupleIP, func(e *netlink.AttributeEncoder) error {
			e.Bytes(src, f.from.Addr().AsSlice())
			e.Bytes(dst, f.to.Addr().AsSlice())
			return nil
		})
		e.Nested(ctaTupleProto, func(e *netlink.AttributeEncoder) error {
			e.Uint8(ctaProtoNum, unix.IPPROTO_UDP)
			e.Uint16(ctaSrcPort, f.from.Port())
			e.Uint16(ctaDstPort, f.to.Port())
			return nil
		})
		return nil
	})
	attributes, err := e.Encode()
	if err != nil {
		return nil, err
	}
	flags := netlink.Request | netlink.Acknowledge
	nlcount.Sent(1)
	return c.conn.Execute(netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(ctSubsystem<<8 | uint16(typ)), Flags: flags},
		Data:   append([]byte{family, unix.NFNETLINK_V0, 0, 0}, attributes...),
	})
}

// forget deletes flows. What is not there is no error.
func (c *conntrack) forget(flows []flow) error {
	var errs []error
	for _, f := range flows {
		if _, err := c.request(ctDelete, f); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("deleting the flow from %s to %s from the connection table: %w", f.from, f.to, err))
		}
	}
	return errors.Join(errs...)
}

// translated tells whether the table has the flow as one that is translated.
func (c *conntrack) translated(f flow) (bool, error) {
	answers, err := c.request(ctGet, f)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for the flow from %s to %s in the connection table: %w", f.from, f.to, err)
	}
	for _, m := range answers {
		if len(m.Data) < 4 {
			continue
		}
		d, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			continue
		}
		d.ByteOrder = binary.BigEndian
		for d.Next() {
			if d.Type() == ctaStatus && d.Uint32()&ipsNAT != 0 {
				return true, nil
			}
		}
	}
	return false, nil
}
