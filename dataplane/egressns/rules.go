package egressns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// The chains. Those without a hook are reached by goto.
const (
	chainIn         = "skein_in"         // prerouting, before conntrack
	chainDoor       = "skein_door"       // packets to an endpoint
	chainLocal      = "skein_local"      // output, before conntrack
	chainForward    = "skein_forward"    // forward
	chainOut        = "skein_out"        // from a client
	chainOutLease   = "skein_out_lease"  // from a client whose slot was granted a ticket
	chainBackLease  = "skein_back_lease" // the same for an answer
	chainSent       = "skein_sent_by"    // from a client, allowed
	chainBack       = "skein_back"       // from eth0
	chainReceived   = "skein_received_by"
	chainProbe      = "skein_probe" // from the probe of a gateway without a slot
	chainSource     = "skein_source"
	chainInput      = "skein_input" // to the namespace itself
	chainLast       = "skein_last"  // leaving packets, whoever sent them
	chainLastLease  = "skein_last_lease"
	chainLastTicket = "skein_last_ticket"
	chainRecall     = "skein_recall" // prerouting, after conntrack and before routing
)

// direction is the set of packets that a rule applies to.
type direction uint8

const (
	outward direction = 1 << iota // from a client to its destination
	inward                        // the answer
	wrapped                       // in the tunnel's own packets
	both    = outward | inward
)

// rule is one rule, with what Way needs for drawing a packet's path.
type rule struct {
	nftable.Rule
	way   direction
	next  string // the chain that it jumps to
	sixth bool   // for IPv6
}

// chain is one chain with its rules. hook is nil for a chain reached by goto.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority int32
	drop     bool // the policy
	rules    []rule
}

// declared is the chain in the form that nftable writes.
func (c chain) declared() nftable.Chain {
	out := nftable.Chain{Name: c.name, Type: c.kind, Hook: c.hook, Priority: c.priority, Drop: c.drop}
	for _, r := range c.rules {
		out.Rules = append(out.Rules, r.Rule)
	}
	return out
}

// part is a part of a rule.
type part struct {
	text  string
	exprs []expr.Any
}

func one(way direction, parts ...part) rule {
	r := rule{way: way}
	var words []string
	for _, p := range parts {
		if p.text != "" {
			words = append(words, p.text)
		}
		r.Exprs = append(r.Exprs, p.exprs...)
	}
	if n := len(r.Exprs); n > 0 {
		if v, ok := r.Exprs[n-1].(*expr.Verdict); ok {
			r.next = v.Chain
		}
	}
	r.Text = strings.Join(words, " ")
	return r
}

// family is what differs between IPv4 and IPv6.
type family struct {
	nftable.IP
	slot, source, endpoint, address, way, to, inside string // the sets and maps
}

// families are in the order of their rules.
var families = []family{
	{nftable.IPv4, MapSlot4, MapSource4, MapEndpoint4, MapAddress4, MapWay4, SetTo4, SetInside4},
	{nftable.IPv6, MapSlot6, MapSource6, MapEndpoint6, MapAddress6, MapWay6, SetTo6, SetInside6},
}

func (f family) six() bool { return f.Proto == unix.NFPROTO_IPV6 }

const regAfter = unix.NFT_REG32_04 // register after an interface's name

func iif(name string) part {
	return part{fmt.Sprintf("iifname %q", name), nftable.Link(expr.MetaKeyIIFNAME, name)}
}

func oif(name string) part {
	return part{fmt.Sprintf("oifname %q", name), nftable.Link(expr.MetaKeyOIFNAME, name)}
}

// iifTunnel matches the device of any tunnel.
func iifTunnel() part {
	const prefix = "fou"
	return part{`iifname "` + prefix + `*"`,
		[]expr.Any{nftable.Meta(expr.MetaKeyIIFNAME), nftable.Equal([]byte(prefix)...)}}
}

func (f family) saddr() part { return part{f.Word + " saddr", f.Source()} }
func (f family) daddr() part { return part{f.Word + " daddr", f.Destination()} }

// fromTunnel is the device concatenated with the source address.
func (f family) fromTunnel() part {
	return part{"iifname . " + f.Word + " saddr", append(f.Only(), nftable.Meta(expr.MetaKeyIIFNAME),
		nftable.Load(expr.PayloadBaseNetworkHeader, f.Src, f.Len, regAfter))}
}

func in(set string) part    { return part{"@" + set, []expr.Any{nftable.In(set)}} }
func notIn(set string) part { return part{"!= @" + set, []expr.Any{nftable.NotIn(set)}} }

// marked sets the packet's mark to the map's value for a key. Marks are local to this namespace. They pass a value
// from one map to the next, since a common version of nft crashes when it lists maps that feed each other directly.
func marked(key part, m string) part {
	return part{"meta mark set " + key.text + " map @" + m, append(key.exprs, nftable.Mapped(m), nftable.SetMark())}
}

