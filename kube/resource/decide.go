package resource

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// Decision is what to do about a resource now.
type Decision struct {
	Command   *skeinv1.Command // to be given; nil: none
	Condition Condition        // what holds when there is no command, or until it was answered
	Finalize  bool             // put the finalizer on, before anything else
	Release   bool             // the finalizer can go: the log has let go
	Observed  int64            // the generation that has been taken to the log
}

// requestID names the intent, so that two nodes that have it at once do it once.
func requestID(m Meta, what string) string {
	return fmt.Sprintf("kube-%s-%d-%s", m.UID, m.Generation, what)
}

func applied() Condition {
	return Condition{Type: Synced, True: true, Reason: ReasonApplied, Message: "the log matches this resource"}
}

func differs(reason, format string, args ...any) Condition {
	return Condition{Type: Synced, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

var pending = Condition{Type: Synced, Reason: ReasonPending, Message: "the log has not answered yet"}

// Refused is the condition after the log has refused a command.
func Refused(m Meta, err error) Condition {
	reason := ReasonRefused
	if m.Deleting {
		reason = ReasonInUse
	}
	return differs(reason, "%s", err)
}

// Pool decides about an address pool.
func Pool(st *events.State, p AddressPool) Decision {
	have := st.Pool(p.Name)
	if p.Deleting {
		return deleting(
			p.Meta,
			p.Observed,
			have != nil,
			&skeinv1.Command{
				RequestId: requestID(p.Meta, "remove"),
				Body:      &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: p.Name}},
			},
		)
	}
	d := Decision{Observed: p.Observed, Finalize: !p.Finalized()}
	known := p.Observed == p.Generation
	want := p.wanted(have)
	switch {
	case have == nil && known:
		d.Condition = differs(ReasonRemoved,
			"pool %s was removed by a command since; change this resource to create it again, or delete it", p.Name)
	case have == nil:
		d.Condition = pending
		d.Command = &skeinv1.Command{
			RequestId: requestID(p.Meta, "create"),
			Body:      &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: want}},
		}
	default:
		add, fields, cannot := poolDiff(have, want)
		switch {
		case len(add) == 0 && len(fields) == 0 && cannot == "":
			d.Condition, d.Observed = applied(), p.Generation
		case known && cannot == "":
			d.Condition = differs(ReasonCommand,
				"a command has changed %s of pool %s since; change this resource to apply its values again",
				strings.Join(append(fields, addText(add)...), ", "), p.Name)
		case len(add) == 0 && len(fields) == 0 || known:
			d.Condition, d.Observed = differs(ReasonImmutable, "%s", cannot), p.Generation
		default:
			d.Condition = pending
			d.Command = &skeinv1.Command{
				RequestId: requestID(p.Meta, "change"),
				Body: &skeinv1.Command_ChangePool{
					ChangePool: &skeinv1.ChangePool{Name: p.Name, AddSubnets: add, Set: want, Fields: fields},
				},
			}
		}
	}
	return d
}

func addText(add []*skeinv1.PoolSubnet) []string {
	if len(add) == 0 {
		return nil
	}
	return []string{"subnets"}
}

func deleting(m Meta, observed int64, there bool, remove *skeinv1.Command) Decision {
	d := Decision{Observed: observed, Condition: pending}
	switch {
	case !m.Finalized():
	case !there:
		d.Release = true
	default:
		d.Command = remove
	}
	return d
}

// wanted is the pool as the resource wishes it, with the log's own values for what it leaves out.
func (p AddressPool) wanted(have *skeinv1.Pool) *skeinv1.Pool {
	w := &skeinv1.Pool{Name: p.Name, BlockSizeBits: defaultBlockBits}
	if have != nil {
		w = proto.CloneOf(have)
		w.Subnets = nil
	}
	for _, s := range p.Spec.Subnets {
		w.Subnets = append(w.Subnets, &skeinv1.PoolSubnet{Ipv4: prefix(s.IPv4), Ipv6: prefix(s.IPv6)})
	}
	set(&w.BlockSizeBits, p.Spec.BlockSizeBits)
	set(&w.Draining, p.Spec.Draining)
	set(&w.CooldownSeconds, p.Spec.CooldownSeconds)
	set(&w.StickySeconds, p.Spec.StickySeconds)
	set(&w.MaxBlocksPerNode, p.Spec.MaxBlocksPerNode)
	if p.Spec.Namespaces != nil {
		w.Namespaces = sortedCopy(p.Spec.Namespaces)
	}
	if p.Spec.Allowed != nil {
		w.Allowed = sortedCopy(p.Spec.Allowed)
	}
	if p.Spec.Quotas != nil {
		w.Quotas = p.Spec.Quotas
	}
	return w
}

// defaultBlockBits makes blocks of 32 addresses, as `skein pool create` does.
const defaultBlockBits = 5

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

// prefix and address write an address as the log does. What is none the log refuses.
func prefix(text string) string {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.String()
	}
	return text
}

func address(text string) string {
	if a, err := netip.ParseAddr(text); err == nil {
		return a.String()
	}
	return text
}

func sortedCopy(s []string) []string { return slices.Compact(slices.Sorted(slices.Values(s))) }

func sameSet(a, b []string) bool { return slices.Equal(sortedCopy(a), sortedCopy(b)) }

// poolDiff is what a pool lacks of what is wanted: subnets, and names of fields; and what of it cannot be had.
func poolDiff(have, want *skeinv1.Pool) (add []*skeinv1.PoolSubnet, fields []string, cannot string) {
	same := func(a, b *skeinv1.PoolSubnet) bool { return a.GetIpv4() == b.GetIpv4() && a.GetIpv6() == b.GetIpv6() }
	for _, w := range want.GetSubnets() {
		if !slices.ContainsFunc(have.GetSubnets(), func(h *skeinv1.PoolSubnet) bool { return same(h, w) }) {
			add = append(add, w)
		}
	}
	var problems []string
	for _, h := range have.GetSubnets() {
		if !slices.ContainsFunc(want.GetSubnets(), func(w *skeinv1.PoolSubnet) bool { return same(h, w) }) {
			problems = append(
				problems,
				fmt.Sprintf(
					"subnet %s is not taken out of pool %s: subnets can only be added; drain the pool and make another",
					strings.Trim(h.GetIpv4()+","+h.GetIpv6(), ","),
					have.GetName(),
				),
			)
		}
	}
	if have.GetBlockSizeBits() != want.GetBlockSizeBits() {
		problems = append(
			problems,
			fmt.Sprintf("blockSizeBits of pool %s stays %d: it cannot be changed", have.GetName(),
				have.GetBlockSizeBits()),
		)
	}
	for _, f := range []struct {
		name string
		same bool
	}{
		{"draining", have.GetDraining() == want.GetDraining()},
		{"cooldown_seconds", have.GetCooldownSeconds() == want.GetCooldownSeconds()},
		{"sticky_seconds", have.GetStickySeconds() == want.GetStickySeconds()},
		{"max_blocks_per_node", have.GetMaxBlocksPerNode() == want.GetMaxBlocksPerNode()},
		{"namespaces", sameSet(have.GetNamespaces(), want.GetNamespaces())},
		{"allowed", sameSet(have.GetAllowed(), want.GetAllowed())},
		{"quotas", maps.Equal(have.GetQuotas(), want.GetQuotas())},
	} {
		if !f.same {
			fields = append(fields, f.name)
		}
	}
	return add, fields, strings.Join(problems, "; ")
}
