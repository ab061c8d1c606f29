package redteam

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// proposal is a request with an ID of its own, unless the command has one.
func (p *person) proposal(c *skeinv1.Command) *skeinv1.ProposeRequest {
	if c.GetRequestId() == "" {
		c.RequestId = consensus.NewRequestID()
	}
	return &skeinv1.ProposeRequest{Command: c}
}

// errNotHeard is for requests that reached no guard.
var errNotHeard = errors.New("the request did not reach the server")

// propose sends a command to a server and looks at the log afterwards.
func (f *Field) propose(ctx context.Context, p *person, r *skeinv1.ProposeRequest) (seen Seen, err error) {
	if seen.Before, err = f.log(ctx); err != nil {
		return seen, err
	}
	answer, err := p.cluster(relayNode).Propose(ctx, r)
	switch code := connect.CodeOf(err); {
	case err == nil:
		seen.Refusal = answer.GetAnswer().GetErrorMessage()
		if at := answer.GetAnswer().GetIndex(); at > 0 {
			err = until(ctx, patience, func() error {
				s, err := f.log(ctx)
				if err == nil && s.GetIndex() < at {
					err = errors.New("the log is behind")
				}
				return err
			})
			if err != nil {
				return seen, err
			}
		}
	case code == connect.CodePermissionDenied || code == connect.CodeInvalidArgument ||
		code == connect.CodeResourceExhausted || code == connect.CodeUnauthenticated ||
		code == connect.CodeFailedPrecondition:
		seen.Refusal = err.Error()
	default:
		return seen, errors.Join(errNotHeard, err)
	}
	seen.After, err = f.log(ctx)
	return seen, err
}

// command is an attempt of an ordinary member to have a command decided.
func command(name string, guard Guard, make func(*Field) *skeinv1.Command, judge func(Seen) string) Attempt {
	return Attempt{Name: name, From: Member, Guard: guard, Judge: judge,
		Try: func(ctx context.Context, f *Field) (Seen, error) {
			return f.propose(ctx, f.mallory, f.mallory.proposal(make(f)))
		}}
}

// forged is the same with a request that says more than a command.
func forged(name string, guard Guard, make func(*Field) *skeinv1.ProposeRequest, judge func(Seen) string) Attempt {
	return Attempt{Name: name, From: Member, Guard: guard, Judge: judge,
		Try: func(ctx context.Context, f *Field) (Seen, error) {
			return f.propose(ctx, f.mallory, make(f))
		}}
}

// changed judges that one part of the log is other than before.
func changed(what string, part func(*skeinv1.State) proto.Message) func(Seen) string {
	return func(s Seen) string {
		if proto.Equal(part(s.Before), part(s.After)) {
			return ""
		}
		return what
	}
}

// Parts of the log, for judges.
func serversOf(s *skeinv1.State) proto.Message  { return &skeinv1.State{Servers: s.GetServers()} }
func tokensOf(s *skeinv1.State) proto.Message   { return &skeinv1.State{Tokens: s.GetTokens()} }
func nodesOf(s *skeinv1.State) proto.Message    { return &skeinv1.State{Nodes: s.GetNodes()} }
func poolsOf(s *skeinv1.State) proto.Message    { return &skeinv1.State{Pools: s.GetPools()} }
func grantsOf(s *skeinv1.State) proto.Message   { return &skeinv1.State{Grants: s.GetGrants()} }
func staticsOf(s *skeinv1.State) proto.Message  { return &skeinv1.State{Statics: s.GetStatics()} }
func settingsOf(s *skeinv1.State) proto.Message { return s.GetSettings() }
func egressesOf(s *skeinv1.State) proto.Message { return &skeinv1.State{Egresses: s.GetEgresses()} }
func slotsOf(s *skeinv1.State) proto.Message    { return &skeinv1.State{Slots: s.GetSlots()} }
func revokedOf(s *skeinv1.State) proto.Message  { return &skeinv1.State{Revoked: s.GetRevoked()} }

// blocksOf are the blocks of one node, or with an empty ID the reserved ones.
func blocksOf(id string) func(*skeinv1.State) proto.Message {
	return func(s *skeinv1.State) proto.Message {
		out := &skeinv1.State{}
		for _, b := range s.GetBlocks() {
			if b.GetNodeId() == id {
				out.Blocks = append(out.Blocks, b)
			}
		}
		return out
	}
}

func reservedOf(s *skeinv1.State) proto.Message { return blocksOf("")(s) }

