package consensus

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Clients take and give back blocks, addresses and grants through random nodes of a cluster of three servers, while
// servers crash, the network splits, loses one way and delays, requests come twice and clocks jump. Porcupine then says
// whether what the clients were told can have come from the allocator that the model describes; an audit of the log
// says whether anything was given twice at any index; and a replay, a snapshot with its tail and all replicas must
// agree.
//
// SKEIN_TEST_SEED runs one seed and SKEIN_TEST_SEEDS so many. A seed repeats a run's faults, not its scheduling.
func TestNothingIsGivenTwice(t *testing.T) {
	first, n := uint64(1), uint64(4)
	if v, err := strconv.ParseUint(os.Getenv("SKEIN_TEST_SEED"), 10, 64); err == nil {
		first, n = v, 1
	} else if v, err := strconv.ParseUint(os.Getenv("SKEIN_TEST_SEEDS"), 10, 64); err == nil {
		n = v
	} else if testing.Short() {
		n = 1
	}
	for seed := first; seed < first+n; seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			s := &allocStorm{storm: storm{t: t, seed: seed}}
			simulate(t, func(t *testing.T, c *cluster) {
				s.t, s.c = t, c
				s.run()
			})
			s.t = t
			s.check() // outside of virtual time, in which no time passes for it
		})
	}
}

// What the clients share.
var allocPools = []poolSpec{
	{name: "small", size: 8, extended: 8},                          // blocks of one address
	{name: "wide", size: 8, extended: 12, most: 5},                 // dual stack
	{name: "resting", size: 8, extended: 8, cooldown: int64(20e9)}, // 20 s
	{name: "fixed", size: 2, extended: 2},                          // with the static addresses
	{name: "quota", size: 2, extended: 2, most: 0},                 // from which a namespace may have ten addresses
}

const (
	allocNodes   = 5 // that own blocks; the last is revoked
	allocClients = 8
	allocQuota   = 10
	allocSpace   = "team"
)

var allocStatics = []string{"10.6.0.1", "10.6.0.2"}

