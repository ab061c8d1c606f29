package doctor

import (
	"fmt"
	"slices"
	"strings"
)

// Chain is an nftables chain, those that iptables makes by nftables among them.
type Chain struct {
	Family   string // ip | ip6 | inet
	Table    string
	Name     string
	Hook     string // input | forward | prerouting; empty: others jump to it
	Type     string // filter | nat | route
	Priority int
	Drop     bool // its policy
	Rules    []FilterRule
}

func (c Chain) where() string { return fmt.Sprintf("table %s %s, chain %s", c.Family, c.Table, c.Name) }

// FilterRule is a rule of a chain, as far as it decides about a packet. It applies when all its conditions hold.
type FilterRule struct {
	Conditions []Condition
	Verdict    string // accept | drop | return | jump | goto; empty: the next rule
	Target     string // of jump and goto
}

// Fields that conditions ask for. FieldOther is one that a Packet does not have: a source, a time, a set of addresses.
const (
	FieldProto = "l4proto"
	FieldPort  = "dport"
	FieldState = "ct state"
	FieldIn    = "iifname"
	FieldFam   = "nfproto"
	FieldOther = "?"
)

// Bits of the connection tracking state, as nftables has them.
const (
	stateEstablished = 2
	stateNew         = 8
)

// Protocol numbers, and families as netfilter numbers them.
const (
	protoTCP, protoUDP = 6, 17
	nfIPv4, nfIPv6     = 2, 10
)

// Condition holds when a field, masked, lies in one of the ranges or is one of the names.
type Condition struct {
	Field  string
	Mask   uint64 // 0: none
	Ranges [][2]uint64
	Names  []string // of FieldIn; a * at the end stands for any rest
	Not    bool
	Map    []MapElement // a verdict map: the first element with the field's value decides
}

// MapElement is one of a verdict map.
type MapElement struct {
	Range   [2]uint64
	Verdict string
	Target  string
}

// Packet is what a firewall is asked about. A field that is its zero value is not known.
type Packet struct {
	IPv6  bool
	Proto uint64
	Port  uint64
	State uint64
	In    string
}

// answer is that of a condition or a chain about a packet of which not all is known.
type answer int

const (
	no answer = iota
	perhaps
	yes
)

func (p Packet) value(field string) (v uint64, known bool) {
	switch field {
	case FieldProto:
		v = p.Proto
	case FieldPort:
		v = p.Port
	case FieldState:
		v = p.State
	case FieldFam:
		if v = nfIPv4; p.IPv6 {
			v = nfIPv6
		}
	}
	return v, v != 0
}

func (c Condition) holds(p Packet) answer {
	if c.Field == FieldIn && p.In != "" && len(c.Names) > 0 {
		found := slices.ContainsFunc(c.Names, func(n string) bool {
			begin, any := strings.CutSuffix(n, "*")
			return n == p.In || any && strings.HasPrefix(p.In, begin)
		})
		return known(found != c.Not)
	}
	v, ok := p.value(c.Field)
	if !ok {
		return perhaps
	}
	if c.Mask != 0 {
		v &= c.Mask
	}
	return known(slices.ContainsFunc(c.Ranges, func(r [2]uint64) bool { return v >= r[0] && v <= r[1] }) != c.Not)
}

func known(b bool) answer {
	if b {
		return yes
	}
	return no
}

// fate is what becomes of a packet, and where that was decided.
type fate struct {
	verdict string // accept | drop; empty: the chain ended without one
	sure    bool   // false: some packets of this kind fare otherwise
	where   string
}

// walk follows a packet through chains.
type walk struct {
	chains []Chain
	packet Packet
	open   bool // some of these packets are accepted already
	shut   bool // some are dropped already
	shutAt string
}

const deepest = 16 // as many jumps as the kernel allows

func (w *walk) chain(c Chain, depth int) (verdict, where string) {
	for i, r := range c.Rules {
		at := fmt.Sprintf("%s, rule %d", c.where(), i+1)
		a, verdict, target := w.rule(r)
		if a == no || verdict == "" {
			continue
		}
		if verdict == "jump" || verdict == "goto" {
			v, where := w.jump(c, target, depth)
			if v == "" && verdict == "goto" && a == yes {
				return "", ""
			}
			if v == "" {
				continue
			}
			verdict, at = v, where
		}
		if a == yes {
			if verdict == "return" {
				return "", ""
			}
			return verdict, at
		}
		switch verdict {
		case "accept":
			w.open = true
		case "drop":
			if w.shut = true; w.shutAt == "" {
				w.shutAt = at
			}
		}
	}
	return "", ""
}

// rule says whether a rule applies, and with which verdict. A verdict map is a rule with several.
func (w *walk) rule(r FilterRule) (a answer, verdict, target string) {
	a, verdict, target = yes, r.Verdict, r.Target
	for _, c := range r.Conditions {
		if c.Map != nil {
			v, ok := w.packet.value(c.Field)
			if !ok {
				a, verdict = min(a, perhaps), "accept" // what the map may give this packet
				if !slices.ContainsFunc(c.Map, func(m MapElement) bool { return m.Verdict == "accept" }) {
					verdict = ""
				}
				continue
			}
			i := slices.IndexFunc(c.Map, func(m MapElement) bool { return v >= m.Range[0] && v <= m.Range[1] })
			if i < 0 {
				return no, "", ""
			}
			verdict, target = c.Map[i].Verdict, c.Map[i].Target
			continue
		}
		a = min(a, c.holds(w.packet))
	}
	return a, verdict, target
}

func (w *walk) jump(from Chain, target string, depth int) (verdict, where string) {
	if depth >= deepest {
		return "", ""
	}
	for _, c := range w.chains {
		if c.Table == from.Table && c.Family == from.Family && c.Name == target {
			return w.chain(c, depth+1)
		}
	}
	return "", ""
}

// firewall says what becomes of a packet at a hook. Every base chain there is asked; a drop by one is a drop, whatever
// the others say. Chains of skein's own tables are left out.
func firewall(chains []Chain, own []string, hook string, p Packet) fate {
	family := "ip"
	if p.IPv6 {
		family = "ip6"
	}
	out := fate{verdict: "accept", sure: true}
	for _, c := range chains {
		if c.Hook != hook || c.Type != "filter" || c.Family != "inet" && c.Family != family ||
			c.Family == "inet" && slices.Contains(own, c.Table) {
			continue
		}
		w := walk{chains: chains, packet: p}
		verdict, where := w.chain(c, 0)
		if verdict == "" && c.Drop {
			verdict, where = "drop", c.where()+", its policy"
		}
		switch {
		case verdict == "drop" && !w.open:
			return fate{verdict: "drop", sure: true, where: where}
		case verdict == "drop":
			out = fate{verdict: "drop", where: where}
		case w.shut && out.verdict == "accept":
			out = fate{verdict: "accept", where: w.shutAt}
		}
	}
	return out
}
