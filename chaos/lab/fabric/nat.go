package fabric

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// mappingLifetime is how long a cone's mapping lives after the last packet out (RFC 4787 asks for two
// minutes at least). The kernel's own conntrack entries live 30 s, or 120 s once answered.
const mappingLifetime = 120 * time.Second

// portKey turns a host's source port into its public one by exclusive or. It is what makes a cone of
// the lab endpoint-independent whatever happens: the mapping is a function, not a memory. The first
// host of a site keeps its ports; each further one has another key, so that two hosts that both use
// port 51820 get two public ports. Bit 15 is left alone, so that high ports stay high.
//
// A router that others are behind has keys of its own: the same ones twice would undo each other. No two
// of 32 clients behind 32 routers get the same port (TestPortKeys).
func portKey(index int, outer bool) uint16 {
	if outer {
		return uint16(index*0x5a6b) & 0x7fff
	}
	return uint16(index*0x3c6f) & 0x7fff
}

// natTable holds a router's NAT.
const natTable = "sknat"

// translate installs a site's NAT in its router, in place of the one that is there.
func translate(router string, s Site, clients []client) error {
	if s.LAN6.IsValid() {
		if err := firewall6(router, s); err != nil {
			return err
		}
	}
	if s.NAT == None {
		return nil
	}
	return replaceRuleset(router, nftables.TableFamilyIPv4, natTable, func(rs *ruleset) {
		n := &nat{ruleset: rs, site: s,
			pre: rs.chain("prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest),
			post: rs.chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting,
				*nftables.ChainPriorityNATSource),
			forward: rs.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter),
			input:   rs.chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityFilter),
		}
		// What nobody inside asked for must end before conntrack confirms it: a confirmed entry would
		// hold the very tuple that a host punching towards this sender is about to need.
		rs.add(n.input, from(wanLink), notProto(unix.IPPROTO_ICMP), drop())
		n.onlyProtocols()

		switch {
		case s.NAT == OneToOne:
			n.oneToOne(clients)
		case s.NAT.cone():
			for _, c := range clients {
				n.cone(c)
			}
			if s.Hairpin {
				n.hairpin(clients)
			}
		case s.NAT == Symmetric:
			rs.add(n.post, out(wanLink), proto(unix.IPPROTO_UDP), rule{&expr.Masq{Random: true, FullyRandom: true}})
		case s.NAT == SymmetricSequential:
			n.sequential()
		case s.NAT == UDPBlocked:
			rs.add(n.forward, from(wanLink), proto(unix.IPPROTO_UDP), drop())
			rs.add(n.forward, out(wanLink), proto(unix.IPPROTO_UDP), drop())
		default:
			rs.err = fmt.Errorf("NAT kind %q is not known", s.NAT)
		}
		rs.add(n.post, out(wanLink), rule{&expr.Masq{}})
	})
}

// nat is a router's table while it is put together.
type nat struct {
	*ruleset
	site                      Site
	pre, post, forward, input *nftables.Chain
}

func (n *nat) oneToOne(clients []client) {
	for _, c := range clients {
		if !n.site.Hairpin { // else the core sends it back
			n.add(n.forward, from(lanLink), dest(c.outside), drop())
		}
		n.add(n.pre, from(wanLink), dest(c.outside), rule{immediate(reg1, c.addr),
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1}})
		n.add(n.post, out(wanLink), source(c.addr), rule{immediate(reg1, c.outside),
			&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1}})
	}
}

// Ports of a sequential NAT. After its mappings are forgotten it goes on elsewhere, as a NAT that has
// other users would.
const (
	sequentialFirst = 20000
	sequentialPorts = 40000
	sequentialSkip  = 1013 // per generation
)

// sequential maps each new flow to the port after the last one's. A port range without random would do
// on old kernels; newer ones search a range from a random place.
func (n *nat) sequential() {
	first := uint32(sequentialFirst + n.site.Generation*sequentialSkip%(65536-sequentialFirst-sequentialPorts))
	n.add(n.post, out(wanLink), proto(unix.IPPROTO_UDP), rule{
		immediate(reg1, n.site.Outside),
		&expr.Numgen{Register: reg2, Modulus: sequentialPorts, Type: unix.NFT_NG_INCREMENTAL, Offset: first},
		// A number in the host's order (its low half comes first on all that Go's Linux ports of note run on).
		&expr.Byteorder{SourceRegister: reg2, DestRegister: reg2, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1, RegProtoMin: reg2,
			Specified: true},
	})
}

// filtering is what a kind lets in at a mapped port.
func (n *nat) filtering() NAT {
	if n.site.NAT == Double { // the carrier in front of it has its own
		return PortRestrictedCone
	}
	return n.site.NAT
}

func (n *nat) key(c client) uint16 {
	return portKey(c.index+n.site.Generation*MaxHosts*2, n.site.outer)
}

