package addresses

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	whoPatience = 3 * time.Second // for the node that has the block
	whoHistory  = 100             // lines
)

// Who tells who has an address, or had it, and which event says so. The log knows nodes, blocks and reserved addresses;
// the pod is known by the node that has the block, which is asked.
func (s AddressService) Who(ctx context.Context, r *skeinv1.WhoRequest) (*skeinv1.WhoResponse, error) {
	at, err := netip.ParseAddr(r.GetAddress())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is not an IP address", r.GetAddress()))
	}
	at = at.Unmap()
	st, err := s.Agent.StateThen(ctx, r.GetAtIndex(), r.GetAtTime())
	if err != nil {
		return nil, err
	}
	out := who(st, at)
	addTranslations(out, st, at, s.Agent.Records())
	out.AtIndex, out.AtTime = st.Index(), st.Time()
	var moment int64
	if r.GetAtIndex() != 0 {
		moment = st.Time()
	}
	if r.GetAtTime() != 0 {
		moment, out.AtTime = r.GetAtTime(), r.GetAtTime()
	}
	s.addEvents(ctx, out, at, st.Index())
	s.addPod(ctx, out, at, moment)
	return out, nil
}

// who is what the agreed state says of an address.
func who(st *events.State, at netip.Addr) *skeinv1.WhoResponse {
	out := &skeinv1.WhoResponse{Address: at.String(), Kind: "unknown", Says: "It lies in no pool and is not a member's"}
	text := at.String()
	for _, n := range st.Nodes() {
		if n.GetIpv4() == text || n.GetIpv6() == text {
			out.Kind, out.NodeId, out.Node = "node", n.GetId(), n.GetName()
			out.EventIndex, out.EventTime, out.Event = n.GetAdmittedIndex(), n.GetAdmittedAt(), "node_admitted"
			out.Says = fmt.Sprintf("It is the overlay address of node %s", n.GetName())
			return out
		}
	}
	for _, n := range st.RevokedNodes() {
		if n.GetNode().GetIpv4() == text || n.GetNode().GetIpv6() == text {
			out.Kind, out.NodeId, out.Node, out.EventTime = "node", n.GetNode().GetId(), n.GetNode().GetName(), n.GetRevokedAt()
			out.Event = "node_revoked"
			out.Says = fmt.Sprintf("It was the overlay address of node %s, which was revoked; nobody gets it again", out.Node)
			return out
		}
	}
	if p, network := st.PlainPeerAt(at); p != nil {
		out.Kind, out.EventIndex, out.EventTime, out.Event = "plain-peer", p.GetCreatedIndex(), p.GetCreatedAt(),
			"plain_peer_set"
		out.Says = fmt.Sprintf("It is the address of plain peer %s, which runs WireGuard and no skein", p.GetName())
		if !network.IsSingleIP() || network.Addr().String() != p.GetIpv4() && network.Addr().String() != p.GetIpv6() {
			out.Says = fmt.Sprintf("It lies in %s, a network behind plain peer %s, which runs WireGuard and no skein",
				network, p.GetName())
		}
		return out
	}
	if n, p := st.PodCIDRAt(at); n != nil {
		out.Kind, out.NodeId, out.Node = "pod-cidr", n.GetId(), n.GetName()
		out.Says = fmt.Sprintf(
			"It lies in %s, the pod CIDR of %s (Kubernetes Node %s), where another CNI gives the addresses",
			p, n.GetName(), n.GetPodCidrs().GetKubernetesNode())
		return out
	}
	pool, number, block := st.BlockAt(at)
	if pool == nil {
		return out
	}
	out.Pool, out.Block = pool.GetName(), block
	if use, ok := st.EgressAddressAt(at); ok {
		whoOfEgress(st, use, out)
		return out
	}
	if x := st.Static(pool.GetName(), at); x != nil {
		out.Kind, out.NodeId, out.EventIndex, out.EventTime = "static", x.GetNodeId(), x.GetIndex(), x.GetSince()
		out.Says = fmt.Sprintf("It is reserved for pod %s/%s; no node holds it", x.GetNamespace(), x.GetPod())
		out.Event = "address_reserved"
		if out.Node = api.NodeName(st, x.GetNodeId()); x.GetNodeId() != "" {
			out.Event = "address_claimed"
			out.Says = fmt.Sprintf("It is reserved for pod %s/%s; node %s holds it", x.GetNamespace(), x.GetPod(), out.Node)
		}
		return out
	}
	switch {
	case block.GetNodeId() != "":
		out.Kind, out.NodeId, out.Node, out.EventIndex, out.EventTime = "block", block.GetNodeId(),
			api.NodeName(st, block.GetNodeId()), block.GetIndex(), block.GetSince()
		out.Event = "block_allocated"
		out.Says = fmt.Sprintf("It lies in block %s of node %s, pool %s", blockText(block, out.Address),
			out.Node, pool.GetName())
	case block != nil:
		out.Kind, out.EventIndex, out.EventTime = "reserved", block.GetIndex(), block.GetSince()
		out.Event = "block_reserved"
		out.Says = fmt.Sprintf("It lies in block %s of pool %s, which is reserved: %s", blockText(block, out.Address),
			pool.GetName(), api.ReasonText(block.GetReason()))
	default:
		out.Kind, out.Says = "free", fmt.Sprintf("It lies in pool %s, in block %d, which nobody has", pool.GetName(), number)
		if i := slices.IndexFunc(st.Freed(pool.GetName()), func(f *skeinv1.FreedBlock) bool {
			return f.GetNumber() == number
		}); i >= 0 {
			f := st.Freed(pool.GetName())[i]
			out.Kind, out.EventIndex, out.EventTime, out.Event = "resting", f.GetIndex(), f.GetAt(), "block_released"
			out.Says = fmt.Sprintf("It lies in pool %s, in block %d, which was given back and waits its turn",
				pool.GetName(), number)
		}
	}
	return out
}