func allocPool(p poolSpec) *skeinv1.Pool {
	return map[string]*skeinv1.Pool{
		"small": {BlockSizeBits: 0, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.9.0.8/29"}}},
		"wide": {BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.8.0.0/24", Ipv6: "fd00:8::/120"}},
			MaxBlocksPerNode: uint32(p.most)},
		"resting": {BlockSizeBits: 1, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.7.0.0/29"}, {Ipv4: "10.7.1.8/29"}},
			CooldownSeconds: 20},
		"fixed": {BlockSizeBits: 2, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.6.0.0/29"}}},
		"quota": {BlockSizeBits: 6, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.5.0.0/25"}},
			Quotas: map[string]uint32{allocSpace: allocQuota}},
	}[p.name]
}

// allocStorm is a storm in which pools are used.
type allocStorm struct {
	storm
	recorder
	owners  []string // node IDs, from 1
	numbers map[string]int
	clocks  map[identity.ID]*atomic.Int64 // how far a server's clock is off
	late    sync.WaitGroup                // requests on their second way
	faults  map[string]int
	began   time.Time
	virtual time.Duration
	log     []*skeinv1.Event
	last    *events.State
}

func (s *allocStorm) run() {
	rng := rand.New(rand.NewPCG(s.seed, 1))
	s.clocks, s.faults, s.numbers, s.began = make(map[identity.ID]*atomic.Int64), make(map[string]int),
		make(map[string]int), time.Now()
	s.c.tune = func(cfg *ServerConfig) {
		cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingEntries = 64, time.Second, 16
		cfg.NoSync = true
		off := s.clock(cfg.ID)
		cfg.Now = func() time.Time { return time.Now().Add(time.Duration(off.Load())) }
	}
	s.c.form(3)
	for i := range 2 {
		s.c.join(s.c.add(fmt.Sprintf("agent%d", i), false))
	}
	s.prepare()
	s.gather()
	ctx, stop := context.WithCancel(context.Background())
	var clients sync.WaitGroup
	for client := range allocClients {
		clients.Go(func() { s.use(ctx, client, rand.New(rand.NewPCG(s.seed, uint64(client+2)))) })
	}
	watched, hashes := make(map[string]uint64), make(map[uint64][32]byte)
	for i, name := range s.plan(rng) {
		if i == 4 {
			s.change(rng)
		}
		s.faults[name]++
		allocFaults[name](s, rng)
		s.pause(rng, 1500)
		s.watch(watched, hashes)
		s.gather()
	}
	s.c.net.heal()
	for _, n := range s.c.nodes {
		if !n.running() {
			n.start(false)
		}
	}
	stop()
	clients.Wait()
	s.late.Wait()
	for i, n := range s.c.nodes { // each says at the end what it sees
		s.look(context.Background(), allocClients+i, n)
	}
	s.c.agree()
	s.watch(watched, hashes)
	s.collect()
	s.virtual = time.Since(s.began)
}

func (s *allocStorm) clock(id identity.ID) *atomic.Int64 {
	if s.clocks[id] == nil {
		s.clocks[id] = new(atomic.Int64)
	}
	return s.clocks[id]
}

// prepare makes nodes that own blocks, the pools and the static addresses.
func (s *allocStorm) prepare() {
	first := s.c.nodes[0]
	secret := sha256.Sum256([]byte("owners"))
	allow := tokenCommand(tokenID(1), secret[:])
	allow.GetCreateToken().Uses = allocNodes
	s.c.propose(first, allow)
	s.owners = []string{""}
	for _, n := range s.c.nodes {
		if !n.server { // the others ask through servers
			s.numbers[n.id.String()] = len(s.owners)
			s.owners = append(s.owners, n.id.String())
		}
	}
	for i := len(s.owners) - 1; i < allocNodes; i++ {
		n := &node{c: s.c, name: fmt.Sprintf("owner%d", i+1)}
		seed := sha256.Sum256([]byte(n.name))
		n.key, n.wg = identity.KeyFromSeed(seed[:]), identity.WireGuardKey(sha256.Sum256([]byte("wg"+n.name)))
		s.c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
			Node: n.newNode(), TokenId: tokenID(1), TokenSecretHash: secret[:], ClusterId: testCluster}}})
		s.numbers[n.key.ID().String()] = i + 1
		s.owners = append(s.owners, n.key.ID().String())
	}
	for _, p := range allocPools {
		pool := allocPool(p)
		pool.Name = p.name
		s.c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: pool}}})
	}
	for i, a := range allocStatics {
		s.c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{
			Pool: "fixed", Address: a, Namespace: allocSpace, Pod: fmt.Sprint("db-", i)}}})
	}
}

// objects are all that has a history.
func (s *allocStorm) objects() (out []string) {
	for _, p := range allocPools {
		if p.name != "fixed" && p.name != "quota" {
			out = append(out, p.name)
		}
	}
	return append(append(out, allocStatics...), "quota")
}

func (s *allocStorm) models() map[string]porcupine.Model {
	out := map[string]porcupine.Model{"quota": grantModel(allocQuota)}
	for _, p := range allocPools[:3] {
		out[p.name] = p.model()
	}
	for _, a := range allocStatics {
		out[a] = claimModel()
	}
	return out
}

// issuer is who asks for an owner: the owner itself, and the first server for nobody, which is 0.
func (s *allocStorm) issuer(owner int) identity.ID {
	for _, n := range s.c.nodes {
		if n.id.String() == s.owners[owner] {
			return n.id
		}
	}
	return s.c.nodes[0].id
}

// anyNode is one that runs, and that hands on what an owner asks: the owner itself, or a server. 0 stands for nobody.
func (s *allocStorm) anyNode(ctx context.Context, rng *rand.Rand, owner int) (*node, *Client) {
	for ctx.Err() == nil {
		n := s.c.nodes[rng.IntN(len(s.c.nodes))]
		may := n.server || s.owners[owner] == n.id.String()
		if client := n.current(); client != nil && may {
			return n, client
		}
		time.Sleep(time.Duration(1+rng.IntN(20)) * time.Millisecond)
	}
	return nil, nil
}

