package doctor

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// translator turns the expressions of a rule into conditions and a verdict. What it does not know becomes FieldOther,
// which holds perhaps.
type translator struct {
	registers map[uint32]loaded
	set       func(name string) (*nftables.Set, []nftables.SetElement)
	family    nftables.TableFamily
	rule      FilterRule
}

// loaded is what a register holds.
type loaded struct {
	field string
	mask  uint64
	host  bool // a number in the host's byte order
}

func translate(r *nftables.Rule, set func(string) (*nftables.Set, []nftables.SetElement)) FilterRule {
	t := translator{registers: map[uint32]loaded{}, set: set, family: r.Table.Family}
	for _, e := range r.Exprs {
		if t.one(e) {
			break
		}
	}
	return t.rule
}

func (t *translator) must(c Condition) { t.rule.Conditions = append(t.rule.Conditions, c) }

func (t *translator) load(register uint32, field string, host bool) {
	t.registers[register] = loaded{field: field, host: host}
}

// one takes an expression in and reports whether the rule has its verdict.
func (t *translator) one(e expr.Any) (done bool) {
	switch e := e.(type) {
	case *expr.Meta:
		t.meta(e)
	case *expr.Ct:
		if e.SourceRegister {
			break
		}
		if t.load(e.Register, FieldOther, true); e.Key == expr.CtKeySTATE {
			t.load(e.Register, FieldState, true)
		}
	case *expr.Payload:
		t.payload(e)
	case *expr.Bitwise:
		r := t.registers[e.SourceRegister]
		if r.mask = number(e.Mask, r.host); slices.ContainsFunc(e.Xor, func(b byte) bool { return b != 0 }) {
			r.field = FieldOther
		}
		t.registers[e.DestRegister] = r
	case *expr.Cmp:
		t.compare(e)
	case *expr.Range:
		r := t.registers[e.Register]
		t.must(Condition{Field: r.field, Mask: r.mask, Not: e.Op == expr.CmpOpNeq,
			Ranges: [][2]uint64{{number(e.FromData, r.host), number(e.ToData, r.host)}}})
	case *expr.Lookup:
		t.lookup(e)
	case *expr.Match:
		t.match(e)
	case *expr.Limit, *expr.Connlimit, *expr.Quota:
		t.must(Condition{Field: FieldOther})
	case *expr.Target:
		if e.Name == "REJECT" {
			t.rule.Verdict = "drop"
			return true
		}
	case *expr.Reject:
		t.rule.Verdict = "drop"
		return true
	case *expr.Verdict:
		t.rule.Verdict, t.rule.Target = verdict(e)
		return true
	case *expr.Counter, *expr.Log, *expr.Immediate, *expr.Objref, *expr.Notrack:
	default: // what may load a register, or decide
		t.must(Condition{Field: FieldOther})
	}
	return false
}

func (t *translator) meta(e *expr.Meta) {
	if e.SourceRegister {
		return // it sets something
	}
	switch e.Key {
	case expr.MetaKeyL4PROTO:
		t.load(e.Register, FieldProto, true)
	case expr.MetaKeyIIFNAME:
		t.load(e.Register, FieldIn, false)
	case expr.MetaKeyNFPROTO:
		t.load(e.Register, FieldFam, true)
	default:
		t.load(e.Register, FieldOther, true)
	}
}

func (t *translator) payload(e *expr.Payload) {
	if e.OperationType != expr.PayloadLoad {
		return
	}
	field := FieldOther
	switch {
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 2 && e.Len == 2:
		field = FieldPort
	case e.Base == expr.PayloadBaseNetworkHeader && e.Len == 1 && t.family == nftables.TableFamilyIPv4 && e.Offset == 9,
		e.Base == expr.PayloadBaseNetworkHeader && e.Len == 1 && t.family == nftables.TableFamilyIPv6 && e.Offset == 6:
		field = FieldProto
	}
	t.load(e.DestRegister, field, false)
}

func (t *translator) compare(e *expr.Cmp) {
	r := t.registers[e.Register]
	c := Condition{Field: r.field, Mask: r.mask, Not: e.Op == expr.CmpOpNeq}
	if r.field == FieldIn {
		name := string(bytes.TrimRight(e.Data, "\x00"))
		if len(e.Data) > 0 && e.Data[len(e.Data)-1] != 0 && len(e.Data) < 16 {
			name += "*" // compared as far as it goes
		}
		c.Names = []string{name}
		t.must(c)
		return
	}
	v, most := number(e.Data, r.host), ^uint64(0)
	switch e.Op {
	case expr.CmpOpEq, expr.CmpOpNeq:
		c.Ranges = [][2]uint64{{v, v}}
	case expr.CmpOpLt:
		c.Ranges = [][2]uint64{{0, max(v, 1) - 1}}
	case expr.CmpOpLte:
		c.Ranges = [][2]uint64{{0, v}}
	case expr.CmpOpGt:
		c.Ranges = [][2]uint64{{v + 1, most}}
	case expr.CmpOpGte:
		c.Ranges = [][2]uint64{{v, most}}
	}
	t.must(c)
}