// whoOfEgress is what the agreed state says of an address of an egress: the owner of its slot has it.
func whoOfEgress(st *events.State, use events.EgressUse, out *skeinv1.WhoResponse) {
	what := "Tunnels lead to it: it is the endpoint"
	if use.Source {
		what = "Packets leave with it: it is the source address"
	}
	e, s := st.Egress(use.Namespace, use.Name), st.Slot(use.Namespace, use.Name, use.Slot)
	out.Kind = "egress"
	out.Says = fmt.Sprintf("%s of slot %d of egress %s/%s, which nobody owns", what, use.Slot, use.Namespace, use.Name)
	out.EventIndex, out.EventTime, out.Event = e.GetCreatedIndex(), e.GetCreatedAt(), "egress_defined"
	if s.GetEpoch() == 0 {
		return
	}
	out.EventIndex, out.EventTime, out.Event = s.GetEpoch(), s.GetSince(), "slot_released"
	if s.GetNodeId() == "" {
		return
	}
	out.NodeId, out.Node, out.Event = s.GetNodeId(), api.NodeName(st, s.GetNodeId()), "slot_assigned"
	if s.GetFromNodeId() != "" {
		out.Event = "slot_moved"
	}
	out.Says = fmt.Sprintf("%s of slot %d of egress %s/%s, which node %s owns", what, use.Slot, use.Namespace,
		use.Name, out.Node)
}

// blockText is the block's prefix of the address's family.
func blockText(b *skeinv1.Block, address string) string {
	if !strings.Contains(address, ":") {
		return b.GetIpv4()
	}
	return b.GetIpv6()
}

// addEvents adds what archives still have about the address.
func (s AddressService) addEvents(ctx context.Context, out *skeinv1.WhoResponse, at netip.Addr, last uint64) {
	st := s.Agent.State()
	_, number, _ := st.BlockAt(at)
	use, ofEgress := st.EgressAddressAt(at)
	_ = s.Agent.EachEvent(ctx, last, func(e *skeinv1.Event) {
		name, line := concerns(st, e, out, number)
		if name == "" && ofEgress {
			name, line = concernsEgress(st, e, use)
		}
		if name == "" {
			name, line = concernsTranslation(e, out.GetAddress())
		}
		if name == "" {
			return
		}
		if e.GetIndex() == out.EventIndex || out.Kind == "pod-cidr" && e.GetPodCidrsSet() != nil || out.EventIndex == 0 &&
			e.GetNodeRevoked() != nil {
			out.Event, out.EventIndex, out.EventTime = name, e.GetIndex(), e.GetTime()
		}
		if out.History = append(out.History, fmt.Sprintf("%s  event %d: %s",
			time.Unix(0, e.GetTime()).Format("2006-01-02 15:04:05"), e.GetIndex(), line)); len(out.History) > whoHistory {
			out.History = out.History[1:]
		}
	})
}