// preyOf is what the prey has.
func preyOf(s *skeinv1.State) proto.Message {
	out := &skeinv1.State{}
	for _, n := range s.GetNodes() {
		if n.GetName() == "prey" || n.GetName() == "renamed" {
			out.Nodes = append(out.Nodes, n)
			out.Blocks = blocksOf(n.GetId())(s).(*skeinv1.State).GetBlocks()
		}
	}
	return out
}

// freshKey is the public half of a WireGuard key that the attacker has just made: two members may not have the same.
func freshKey() identity.WireGuardKey {
	private, err := identity.NewWireGuardKey()
	if err == nil {
		private, err = private.Public()
	}
	if err != nil {
		panic(err) // crypto/rand does not fail
	}
	return private
}

// secretOf is a token's secret and its hash.
func secretOf(word string) (secret, hash []byte) {
	h := sha256.Sum256([]byte(word))
	return []byte(word), h[:]
}

func memberRPC() []Attempt {
	return append(append(ownCommands(), adminCommands()...), inOthersNames()...)
}

// ownCommands are those that a member may give for itself, given for another.
func ownCommands() []Attempt {
	return []Attempt{
		command("rotate another node's WireGuard key to the attacker's", OwnOnly, func(f *Field) *skeinv1.Command {
			key := freshKey()
			return &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{
				NodeId: f.prey.id(), WireguardKey: key[:]}}}
		}, changed("another node's WireGuard key", preyOf)),
		command("allocate blocks for another node", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
				NodeId: f.prey.id(), Pool: "default", Total: 5}}}
		}, changed("blocks for another node", preyOf)),
		command("release another node's blocks", OwnOnly, func(f *Field) *skeinv1.Command {
			r := &skeinv1.ReleaseBlocks{Pool: "default", NodeId: f.prey.id(), Reason: "red team"}
			for _, b := range f.members.GetBlocks() {
				if b.GetNodeId() == f.prey.id() {
					r.Numbers = append(r.Numbers, b.GetNumber())
				}
			}
			return &skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: r}}
		}, changed("another node's blocks", preyOf)),
		command("claim a static address for another node", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{NodeId: f.prey.id(),
				Pool: "default", Address: "10.100.3.77", Namespace: "vault", Pod: "safe"}}}
		}, changed("a pod's static address is elsewhere", staticsOf)),
		command("take a quota's grant in another node's name", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_SetGrant{SetGrant: &skeinv1.SetGrant{NodeId: f.prey.id(),
				Pool: "default", Namespace: "vault", Addresses: 16}}}
		}, changed("a grant of another node", grantsOf)),
		command("change another node's labels, to make it a gateway", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.prey.id(),
				SetLabels: true, Labels: map[string]string{"gateway": "forged"}}}}
		}, changed("another node's labels", preyOf)),
		command("rename another node", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.prey.id(),
				Name: "renamed"}}}
		}, changed("another node's name", func(s *skeinv1.State) proto.Message {
			out := &skeinv1.State{}
			for _, n := range s.GetNodes() {
				out.Nodes = append(out.Nodes, &skeinv1.Node{Id: n.GetId(), Name: n.GetName()})
			}
			return out
		})),
		command("put another node into another site", OwnOnly, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.prey.id(),
				Settings: &skeinv1.NodeSettings{SiteSet: true, Site: forgedSite}, SettingsFields: []string{"site"}}}}
		}, changed("another node's settings", nodeSettingsOf)),
		command("have the log say that it leads its site", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: f.mallory.id(),
				Settings: &skeinv1.NodeSettings{Leader: "yes"}, SettingsFields: []string{"leader"}}}}
		}, changed("its own settings", nodeSettingsOf)),
		{Name: "lower another node's event schema, so that new commands are refused", From: Member, Guard: OwnOnly,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.holdBack(ctx, "dc2")
			}, Judge: heldBack},
		{Name: "lower its own event schema, so that new commands are refused", From: Member, Guard: OwnOnly,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.holdBack(ctx, attacker)
			}, Judge: heldBack},
		command("take all of a pool's blocks", Fair, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
				NodeId: f.mallory.id(), Pool: "spare", Total: 1 << 20}}}
		}, func(s Seen) string {
			if n := len(s.After.GetBlocks()) - len(s.Before.GetBlocks()); n > 16 {
				return "more blocks at once than a node gets"
			}
			return ""
		}),
		{Name: "read the whole state again and again", From: Member, Guard: Fair,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.readStates(ctx)
			}, Judge: bounded("states")},
	}
}