func (t *translator) lookup(e *expr.Lookup) {
	r := t.registers[e.SourceRegister]
	set, elements := t.set(e.SetName)
	if set == nil || set.Concatenation || r.field == "" {
		r.field = FieldOther
	}
	c := Condition{Field: r.field, Mask: r.mask, Not: e.Invert}
	switch {
	case r.field == FieldOther && !(e.IsDestRegSet && e.DestRegister == 0):
	case e.IsDestRegSet && e.DestRegister == 0: // NFT_REG_VERDICT
		c.Map = []MapElement{}
		for _, k := range elements {
			n := number(k.Key, r.host)
			m := MapElement{Range: [2]uint64{n, n}}
			m.Verdict, m.Target = verdict(verdictOf(k))
			c.Map = append(c.Map, m)
		}
	case e.IsDestRegSet:
		t.load(e.DestRegister, FieldOther, true)
	case r.field == FieldIn:
		for _, k := range elements {
			c.Names = append(c.Names, string(bytes.TrimRight(k.Key, "\x00")))
		}
	default:
		c.Ranges = ranges(elements, r.host, set.Interval)
	}
	t.must(c)
}

// verdictOf is an element's verdict, which the library leaves as the kernel's attributes.
func verdictOf(k nftables.SetElement) *expr.Verdict {
	if k.VerdictData != nil {
		return k.VerdictData
	}
	v := &expr.Verdict{Kind: expr.VerdictContinue}
	for typ, b := range nfnl.Attributes(k.Val) {
		switch {
		case typ == unix.NFTA_VERDICT_CODE && len(b) == 4:
			v.Kind = expr.VerdictKind(int32(binary.BigEndian.Uint32(b)))
		case typ == unix.NFTA_VERDICT_CHAIN:
			v.Chain = string(bytes.TrimRight(b, "\x00"))
		}
	}
	return v
}

// ranges are the values of a set. An interval is an element and another that marks its end.
func ranges(elements []nftables.SetElement, host, interval bool) (out [][2]uint64) {
	if !interval {
		for _, k := range elements {
			out = append(out, [2]uint64{number(k.Key, host), number(k.Key, host)})
		}
		return out
	}
	sorted := slices.SortedFunc(slices.Values(elements), func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
			return c
		}
		if a.IntervalEnd {
			return -1
		}
		return 1
	})
	for i, k := range sorted {
		if k.IntervalEnd {
			continue
		}
		last := ^uint64(0)
		if i+1 < len(sorted) {
			last = number(sorted[i+1].Key, host) - 1
		}
		out = append(out, [2]uint64{number(k.Key, host), last})
	}
	return out
}

// match is an extension of iptables.
func (t *translator) match(e *expr.Match) {
	switch info := e.Info.(type) {
	case *xt.Comment:
	case *xt.Tcp:
		t.ports(protoTCP, info.DstPorts, info.InvFlags&xt.TcpInvDestPorts != 0, info.SrcPorts != [2]uint16{0, 65535} ||
			info.FlagsMask != 0 || info.Option != 0)
	case *xt.Udp:
		t.ports(protoUDP, info.DstPorts, info.InvFlags&xt.UdpInvDestPorts != 0, info.SrcPorts != [2]uint16{0, 65535})
	case *xt.ConntrackMtinfo3:
		t.conntrack(info.ConntrackMtinfoBase, info.StateMask)
	case *xt.ConntrackMtinfo2:
		t.conntrack(info.ConntrackMtinfoBase, info.StateMask)
	default:
		t.must(Condition{Field: FieldOther})
	}
}

func (t *translator) ports(proto uint64, ports [2]uint16, not, more bool) {
	t.must(Condition{Field: FieldProto, Ranges: [][2]uint64{{proto, proto}}})
	if ports != [2]uint16{0, 65535} {
		t.must(Condition{Field: FieldPort, Ranges: [][2]uint64{{uint64(ports[0]), uint64(ports[1])}}, Not: not})
	}
	if more {
		t.must(Condition{Field: FieldOther})
	}
}

