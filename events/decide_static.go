package events

import (
	"net/netip"
	"strings"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// StaticReason is the reason of a reserved block that was reserved for a static address. Such a block is
// given back with its last one.
const StaticReason = "static addresses"

// reserveAddress keeps an address for one pod and, if it must, reserves the block around it.
func (d *decision) reserveAddress(c *skeinv1.ReserveAddress) error {
	if err := checkPod(c.GetNamespace(), c.GetPod()); err != nil {
		return err
	}
	r, n, ipv4, ipv6, err := d.addressAt(c.GetPool(), c.GetAddress())
	if err != nil {
		return err
	}
	key := staticKey(ipv4, ipv6)
	if old, _ := r.statics.get(textKey(key), key); old != nil {
		if old.GetNamespace() != c.GetNamespace() || old.GetPod() != c.GetPod() {
			return refuse(AlreadyExists, "address %s of pool %s is kept for pod %s/%s: take another, or release it first", key,
				r.pool.GetName(), old.GetNamespace(), old.GetPod())
		}
		d.answer.Static = old
		return nil
	}
	if err := d.checkNoEgress(ipv4, ipv6); err != nil {
		return err
	}
	if r.pool.GetDraining() {
		return refuseDraining(r.pool)
	}
	if d.s.staticCount >= MaxStatics {
		return refuse(ResourceExhausted, "there are %d static addresses already, the most that are allowed: release some "+
			"with skein ip release", d.s.staticCount)
	}
	if have := d.s.StaticOf(c.GetNamespace(), c.GetPod()); len(have) >= MaxPodStatics {
		return refuse(ResourceExhausted, "pod %s/%s has %d static addresses already: release one first", c.GetNamespace(),
			c.GetPod(), len(have))
	}
	b, err := d.reserve(r, n, StaticReason)
	if err != nil {
		return err
	}
	if node, ok := importedFor(b); ok {
		return refuse(FailedPrecondition, "block %s of pool %s is kept for node %s, whose pods may have its addresses: "+
			"take an address of another block", blockName(b), b.GetPool(), node)
	}
	v := &skeinv1.StaticAddress{
		Pool: r.pool.GetName(), Ipv4: text(ipv4), Ipv6: text(ipv6), Namespace: c.GetNamespace(), Pod: c.GetPod(),
		Since: d.c.GetTime(), Index: d.nextIndex(),
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{Address: v}}})
	d.answer.Static = v
	return nil
}

// checkNoEgress refuses addresses that belong to an egress: no pod may have them.
func (d *decision) checkNoEgress(addrs ...netip.Addr) error {
	for _, a := range addrs {
		if use, taken := d.s.EgressAddressAt(a); taken {
			return refuse(AlreadyExists, "address %s is %s: take another", a, use)
		}
	}
	return nil
}

func checkPod(namespace, pod string) error {
	if err := checkKubeName("namespace", namespace); err != nil {
		return err
	}
	return checkKubeName("pod's name", pod)
}

// addressAt is the pair of addresses that one of them names, and its block. The pool may be left out.
func (d *decision) addressAt(pool, addr string) (r *poolState, n uint64, ipv4, ipv6 netip.Addr, err error) {
	a, perr := netip.ParseAddr(addr)
	if perr != nil || a.Zone() != "" {
		return nil, 0, ipv4, ipv6, refuse(InvalidArgument, "%.80q is not an address; write one like 10.64.0.5", addr)
	}
	a = a.Unmap()
	if r, err = d.poolAt(pool, a); err != nil {
		return nil, 0, ipv4, ipv6, err
	}
	n, offset, _ := r.layout.find(a)
	ipv4, ipv6 = r.layout.pair(n, offset)
	return r, n, ipv4, ipv6, nil
}

// claimAddress gives a static address to the node where its pod is, or takes it from there. A node that gives up
// what it does not hold has what it wants: its first answer may have been lost.
func (d *decision) claimAddress(c *skeinv1.ClaimAddress) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	r, _, ipv4, ipv6, err := d.addressAt(c.GetPool(), c.GetAddress())
	if err != nil {
		return err
	}
	key := staticKey(ipv4, ipv6)
	v, _ := r.statics.get(textKey(key), key)
	d.answer.Static = v
	if c.GetGiveUp() {
		if v.GetNodeId() == n.GetId() {
			d.answer.Static = d.emitClaimed(v, "")
		}
		return nil
	}
	if err := d.checkNoEgress(ipv4, ipv6); err != nil {
		return err
	}
	switch {
	case v == nil:
		return refuse(NotFound, "address %s of pool %s is kept for no pod: reserve it first with skein ip reserve", key,
			r.pool.GetName())
	case v.GetNamespace() != c.GetNamespace() || v.GetPod() != c.GetPod():
		return refuse(PermissionDenied, "address %s of pool %s is kept for pod %s/%s, not for %.253q/%.253q", key,
			r.pool.GetName(), v.GetNamespace(), v.GetPod(), c.GetNamespace(), c.GetPod())
	case v.GetNodeId() == n.GetId():
		return nil
	case v.GetNodeId() != "":
		return refuse(FailedPrecondition, "address %s of pool %s is held by node %s since %s: it comes free when the pod "+
			"there ends, or when that node is revoked",
			key, r.pool.GetName(), d.s.nameOf(v.GetNodeId()), when(v.GetSince()))
	case r.pool.GetDraining():
		return refuseDraining(r.pool)
	case d.s.staticCount >= MaxNodeStatics &&
		len(d.s.StaticsOf(n.GetId())) >= MaxNodeStatics: // the count alone is at hand
		return refuse(ResourceExhausted, "node %s holds %d static addresses, the most that a node may hold: move pods to "+
			"other nodes", n.GetName(), MaxNodeStatics)
	}
	d.answer.Static = d.emitClaimed(v, n.GetId())
	return nil
}

