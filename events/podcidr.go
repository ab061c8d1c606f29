package events

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Bounds of the networks that another CNI runs pods in. Fold rests on none of them.
const (
	MaxPodRanges = 16
	MaxPodCIDRs  = 8 // of a node
)

// podCIDRSchema is the schema that brought pod CIDRs.
const podCIDRSchema = 5

// podNet is a network of a node's pods, which another CNI runs.
type podNet struct {
	prefix netip.Prefix
	node   string // its ID
}

// podNetOverlapping is a node's network that overlaps the prefix, other than one of the node except.
func (s *State) podNetOverlapping(p netip.Prefix, except string) (podNet, bool) {
	for _, n := range s.podNets {
		if n.node != except && n.prefix.Overlaps(p) {
			return n, true
		}
	}
	return podNet{}, false
}

// PodCIDRAt is the node whose pods have an address by another CNI, and the network; nil: no node.
func (s *State) PodCIDRAt(a netip.Addr) (*skeinv1.Node, netip.Prefix) {
	a = a.Unmap()
	n, ok := s.podNetOverlapping(netip.PrefixFrom(a, a.BitLen()), "")
	if !ok {
		return nil, netip.Prefix{}
	}
	return find(&s.nodes, n.node), n.prefix
}

// readPodCIDRs reads networks, which must be in their one form, sorted, and apart from each other.
func readPodCIDRs(c *skeinv1.PodCidrs) ([]netip.Prefix, bool) {
	var out []netip.Prefix
	for i, text := range c.GetCidrs() {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.String() != text || i > 0 && c.GetCidrs()[i-1] >= text ||
			slices.ContainsFunc(out, p.Overlaps) {
			return nil, false
		}
		out = append(out, p)
	}
	return out, len(out) > 0 && c.GetKubernetesNode() != ""
}

// setPodCIDRs folds a node's networks, unless somebody else has an address in them; it reports whether it did.
func (s *State) setPodCIDRs(id string, c *skeinv1.PodCidrs) bool {
	old := find(&s.nodes, id)
	if old == nil {
		return false
	}
	var prefixes []netip.Prefix
	if c != nil {
		var ok bool
		if prefixes, ok = readPodCIDRs(c); !ok || !s.podCIDRsApart(id, prefixes) {
			return false
		}
	}
	n := copyNode(old)
	n.PodCidrs = c
	s.replace(n)
	s.sizes.drop(sectionNodes, old)
	s.sizes.add(sectionNodes, n)
	s.dropPodNets(id)
	nets := slices.Clone(s.podNets)
	for _, p := range prefixes {
		nets = append(nets, podNet{p, id})
	}
	slices.SortFunc(nets, func(x, y podNet) int { return x.prefix.Addr().Compare(y.prefix.Addr()) })
	s.podNets = nets
	return true
}

func (s *State) podCIDRsApart(id string, prefixes []netip.Prefix) bool {
	for _, p := range prefixes {
		_, pods := s.podNetOverlapping(p, id)
		_, pool := s.overlap(p)
		_, plain := s.plainNetOverlapping(p, "")
		_, translated := s.translationOver(p, false)
		if pods || pool || plain || translated || slices.ContainsFunc(s.overlays(), p.Overlaps) {
			return false
		}
	}
	return true
}

func (s *State) dropPodNets(id string) {
	s.podNets = slices.DeleteFunc(slices.Clone(s.podNets), func(n podNet) bool { return n.node == id })
}

// loadPodCIDRs takes the networks that a snapshot's nodes have.
func (s *State) loadPodCIDRs(p *skeinv1.State) error {
	for _, n := range p.GetNodes() {
		if n.GetPodCidrs() != nil && !s.setPodCIDRs(n.GetId(), n.GetPodCidrs()) {
			return fmt.Errorf("node %q (%q): its pods' networks are malformed or belong to another", n.GetId(), n.GetName())
		}
	}
	return nil
}