func plainPeersOf(s *skeinv1.State) proto.Message {
	return &skeinv1.State{PlainPeers: s.GetPlainPeers()}
}

// nodeSettingsOf is what is set of all nodes.
func nodeSettingsOf(s *skeinv1.State) proto.Message {
	out := &skeinv1.State{}
	for _, n := range s.GetNodes() {
		out.Nodes = append(out.Nodes, &skeinv1.Node{Id: n.GetId(), Settings: n.GetSettings()})
	}
	return out
}

// holdBack lowers a node's schema and looks whether an admin's command passes afterwards.
func (f *Field) holdBack(ctx context.Context, node string) (Seen, error) {
	lower := func(p *person, high uint32) (Seen, error) {
		return f.propose(ctx, p, p.proposal(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{
			ChangeNode: &skeinv1.ChangeNode{NodeId: f.id(node).String(), MinSchema: 1, MaxSchema: high}}}))
	}
	seen, err := lower(f.mallory, 1)
	if err != nil {
		return seen, err
	}
	if seen.After, err = f.log(ctx); err != nil {
		return seen, err
	}
	defer lower(f.mallory, f.maxSchema()) // the next attempts want the lab as it was
	if _, err := f.api(relayNode).CreatePool(ctx,
		&skeinv1.CreatePoolRequest{Pool: &skeinv1.Pool{Name: "held-back", BlockSizeBits: 2,
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.98.0.0/24"}}}}); err != nil {
		seen.Lost = append(seen.Lost, "an admin's command: "+brief(err.Error()))
		return seen, nil
	}
	_, err = f.api(relayNode).RemovePool(ctx, &skeinv1.RemovePoolRequest{Name: "held-back"})
	return seen, err
}

func heldBack(s Seen) string {
	if len(s.Lost) > 0 {
		return s.Lost[0]
	}
	for _, b := range s.Before.GetNodes() {
		if a := nodeOf(s.After, b.GetId()); a.GetMaxSchema() < b.GetMaxSchema() && b.GetName() != attacker {
			return "the schema of " + b.GetName() + " is lower"
		}
	}
	return ""
}

// adminCommands concern all.
func adminCommands() []Attempt {
	egress := &skeinv1.Egress{Namespace: "out", Name: "evil", Destinations: []string{"0.0.0.0/0"},
		Gateways: map[string]string{"gateway": "yes"}, Replicas: 1}
	return []Attempt{
		command("create a token", Roles, func(*Field) *skeinv1.Command {
			_, hash := secretOf("forged")
			return &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: "00000000000000aa",
				SecretHash: hash, LifetimeNanos: int64(time.Hour), Uses: 9}}}
		}, changed("a token of its own", tokensOf)),
		command("create a token for servers", Roles, func(*Field) *skeinv1.Command {
			_, hash := secretOf("forged for servers")
			return &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: "00000000000000ab",
				SecretHash: hash, LifetimeNanos: int64(time.Hour), Uses: 9, Role: "server"}}}
		}, changed("a token of its own", tokensOf)),
		command("revoke others' tokens", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{
				TokenId: f.members.GetTokens()[0].GetId()}}}
		}, changed("a token is gone", tokensOf)),
		command("change the cluster's settings", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
				Settings: &skeinv1.Settings{RouteNodeAddresses: true}, Fields: []string{"route_node_addresses"}}}}
		}, changed("settings", settingsOf)),
		{Name: "rotate the gossip key", From: Member, Guard: Roles, Try: func(ctx context.Context, f *Field) (Seen, error) {
			before := f.members.GetGossipKeys().GetPrimary()
			seen, err := f.propose(ctx, f.mallory,
				f.mallory.proposal(&skeinv1.Command{Body: &skeinv1.Command_RotateGossipKey{
					RotateGossipKey: &skeinv1.RotateGossipKey{}}}))
			if err == nil {
				err = f.refresh(ctx)
			}
			if string(before) != string(f.members.GetGossipKeys().GetPrimary()) {
				seen.Lost = append(seen.Lost, "the gossip key was rotated")
			}
			return seen, err
		}, Judge: lost},
		command("create a pool", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
				Name: "evil", BlockSizeBits: 2, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "172.16.0.0/24"}}}}}}
		}, changed("a pool", poolsOf)),
		command("drain a pool", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: "spare",
				Set: &skeinv1.Pool{Draining: true}, Fields: []string{"draining"}}}}
		}, changed("a pool", poolsOf)),
		command("remove a pool", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RemovePool{RemovePool: &skeinv1.RemovePool{Name: "spare"}}}
		}, changed("a pool is gone", poolsOf)),
		command("import pools", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ImportPools{ImportPools: &skeinv1.ImportPools{
				Pools: []*skeinv1.Pool{{Name: "imported", BlockSizeBits: 2,
					Subnets: []*skeinv1.PoolSubnet{{Ipv4: "172.17.0.0/24"}}}}}}}
		}, changed("a pool", poolsOf)),
		command("reserve a block, so that nobody gets it", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: "default",
				Prefix: "10.100.3.128", Reason: "red team"}}}
		}, changed("a reserved block", reservedOf)),
		command("release a reserved block", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{Pool: "default",
				Prefix: "10.100.3.128", Reason: "red team"}}}
		}, changed("a reserved block is free", reservedOf)),
		command("reserve a static address", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{
				Pool: "default", Address: "10.100.2.9", Namespace: "evil", Pod: "x"}}}
		}, changed("a static address", staticsOf)),
		command("release another's static address", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ReleaseAddress{ReleaseAddress: &skeinv1.ReleaseAddress{
				Pool: "default", Address: "10.100.3.77", Force: true}}}
		}, changed("a static address is gone", staticsOf)),
		command("define an egress for all traffic", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: egress}}}
		}, changed("an egress", egressesOf)),
		command("drain another node", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_DrainNode{DrainNode: &skeinv1.DrainNode{NodeId: f.prey.id(),
				Draining: true}}}
		}, changed("another node is drained", preyOf)),
		command("assign an egress slot to itself", Leases, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: "out",
				Name: "fixed", NodeId: f.mallory.id(), Epoch: f.slot("fixed").GetEpoch(), Reason: "red team"}}}
		}, changed("a slot", slotsOf)),
		command("release another's egress slot", Leases, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ReleaseSlot{ReleaseSlot: &skeinv1.ReleaseSlot{Namespace: "out",
				Name: "fixed", Epoch: f.slot("fixed").GetEpoch(), Reason: "red team"}}}
		}, changed("a slot", slotsOf)),
		command("lead an egress's clients to other gateways", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_ChangeEgress{ChangeEgress: &skeinv1.ChangeEgress{Namespace: "out",
				Name: "nat", Set: &skeinv1.Egress{Destinations: []string{"203.0.113.0/25"}}, Fields: []string{"destinations"}}}}
		}, changed("an egress", egressesOf)),
		command("remove an egress", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RemoveEgress{RemoveEgress: &skeinv1.RemoveEgress{Namespace: "out",
				Name: "evil"}}}
		}, changed("an egress is gone", egressesOf)),
		command("admit a plain peer that it carries itself", Roles, func(f *Field) *skeinv1.Command {
			peer, carrier := freshKey(), freshKey()
			return &skeinv1.Command{Body: &skeinv1.Command_SetPlainPeer{SetPlainPeer: &skeinv1.SetPlainPeer{
				PlainPeer: &skeinv1.PlainPeer{Name: "rogue", PublicKey: peer[:], CarrierKey: carrier[:],
					AllowedIps: []string{"192.168.99.0/24"},
					Carriers:   []*skeinv1.PlainCarrier{{NodeId: f.mallory.id(), Sealed: make([]byte, 128)}}}}}}
		}, changed("a plain peer", plainPeersOf)),
		command("remove a plain peer", Roles, func(*Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RemovePlainPeer{
				RemovePlainPeer: &skeinv1.RemovePlainPeer{Name: guest}}}
		}, changed("a plain peer is gone", plainPeersOf)),
		command("create the cluster anew", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
				ClusterId: "00000000000000000000000000000001", OverlayIpv4: "10.4.0.0/16"}}}
		}, changed("another cluster", func(s *skeinv1.State) proto.Message { return s.GetCluster() })),
		command("promote itself to a voter", RaftStreams, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_PromoteServer{PromoteServer: &skeinv1.PromoteServer{
				NodeId: f.mallory.id()}}}
		}, changed("a voter", serversOf)),
	}
}