// releaseAddress ends a reservation, and that of its block if it was made for static addresses and this was
// the last one.
func (d *decision) releaseAddress(c *skeinv1.ReleaseAddress) error {
	r, n, ipv4, ipv6, err := d.addressAt(c.GetPool(), c.GetAddress())
	if err != nil {
		return err
	}
	key := staticKey(ipv4, ipv6)
	v, _ := r.statics.get(textKey(key), key)
	switch {
	case v == nil:
		return refuse(NotFound, "address %s of pool %s is kept for no pod", key, r.pool.GetName())
	case v.GetNodeId() != "" && !c.GetForce():
		return refuse(FailedPrecondition, "address %s of pool %s is held by node %s for pod %s/%s: end that pod first, or "+
			"repeat it with --force if the node is gone",
			key, r.pool.GetName(), d.s.nameOf(v.GetNodeId()), v.GetNamespace(), v.GetPod())
	case v.GetNodeId() != "":
		d.emitClaimed(v, "")
	}
	in, _ := r.staticsIn.get(n, "")
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_AddressReleased{AddressReleased: &skeinv1.AddressReleased{
		Pool: r.pool.GetName(), Address: key}}})
	if b := r.block(n); in == 1 && madeFor(b) && d.s.egressesIn(b.GetPool(), n) == 0 {
		d.emitReleased(r.block(n), "its last static address was released")
	}
	return nil
}

// setGrant says how many addresses of a namespace with a quota a node may have. All of a namespace's grants together
// never exceed the quota: so nodes can give addresses without asking each time, and cannot give too many.
func (d *decision) setGrant(c *skeinv1.SetGrant) error {
	if err := checkKubeName("namespace", c.GetNamespace()); err != nil {
		return err
	}
	r, err := d.pool(c.GetPool())
	if err != nil {
		return err
	}
	have := d.s.Grant(c.GetPool(), c.GetNamespace(), c.GetNodeId())
	if have.GetAddresses() == c.GetAddresses() {
		d.answer.Grant = have
		return nil
	}
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	if c.GetAddresses() > have.GetAddresses() {
		if err := d.checkGrant(r, c, have); err != nil {
			return err
		}
	}
	g := &skeinv1.Grant{Pool: c.GetPool(), Namespace: c.GetNamespace(), NodeId: n.GetId(), Addresses: c.GetAddresses()}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: g}}})
	d.answer.Grant = g
	return nil
}

// checkGrant refuses a larger grant where there is no quota, or too little of it left.
func (d *decision) checkGrant(r *poolState, c *skeinv1.SetGrant, have *skeinv1.Grant) error {
	ns := c.GetNamespace()
	quota, limited := r.pool.GetQuotas()[ns]
	sum, _ := r.granted.get(textKey(ns), ns)
	switch {
	case !limited:
		return refuse(FailedPrecondition, "namespace %s has no quota in pool %s: its pods need no grant", ns, c.GetPool())
	case r.pool.GetDraining():
		return refuseDraining(r.pool)
	case sum-uint64(have.GetAddresses())+uint64(c.GetAddresses()) > uint64(quota):
		return refuse(ResourceExhausted, "namespace %s may have %d addresses of pool %s, and nodes hold %d of them (%s): "+
			"end pods there, or raise the quota",
			ns, quota, c.GetPool(), sum, d.s.grantees(r, ns))
	case have == nil && d.s.grantCount >= MaxGrants:
		return refuse(ResourceExhausted, "there are %d grants already: give fewer namespaces a quota", d.s.grantCount)
	case have == nil && d.s.grantCount >= MaxNodeGrants && len(d.s.GrantsOf(c.GetNodeId())) >= MaxNodeGrants:
		return refuse(ResourceExhausted, "node %s has %d grants, the most that a node may have: give fewer namespaces a "+
			"quota, or move pods to other nodes", d.s.nameOf(c.GetNodeId()), MaxNodeGrants)
	}
	return nil
}

// Blocks of nodes that were not members when they were imported are reserved with a reason made of these.
const (
	importedPrefix = "for node "
	importedSuffix = " (imported)"
)

// importedFor is the node for which an import reserved a block.
func importedFor(b *skeinv1.Block) (node string, ok bool) {
	if b == nil || b.GetNodeId() != "" {
		return "", false
	}
	rest, ok := strings.CutPrefix(b.GetReason(), importedPrefix)
	if !ok {
		return "", false
	}
	return strings.CutSuffix(rest, importedSuffix)
}