// checkPodRanges bounds the setting.
func checkPodRanges(ranges []string) error {
	if len(ranges) > MaxPodRanges {
		return refuse(InvalidArgument, "setting pod_ranges: %d ranges are too many; use up to %d", len(ranges), MaxPodRanges)
	}
	for _, text := range ranges {
		if _, err := readPodPrefix("setting pod_ranges", text); err != nil {
			return err
		}
	}
	return nil
}

func readPodPrefix(what, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil || p.Addr().Is4In6() || p.Addr().Zone() != "":
		return p, refuse(InvalidArgument, "%s: %.80q is not a prefix; write one like 10.244.0.0/16", what, text)
	case p != p.Masked():
		return p, refuse(InvalidArgument, "%s: %s has host bits set; write %s", what, p, p.Masked())
	}
	for _, u := range unusable {
		if p.Overlaps(netip.MustParsePrefix(u.prefix)) {
			return p, refuse(InvalidArgument, "%s: %s overlaps %s (%s); no pod has an address there", what, p, u.prefix, u.why)
		}
	}
	return p, nil
}

// plainPrefixes are prefixes in their one form and order, each once.
func plainPrefixes(in []string) []string {
	var out []string
	for _, text := range in {
		if p, err := netip.ParsePrefix(text); err == nil {
			text = p.String()
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// checkPodRangesKnown refuses the setting while a server could not fold what follows from it.
func (d *decision) checkPodRangesKnown(next *skeinv1.Settings) error {
	behind := d.s.Holdbacks(podCIDRSchema)
	if len(next.GetPodRanges()) == 0 || len(behind) == 0 {
		return nil
	}
	n := behind[0]
	return refuse(FailedPrecondition, "server %s folds event schemas up to %d and pod ranges need %d: upgrade skein on "+
		"%s first",
		n.GetName(), n.GetMaxSchema(), podCIDRSchema, n.GetName())
}

// dropPodCIDRsOutside ends the networks of nodes that are outside of the ranges.
func (d *decision) dropPodCIDRsOutside(ranges []string) {
	for n := range d.s.nodes.all() {
		have := n.GetPodCidrs()
		if have == nil {
			continue
		}
		inside := slices.DeleteFunc(slices.Clone(have.GetCidrs()), func(c string) bool { return !Covered(c, ranges) })
		switch {
		case len(inside) == 0:
			d.emitPodCIDRs(n.GetId(), nil)
		case len(inside) < len(have.GetCidrs()):
			d.emitPodCIDRs(n.GetId(), &skeinv1.PodCidrs{KubernetesNode: have.GetKubernetesNode(), Cidrs: inside})
		}
	}
}

// Covered reports whether a prefix lies in one of the ranges.
func Covered(prefix string, ranges []string) bool {
	p, err := netip.ParsePrefix(prefix)
	return err == nil && slices.ContainsFunc(ranges, func(text string) bool {
		r, err := netip.ParsePrefix(text)
		return err == nil && r.Bits() <= p.Bits() && r.Contains(p.Addr())
	})
}

func (d *decision) emitPodCIDRs(id string, c *skeinv1.PodCidrs) {
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_PodCidrsSet{PodCidrsSet: &skeinv1.PodCidrsSet{NodeId: id, PodCidrs: c}}})
}

func (d *decision) setPodCIDRs(c *skeinv1.SetPodCidrs) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	want, err := d.readPodCIDRs(n, c.GetPodCidrs())
	if err != nil {
		return err
	}
	d.answer.Node = n
	if proto.Equal(want, n.GetPodCidrs()) {
		return nil
	}
	freed := d.formerOf(n, want)
	for _, text := range want.GetCidrs() {
		if err := d.checkPodCIDRFree(n, netip.MustParsePrefix(text), freed); err != nil {
			return err
		}
	}
	if freed != "" {
		d.emitPodCIDRs(freed, nil)
	}
	d.emitPodCIDRs(n.GetId(), want)
	next := copyNode(n)
	next.PodCidrs = want
	d.answer.Node = next
	return nil
}

