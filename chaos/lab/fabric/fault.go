package fabric

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The lab's own table in each host, and its chains.
const (
	hostTable   = "skeinlab"
	stampChain  = "stamp"
	faultsChain = "faults"
)

// Drop tells a host to drop what comes from another.
type Drop struct {
	From    int   // the sender's number
	Proto   uint8 // 0: every protocol
	Percent int   // so many of a hundred packets, at random; 0: all
	Above   int   // only packets longer than this, in bytes with the IP header; 0: of any length
}

func (d Drop) matches() rule {
	var r rule
	if d.Proto != 0 {
		r = proto(d.Proto)
	}
	if d.Above != 0 {
		r = append(r, &expr.Meta{Key: expr.MetaKeyLEN, Register: reg1}, toNetwork(), compare(expr.CmpOpGt, d.Above))
	}
	if d.Percent != 0 {
		r = append(r, &expr.Numgen{Register: reg1, Modulus: 100, Type: unix.NFT_NG_RANDOM}, toNetwork(),
			compare(expr.CmpOpLt, d.Percent))
	}
	return r
}

// toNetwork turns a number in reg1 round, because comparing goes byte by byte.
func toNetwork() expr.Any {
	return &expr.Byteorder{SourceRegister: reg1, DestRegister: reg1, Op: expr.ByteorderHton, Len: 4, Size: 4}
}

func compare(op expr.CmpOp, with int) expr.Any {
	return &expr.Cmp{Op: op, Register: reg1, Data: binary.BigEndian.AppendUint32(nil, uint32(with))}
}

func hostChains(rs *ruleset) (stamp, faults *nftables.Chain) {
	// After everything else that may rewrite a packet, and before everything that may accept one.
	stamp = rs.chain(stampChain, nftables.ChainTypeFilter, nftables.ChainHookPostrouting, 300)
	faults = rs.chain(faultsChain, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw)
	return stamp, faults
}

// installStamp makes a host write its number into the DSCP field of all that leaves it.
func installStamp(ns string, number int) error {
	return inRuleset(ns, nftables.TableFamilyINet, hostTable, func(rs *ruleset) {
		stamp, _ := hostChains(rs)
		rs.add(stamp, out(HostLink), family(unix.NFPROTO_IPV4), setDSCP(0x00fc, uint16(number)<<2, 10))
		rs.add(stamp, out(HostLink), family(unix.NFPROTO_IPV6), setDSCP(0x0fc0, uint16(number)<<6, 0))
	})
}

// setDSCP rewrites the field under mask in the first two bytes of the network header. checksum is
// the offset of the header checksum, 0 for none.
func setDSCP(mask, value uint16, checksum uint32) rule {
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg1, Base: expr.PayloadBaseNetworkHeader,
		Offset: 0, Len: 2}
	if checksum != 0 {
		write.CsumType, write.CsumOffset = expr.CsumTypeInet, checksum
	}
	return rule{
		header(0, 2, reg1),
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 2,
			Mask: binary.BigEndian.AppendUint16(nil, ^mask), Xor: binary.BigEndian.AppendUint16(nil, value)},
		write,
	}
}

func isDSCP(mask, value uint16) rule {
	return rule{
		header(0, 2, reg1),
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 2, Mask: binary.BigEndian.AppendUint16(nil, mask),
			Xor: []byte{0, 0}},
		equal(binary.BigEndian.AppendUint16(nil, value)),
	}
}

// SetDrops replaces all faults of one host, in one transaction. Neighbour discovery always passes:
// a fault is between hosts, not on their wire.
func SetDrops(lab, host string, drops []Drop) error {
	drops = slices.Clone(drops)
	slices.SortFunc(drops, func(a, b Drop) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Above, b.Above),
			cmp.Compare(a.Percent, b.Percent))
	})
	drops = slices.Compact(drops)
	err := inRuleset(HostNS(lab, host), nftables.TableFamilyINet, hostTable, func(rs *ruleset) {
		_, faults := hostChains(rs)
		rs.conn.FlushChain(faults)
		if len(drops) == 0 {
			return
		}
		rs.add(faults, proto(unix.IPPROTO_ICMPV6), rule{
			transport(0, 1, reg1),
			&expr.Cmp{Op: expr.CmpOpGte, Register: reg1, Data: []byte{133}},
			&expr.Cmp{Op: expr.CmpOpLte, Register: reg1, Data: []byte{137}},
		}, accept())
		for _, d := range drops {
			only, n := d.matches(), uint16(d.From)
			rs.add(faults, from(HostLink), family(unix.NFPROTO_IPV4), isDSCP(0x00fc, n<<2), only, drop())
			rs.add(faults, from(HostLink), family(unix.NFPROTO_IPV6), isDSCP(0x0fc0, n<<6), only, drop())
		}
	})
	if err != nil {
		return fmt.Errorf("faults of node %s: %w", host, err)
	}
	return nil
}

// Segment makes a host's link carry packets as they would be on a wire, one by one (true), or as many
// together as the kernel likes. Faults that look at the length of packets need it at the sender.
func Segment(lab, host string, single bool) error {
	most := 65535
	if single {
		most = 1
	}
	return on(HostNS(lab, host), func(h *netlink.Handle) error {
		l, err := h.LinkByName(HostLink)
		if err == nil {
			err = h.LinkSetGSOMaxSegs(l, most)
		}
		if err != nil {
			return fmt.Errorf("segments of %s: %w", HostLink, err)
		}
		return nil
	})
}
