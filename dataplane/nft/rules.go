package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

const reg = 1 // the register our rules work in

// ruleExprs are the kernel's form of the rules, in the order of rulesText.
func ruleExprs(n dataplane.Numbers) [][]expr.Any {
	mark := func(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }
	fromWG := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mark(n.MarkMask), Xor: mark(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: mark(n.MarkWG)},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}
	toTunnel := func(proto byte, offset, length uint32, set string) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: reg, SetName: set},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mark(^n.MarkMask), Xor: mark(n.MarkRoute)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg},
			&expr.Verdict{Kind: expr.VerdictAccept},
		}
	}
	return [][]expr.Any{
		fromWG,
		toTunnel(unix.NFPROTO_IPV4, 16, 4, dataplane.SetTargetsIPv4),
		toTunnel(unix.NFPROTO_IPV6, 24, 16, dataplane.SetTargetsIPv6),
	}
}

// clampExprs make both ends of a TCP connection through the tunnel send segments that fit the route's MTU: what
// forwards, or has asked another route first, does not know it. The kernel never raises the option (nft_exthdr).
func clampExprs(n dataplane.Numbers) []expr.Any {
	const flags, synRst, syn, maxseg, size = 13, 0x06, 0x02, 2, 2
	mark := func(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mark(n.MarkMask), Xor: mark(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: mark(n.MarkRoute)},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
		load(transport, flags, 1, reg),
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{synRst}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{syn}},
		&expr.Rt{Register: reg, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: reg, DestRegister: reg, Op: expr.ByteorderHton, Len: size, Size: size},
		&expr.Exthdr{SourceRegister: reg, Type: maxseg, Offset: 2, Len: size, Op: expr.ExthdrOpTcpopt},
	}
}

// Registers for a key of several parts: the first three 32-bit ones, as the kernel names them.
const (
	part1 = reg
	part2 = unix.NFT_REG32_01
	part3 = unix.NFT_REG32_02
	reg2  = unix.NFT_REG_2
)

// Offsets in the IPv4 and UDP headers.
const (
	ipSource, ipDestination           = 12, 16
	udpSource, udpDestination, udpSum = 0, 2, 6
	header, transport                 = expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
)

func load(base expr.PayloadBase, offset, length, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

// setPort writes a port of the UDP header, and the checksum with it.
func setPort(offset, from uint32) expr.Any {
	return &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: from, Base: transport, Offset: offset, Len: 2,
		CsumType: expr.CsumTypeInet, CsumOffset: udpSum}
}

func isUDP4() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_UDP}},
	}
}

// rewriteInExprs hand what comes from a peer to its port over to WireGuard's.
func rewriteInExprs(port int) []expr.Any {
	return append(isUDP4(),
		load(header, ipSource, 4, part1), load(transport, udpSource, 2, part2), load(transport, udpDestination, 2, part3),
		&expr.Lookup{SourceRegister: reg, SetName: dataplane.SetRewriteIn},
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
		setPort(udpDestination, reg))
}

// rewriteOutExprs let what WireGuard's port sends to a peer leave by the peer's port.
func rewriteOutExprs(port int) []expr.Any {
	return append(isUDP4(),
		load(transport, udpSource, 2, reg),
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
		load(header, ipDestination, 4, part1), load(transport, udpDestination, 2, part2),
		&expr.Lookup{SourceRegister: reg, DestRegister: reg2, IsDestRegSet: true, SetName: dataplane.MapRewriteOut},
		setPort(udpSource, reg2))
}

// rewriteText names a rewriting rule, whatever port it is for; "" if it is none.
func rewriteText(exprs []expr.Any, have string) string {
	for _, e := range exprs {
		var data []byte
		switch e := e.(type) {
		case *expr.Immediate:
			data = e.Data
		case *expr.Cmp:
			data = e.Data
		}
		if len(data) != 2 {
			continue
		}
		port := int(binary.BigEndian.Uint16(data))
		switch have {
		case dump(rewriteInExprs(port)):
			return rewriteInText(port)
		case dump(rewriteOutExprs(port)):
			return rewriteOutText(port)
		}
	}
	return ""
}

// rewriteElements are the elements of one of the two sets of rewrites.
func rewriteElements(kind string, rs []dataplane.PortRewrite) []nftables.SetElement {
	// parts of a key fill words
	port := func(b []byte, p uint16) []byte { return append(binary.BigEndian.AppendUint16(b, p), 0, 0) }
	var out []nftables.SetElement
	for _, r := range rs {
		e := nftables.SetElement{Key: port(r.Remote.Addr().AsSlice(), r.Remote.Port())}
		if kind == kindPorts {
			e.Key = port(e.Key, r.Local)
		} else {
			e.Val = binary.BigEndian.AppendUint16(nil, r.Local)
		}
		out = append(out, e)
	}
	return out
}