// slot is slot 0 of an egress of the lab, as a member knows it.
func (f *Field) slot(egress string) *skeinv1.EgressSlot { return slotNow(f.members, egress) }

// lost judges by what honest nodes have lost.
func lost(s Seen) string {
	if len(s.Lost) == 0 {
		return ""
	}
	return s.Lost[0]
}

// given judges by what the attacker got.
func given(s Seen) string {
	if len(s.Given) == 0 {
		return ""
	}
	return s.Given[0]
}

// inOthersNames are commands with another issuer, another's request ID, or another's token.
func inOthersNames() []Attempt {
	revokePrey := func(f *Field, issuer string) *skeinv1.Command {
		return &skeinv1.Command{Issuer: issuer, RequestId: consensus.NewRequestID(),
			Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: f.prey.id(), Reason: "forged"}}}
	}
	rotatePrey := func(f *Field) *skeinv1.Command {
		key := freshKey()
		return &skeinv1.Command{Issuer: f.prey.id(), RequestId: consensus.NewRequestID(),
			Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: f.prey.id(),
				WireguardKey: key[:]}}}
	}
	return []Attempt{
		forged("name a server as the issuer", Issuer, func(f *Field) *skeinv1.ProposeRequest {
			return &skeinv1.ProposeRequest{Command: revokePrey(f, f.id("dc1").String()), Forwarded: true}
		}, changed("a node is revoked", revokedOf)),
		forged("rotate a node's key with that node as the issuer", Issuer, func(f *Field) *skeinv1.ProposeRequest {
			return &skeinv1.ProposeRequest{Command: rotatePrey(f)}
		}, changed("another node's WireGuard key", preyOf)),
		forged("forward a command in a victim's name", Issuer, func(f *Field) *skeinv1.ProposeRequest {
			return &skeinv1.ProposeRequest{Command: rotatePrey(f), Forwarded: true}
		}, changed("another node's WireGuard key", preyOf)),
		forged("set the log's time a year ahead", Issuer, func(f *Field) *skeinv1.ProposeRequest {
			r := f.mallory.proposal(&skeinv1.Command{Time: time.Now().Add(365 * 24 * time.Hour).UnixNano(),
				Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: f.mallory.id(),
					Pool: "default", Total: 1}}})
			return r
		}, func(s Seen) string {
			if ahead := time.Duration(s.After.GetTime() - s.Before.GetTime()); ahead > time.Hour {
				return "the log's time is ahead by " + ahead.String()
			}
			return ""
		}),
		{Name: "repeat another's request ID", From: Member, Guard: RequestIDs,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				theirs, err := f.tokenRequest(ctx)
				if err != nil {
					return seen, err
				}
				r, err := f.mallory.cluster(relayNode).Propose(ctx,
					&skeinv1.ProposeRequest{Command: &skeinv1.Command{RequestId: theirs,
						Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{TokenId: "0000000000000000"}}}})
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				seen.Refusal = r.GetAnswer().GetErrorMessage()
				if r.GetAnswer().GetToken() != nil {
					seen.Given = append(seen.Given, "the answer to another's command")
				}
				return seen, nil
			}, Judge: given},
		readmit("take over another member's WireGuard key by admitting it again", "prey"),
		readmit("take over a server's WireGuard key by admitting it again", "dc2"),
		admitByHash("admit a node by the hash of a token, which every member sees", false),
		admitByHash("admit a server by the hash of a token", true),
		command("grant itself the role of an admin", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: f.mallory.id(),
				Admin: true}}}
		}, changed("the role of an admin", nodesOf)),
		command("revoke another node", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: f.doomed.id(),
				Reason: "red team"}}}
		}, changed("a node is revoked", revokedOf)),
		command("make another node a server", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: f.puppet.id()}}}
		}, changed("a server", serversOf)),
		command("take the vote from a server", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{
				NodeId: f.id("dc3").String(), Reason: "red team", Force: true}}}
		}, changed("a server is none any more", serversOf)),
		command("make itself a server", Roles, func(f *Field) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: f.mallory.id()}}}
		}, changed("a server", serversOf)),
	}
}