// conntrack has the bits of states where nftables has them, but for those above new.
func (t *translator) conntrack(m xt.ConntrackMtinfoBase, states uint16) {
	if m.MatchFlags != uint16(xt.ConntrackState) && m.MatchFlags != uint16(xt.ConntrackState|xt.ConntrackStateAlias) {
		t.must(Condition{Field: FieldOther})
		return
	}
	t.must(Condition{Field: FieldState, Mask: uint64(states), Ranges: [][2]uint64{{0, 0}},
		Not: m.InvertFlags&uint16(xt.ConntrackState) == 0})
}

func verdict(v *expr.Verdict) (name, target string) {
	switch v.Kind {
	case expr.VerdictAccept, expr.VerdictQueue:
		return "accept", "" // a queue's program decides; mostly it lets pass
	case expr.VerdictDrop:
		return "drop", ""
	case expr.VerdictReturn:
		return "return", ""
	case expr.VerdictJump:
		return "jump", v.Chain
	case expr.VerdictGoto:
		return "goto", v.Chain
	}
	return "", ""
}

// number reads up to eight bytes.
func number(b []byte, host bool) (v uint64) {
	if host {
		switch len(b) {
		case 1:
			return uint64(b[0])
		case 2:
			return uint64(binary.NativeEndian.Uint16(b))
		case 4:
			return uint64(binary.NativeEndian.Uint32(b))
		case 8:
			return binary.NativeEndian.Uint64(b)
		}
	}
	for _, one := range b[:min(len(b), 8)] {
		v = v<<8 | uint64(one)
	}
	return v
}

var hooks = map[nftables.ChainHook]string{
	*nftables.ChainHookPrerouting: "prerouting", *nftables.ChainHookInput: "input", *nftables.ChainHookForward: "forward",
	*nftables.ChainHookOutput: "output", *nftables.ChainHookPostrouting: "postrouting",
}

var families = map[nftables.TableFamily]string{
	nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6",
	nftables.TableFamilyBridge: "bridge", nftables.TableFamilyARP: "arp", nftables.TableFamilyNetdev: "netdev",
}

// mostRules bounds what is read: hosts with more have chains for each of many pods, which decide nothing about skein.
const mostRules = 20_000

// readFirewall reads all tables. Every chain is there; the rules of chains are, of families that matter here.
func readFirewall() (tables []string, chains []Chain, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, nil, err
	}
	list, err := c.ListTables()
	if err != nil {
		return nil, nil, err
	}
	for _, t := range list {
		tables = append(tables, families[t.Family]+" "+t.Name)
	}
	slices.Sort(tables)
	all, err := c.ListChains()
	if err != nil {
		return tables, nil, err
	}
	sets, n := map[string]cachedSet{}, 0
	for _, k := range all {
		one := Chain{Family: families[k.Table.Family], Table: k.Table.Name, Name: k.Name, Type: string(k.Type)}
		if k.Hooknum != nil {
			one.Hook = hooks[*k.Hooknum]
			one.Drop = k.Policy != nil && *k.Policy == nftables.ChainPolicyDrop
		}
		if k.Priority != nil {
			one.Priority = int(*k.Priority)
		}
		if n < mostRules && slices.Contains([]string{"inet", "ip", "ip6"}, one.Family) {
			rules, err := c.GetRules(k.Table, k)
			if err != nil {
				return tables, chains, err
			}
			n += len(rules)
			for _, r := range rules {
				r.Table = k.Table
				one.Rules = append(one.Rules, translate(r, setReader(c, k.Table, sets)))
			}
		}
		chains = append(chains, one)
	}
	slices.SortStableFunc(chains, func(a, b Chain) int { return strings.Compare(a.where(), b.where()) })
	return tables, chains, nil
}

type cachedSet struct {
	set      *nftables.Set
	elements []nftables.SetElement
}

// setReader reads a set once. One that cannot be read is nil: what is in it is not known.
func setReader(c *nftables.Conn, t *nftables.Table, cache map[string]cachedSet) func(string) (*nftables.Set,
	[]nftables.SetElement) {
	return func(name string) (*nftables.Set, []nftables.SetElement) {
		key := families[t.Family] + " " + t.Name + " " + name
		have, ok := cache[key]
		if !ok {
			if s, err := c.GetSetByName(t, name); err == nil {
				if elements, err := c.GetSetElements(s); err == nil {
					have = cachedSet{s, elements}
				}
			}
			cache[key] = have
		}
		return have.set, have.elements
	}
}

// nativeAppend appends a word as it lies in the host's memory.
func nativeAppend(b []byte, w uint32) []byte { return binary.NativeEndian.AppendUint32(b, w) }
