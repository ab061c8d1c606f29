package fabric

import (
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The chains of hostTable about what a host passes on.
const (
	forwardChain = "forward"
	passedChain  = "passed"
)

// ForwardDrop tells a host which of the packets that it passes on it drops: those to which all of it applies.
type ForwardDrop struct {
	New   bool         // that begin a flow, as the host's conntrack sees it
	Above int          // that are longer than this, in bytes with the IP header; 0: of any length
	To    []netip.Addr // that are for one of these; none: for anybody
}

// matches is a rule for each address, or one.
func (d ForwardDrop) matches() []rule {
	var common rule
	if d.New {
		common = append(common, isNew()...)
	}
	common = append(common, Drop{Above: d.Above}.matches()...)
	if len(d.To) == 0 {
		return []rule{common}
	}
	var out []rule
	for _, a := range d.To {
		out = append(out, match(isFor(a), common))
	}
	return out
}

// isFor matches the destination, in a table of both families.
func isFor(a netip.Addr) rule {
	if a.Is4() {
		return match(family(unix.NFPROTO_IPV4), dest(a))
	}
	return match(family(unix.NFPROTO_IPV6), rule{header(offsetDst6, 16, reg1), equal(a.AsSlice())})
}

// TrackForwarded lets a host's conntrack take down which flows it passes on, so that a later drop of new ones spares
// those. It tracks until the host's drops are set to none.
func TrackForwarded(lab, host string) error {
	err := inRuleset(HostNS(lab, host), nftables.TableFamilyINet, hostTable, func(rs *ruleset) {
		rs.add(forward(rs), isNew(), rule{&expr.Counter{}})
	})
	if err != nil {
		return fmt.Errorf("flows that node %s passes on: %w", host, err)
	}
	return nil
}

// SetForwardDrops replaces all that a host drops of what it passes on from one of the links to one of them, in one
// transaction. What is for the host itself, and what it sends, is not touched.
func SetForwardDrops(lab, host string, links []string, drops []ForwardDrop) error {
	err := inRuleset(HostNS(lab, host), nftables.TableFamilyINet, hostTable, func(rs *ruleset) {
		base := forward(rs)
		passed := rs.conn.AddChain(&nftables.Chain{Name: passedChain, Table: rs.table})
		rs.conn.FlushChain(base)
		rs.conn.FlushChain(passed)
		if len(drops) == 0 {
			return
		}
		for _, in := range links {
			for _, to := range links {
				rs.add(base, from(in), out(to), rule{&expr.Verdict{Kind: expr.VerdictJump, Chain: passedChain}})
			}
		}
		for _, d := range drops {
			for _, only := range d.matches() {
				rs.add(passed, only, drop())
			}
		}
	})
	if err != nil {
		return fmt.Errorf("what node %s passes on: %w", host, err)
	}
	return nil
}

func forward(rs *ruleset) *nftables.Chain {
	return rs.chain(forwardChain, nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter)
}