// fromRewriteElements reads them back, sorted; what is not of this shape is left out.
func fromRewriteElements(es []nftables.SetElement) []dataplane.PortRewrite {
	var out []dataplane.PortRewrite
	for _, e := range es {
		local := e.Val
		if len(e.Key) == 12 {
			local = e.Key[8:]
		}
		if len(e.Key) < 8 || len(local) < 2 {
			continue
		}
		out = append(out, dataplane.PortRewrite{
			Local:  binary.BigEndian.Uint16(local),
			Remote: netip.AddrPortFrom(netip.AddrFrom4([4]byte(e.Key[:4])), binary.BigEndian.Uint16(e.Key[4:])),
		})
	}
	slices.SortFunc(out, dataplane.PortRewrite.Compare)
	return out
}

// ruleText names what a rule read from the kernel means: one of ours, or a dump of its expressions.
func ruleText(n dataplane.Numbers, exprs []expr.Any) string {
	have := dump(exprs)
	if text := rewriteText(exprs, have); text != "" {
		return text
	}
	if text := sourceText(n, exprs, have); text != "" {
		return text
	}
	if text := translateText(exprs, have); text != "" {
		return text
	}
	if have == dump(clampExprs(n)) {
		return clampText(n)
	}
	for i, ours := range ruleExprs(n) {
		if dump(ours) == have {
			return rulesText(n)[i]
		}
	}
	return have
}

// dump writes expressions without what differs between saying and reading back: set IDs, empty fields.
func dump(exprs []expr.Any) string {
	var parts []string
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Meta:
			parts = append(parts, fmt.Sprintf("meta(%d,%v,%d)", e.Key, e.SourceRegister, e.Register))
		case *expr.Bitwise:
			parts = append(parts, fmt.Sprintf("bitwise(%d,%d,%x,%x)", e.SourceRegister, e.DestRegister, e.Mask, e.Xor))
		case *expr.Cmp:
			parts = append(parts, fmt.Sprintf("cmp(%d,%d,%x)", e.Op, e.Register, e.Data))
		case *expr.Payload:
			parts = append(parts, fmt.Sprintf("payload(%d,%d,%d,%d,%d)", e.OperationType, e.DestRegister+e.SourceRegister,
				e.Base, e.Offset, e.Len))
			if e.OperationType == expr.PayloadWrite {
				parts = append(parts, fmt.Sprintf("checksum(%d,%d,%d)", e.CsumType, e.CsumOffset, e.CsumFlags))
			}
		case *expr.Immediate:
			parts = append(parts, fmt.Sprintf("immediate(%d,%x)", e.Register, e.Data))
		case *expr.Lookup:
			parts = append(parts, fmt.Sprintf("lookup(%d,%s,%v)", e.SourceRegister, e.SetName, e.Invert))
			if e.IsDestRegSet {
				parts = append(parts, fmt.Sprintf("into(%d)", e.DestRegister))
			}
		case *expr.Fib:
			parts = append(parts, fmt.Sprintf("fib(%d,%v)", e.Register,
				[]bool{e.ResultOIF, e.FlagSADDR, e.FlagIIF, e.FlagPRESENT, e.FlagDADDR, e.FlagMARK, e.FlagOIF}))
		case *expr.Rt, *expr.Byteorder: // the library does not read them back
		case *expr.Exthdr:
			parts = append(parts, fmt.Sprintf("exthdr(%d,%d,%d,%d,%d)", e.SourceRegister, e.Type, e.Offset, e.Len, e.Op))
		case *expr.Verdict:
			parts = append(parts, fmt.Sprintf("verdict(%d,%s)", e.Kind, e.Chain))
		default:
			parts = append(parts, fmt.Sprintf("%T", e))
		}
	}
	return strings.Join(parts, " ")
}

// chainKind puts a chain's nature in nft's words.
func chainKind(c *nftables.Chain) string {
	hook, prio, policy := "none", int32(0), "accept"
	if c.Hooknum != nil {
		switch *c.Hooknum {
		case *nftables.ChainHookPrerouting:
			hook = "prerouting"
		case *nftables.ChainHookOutput:
			hook = "output"
		case *nftables.ChainHookPostrouting:
			hook = "postrouting"
		default:
			hook = fmt.Sprint(*c.Hooknum)
		}
	}
	if c.Priority != nil {
		prio = int32(*c.Priority)
	}
	if c.Policy != nil && *c.Policy != nftables.ChainPolicyAccept {
		policy = "drop"
	}
	return fmt.Sprintf("type %s hook %s priority %d policy %s", c.Type, hook, prio, policy)
}