// readPodCIDRs is what a command gives a node, checked and in its one form; nil: none.
func (d *decision) readPodCIDRs(n *skeinv1.Node, c *skeinv1.PodCidrs) (*skeinv1.PodCidrs, error) {
	if len(c.GetCidrs()) == 0 {
		return nil, nil
	}
	if err := checkKubeName("Kubernetes Node", c.GetKubernetesNode()); err != nil {
		return nil, err
	}
	out := &skeinv1.PodCidrs{KubernetesNode: c.GetKubernetesNode(), Cidrs: plainPrefixes(c.GetCidrs())}
	if len(out.GetCidrs()) > MaxPodCIDRs {
		return nil, refuse(InvalidArgument, "node %s: %d pod CIDRs are too many; at most %d are routed", n.GetName(),
			len(out.GetCidrs()), MaxPodCIDRs)
	}
	ranges := d.s.settings.get().GetPodRanges()
	var read []netip.Prefix
	for _, text := range out.GetCidrs() {
		p, err := readPodPrefix("pod CIDR of "+n.GetName(), text)
		switch {
		case err != nil:
			return nil, err
		case !Covered(text, ranges):
			return nil, refuse(FailedPrecondition, "pod CIDR %s of %s lies outside of the pod ranges (%s): widen them with "+
				"skein settings --pod-ranges",
				p, n.GetName(), orNone(ranges))
		case slices.ContainsFunc(read, p.Overlaps):
			return nil, refuse(InvalidArgument, "the pod CIDRs of %s (%s) overlap", n.GetName(),
				strings.Join(out.GetCidrs(), ", "))
		}
		read = append(read, p)
	}
	return out, nil
}

func orNone(ranges []string) string {
	if len(ranges) == 0 {
		return "there are none"
	}
	return strings.Join(ranges, ", ")
}

// formerOf is the ID of another member that had the networks of the same Kubernetes Node; a Node is one member's.
func (d *decision) formerOf(n *skeinv1.Node, want *skeinv1.PodCidrs) string {
	if want == nil {
		return ""
	}
	for _, p := range d.s.podNets {
		if o := find(&d.s.nodes, p.node); p.node != n.GetId() &&
			o.GetPodCidrs().GetKubernetesNode() == want.GetKubernetesNode() {
			return p.node
		}
	}
	return ""
}

// checkPodCIDRFree refuses a network in which somebody else has addresses; freed is a node that gives its own up.
func (d *decision) checkPodCIDRFree(n *skeinv1.Node, p netip.Prefix, freed string) error {
	for _, o := range d.s.podNets {
		if o.node != n.GetId() && o.node != freed && o.prefix.Overlaps(p) {
			return refuse(AlreadyExists, "pod CIDR %s of %s overlaps %s of %s: two Nodes must not have the same addresses", p,
				n.GetName(), o.prefix, d.s.called(o.node))
		}
	}
	if o, taken := d.s.overlap(p); taken {
		return refuse(AlreadyExists, "pod CIDR %s of %s overlaps %s of pool %s: have one of the two give out other addresses",
			p, n.GetName(), o.prefix, o.pool)
	}
	if o, taken := d.s.plainNetOverlapping(p, ""); taken {
		return refuse(AlreadyExists, "pod CIDR %s of %s overlaps %s behind plain peer %s: two must not have the same "+
			"addresses", p, n.GetName(), o.prefix, o.peer)
	}
	for _, o := range d.s.overlays() {
		if o.Overlaps(p) {
			return refuse(AlreadyExists, "pod CIDR %s of %s overlaps the overlay %s, where nodes have their addresses",
				p, n.GetName(), o)
		}
	}
	if err := d.s.checkNotTranslated("pod CIDR", p, false); err != nil {
		return err
	}
	return d.s.checkNoDestination("pod CIDR", []netip.Prefix{p})
}
