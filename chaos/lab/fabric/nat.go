package fabric

import (
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
func portKey(indexInSite int) uint16 { return uint16(indexInSite*0x3c6f) & 0x7fff }

// translate installs a site's NAT in its router.
func translate(router string, s Site, hosts []Host) error {
	if s.LAN6.IsValid() {
		if err := firewall6(router, s); err != nil {
			return err
		}
	}
	if s.NAT == None {
		return nil
	}
	return inRuleset(router, nftables.TableFamilyIPv4, "sknat", func(rs *ruleset) {
		pre := rs.chain("prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest)
		post := rs.chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource)
		forward := rs.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter)
		input := rs.chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, *nftables.ChainPriorityFilter)
		// What nobody inside asked for must end before conntrack confirms it: a confirmed entry would
		// hold the very tuple that a host punching towards this sender is about to need.
		rs.add(input, from(wanLink), notProto(unix.IPPROTO_ICMP), drop())

		switch {
		case s.NAT == OneToOne:
			for _, h := range hosts {
				rs.add(pre, from(wanLink), dest(h.Public), dnat(h))
				rs.add(post, out(wanLink), source(h.Addr), rule{immediate(reg1, h.Public),
					&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1}})
			}
		case s.NAT.cone():
			for i, h := range hosts {
				cone(rs, s.NAT, h, portKey(i), pre, post, forward)
			}
		case s.NAT == Symmetric:
			rs.add(post, out(wanLink), proto(unix.IPPROTO_UDP), rule{&expr.Masq{Random: true, FullyRandom: true}})
		case s.NAT == UDPBlocked:
			rs.add(forward, from(wanLink), proto(unix.IPPROTO_UDP), drop())
			rs.add(forward, out(wanLink), proto(unix.IPPROTO_UDP), drop())
		default:
			rs.err = fmt.Errorf("NAT kind %q is not known", s.NAT)
		}
		rs.add(post, out(wanLink), rule{&expr.Masq{}})
	})
}

func dnat(h Host) rule {
	return rule{immediate(reg1, h.Addr), &expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1}}
}

// cone installs one host's UDP mapping. Going out, the source port becomes port ^ key, and what the
// filtering behaviour has to remember goes into a set: the public port (full cone), or the public port
// with the remote address (restricted cone). Coming in, what the set knows is translated back. A
// port-restricted cone remembers nothing more than conntrack does.
func cone(rs *ruleset, kind NAT, h Host, key uint16, pre, post, forward *nftables.Chain) {
	rs.add(post, out(wanLink), source(h.Addr), proto(unix.IPPROTO_UDP), rule{
		immediate(reg1, h.Public),
		transport(offsetSport, 2, reg2), xor16(reg2, key),
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1, RegProtoMin: reg2},
	})
	if kind == PortRestrictedCone {
		return
	}
	known := &nftables.Set{Name: fmt.Sprintf("h%d", h.Number), KeyType: nftables.TypeInetService, Dynamic: true, HasTimeout: true, Size: 65535}
	outKey := rule{transport(offsetSport, 2, slot0), xor16(slot0, key)}
	inKey := rule{transport(offsetDport, 2, slot0)}
	if kind == RestrictedCone {
		known.KeyType, known.Concatenation = nftables.MustConcatSetType(nftables.TypeInetService, nftables.TypeIPAddr), true
		outKey = append(outKey, header(offsetDst4, 4, slot1))
		inKey = append(inKey, header(offsetSrc4, 4, slot1))
	}
	rs.set(known)
	rs.add(forward, out(wanLink), source(h.Addr), proto(unix.IPPROTO_UDP), outKey, rule{
		&expr.Dynset{SrcRegKey: slot0, SetName: known.Name, SetID: known.ID, Operation: uint32(unix.NFT_DYNSET_OP_UPDATE), Timeout: mappingLifetime},
	})
	rs.add(pre, from(wanLink), proto(unix.IPPROTO_UDP), inKey, rule{
		&expr.Lookup{SourceRegister: slot0, SetName: known.Name, SetID: known.ID},
		immediate(reg1, h.Addr),
		transport(offsetDport, 2, reg2), xor16(reg2, key),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg1, RegProtoMin: reg2},
	})
}

// firewall6 guards a site's IPv6: nothing is translated, but where the IPv4 side is not open either
// only answers come in, and a site that blocks UDP blocks it here too.
func firewall6(router string, s Site) error {
	if s.NAT == None || s.NAT == OneToOne || s.NAT == FullCone {
		return nil
	}
	return inRuleset(router, nftables.TableFamilyIPv6, "sknat", func(rs *ruleset) {
		forward := rs.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter)
		if s.NAT == UDPBlocked {
			rs.add(forward, from(wanLink), proto(unix.IPPROTO_UDP), drop())
			rs.add(forward, out(wanLink), proto(unix.IPPROTO_UDP), drop())
		}
		rs.add(forward, from(wanLink), notProto(unix.IPPROTO_ICMPV6), isNew(), drop())
	})
}