// use does one thing after the other, until the end.
func (s *allocStorm) use(ctx context.Context, client int, rng *rand.Rand) {
	for ctx.Err() == nil {
		n, c := s.anyNode(ctx, rng, 0)
		if c == nil {
			return
		}
		if rng.IntN(8) == 0 {
			attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
			s.look(attempt, client, n)
			cancel()
		} else {
			a, object, cmd := s.draw(c.cfg.Replica.State(), rng)
			s.insist(ctx, client, a, []string{object}, cmd, rng)
		}
		time.Sleep(time.Duration(rng.IntN(250)) * time.Millisecond)
	}
}

// insist sends a request until it is answered or the client gives up, now and then a second time by another way, and
// after giving up at times the same wish with another request ID.
func (s *allocStorm) insist(ctx context.Context, client int, a ask, objects []string, cmd *skeinv1.Command,
	rng *rand.Rand) {
	q := s.begin(s.issuer(a.node), client, a, objects, cmd)
	if rng.IntN(4) == 0 {
		delay, patience := time.Duration(rng.IntN(3000))*time.Millisecond, time.Duration(500+rng.IntN(3000))*time.Millisecond
		other := rand.New(rand.NewPCG(s.seed, rng.Uint64()))
		s.late.Go(func() {
			time.Sleep(delay)
			again, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			if _, c := s.anyNode(again, other, a.node); c != nil {
				s.note(s.send(again, q, c))
			}
		})
	}
	for tries := 1 + rng.IntN(3); tries > 0 && ctx.Err() == nil; tries-- {
		_, c := s.anyNode(ctx, rng, a.node)
		if c == nil {
			return
		}
		attempt, cancel := context.WithTimeout(ctx, time.Duration(50+rng.IntN(2500))*time.Millisecond)
		err := s.send(attempt, q, c)
		cancel()
		if s.note(err); err == nil || events.CodeOf(err) != "" {
			return
		}
	}
	if rng.IntN(2) == 0 && ctx.Err() == nil {
		s.insist(ctx, client, a, objects, cmd, rng)
	}
}

// note checks that an outcome is one that clients may have.
func (s *allocStorm) note(err error) {
	if err != nil && events.CodeOf(err) == "" && !errors.Is(err, ErrUncertain) {
		s.t.Errorf("a request ends with %v", err)
	}
}

// draw is something to ask for, as a client may want it that sees an old state.
func (s *allocStorm) draw(state *events.State, rng *rand.Rand) (ask, string, *skeinv1.Command) {
	owner := 1 + rng.IntN(allocNodes)
	pool := allocPools[rng.IntN(3)]
	id := s.owners[owner]
	mine, kept := s.held(state, pool.name, id), s.held(state, pool.name, "")
	switch k := rng.IntN(100); {
	case k < 38:
		a := ask{do: allocate, node: owner, amount: mine.count() + 1 + rng.IntN(2)}
		return a, pool.name, &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
			NodeId: id, Pool: pool.name, Total: uint32(a.amount)}}}
	case k < 68:
		a := ask{do: release, node: owner, blocks: some(mine, rng)}
		if kept != 0 && rng.IntN(3) == 0 {
			a.node, a.blocks, id = 0, some(kept, rng), ""
		}
		return a, pool.name, releaseCommand(pool.name, id, a.blocks)
	case k < 72:
		n := rng.IntN(pool.size)
		v4, _ := blockPrefixes(allocPool(pool), uint64(n))
		return ask{do: reserve, blocks: blocks(0).with(n)}, pool.name,
			&skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{
				Pool: pool.name, Prefix: v4, Reason: "for later"}}}
	case k < 77:
		draining := !state.Pool("wide").GetDraining()
		a := ask{do: map[bool]deed{true: drain, false: resume}[draining]}
		return a, "wide", &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{
			Name: "wide", Set: &skeinv1.Pool{Draining: draining}, Fields: []string{"draining"}}}}
	case k < 90:
		i := rng.IntN(len(allocStatics))
		a := ask{do: claim, node: owner}
		if v := state.Static("fixed", netip.MustParseAddr(allocStatics[i])); v.GetNodeId() != "" && rng.IntN(4) > 0 {
			a = ask{do: giveUp, node: s.numbers[v.GetNodeId()]}
		}
		return a, allocStatics[i], &skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{
			NodeId: s.owners[a.node], Pool: "fixed", Address: allocStatics[i], Namespace: allocSpace, Pod: fmt.Sprint("db-", i),
			GiveUp: a.do == giveUp}}}
	default:
		a := ask{do: grant, node: owner, amount: rng.IntN(6)}
		return a, "quota", &skeinv1.Command{Body: &skeinv1.Command_SetGrant{SetGrant: &skeinv1.SetGrant{
			NodeId: id, Pool: "quota", Namespace: allocSpace, Addresses: uint32(a.amount)}}}
	}
}

