// Package pools answers the commands about address pools, their blocks and their reserved addresses.
package pools

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// PoolService is that part of the API.
type PoolService struct {
	Agent api.Agent
	// Addresses gives this host's pods theirs; nil: this node only relays.
	Addresses Allocator
}

// Allocator says how this host uses its blocks.
type Allocator interface {
	Pools() map[string]ipam.LocalPool
	BlockUse(pool string, number uint64) int
}

// maxHolders is how many nodes a pool's view names.
const maxHolders = 64

// CreatePool makes a pool whose subnets cover no member's own network.
func (s PoolService) CreatePool(ctx context.Context, r *skeinv1.CreatePoolRequest) (*skeinv1.PoolResponse, error) {
	if err := s.checkHosts(ctx, r.GetPool().GetSubnets()); err != nil {
		return nil, err
	}
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: r.GetPool()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.PoolResponse{Pool: answer.GetPool(), Index: answer.GetIndex()}, nil
}

// ChangePool changes a pool.
func (s PoolService) ChangePool(ctx context.Context, r *skeinv1.ChangePoolRequest) (*skeinv1.PoolResponse, error) {
	if err := s.checkHosts(ctx, r.GetChange().GetAddSubnets()); err != nil {
		return nil, err
	}
	answer, err := s.Agent.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: r.GetChange()}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.PoolResponse{Pool: answer.GetPool(), Index: answer.GetIndex()}, nil
}

// checkHosts refuses subnets that hold the address of a member's own network. The members say those themselves, so that
// the log cannot: a node that joins later leaves such blocks out and reports it.
func (s PoolService) checkHosts(ctx context.Context, subnets []*skeinv1.PoolSubnet) error {
	records := s.Agent.RecordsAsked(ctx)
	for _, n := range subnets {
		for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				continue // the leader says what is wrong with it
			}
			for id, record := range records {
				if what := api.Overlapped(p, record); what != "" {
					return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("subnet %s covers %s of node %s: pods with such "+
						"addresses would cut it off; choose another subnet", p, what, s.Agent.Name(id)))
				}
			}
		}
	}
	return nil
}

// RemovePool removes a pool that has no blocks.
func (s PoolService) RemovePool(ctx context.Context,
	r *skeinv1.RemovePoolRequest) (*skeinv1.RemovePoolResponse, error) {
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: r.GetName()}}})
	return &skeinv1.RemovePoolResponse{Index: answer.GetIndex()}, err
}

// Pools lists pools, or one, with how full they are.
func (s PoolService) Pools(_ context.Context, r *skeinv1.PoolsRequest) (*skeinv1.PoolsResponse, error) {
	st := s.Agent.State()
	out := &skeinv1.PoolsResponse{}
	for _, p := range st.Pools() {
		if r.GetName() == "" || r.GetName() == p.GetName() {
			out.Pools = append(out.Pools, s.poolView(st, p))
		}
	}
	if len(out.Pools) == 0 && r.GetName() != "" {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no pool %q; `skein pool list` shows those "+
			"there are", r.GetName()))
	}
	return out, nil
}

func (s PoolService) poolView(st *events.State, p *skeinv1.Pool) *skeinv1.PoolView {
	use := st.PoolUse(p.GetName())
	resting := use.Resting(time.Now())
	v := &skeinv1.PoolView{Pool: p, Blocks: use.Blocks, Owned: use.Owned, Reserved: use.Reserved, Resting: resting,
		Free: use.Free() - resting, Nodes: uint32(use.Nodes)}
	for _, h := range st.PoolHolders(p.GetName()) {
		if len(v.Holders) == maxHolders {
			break
		}
		v.Holders = append(v.Holders, &skeinv1.PoolHolder{NodeId: h.NodeID, Name: api.NodeName(st, h.NodeID),
			Blocks: uint32(h.Blocks)})
	}
	for _, g := range st.Grants() {
		if g.GetPool() == p.GetName() {
			v.Grants = append(v.Grants, g)
		}
	}
	for _, x := range st.Statics() {
		if x.GetPool() == p.GetName() {
			v.Statics = append(v.Statics, x)
		}
	}
	if s.Addresses != nil {
		if l, ok := s.Addresses.Pools()[p.GetName()]; ok {
			v.Local = &skeinv1.LocalPool{Blocks: uint32(l.Blocks), Used: uint32(l.Used), Free: uint32(l.Free),
				Resting: uint32(l.Resting)}
		}
	}
	return v
}