// concerns tells what an event did to an address: the event's name and a line; "" if it has nothing to do with it.
func concerns(st *events.State, e *skeinv1.Event, w *skeinv1.WhoResponse, number uint64) (name, line string) {
	text := w.GetAddress()
	mine := func(pool string, n uint64) bool { return w.GetPool() != "" && pool == w.GetPool() && n == number }
	static := func(pool, address string) bool {
		if pool != w.GetPool() || pool == "" {
			return false
		}
		if address == text {
			return true
		}
		x := st.Static(pool, netip.MustParseAddr(text))
		return x != nil && (address == x.GetIpv4() || address == x.GetIpv6())
	}
	field := e.ProtoReflect().WhichOneof(e.ProtoReflect().Descriptor().Oneofs().ByName("body"))
	if field == nil {
		return "", ""
	}
	name = string(field.Name())
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_NodeAdmitted:
		if n := b.NodeAdmitted.GetNode(); n.GetIpv4() == text || n.GetIpv6() == text {
			return name, "given to node " + n.GetName()
		}
	case *skeinv1.Event_NodeRevoked:
		if w.GetKind() == "node" && b.NodeRevoked.GetNodeId() == w.GetNodeId() {
			return name, "node " + w.GetNode() + " revoked"
		}
	case *skeinv1.Event_PodCidrsSet:
		c := b.PodCidrsSet
		if i := slices.IndexFunc(c.GetPodCidrs().GetCidrs(), func(p string) bool {
			return events.Covered(text+single(text), []string{p})
		}); i >= 0 {
			return name, fmt.Sprintf("%s became the pod CIDR of node %s", c.GetPodCidrs().GetCidrs()[i],
				api.NodeName(st, c.GetNodeId()))
		}
		if w.GetKind() == "pod-cidr" && c.GetNodeId() == w.GetNodeId() && c.GetPodCidrs() == nil {
			return name, "the pod CIDRs of node " + api.NodeName(st, c.GetNodeId()) + " ended"
		}
	case *skeinv1.Event_PlainPeerSet:
		p := b.PlainPeerSet.GetPlainPeer()
		if p.GetIpv4() == text || p.GetIpv6() == text || events.Covered(text+single(text), p.GetAllowedIps()) {
			return name, "given to plain peer " + p.GetName()
		}
	case *skeinv1.Event_PlainPeerRemoved:
		if p, _ := st.PlainPeerAt(netip.MustParseAddr(text)); p != nil && p.GetName() == b.PlainPeerRemoved.GetName() {
			return name, "plain peer " + p.GetName() + " removed: " + api.ReasonText(b.PlainPeerRemoved.GetReason())
		}
	case *skeinv1.Event_BlockAllocated:
		if k := b.BlockAllocated.GetBlock(); mine(k.GetPool(), k.GetNumber()) {
			return name, fmt.Sprintf("block %s given to node %s", blockText(k, text), api.NodeName(st, k.GetNodeId()))
		}
	case *skeinv1.Event_BlockReserved:
		if k := b.BlockReserved.GetBlock(); mine(k.GetPool(), k.GetNumber()) {
			return name, fmt.Sprintf("block %s reserved: %s", blockText(k, text), api.ReasonText(k.GetReason()))
		}
	case *skeinv1.Event_BlockReleased:
		if k := b.BlockReleased; mine(k.GetPool(), k.GetNumber()) {
			return name, "block given back: " + api.ReasonText(k.GetReason())
		}
	case *skeinv1.Event_AddressReserved:
		if x := b.AddressReserved.GetAddress(); x.GetIpv4() == text || x.GetIpv6() == text {
			return name, fmt.Sprintf("reserved for pod %s/%s", x.GetNamespace(), x.GetPod())
		}
	case *skeinv1.Event_AddressClaimed:
		if x := b.AddressClaimed; static(x.GetPool(), x.GetAddress()) {
			if x.GetNodeId() == "" {
				return name, "given up by its node"
			}
			return name, "held by node " + api.NodeName(st, x.GetNodeId())
		}
	case *skeinv1.Event_AddressReleased:
		if x := b.AddressReleased; static(x.GetPool(), x.GetAddress()) {
			return name, "no longer reserved"
		}
	}
	return "", ""
}