func byMark() part                    { return part{"meta mark", []expr.Any{nftable.Meta(expr.MetaKeyMARK)}} }
func is(a netip.Addr) part            { return part{a.String(), []expr.Any{nftable.Equal(a.AsSlice()...)}} }
func l4(name string, proto byte) part { return part{"meta l4proto " + name, nftable.L4(proto)} }

// neighbours matches IPv6 neighbour solicitations and advertisements, which never leave a link.
func neighbours() part {
	const solicit, advertise = 135, 136
	return part{"icmpv6 type nd-neighbor-solicit-nd-neighbor-advert", append(nftable.L4(unix.IPPROTO_ICMPV6),
		nftable.LoadL4(0, 1),
		&expr.Range{Op: expr.CmpOpEq, Register: nftable.Reg, FromData: []byte{solicit}, ToData: []byte{advertise}})}
}

func toFoU() part {
	return part{"udp dport @" + SetPorts, append(nftable.L4(unix.IPPROTO_UDP), nftable.DestPort(), nftable.In(SetPorts))}
}

const (
	ctInvalid     = 1 // NF_CT_STATE_INVALID_BIT
	ctEstablished = 2
	ctRelated     = 4
)

func ctState(text string, bits uint32, without bool) part {
	is := nftable.Differ
	if without {
		is = nftable.Equal
	}
	return part{"ct state " + text, []expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: nftable.Reg},
		nftable.Masked(nftable.Native(bits), nil), is(make([]byte, 4)...)}}
}

// clamp limits the MSS of a TCP connection at both ends to what the route carries.
func clamp() rule { return one(both, part{"meta l4proto tcp " + nftable.ClampText, nftable.Clamp()}) }

func count(name string) part {
	return part{fmt.Sprintf("counter name %q", name),
		[]expr.Any{&expr.Objref{Type: int(nftables.ObjTypeCounter), Name: name}}}
}

var (
	accept  = part{"accept", []expr.Any{nftable.Accept}}
	drop    = part{"drop", []expr.Any{nftable.Drop}}
	notrack = part{"notrack", []expr.Any{&expr.Notrack{}}}
)

func goTo(chain string) part {
	return part{"goto " + chain, []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

// limited is the rate limit for probes of a gateway without a slot.
func limited() part {
	const rate, burst = 50, 50
	return part{fmt.Sprintf("limit rate %d/second burst %d packets", rate, burst), []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst}}}
}

// snat translates the packet's source to its slot's.
func (f family) snat() part {
	return part{"snat " + f.Word + " to meta mark map @" + f.source, append(f.Only(), nftable.Meta(expr.MetaKeyMARK),
		nftable.Mapped(f.source),
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: nftable.Reg})}
}

// holdNot: this kernel queues no packets from a rule of nftables.
const holdNot hold.Form = ""

// queue gives the packet to HoldQueue. Without a reader it continues to the lease check.
func queue(h hold.Form) part {
	return part{fmt.Sprintf("queue flags bypass to %d", HoldQueue), []expr.Any{h.Statement(HoldQueue)}}
}

// each makes one rule per family.
func each(way direction, parts func(f family) []part) (out []rule) {
	for _, f := range families {
		r := one(way, parts(f)...)
		r.sixth = f.six()
		out = append(out, r)
	}
	return out
}

