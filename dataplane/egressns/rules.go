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

// The chains. Those without a hook are gone to from others.
const (
	chainIn         = "skein_in"         // prerouting, before conntrack
	chainDoor       = "skein_door"       // what is sent to an endpoint
	chainLocal      = "skein_local"      // output, before conntrack
	chainForward    = "skein_forward"    // forward
	chainOut        = "skein_out"        // from a client
	chainOutLease   = "skein_out_lease"  // and its slot was granted a ticket
	chainBackLease  = "skein_back_lease" // the same of an answer
	chainSent       = "skein_sent_by"    // from a client, let through
	chainBack       = "skein_back"       // from eth0
	chainReceived   = "skein_received_by"
	chainProbe      = "skein_probe" // from a gateway without a slot
	chainSource     = "skein_source"
	chainInput      = "skein_input" // to the namespace itself
	chainLast       = "skein_last"  // what leaves, whoever sent it
	chainLastLease  = "skein_last_lease"
	chainLastTicket = "skein_last_ticket"
	chainRecall     = "skein_recall" // prerouting, behind conntrack and before routing
)

// direction says which packets a rule is for.
type direction uint8

const (
	outward direction = 1 << iota // from a client to its destination
	inward                        // the answer
	wrapped                       // in the tunnel's own packets
	both    = outward | inward
)

// rule is one rule, with what a packet's way through the table is drawn from.
type rule struct {
	nftable.Rule
	way   direction
	next  string // the chain that it goes to
	sixth bool   // for IPv6
}

// chain is one chain with its rules. hook is nil for one that is gone to.
type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority int32
	drop     bool // the policy
	rules    []rule
}

// declared is the chain as it is written.
func (c chain) declared() nftable.Chain {
	out := nftable.Chain{Name: c.name, Type: c.kind, Hook: c.hook, Priority: c.priority, Drop: c.drop}
	for _, r := range c.rules {
		out.Rules = append(out.Rules, r.Rule)
	}
	return out
}

// part is a piece of a rule.
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

// families in the order that rules come in.
var families = []family{
	{nftable.IPv4, MapSlot4, MapSource4, MapEndpoint4, MapAddress4, MapWay4, SetTo4, SetInside4},
	{nftable.IPv6, MapSlot6, MapSource6, MapEndpoint6, MapAddress6, MapWay6, SetTo6, SetInside6},
}

func (f family) six() bool { return f.Proto == unix.NFPROTO_IPV6 }

const regAfter = unix.NFT_REG32_04 // behind an interface's name

func iif(name string) part {
	return part{fmt.Sprintf("iifname %q", name), nftable.Link(expr.MetaKeyIIFNAME, name)}
}

func oif(name string) part {
	return part{fmt.Sprintf("oifname %q", name), nftable.Link(expr.MetaKeyOIFNAME, name)}
}

// iifTunnel is any tunnel's device.
func iifTunnel() part {
	const prefix = "fou"
	return part{`iifname "` + prefix + `*"`,
		[]expr.Any{nftable.Meta(expr.MetaKeyIIFNAME), nftable.Equal([]byte(prefix)...)}}
}

func (f family) saddr() part { return part{f.Word + " saddr", f.Source()} }
func (f family) daddr() part { return part{f.Word + " daddr", f.Destination()} }

// fromTunnel is the device with the source address.
func (f family) fromTunnel() part {
	return part{"iifname . " + f.Word + " saddr", append(f.Only(), nftable.Meta(expr.MetaKeyIIFNAME),
		nftable.Load(expr.PayloadBaseNetworkHeader, f.Src, f.Len, regAfter))}
}

func in(set string) part    { return part{"@" + set, []expr.Any{nftable.In(set)}} }
func notIn(set string) part { return part{"!= @" + set, []expr.Any{nftable.NotIn(set)}} }

// marked gives the packet the mark that a map has for an address: its slot's. Marks are known in this namespace only,
// and are how a rule goes on from one map to the next: a command that lists rules cannot show maps that lead into one
// another.
func marked(key part, m string) part {
	return part{"meta mark set " + key.text + " map @" + m, append(key.exprs, nftable.Mapped(m), nftable.SetMark())}
}

func byMark() part                    { return part{"meta mark", []expr.Any{nftable.Meta(expr.MetaKeyMARK)}} }
func is(a netip.Addr) part            { return part{a.String(), []expr.Any{nftable.Equal(a.AsSlice()...)}} }
func l4(name string, proto byte) part { return part{"meta l4proto " + name, nftable.L4(proto)} }

// neighbours are IPv6's questions and answers for neighbours; none of them leaves a link.
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

// clamp makes both ends of a TCP connection send segments that fit the route.
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

// limited is the most that a gateway without a slot probes.
func limited() part {
	const rate, burst = 50, 50
	return part{fmt.Sprintf("limit rate %d/second burst %d packets", rate, burst), []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst}}}
}

// snat gives the packet its slot's source.
func (f family) snat() part {
	return part{"snat " + f.Word + " to meta mark map @" + f.source, append(f.Only(), nftable.Meta(expr.MetaKeyMARK),
		nftable.Mapped(f.source),
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: nftable.Reg})}
}

// holdNot is the form of a kernel that queues no packets from a rule of nftables.
const holdNot hold.Form = ""

// queue hands the packet to HoldQueue; with nobody there it goes on, and meets the lease.
func queue(h hold.Form) part {
	return part{fmt.Sprintf("queue flags bypass to %d", HoldQueue), []expr.Any{h.Statement(HoldQueue)}}
}

// each makes a rule for each family.
func each(way direction, parts func(f family) []part) (out []rule) {
	for _, f := range families {
		r := one(way, parts(f)...)
		r.sixth = f.six()
		out = append(out, r)
	}
	return out
}

// chains is the whole table of rules, in the order that a packet meets them.
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
				one(inward, oif(Uplink), count(countStrangers), drop), // its client is gone, and it would go back
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
			// the host looks for a slot's address before its lease runs
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

// destinations drop what goes elsewhere.
func destinations(way direction) []rule {
	return slices.Concat(
		each(way, func(f family) []part { return []part{f.daddr(), in(f.inside), count(countDestination), drop} }),
		each(way, func(f family) []part { return []part{f.daddr(), notIn(f.to), count(countDestination), drop} }))
}

// wayOf marks packets with the slot that they came by.
func wayOf() []rule {
	return each(outward, func(f family) []part { return []part{marked(f.fromTunnel(), f.way)} })
}

// remember notes in the connection which slot it takes; the last packet counts. A client that belongs to another slot
// by now keeps flows by this one.
func remember() part {
	return part{"ct mark set meta mark", []expr.Any{nftable.Meta(expr.MetaKeyMARK),
		&expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg, SourceRegister: true}}}
}

// recall marks an answer with the slot that its connection takes. One that has none noted is from before there were
// notes, and takes the client's.
func recall() rule {
	return one(inward, part{"ct mark != 0 meta mark set ct mark", []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg}, nftable.Differ(make([]byte, 4)...), nftable.SetMark()}})
}

// slotOf marks packets with the slot of their client.
func slotOf(way direction, client func(family) part) []rule {
	return each(way, func(f family) []part { return []part{marked(client(f), f.slot)} })
}

// leased goes on with the ticket that the slot was granted as the mark, and drops where it has none.
func leased(way direction, next string) []rule {
	return []rule{one(way, marked(byMark(), MapGranted), goTo(next)), one(way, count(countLease), drop)}
}

// live goes on when the ticket lives.
func live(way direction, next string) []rule {
	return []rule{one(way, byMark(), in(SetTickets), goTo(next)), one(way, count(countLease), drop)}
}