// single is the prefix length of one address.
func single(address string) string {
	if strings.Contains(address, ":") {
		return "/128"
	}
	return "/32"
}

// concernsEgress tells what an event did to the slot of an egress that an address belongs to.
func concernsEgress(st *events.State, e *skeinv1.Event, use events.EgressUse) (name, line string) {
	slot := func(s *skeinv1.EgressSlot) bool {
		return s.GetNamespace() == use.Namespace && s.GetName() == use.Name && s.GetNumber() == use.Slot
	}
	egress := func(x *skeinv1.Egress) bool { return x.GetNamespace() == use.Namespace && x.GetName() == use.Name }
	of := fmt.Sprintf("slot %d of egress %s/%s", use.Slot, use.Namespace, use.Name)
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_EgressDefined:
		if egress(b.EgressDefined.GetEgress()) {
			return "egress_defined", fmt.Sprintf("egress %s/%s defined", use.Namespace, use.Name)
		}
	case *skeinv1.Event_EgressChanged:
		if egress(b.EgressChanged.GetEgress()) {
			return "egress_changed", fmt.Sprintf("egress %s/%s changed: %s", use.Namespace, use.Name,
				b.EgressChanged.GetChange())
		}
	case *skeinv1.Event_SlotAssigned:
		if s := b.SlotAssigned.GetSlot(); slot(s) {
			return "slot_assigned", fmt.Sprintf("%s given to node %s: %s", of, api.NodeName(st, s.GetNodeId()),
				api.ReasonText(s.GetReason()))
		}
	case *skeinv1.Event_SlotMoved:
		if s := b.SlotMoved.GetSlot(); slot(s) {
			return "slot_moved", fmt.Sprintf("%s moved from node %s to %s: %s", of, api.NodeName(st, s.GetFromNodeId()),
				api.NodeName(st, s.GetNodeId()), api.ReasonText(s.GetReason()))
		}
	case *skeinv1.Event_SlotReleased:
		if s := b.SlotReleased.GetSlot(); slot(s) {
			return "slot_released", fmt.Sprintf("%s taken from node %s: %s", of, api.NodeName(st, s.GetFromNodeId()),
				api.ReasonText(s.GetReason()))
		}
	}
	return "", ""
}

// addPod asks the node that has the block which pod has the address.
func (s AddressService) addPod(ctx context.Context, out *skeinv1.WhoResponse, at netip.Addr, moment int64) {
	id, err := identity.ParseID(out.GetNodeId())
	if out.GetKind() != "block" && out.GetKind() != "static" || err != nil {
		return
	}
	q := &skeinv1.HolderRequest{Address: at.String(), At: moment}
	var r *skeinv1.HolderResponse
	if id == s.Agent.Self() {
		r, err = s.HolderOf(q)
	} else {
		ctx, cancel := context.WithTimeout(ctx, whoPatience)
		defer cancel()
		r, err = s.Ask(ctx, id, q)
	}
	if err != nil {
		var c *connect.Error
		if errors.As(err, &c) {
			err = errors.New(c.Message())
		}
		out.PodUnknown = fmt.Sprintf("node %s did not report it: %v", out.GetNode(), err)
		return
	}
	for _, h := range r.GetHolders() {
		if moment != 0 || h.GetUntil() == 0 {
			out.Pod = h
		}
		if moment == 0 {
			out.History = append(out.History, holderLine(out.GetNode(), h))
		}
	}
}

func holderLine(node string, h *skeinv1.Holder) string {
	until := ""
	if h.GetUntil() != 0 {
		until = ", until " + time.Unix(0, h.GetUntil()).Format("2006-01-02 15:04:05")
	}
	return fmt.Sprintf("%s  node %s: pod %s%s", time.Unix(0, h.GetSince()).Format("2006-01-02 15:04:05"), node,
		podText(h), until)
}

func podText(h *skeinv1.Holder) string {
	switch {
	case h.GetPod() != "":
		return h.GetNamespace() + "/" + h.GetPod()
	case h.GetContainerId() != "":
		return "of container " + h.GetContainerId()
	}
	return "that somebody else made"
}