// readmit has a member admitted again with the token that the attacker has joined with itself: first with another
// WireGuard key, then with other event schemas. It proves the token's secret, and nobody asks it for the member's
// identity.
func readmit(name, of string) Attempt {
	return Attempt{Name: name, From: Member, Guard: Roles, Judge: takenOver(of),
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			state, err := f.log(ctx)
			if err != nil {
				return seen, err
			}
			have, key := nodeOf(state, f.id(of).String()), freshKey()
			again := func(wg []byte, most uint32) (Seen, error) {
				r := &skeinv1.JoinRequest{Node: &skeinv1.NewNode{Name: have.GetName(), IdentityKey: have.GetIdentityKey(),
					WireguardKey: wg, MinSchema: have.GetMinSchema(), MaxSchema: most}}
				show(r, f.puppet.token)
				hash := sha256.Sum256(r.GetTokenSecret())
				return f.propose(ctx, f.mallory, f.mallory.proposal(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{
					AdmitNode: &skeinv1.AdmitNode{Node: r.GetNode(), TokenId: r.GetTokenId(), TokenSecret: r.GetTokenSecret(),
						TokenProof: r.GetTokenProof(), TokenSecretHash: hash[:], ClusterId: r.GetClusterId()}}}))
			}
			first, err := again(key[:], have.GetMaxSchema())
			if err != nil {
				return first, err
			}
			seen, err = again(nodeOf(first.After, have.GetId()).GetWireguardKey(), have.GetMaxSchema()+1)
			seen.Before = first.Before
			seen.Refusal = cmp.Or(first.Refusal, seen.Refusal)
			return seen, err
		}}
}