func setKind(s *nftables.Set) string {
	k := s.KeyType.Name
	if s.IsMap && s.DataType.Name != nftables.TypeInetService.Name {
		k += " to " + s.DataType.Name
	}
	if s.Interval {
		k += " interval"
	}
	for _, f := range []struct {
		on   bool
		name string
	}{{s.IsMap, "map"}, {s.HasTimeout, "timeout"}, {s.Constant, "constant"}, {s.Dynamic, "dynamic"}} {
		if f.on {
			k += " " + f.name
		}
	}
	return k
}

func addr(key []byte) (netip.Addr, bool) { return netip.AddrFromSlice(key) }

// fromElements pairs the starts and ends of an interval set. A start without an end of its own lasts
// until the next start, the last one to the end of the address space.
func fromElements(es []nftables.SetElement) []Range {
	es = slices.Clone(es)
	slices.SortFunc(es, func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 {
			return c
		}
		return endFirst(a) - endFirst(b)
	})
	var out []Range
	open := false
	for _, e := range es {
		a, ok := addr(e.Key)
		if !ok {
			continue
		}
		if open {
			out[len(out)-1].To = a.Prev()
		}
		open = !e.IntervalEnd
		if open {
			out = append(out, Range{From: a})
		}
	}
	if open {
		n := &out[len(out)-1]
		n.To = last(netip.PrefixFrom(n.From, 0))
	}
	return out
}

func endFirst(e nftables.SetElement) int {
	if e.IntervalEnd {
		return 0
	}
	return 1
}

func toElements(rs []Range) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, 2*len(rs))
	for _, r := range rs {
		out = append(out, nftables.SetElement{Key: r.From.AsSlice()})
		if end := r.To.Next(); end.IsValid() { // else it lasts to the end of the address space
			out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

// setIDs are given here, or the library counts in a global.
var setIDs = func() map[string]uint32 {
	ids := map[string]uint32{}
	for i, name := range []string{dataplane.SetTargetsIPv4, dataplane.SetTargetsIPv6, dataplane.SetRewriteIn,
		dataplane.MapRewriteOut,
		dataplane.SetOverlayIPv4, dataplane.SetOverlayIPv6, dataplane.SetPoolsIPv4, dataplane.SetPoolsIPv6,
		dataplane.SetGateways, dataplane.SetTunnels, dataplane.SetInsideIPv4, dataplane.SetInsideIPv6} {
		ids[name] = uint32(i + 1)
	}
	return ids
}()

func setOf(kind string) *nftables.Set {
	s := &nftables.Set{}
	switch kind {
	case kindPorts:
		s.Concatenation, s.KeyType = true, nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService,
			nftables.TypeInetService)
	case kindPeers:
		s.Concatenation, s.KeyType = true, nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
		s.IsMap, s.DataType = true, nftables.TypeInetService
	case kindLinks:
		s.KeyType = nftables.TypeIFName
	case kindIPv6:
		s.Interval, s.KeyType = true, nftables.TypeIP6Addr
	default:
		s.Interval, s.KeyType = true, nftables.TypeIPAddr
	}
	return s
}

// portID reads the address the kernel gave a netlink socket.
func portID(sa unix.Sockaddr) uint32 {
	if n, ok := sa.(*unix.SockaddrNetlink); ok {
		return n.Pid
	}
	return 0
}

// ForeignTable reads an nftables notification: the table it is about, and whether it could be read.
// In every message about tables, chains, sets, elements and rules the table's name is attribute 1.
func ForeignTable(payload []byte) (family byte, table string, ok bool) {
	const header, attr, nameType, typeMask = 4, 4, 1, 0x3fff
	if len(payload) < header {
		return 0, "", false
	}
	family = payload[0]
	for b := payload[header:]; len(b) >= attr; {
		n := int(binary.NativeEndian.Uint16(b))
		t := binary.NativeEndian.Uint16(b[2:]) & typeMask
		if n < attr || n > len(b) {
			return 0, "", false
		}
		if t == nameType {
			return family, strings.TrimRight(string(b[attr:n]), "\x00"), true
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return 0, "", false
}