// HolderOf tells which of this node's pods has, or had, an address: what is in use now, and what the journal remembers.
func (s AddressService) HolderOf(r *skeinv1.HolderRequest) (*skeinv1.HolderResponse, error) {
	at, err := netip.ParseAddr(r.GetAddress())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%.60q is not an IP address", r.GetAddress()))
	}
	if s.Host == nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this node only relays and has no pods"))
	}
	entries, err := s.Journal.Read(time.Time{}, time.Time{}, func(e *skeinv1.JournalEntry) bool {
		p := e.GetPodAddress()
		return p != nil && (p.GetIpv4() == at.String() || p.GetIpv6() == at.String())
	})
	if err != nil {
		return nil, api.Error(err)
	}
	all := holders(entries, s.Host.Holders(at))
	if r.GetAt() == 0 {
		return &skeinv1.HolderResponse{Holders: all}, nil
	}
	out := &skeinv1.HolderResponse{}
	for _, h := range all {
		if h.GetSince() <= r.GetAt() && (h.GetUntil() == 0 || r.GetAt() < h.GetUntil()) {
			out.Holders = []*skeinv1.Holder{h}
		}
	}
	return out, nil
}

// holders puts what the journal tells and what is held now together, oldest first.
func holders(entries []*skeinv1.JournalEntry, now []ipam.Lease) []*skeinv1.Holder {
	var out []*skeinv1.Holder
	open := func(p *skeinv1.PodAddress) *skeinv1.Holder {
		for _, h := range slices.Backward(out) {
			if h.GetUntil() == 0 && h.GetContainerId() == p.GetContainerId() && h.GetInterface() == p.GetInterface() {
				return h
			}
		}
		return nil
	}
	for _, e := range entries {
		p := e.GetPodAddress()
		switch h := open(p); p.GetWhat() {
		case "given", "adopted":
			if h == nil {
				state := map[string]string{"given": "used", "adopted": "adopted"}[p.GetWhat()]
				out = append(out, &skeinv1.Holder{Namespace: p.GetNamespace(), Pod: p.GetPod(), ContainerId: p.GetContainerId(),
					Interface: p.GetInterface(),
					Ipv4:      p.GetIpv4(), Ipv6: p.GetIpv6(), Since: e.GetTime(), State: state})
			}
		case "taken-back", "leaked":
			if h != nil {
				h.Until, h.State = e.GetTime(), "resting"
			}
		}
	}
	for _, l := range now {
		h := holderOf(l)
		same := func(o *skeinv1.Holder) bool {
			return o.GetContainerId() == h.GetContainerId() && o.GetInterface() == h.GetInterface() &&
				(o.GetUntil() == 0 || h.GetUntil() != 0)
		}
		if i := slices.IndexFunc(out, same); i >= 0 {
			proto.Merge(out[i], &skeinv1.Holder{State: h.GetState(), Until: h.GetUntil()})
			continue
		}
		out = append(out, h)
	}
	slices.SortStableFunc(out, func(x, y *skeinv1.Holder) int { return int(min(max(x.GetSince()-y.GetSince(), -1), 1)) })
	return out
}

func holderOf(l ipam.Lease) *skeinv1.Holder {
	h := &skeinv1.Holder{Namespace: l.Namespace, Pod: l.Pod, ContainerId: l.Key.ContainerID, Interface: l.Key.Interface,
		Since: l.Since.UnixNano(), State: "used"}
	if l.IPv4.IsValid() {
		h.Ipv4 = l.IPv4.String()
	}
	if l.IPv6.IsValid() {
		h.Ipv6 = l.IPv6.String()
	}
	if l.Adopted {
		h.State = "adopted"
	}
	if !l.Until.IsZero() {
		h.Until, h.State = l.Until.UnixNano(), "resting"
	}
	return h
}

// Pods lists the pods of this host that have addresses. It may have the kernel read anew first.
func (s AddressService) Pods(_ context.Context, r *skeinv1.PodsRequest) (*skeinv1.PodsResponse, error) {
	out := &skeinv1.PodsResponse{}
	if s.Host == nil {
		return out, nil
	}
	if r.GetLook() {
		s.Host.Look()
	}
	for _, l := range s.Host.Leases() {
		out.Pods = append(out.Pods, &skeinv1.PodView{Holder: holderOf(l), Pool: l.Pool, HostInterface: cniserver.LinkOf(l),
			Netns: l.NetNS})
	}
	return out, nil
}