// takenOver judges that a node has another key or other event schemas.
func takenOver(name string) func(Seen) string {
	return func(s Seen) string {
		for _, b := range s.Before.GetNodes() {
			a := nodeOf(s.After, b.GetId())
			switch {
			case b.GetName() != name:
			case string(a.GetWireguardKey()) != string(b.GetWireguardKey()):
				return "the log gives " + name + " another WireGuard key"
			case a.GetMinSchema() != b.GetMinSchema() || a.GetMaxSchema() != b.GetMaxSchema():
				return "the log gives " + name + " other event schemas"
			}
		}
		return ""
	}
}

// readStates reads the whole state a hundred times, one after the other.
func (f *Field) readStates(ctx context.Context) (seen Seen, err error) {
	const asks, burst, perSecond = 100, 20, 1
	began := time.Now()
	for range asks {
		switch _, err := f.puppet.cluster(relayNode).ReadState(ctx, &skeinv1.ReadStateRequest{}); {
		case err == nil:
			seen.Count++
		case connect.CodeOf(err) == connect.CodeResourceExhausted:
			seen.Refusal = err.Error()
		default:
			return seen, errors.Join(errNotHeard, err)
		}
	}
	if seen.Count == 0 {
		return seen, errors.New("not even one state was read")
	}
	seen.Bound = burst + perSecond*(1+int(time.Since(began).Seconds()))
	return seen, nil
}

// tokenRequest is the request ID by which an admin made a token, as the log tells every member.
func (f *Field) tokenRequest(ctx context.Context) (string, error) {
	if _, err := f.token(ctx, 1); err != nil {
		return "", err
	}
	state, err := f.log(ctx)
	if err != nil {
		return "", err
	}
	r, err := f.mallory.cluster(relayNode).ReadEvents(ctx,
		&skeinv1.ReadEventsRequest{After: max(state.GetIndex(), 20) - 20})
	if err != nil {
		return "", err
	}
	for _, e := range r.GetEvents() {
		if e.GetTokenCreated() != nil && e.GetRequestId() != "" {
			return e.GetRequestId(), nil
		}
	}
	return "", errors.New("no event says by which request a token was made")
}

// admitByHash has a node admitted as if a joiner had shown the secret.
func admitByHash(name string, server bool) Attempt {
	return Attempt{Name: name, From: Member, Guard: Tokens,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			token, err := f.token(ctx, 1)
			if err != nil {
				return seen, err
			}
			key, err := identity.NewKey()
			if err != nil {
				return seen, err
			}
			state, err := f.log(ctx)
			if err != nil {
				return seen, err
			}
			var hash []byte // as the replica of every member has it
			for _, t := range state.GetTokens() {
				if t.GetId() == token.GetTokenId() {
					hash = t.GetSecretHash()
				}
			}
			wg := make([]byte, 32)
			copy(wg, key.Public())
			return f.propose(ctx, f.mallory,
				f.mallory.proposal(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
					Node: &skeinv1.NewNode{Name: "byhash-" + key.ID().String()[:4], IdentityKey: key.Public(), WireguardKey: wg,
						Server: server, MinSchema: 1, MaxSchema: f.maxSchema()},
					TokenId: token.GetTokenId(), TokenSecretHash: hash, ClusterId: token.GetClusterId(),
				}}}))
		}, Judge: func(s Seen) string {
			if len(s.After.GetServers()) > len(s.Before.GetServers()) {
				return "a server of its own"
			}
			return changed("a node of its own", nodesOf)(s)
		}}
}