// Blocks lists blocks with their owners.
func (s PoolService) Blocks(_ context.Context, r *skeinv1.BlocksRequest) (*skeinv1.BlocksResponse, error) {
	st := s.Agent.State()
	node := ""
	if r.GetNode() != "" {
		n, _, err := api.Find(st, r.GetNode())
		if err != nil {
			return nil, err
		}
		node = n.GetId()
	}
	if r.GetPool() != "" && st.Pool(r.GetPool()) == nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no pool %q; `skein pool list` shows those "+
			"there are", r.GetPool()))
	}
	names := map[string]string{}
	for _, n := range st.Nodes() {
		names[n.GetId()] = n.GetName()
	}
	out := &skeinv1.BlocksResponse{}
	for _, b := range st.Blocks() {
		switch {
		case r.GetPool() != "" && b.GetPool() != r.GetPool(), node != "" && b.GetNodeId() != node, r.GetReserved() &&
			b.GetNodeId() != "":
			continue
		}
		v := &skeinv1.BlockView{Block: b, Node: names[b.GetNodeId()], Local: b.GetNodeId() == s.Agent.Self().String()}
		if v.Local && s.Addresses != nil {
			v.Used = uint32(s.Addresses.BlockUse(b.GetPool(), b.GetNumber()))
		}
		out.Blocks = append(out.Blocks, v)
	}
	return out, nil
}

// ReserveBlock keeps a block from being given to a node.
func (s PoolService) ReserveBlock(ctx context.Context,
	r *skeinv1.ReserveBlockRequest) (*skeinv1.BlockResponse, error) {
	pool, err := s.poolFor(r.GetPool(), r.GetPrefix())
	if err != nil {
		return nil, err
	}
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: pool,
			Prefix: r.GetPrefix(), Reason: r.GetReason()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.BlockResponse{Block: first(answer.GetBlocks()), Index: answer.GetIndex()}, nil
}

// ReleaseBlock takes a block from whom it is given or reserved for.
func (s PoolService) ReleaseBlock(ctx context.Context,
	r *skeinv1.ReleaseBlockRequest) (*skeinv1.BlockResponse, error) {
	pool, err := s.poolFor(r.GetPool(), r.GetPrefix())
	if err != nil {
		return nil, err
	}
	_, _, block := s.Agent.State().BlockAt(startOf(r.GetPrefix()))
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{Pool: pool,
			Prefix: r.GetPrefix(), Reason: "released by hand"}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.BlockResponse{Block: block, Index: answer.GetIndex()}, nil
}

// ReserveAddress keeps an address for a pod.
func (s PoolService) ReserveAddress(ctx context.Context,
	r *skeinv1.ReserveAddressRequest) (*skeinv1.StaticResponse, error) {
	pool, err := s.poolFor(r.GetPool(), r.GetAddress())
	if err != nil {
		return nil, err
	}
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{
			Pool: pool, Address: r.GetAddress(), Namespace: r.GetNamespace(), Pod: r.GetPod()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.StaticResponse{Address: answer.GetStatic(), Index: answer.GetIndex()}, nil
}

// ReleaseAddress ends that.
func (s PoolService) ReleaseAddress(ctx context.Context,
	r *skeinv1.ReleaseAddressRequest) (*skeinv1.StaticResponse, error) {
	pool, err := s.poolFor(r.GetPool(), r.GetAddress())
	if err != nil {
		return nil, err
	}
	old := s.Agent.State().Static(pool, startOf(r.GetAddress()))
	answer, err := s.Agent.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_ReleaseAddress{ReleaseAddress: &skeinv1.ReleaseAddress{Pool: pool,
			Address: r.GetAddress(), Force: r.GetForce()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.StaticResponse{Address: old, Index: answer.GetIndex()}, nil
}

// Statics lists the reserved addresses.
func (s PoolService) Statics(context.Context, *skeinv1.StaticsRequest) (*skeinv1.StaticsResponse, error) {
	return &skeinv1.StaticsResponse{Addresses: s.Agent.State().Statics()}, nil
}

// poolFor is the pool that was named, or else the one that an address or prefix lies in.
func (s PoolService) poolFor(name, address string) (string, error) {
	if name != "" {
		return name, nil
	}
	at := startOf(address)
	if !at.IsValid() {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is neither a prefix such as "+
			"10.64.3.0/27 nor an address", address))
	}
	if p, _, _ := s.Agent.State().BlockAt(at); p != nil {
		return p.GetName(), nil
	}
	return "", connect.NewError(connect.CodeNotFound, fmt.Errorf("%s lies in no pool; `skein pool list` shows their "+
		"subnets", address))
}

// startOf is an address, or the first of a prefix; invalid if the text is neither.
func startOf(text string) netip.Addr {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Addr().Unmap()
	}
	a, _ := netip.ParseAddr(text)
	return a.Unmap()
}

func first[T any](list []*T) *T {
	if len(list) == 0 {
		return nil
	}
	return list[0]
}

// Import takes over pools, blocks and addresses of another system, or says what that would change.
func (s PoolService) Import(ctx context.Context, r *skeinv1.ImportRequest) (*skeinv1.ImportResponse, error) {
	if r.GetImport() == nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the request holds nothing to import"))
	}
	for _, p := range r.GetImport().GetPools() {
		if err := s.checkHosts(ctx, p.GetSubnets()); err != nil {
			return nil, err
		}
	}
	answer, err := s.Agent.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_ImportPools{ImportPools: r.GetImport()}})
	if err != nil {
		return nil, err
	}
	changed := len(answer.GetPlan()) > 1 // the first line sums up the others; of a dry run: it would
	return &skeinv1.ImportResponse{Plan: answer.GetPlan(), Index: answer.GetIndex(), Changed: changed}, nil
}