// known is the set in which a cone remembers whom a client has sent to, and how a packet going out and
// one coming in are looked up in it: by public port (full cone), and remote address (restricted cone).
func (n *nat) known(c client) (set *nftables.Set, outKey, inKey rule) {
	set = &nftables.Set{Name: fmt.Sprintf("c%d", c.index), KeyType: nftables.TypeInetService, Dynamic: true,
		HasTimeout: true, Size: 65535}
	outKey = rule{transport(offsetSport, 2, slot0), xor16(slot0, n.key(c))}
	inKey = rule{transport(offsetDport, 2, slot0)}
	if n.filtering() == RestrictedCone {
		set.KeyType, set.Concatenation = nftables.MustConcatSetType(nftables.TypeInetService, nftables.TypeIPAddr), true
		outKey = append(outKey, header(offsetDst4, 4, slot1))
		inKey = append(inKey, header(offsetSrc4, 4, slot1))
	}
	return set, outKey, inKey
}

// cone installs one client's UDP mapping. Going out, the source port becomes port ^ key, and what the
// filtering behaviour has to remember goes into a set. Coming in, what the set knows is translated back.
// A port-restricted cone remembers nothing more than conntrack does.
func (n *nat) cone(c client) {
	n.add(n.post, out(wanLink), source(c.addr), proto(unix.IPPROTO_UDP), n.outwards(c))
	if n.filtering() == PortRestrictedCone {
		return
	}
	known, outKey, inKey := n.known(c)
	n.set(known)
	n.add(n.forward, out(wanLink), source(c.addr), proto(unix.IPPROTO_UDP), outKey, remember(known))
	n.add(n.pre, from(wanLink), proto(unix.IPPROTO_UDP), inKey, lookup(known), n.inwards(c))
}

// outwards rewrites a client's source to its mapping.
func (n *nat) outwards(c client) rule {
	return rule{
		immediate(reg1, n.site.Outside),
		transport(offsetSport, 2, reg2), xor16(reg2, n.key(c)),
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1, RegProtoMin: reg2,
			Specified: true},
	}
}

// inwards rewrites a mapping to the client.
func (n *nat) inwards(c client) rule {
	return rule{
		immediate(reg1, c.addr),
		transport(offsetDport, 2, reg2), xor16(reg2, n.key(c)),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1, RegProtoMin: reg2, Specified: true},
	}
}

func remember(set *nftables.Set) rule {
	return rule{&expr.Dynset{SrcRegKey: slot0, SetName: set.Name, SetID: set.ID,
		Operation: uint32(unix.NFT_DYNSET_OP_UPDATE), Timeout: mappingLifetime}}
}

func lookup(set *nftables.Set) rule {
	return rule{&expr.Lookup{SourceRegister: slot0, SetName: set.Name, SetID: set.ID}}
}

// hairpinMark marks what was turned round on its way in, for its way out again.
const hairpinMark = 1

// hairpin turns round what clients send to the NAT's own address: source and destination are both
// translated (RFC 4787, REQ-9), and the filtering is that of any other sender.
func (n *nat) hairpin(clients []client) {
	seen := n.chain("hairpin", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, *nftables.ChainPriorityMangle)
	inside := func(c client) rule {
		return match(from(lanLink), source(c.addr), dest(n.site.Outside), proto(unix.IPPROTO_UDP))
	}
	for _, to := range clients {
		known, outKey, inKey := n.known(to)
		if n.filtering() == PortRestrictedCone {
			known.Name = fmt.Sprintf("p%d", to.index)
			known.KeyType, known.Concatenation = nftables.MustConcatSetType(nftables.TypeInetService,
				nftables.TypeInetService), true
			n.set(known)
			outKey = append(outKey, transport(offsetDport, 2, slot1))
		}
		n.add(seen, inside(to), outKey, remember(known))
		for _, by := range clients {
			switch n.filtering() {
			case PortRestrictedCone:
				inKey = rule{transport(offsetDport, 2, slot0), transport(offsetSport, 2, slot1), xor16(slot1, n.key(by))}
			case RestrictedCone:
				inKey = rule{transport(offsetDport, 2, slot0), immediate(slot1, n.site.Outside)}
			}
			n.add(n.pre, inside(by), inKey, lookup(known), rule{
				&expr.Immediate{Register: reg1, Data: binary.NativeEndian.AppendUint32(nil, hairpinMark)},
				&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg1},
			}, n.inwards(to))
		}
		n.add(n.post, out(lanLink), source(to.addr), proto(unix.IPPROTO_UDP), rule{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg1}, equal(binary.NativeEndian.AppendUint32(nil, hairpinMark)),
		}, n.outwards(to))
	}
	n.add(n.input, from(lanLink), dest(n.site.Outside), proto(unix.IPPROTO_UDP), drop()) // as above
}

// firewall6 guards a site's IPv6: nothing is translated, but where the IPv4 side is not open either
// only answers come in, and a site that blocks UDP blocks it here too.
func firewall6(router string, s Site) error {
	open := s.NAT == None || s.NAT == OneToOne || s.NAT == FullCone
	return replaceRuleset(router, nftables.TableFamilyIPv6, natTable, func(rs *ruleset) {
		if open {
			return
		}
		forward := rs.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter)
		if s.NAT == UDPBlocked {
			rs.add(forward, from(wanLink), proto(unix.IPPROTO_UDP), drop())
			rs.add(forward, out(wanLink), proto(unix.IPPROTO_UDP), drop())
		}
		rs.add(forward, from(wanLink), notProto(unix.IPPROTO_ICMPV6), isNew(), drop())
	})
}