// chains is the complete table of rules, in the order in which a packet meets them.
func chains(h hold.Form) []chain {
	return []chain{
		{name: chainIn, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting,
			priority: -300, rules: inRules(h)},
		{name: chainRecall, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: -150,
			rules: []rule{one(inward, iif(Uplink), part{recall().Text, recall().Exprs})}},
		{name: chainDoor, rules: slices.Concat(
			each(wrapped, func(f family) []part { return []part{marked(f.saddr(), f.slot), notrack, accept} }),
			[]rule{one(wrapped, count(countStrangers), drop)})},
		{name: chainForward, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward,
			drop: true, rules: slices.Concat(
				[]rule{one(both, ctState("invalid", ctInvalid, false), count(countInvalid), drop)},
				[]rule{one(inward, iif(Uplink), goTo(chainBack))},
				each(outward, func(f family) []part { return []part{oif(Uplink), marked(f.fromTunnel(), f.way), goTo(chainOut)} }),
				each(0, func(f family) []part {
					return []part{oif(Uplink), iif(Probe), f.saddr(), is(ProbeSource(-1, f.six())),
						goTo(chainProbe)}
				}),
				[]rule{one(outward, count(countStrangers), drop)})},
		{name: chainOut, rules: slices.Concat(
			[]rule{
				one(outward, l4("4", unix.IPPROTO_IPIP), count(countNested), drop),
				one(outward, l4("41", unix.IPPROTO_IPV6), count(countNested), drop),
				one(outward, toFoU(), count(countNested), drop),
			},
			destinations(outward),
			leased(outward, chainOutLease))},
		{name: chainOutLease, rules: live(outward, chainSent)},
		{name: chainSent, rules: slices.Concat([]rule{clamp()}, wayOf(), []rule{one(outward, remember()),
			one(outward, byMark(), in(SetSent), accept), one(outward, drop)})},
		{name: chainBack, rules: slices.Concat(
			[]rule{
				one(inward, ctState("!= established,related", ctEstablished|ctRelated, true), count(countStrangers), drop),
				one(inward, oif(Uplink), count(countStrangers), drop), // its client is gone, and the packet would be sent back
			},
			each(0, func(f family) []part {
				return []part{oif(Probe), f.daddr(), is(ProbeSource(-1, f.six())), accept}
			}),
			slotOf(inward, family.daddr), []rule{recall()},
			leased(inward, chainBackLease))},
		{name: chainBackLease, rules: live(inward, chainReceived)},
		{name: chainReceived, rules: slices.Concat([]rule{clamp()}, slotOf(inward, family.daddr), []rule{recall(),
			one(inward, byMark(), in(SetReceived), accept), one(inward, drop)})},
		{name: chainProbe, rules: slices.Concat(destinations(0), slotOf(0, family.saddr), each(0, func(f family) []part {
			return []part{l4(map[bool]string{false: "icmp", true: "ipv6-icmp"}[f.six()], f.ICMP), limited(), accept}
		}), []rule{one(0, l4("tcp", unix.IPPROTO_TCP), limited(), accept), one(0, drop)})},
		{name: chainSource, kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: 100,
			rules: each(outward, func(f family) []part { return []part{oif(Uplink), f.snat()} })},
		{name: chainLast, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPostrouting, priority: 300,
			// the host resolves a slot's address before its lease runs
			rules: slices.Concat([]rule{one(0, oif(Uplink), neighbours(), accept)},
				each(outward, func(f family) []part {
					return []part{oif(Uplink), marked(f.saddr(), f.address), goTo(chainLastLease)}
				}))},
		{name: chainLastLease, rules: leased(outward, chainLastTicket)},
		{name: chainLastTicket, rules: []rule{one(outward, byMark(), in(SetTickets), accept),
			one(outward, count(countLease), drop)}},
		{name: chainInput, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput, rules: slices.Concat(
			each(wrapped, func(f family) []part { return []part{iif(Uplink), toFoU(), marked(f.daddr(), f.endpoint), accept} }),
			each(inward, func(f family) []part {
				return []part{iif(Uplink), marked(f.daddr(), f.address), count(countStrangers), drop}
			}),
			[]rule{
				one(inward, iif(Uplink), l4("tcp", unix.IPPROTO_TCP), count(countStrangers), drop),
				one(inward, iif(Uplink), l4("udp", unix.IPPROTO_UDP), count(countStrangers), drop),
			})},
		{name: chainLocal, kind: nftables.ChainTypeFilter, hook: nftables.ChainHookOutput, priority: -300,
			rules: each(wrapped, func(f family) []part { return []part{toFoU(), marked(f.saddr(), f.endpoint), notrack} })},
	}
}

func inRules(h hold.Form) []rule {
	out := each(wrapped, func(f family) []part {
		return []part{iif(Uplink), toFoU(), marked(f.daddr(), f.endpoint), goTo(chainDoor)}
	})
	if h == holdNot {
		return out
	}
	return slices.Concat(out,
		each(inward, func(f family) []part {
			return []part{iif(Uplink), marked(f.daddr(), f.address), byMark(), in(SetHeld), queue(h)}
		}),
		each(outward, func(f family) []part {
			return []part{iifTunnel(), marked(f.fromTunnel(), f.way), byMark(), in(SetHeld), queue(h)}
		}))
}

// destinations drops packets to destinations outside the egress.
func destinations(way direction) []rule {
	return slices.Concat(
		each(way, func(f family) []part { return []part{f.daddr(), in(f.inside), count(countDestination), drop} }),
		each(way, func(f family) []part { return []part{f.daddr(), notIn(f.to), count(countDestination), drop} }))
}

// wayOf marks packets with the slot whose tunnel they came by.
func wayOf() []rule {
	return each(outward, func(f family) []part { return []part{marked(f.fromTunnel(), f.way)} })
}

// remember stores the packet's slot in its connection's mark; the last packet counts. So flows keep their slot after
// their client has changed to another.
func remember() part {
	return part{"ct mark set meta mark", []expr.Any{nftable.Meta(expr.MetaKeyMARK),
		&expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg, SourceRegister: true}}}
}

// recall marks an answer with its connection's slot. A connection without a mark is older than these marks and uses
// the client's slot.
func recall() rule {
	return one(inward, part{"ct mark != 0 meta mark set ct mark", []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg}, nftable.Differ(make([]byte, 4)...), nftable.SetMark()}})
}

// slotOf marks packets with the slot of their client.
func slotOf(way direction, client func(family) part) []rule {
	return each(way, func(f family) []part { return []part{marked(client(f), f.slot)} })
}

// leased continues with the mark set to the slot's granted ticket, and drops packets if there is none.
func leased(way direction, next string) []rule {
	return []rule{one(way, marked(byMark(), MapGranted), goTo(next)), one(way, count(countLease), drop)}
}

// live continues if the ticket has not ended.
func live(way direction, next string) []rule {
	return []rule{one(way, byMark(), in(SetTickets), goTo(next)), one(way, count(countLease), drop)}
}
