package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/dataplane"
)

// Of every host in a lab whose addresses are audited.
var (
	podTable    = dataplane.DefaultNumbers().PodTable()
	exportTable = dataplane.DefaultNumbers().ExportTable()
	tunnel      = dataplane.DefaultNumbers().Link
)

const (
	restingState = "resting" // Holder.state of an address that was given back
	mostFindings = 12        // that an error lists
)

// AddressesAgree waits until all accounts of pods' addresses agree: no address is given twice in the lab; each lies in
// a block of its node by every agent's state; what each agent says of its pods, the namespaces that exist and the
// kernel's tables are the same; and no node keeps more than one empty block of a pool. others are pods that somebody
// else than the lab has started on its nodes.
func (l *Lab) AddressesAgree(ctx context.Context, within time.Duration, others ...Pod) error {
	return eventually(ctx, within, 0, func(ctx context.Context) error {
		a, err := l.audit(ctx, others)
		if err != nil {
			return err
		}
		wrong := a.wrong()
		if len(wrong) == 0 {
			return nil
		}
		more := ""
		if len(wrong) > mostFindings {
			more = fmt.Sprintf("\n    and %d more", len(wrong)-mostFindings)
			wrong = wrong[:mostFindings]
		}
		return fmt.Errorf("the accounts of addresses do not agree:\n    %s%s", strings.Join(wrong, "\n    "), more)
	})
}

// audit takes down all accounts there are.
func (l *Lab) audit(ctx context.Context, others []Pod) (accounts, error) {
	out := make(accounts, len(l.agents))
	err := each(l.agents, func(a *agent) error {
		n, err := l.account(ctx, a, others)
		out[slices.Index(l.agents, a)] = n
		return err
	})
	return out, err
}

func (l *Lab) account(ctx context.Context, a *agent, others []Pod) (n nodeAccount, err error) {
	n.node = a.node.Name
	if n.pods, err = l.podsByKernel(a, others); err != nil {
		return n, err
	}
	reach, err := fabric.Routes(a.ns, podTable)
	if err != nil {
		return n, err
	}
	for _, r := range reach {
		switch {
		case r.Link == tunnel: // to other hosts' blocks, reserved addresses and egress slots
		case r.Throw: // what of a pool is not the mesh's
		case r.Unreachable:
			n.unreachable = append(n.unreachable, r.Prefix)
		case r.Prefix.IsSingleIP():
			n.hosts = append(n.hosts, r.Prefix.Addr())
		}
	}
	exported, err := fabric.Routes(a.ns, exportTable)
	if err != nil {
		return n, err
	}
	for _, r := range exported {
		n.exported = append(n.exported, r.Prefix)
	}
	if a.record().Condition != Running {
		return n, nil
	}
	if err := a.died(); err != nil {
		return n, finalError{err}
	}
	n.view, err = a.accounts(ctx)
	return n, err
}

// podsByKernel lists a node's pods with the addresses that their interfaces have.
func (l *Lab) podsByKernel(a *agent, others []Pod) ([]podAccount, error) {
	pods, err := l.Pods(a.node.Name)
	if err != nil {
		return nil, err
	}
	for _, p := range others {
		if p.Node == a.node.Name {
			pods = append(pods, p)
		}
	}
	var out []podAccount
	for _, p := range pods {
		addrs, err := fabric.Addresses(p.NetNS)
		if err != nil {
			return nil, err
		}
		out = append(out, podAccount{p.Name, p.ContainerID, addrs})
	}
	return out, nil
}

// accounts asks an agent.
func (a *agent) accounts(ctx context.Context) (*agentAccount, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	blocks, err1 := a.client.Blocks(ctx, &skeinv1.BlocksRequest{})
	statics, err2 := a.client.Statics(ctx, &skeinv1.StaticsRequest{})
	pods, err3 := a.client.Pods(ctx, &skeinv1.PodsRequest{})
	nodes, err4 := a.client.Nodes(ctx, &skeinv1.NodesRequest{})
	egresses, err5 := a.client.Egresses(ctx, &skeinv1.EgressesRequest{})
	pools, err6 := a.client.Pools(ctx, &skeinv1.PoolsRequest{})
	if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
		return nil, fmt.Errorf("node %s: %w", a.node.Name, err)
	}
	names := map[string]string{}
	for _, n := range nodes.GetNodes() {
		names[n.GetNode().GetId()] = n.GetNode().GetName()
	}
	v := &agentAccount{}
	var errs []error
	for _, e := range egresses.GetEgresses() {
		for _, x := range slices.Concat(e.GetEgress().GetEndpoints(), e.GetEgress().GetAddresses()) {
			for _, text := range []string{x.GetIpv4(), x.GetIpv6()} {
				if at, err := netip.ParseAddr(text); err == nil {
					v.slots = append(v.slots, netip.PrefixFrom(at, at.BitLen()))
				}
			}
		}
	}
	for _, p := range pools.GetPools() {
		for _, n := range p.GetPool().GetSubnets() {
			for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
				if net, err := netip.ParsePrefix(text); err == nil {
					v.pools = append(v.pools, net)
				}
			}
		}
	}
	for _, b := range blocks.GetBlocks() {
		x := blockAccount{pool: b.GetBlock().GetPool(), number: b.GetBlock().GetNumber(), used: b.GetUsed(),
			own: b.GetLocal()}
		if id := b.GetBlock().GetNodeId(); id != "" {
			if x.node = names[id]; x.node == "" {
				x.unknown = id
			}
		}
		for _, s := range []string{b.GetBlock().GetIpv4(), b.GetBlock().GetIpv6()} {
			if p, err := netip.ParsePrefix(s); err == nil {
				x.prefixes = append(x.prefixes, p)
			} else if s != "" {
				errs = append(errs, err)
			}
		}
		v.blocks = append(v.blocks, x)
	}
	for _, s := range statics.GetAddresses() {
		addrs, err := parse(s.GetIpv4(), s.GetIpv6())
		errs = append(errs, err)
		v.statics = append(v.statics, staticAccount{names[s.GetNodeId()], addrs})
	}
	for _, p := range pods.GetPods() {
		if h := p.GetHolder(); h.GetState() != restingState && h.GetUntil() == 0 {
			addrs, err := parse(h.GetIpv4(), h.GetIpv6())
			errs = append(errs, err)
			v.pods = append(v.pods, podAccount{h.GetPod(), h.GetContainerId(), addrs})
		}
	}
	return v, errors.Join(errs...)
}

// parse reads those of some addresses that are there, and puts them in order.
func parse(texts ...string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, s := range texts {
		if s == "" {
			continue
		}
		a, err := netip.ParseAddr(s)
		if err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out, nil
}
