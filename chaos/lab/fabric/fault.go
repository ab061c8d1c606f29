package fabric

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
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
	From  int   // the sender's number
	Proto uint8 // 0: every protocol
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
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg1, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 2}
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
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 2, Mask: binary.BigEndian.AppendUint16(nil, mask), Xor: []byte{0, 0}},
		equal(binary.BigEndian.AppendUint16(nil, value)),
	}
}

// SetDrops replaces all faults of one host, in one transaction. Neighbour discovery always passes:
// a fault is between hosts, not on their wire.
func SetDrops(lab, host string, drops []Drop) error {
	drops = slices.Clone(drops)
	slices.SortFunc(drops, func(a, b Drop) int { return a.From*256 + int(a.Proto) - b.From*256 - int(b.Proto) })
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
			var only rule
			if d.Proto != 0 {
				only = proto(d.Proto)
			}
			n := uint16(d.From)
			rs.add(faults, from(HostLink), family(unix.NFPROTO_IPV4), isDSCP(0x00fc, n<<2), only, drop())
			rs.add(faults, from(HostLink), family(unix.NFPROTO_IPV6), isDSCP(0x0fc0, n<<6), only, drop())
		}
	})
	if err != nil {
		return fmt.Errorf("faults of node %s: %w", host, err)
	}
	return nil
}
