package nattest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const contactKept = time.Minute

// Registers: a concatenation of two values lies in the first two 32-bit ones.
const (
	reg  = 1
	reg2 = 9
	reg3 = 10
)

// Offsets in the IPv4 and UDP headers.
const (
	ipSource, ipDestination   = 12, 16
	udpSource, udpDestination = 0, 2
)

func translate(t testing.TB, ns netns.NsHandle, kind Kind, inside, outside netip.Addr) {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	must(t, err)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"})
	chain := func(name string, kind nftables.ChainType, hook *nftables.ChainHook,
		priority *nftables.ChainPriority) func(...[]expr.Any) {
		ch := c.AddChain(&nftables.Chain{Name: name, Table: table, Type: kind, Hooknum: hook, Priority: priority})
		return func(parts ...[]expr.Any) {
			var all []expr.Any
			for _, p := range parts {
				all = append(all, p...)
			}
			c.AddRule(&nftables.Rule{Table: table, Chain: ch, Exprs: all})
		}
	}
	pre := chain("pre", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest)
	post := chain("post", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	forward := chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter)
	input := chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter)

	// What nobody asked for is dropped before conntrack confirms it: an entry of the router's own would make masquerade
	// choose another port when the inner host sends there later.
	input(iif("wan"), udp(), drop())
	switch kind {
	case OneToOne, FullCone:
		pre(iif("wan"), udp(), dnat(inside))
	case Hairpin:
		pre(udp(), load(ipHeader, ipDestination, 4, reg), equal(outside.AsSlice()), dnat(inside))
		post(oif("lan"), load(ipHeader, ipSource, 4, reg), equal(inside.AsSlice()), []expr.Any{&expr.Masq{}})
	case RestrictedCone:
		set := &nftables.Set{
			Table: table, Name: "contacted", Dynamic: true, HasTimeout: true, Timeout: contactKept, Concatenation: true,
			KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService),
		}
		must(t, c.AddSet(set, nil))
		// Masquerade keeps the port, so the inner source port is the outer one.
		forward(oif("wan"), udp(), load(ipHeader, ipDestination, 4, reg), load(udpHeader, udpSource, 2, reg2),
			[]expr.Any{&expr.Dynset{SrcRegKey: reg, SetName: set.Name, SetID: set.ID, Operation: unix.NFT_DYNSET_OP_UPDATE,
				Timeout: contactKept}})
		pre(iif("wan"), udp(), load(ipHeader, ipSource, 4, reg), load(udpHeader, udpDestination, 2, reg2),
			[]expr.Any{&expr.Lookup{SourceRegister: reg, SetName: set.Name, SetID: set.ID}}, dnat(inside))
	case Forwarded:
		pre(iif("wan"), udp(), load(udpHeader, udpDestination, 2, reg),
			equal(binaryutil.BigEndian.PutUint16(WireGuardPort)), dnat(inside))
	case Blocked:
		forward(udp(), drop())
	}
	switch kind {
	case OneToOne:
		post(oif("wan"), snat(outside))
	case Sequential:
		post(oif("wan"), udp(), sequential(outside))
		post(oif("wan"), []expr.Any{&expr.Masq{}})
	case Narrow:
		post(oif("wan"), udp(), narrow(outside))
		post(oif("wan"), []expr.Any{&expr.Masq{}})
	default:
		post(oif("wan"), []expr.Any{&expr.Masq{FullyRandom: kind == Symmetric}})
	}
	must(t, c.Flush())
}

// firewall lets a host receive answers only.
func firewall(t testing.TB, ns netns.NsHandle) {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	must(t, err)
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "firewall"})
	chain := c.AddChain(&nftables.Chain{Name: "input", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: make([]byte, 4)},
	}, &expr.Verdict{Kind: expr.VerdictAccept})})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(udp(), drop()...)})
	must(t, c.Flush())
}

const (
	ipHeader  = expr.PayloadBaseNetworkHeader
	udpHeader = expr.PayloadBaseTransportHeader
)

func load(base expr.PayloadBase, offset, length, register uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}}
}

func equal(b []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: b}}
}

func link(key expr.MetaKey, name string) []expr.Any {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return append([]expr.Any{&expr.Meta{Key: key, Register: reg}}, equal(b)...)
}

func iif(name string) []expr.Any { return link(expr.MetaKeyIIFNAME, name) }
func oif(name string) []expr.Any { return link(expr.MetaKeyOIFNAME, name) }

func udp() []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}}, equal([]byte{unix.IPPROTO_UDP})...)
}

func drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

func dnat(to netip.Addr) []expr.Any { return nat(expr.NATTypeDestNAT, to) }
func snat(to netip.Addr) []expr.Any { return nat(expr.NATTypeSourceNAT, to) }

// sequential takes the next port for every new flow.
func narrow(outside netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: reg, Data: outside.AsSlice()},
		&expr.Immediate{Register: reg2, Data: binaryutil.BigEndian.PutUint16(NarrowFirst)},
		&expr.Immediate{Register: reg3, Data: binaryutil.BigEndian.PutUint16(NarrowFirst + NarrowPorts - 1)},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg, RegProtoMin: reg2,
			RegProtoMax: reg3, FullyRandom: true},
	}
}

func sequential(outside netip.Addr) []expr.Any {
	const first, many = 20000, 10000
	return []expr.Any{
		&expr.Immediate{Register: reg, Data: outside.AsSlice()},
		&expr.Numgen{Register: reg2, Modulus: many, Type: unix.NFT_NG_INCREMENTAL, Offset: first},
		&expr.Byteorder{SourceRegister: reg2, DestRegister: reg2, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg, RegProtoMin: reg2},
	}
}

func nat(kind expr.NATType, to netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: reg, Data: to.AsSlice()},
		&expr.NAT{Type: kind, Family: unix.NFPROTO_IPV4, RegAddrMin: reg},
	}
}
