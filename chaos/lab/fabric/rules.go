package fabric

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Registers. reg1 and reg2 are 16 bytes wide; slot0 and slot1 are the first two 4-byte parts of reg1,
// where the fields of a concatenated key stand side by side.
const (
	reg1  = unix.NFT_REG_1
	reg2  = unix.NFT_REG_2
	slot0 = unix.NFT_REG32_00
	slot1 = unix.NFT_REG32_01
)

// Offsets in the network and transport headers.
const (
	offsetSrc4  = 12
	offsetDst4  = 16
	offsetDst6  = 24
	offsetSport = 0
	offsetDport = 2
)

// rule is a list of expressions, put together with match.
type rule []expr.Any

func match(parts ...rule) rule {
	var all rule
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func equal(data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg1, Data: data}
}

func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func from(link string) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg1}, equal(ifname(link))}
}

func out(link string) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg1}, equal(ifname(link))}
}

func proto(p byte) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, equal([]byte{p})}
}

func notProto(p byte) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg1,
		Data: []byte{p}}}
}

func family(p byte) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg1}, equal([]byte{p})}
}

func header(offset, size, into uint32) expr.Any {
	return &expr.Payload{DestRegister: into, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size}
}

func transport(offset, size, into uint32) expr.Any {
	return &expr.Payload{DestRegister: into, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: size}
}

func source(a netip.Addr) rule { return rule{header(offsetSrc4, 4, reg1), equal(a.AsSlice())} }
func dest(a netip.Addr) rule   { return rule{header(offsetDst4, 4, reg1), equal(a.AsSlice())} }

func isNew() rule {
	state := make([]byte, 4)
	binary.NativeEndian.PutUint32(state, expr.CtStateBitNEW)
	return rule{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg1},
		&expr.Bitwise{SourceRegister: reg1, DestRegister: reg1, Len: 4, Mask: state, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg1, Data: make([]byte, 4)},
	}
}

func verdict(k expr.VerdictKind) rule { return rule{&expr.Verdict{Kind: k}} }
func drop() rule                      { return verdict(expr.VerdictDrop) }
func accept() rule                    { return verdict(expr.VerdictAccept) }

// xor16 turns the 16-bit value of a register into value ^ key.
func xor16(register uint32, key uint16) expr.Any {
	return &expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 2,
		Mask: []byte{0xff, 0xff}, Xor: binary.BigEndian.AppendUint16(nil, key)}
}

func immediate(register uint32, a netip.Addr) expr.Any {
	return &expr.Immediate{Register: register, Data: a.AsSlice()}
}

// ruleset is one table being put together, and sent as one transaction.
type ruleset struct {
	conn  *nftables.Conn
	table *nftables.Table
	err   error
}

// inRuleset opens a table in the named namespace, lets fn fill it, and commits.
func inRuleset(ns string, fam nftables.TableFamily, table string, fn func(*ruleset)) error {
	h, err := open(ns)
	if err != nil {
		return err
	}
	defer h.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(h)))
	if err != nil {
		return fmt.Errorf("nftables in %s: %w", ns, err)
	}
	rs := &ruleset{conn: conn, table: conn.AddTable(&nftables.Table{Family: fam, Name: table})}
	fn(rs)
	if rs.err == nil {
		rs.err = conn.Flush()
	}
	if rs.err != nil {
		return fmt.Errorf("nftables table %s in %s: %w", table, ns, rs.err)
	}
	return nil
}

// replaceRuleset is inRuleset for a table that starts empty: what was in it goes in the same transaction.
func replaceRuleset(ns string, fam nftables.TableFamily, table string, fn func(*ruleset)) error {
	return inRuleset(ns, fam, table, func(rs *ruleset) {
		rs.conn.DelTable(rs.table)
		rs.table = rs.conn.AddTable(rs.table)
		fn(rs)
	})
}

func (rs *ruleset) chain(name string, kind nftables.ChainType, hook *nftables.ChainHook,
	priority nftables.ChainPriority) *nftables.Chain {
	return rs.conn.AddChain(&nftables.Chain{Name: name, Table: rs.table, Type: kind, Hooknum: hook, Priority: &priority})
}

func (rs *ruleset) add(c *nftables.Chain, parts ...rule) {
	rs.conn.AddRule(&nftables.Rule{Table: rs.table, Chain: c, Exprs: match(parts...)})
}

func (rs *ruleset) set(s *nftables.Set) *nftables.Set {
	s.Table = rs.table
	if err := rs.conn.AddSet(s, nil); err != nil && rs.err == nil {
		rs.err = err
	}
	return s
}