func releaseCommand(pool, id string, b blocks) *skeinv1.Command {
	c := &skeinv1.ReleaseBlocks{Pool: pool, NodeId: id, Reason: "empty"}
	for _, n := range b.numbers() {
		c.Numbers = append(c.Numbers, uint64(n))
	}
	return &skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: c}}
}

func (s *allocStorm) held(state *events.State, pool, id string) (b blocks) {
	for _, v := range state.Blocks() {
		if v.GetPool() == pool && v.GetNodeId() == id {
			b = b.with(int(v.GetNumber()))
		}
	}
	return b
}

// some are one or two of the blocks, or sometimes any at all.
func some(of blocks, rng *rand.Rand) (b blocks) {
	numbers := of.numbers()
	if len(numbers) == 0 || rng.IntN(10) == 0 {
		return b.with(rng.IntN(8))
	}
	for range 1 + rng.IntN(2) {
		b = b.with(numbers[rng.IntN(len(numbers))])
	}
	return b
}

// look commits a command that changes no pool, and reads the state at the index of its answer: what was agreed then.
func (s *allocStorm) look(ctx context.Context, client int, n *node) {
	c := n.current()
	if c == nil {
		return
	}
	q := s.begin(n.id, client, ask{do: look}, s.objects(), label(n.id.String(), int(s.order.Load())))
	if s.send(ctx, q, c) != nil {
		return
	}
	at := q.sent[0].answer.GetIndex()
	if c.cfg.Replica.State().Index() < at {
		wait, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		for c.cfg.Replica.State().Index() < at {
			if c.cfg.Replica.Wait(wait, c.cfg.Replica.State().Index()) != nil {
				return
			}
		}
	}
	state, err := c.cfg.Replica.At(at)
	if err != nil { // it has gone on from a snapshot
		return
	}
	q.seen = s.view(state)
}

// view is what a state says of each object.
func (s *allocStorm) view(state *events.State) map[string]any {
	out := make(map[string]any)
	for _, p := range allocPools[:3] {
		v := poolState{size: poolSize(state.Pool(p.name)), draining: state.Pool(p.name).GetDraining()}
		for _, b := range state.Blocks() {
			if b.GetPool() == p.name && b.GetNodeId() == "" {
				v.owner[b.GetNumber()] = reserved
			} else if b.GetPool() == p.name {
				v.owner[b.GetNumber()] = int8(s.numbers[b.GetNodeId()])
			}
		}
		for _, f := range state.Freed(p.name) {
			v.free(int(f.GetNumber()), 0)
		}
		out[p.name] = v
	}
	for _, a := range allocStatics {
		out[a] = holder{node: s.numbers[state.Static("fixed", netip.MustParseAddr(a)).GetNodeId()]}
	}
	var g grants
	for _, v := range state.Grants() {
		g.of[s.numbers[v.GetNodeId()]] = int(v.GetAddresses())
	}
	out["quota"] = g
	return out
}

// change is what happens once, in the middle: the pool grows and a node is revoked.
func (s *allocStorm) change(rng *rand.Rand) {
	ctx := context.Background()
	s.late.Go(func() {
		rng := rand.New(rand.NewPCG(s.seed, 100))
		s.insist(ctx, allocClients, ask{do: extend}, []string{"wide"},
			&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{
				Name: "wide", AddSubnets: []*skeinv1.PoolSubnet{{Ipv4: "10.8.2.0/25", Ipv6: "fd00:8::200/121"}}}}}, rng)
		s.insist(ctx, allocClients, ask{do: revoke, node: allocNodes}, s.objects(),
			&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
				NodeId: s.owners[allocNodes], Reason: "sold"}}}, rng)
	})
}
