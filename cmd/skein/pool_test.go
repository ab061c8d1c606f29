package main

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

const threeDays = 72 * time.Hour

var (
	defaultPool = &skeinv1.Pool{Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{
		{Ipv4: "10.64.0.0/16", Ipv6: "fd01:203:405:607::/112"}, {Ipv4: "10.65.0.0/24", Ipv6: "fd01:203:405:608::/120"}},
		CreatedAt: 1795269600e9, CreatedIndex: 12, CooldownSeconds: 300, StickySeconds: 90, MaxBlocksPerNode: 16,
		Allowed: []string{"*"}, Quotas: map[string]uint32{"team-a": 20, "team-b": 8}}
	publicPool = &skeinv1.Pool{Name: "public", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "192.0.2.64/28"}}, Draining: true,
		CreatedAt: 1795269600e9, CreatedIndex: 14, Namespaces: []string{"ingress", "mail"}}
	v6Pool = &skeinv1.Pool{Name: strings.Repeat("six", 21), BlockSizeBits: 48,
		Subnets: []*skeinv1.PoolSubnet{{Ipv6: "fd02::/64"}}, CreatedIndex: 15}
	keptIP = &skeinv1.StaticAddress{Pool: "default", Ipv4: "10.64.3.5", Ipv6: "fd01:203:405:607::365",
		Namespace: "mail", Pod: "postfix-0", NodeId: "b33ad742981917ca", Index: 21}
)

func views() []*skeinv1.PoolView {
	kept := proto.CloneOf(keptIP)
	kept.Since = ago(threeDays)
	return []*skeinv1.PoolView{
		{Pool: defaultPool, Blocks: 2056, Owned: 3, Reserved: 1, Resting: 2, Free: 2050, Nodes: 2,
			Local: &skeinv1.LocalPool{Blocks: 2, Used: 31, Free: 32, Resting: 1},
			Holders: []*skeinv1.PoolHolder{{NodeId: "b33ad742981917ca", Name: "home1", Blocks: 2},
				{NodeId: "7ef4fee4c02da850", Name: "dc1", Blocks: 1}},
			Grants: []*skeinv1.Grant{{Pool: "default", Namespace: "team-a", NodeId: "b33ad742981917ca", Addresses: 8},
				{Pool: "default", Namespace: "team-a", NodeId: "7ef4fee4c02da850", Addresses: 4}},
			Statics: []*skeinv1.StaticAddress{kept}},
		{Pool: publicPool, Blocks: 16, Owned: 16, Nodes: 1},
		{Pool: v6Pool, Blocks: 1 << 63, Free: 1 << 63},
	}
}

func TestPoolsAreShown(t *testing.T) {
	f := newFakeAgent(t)
	f.lay(&skeinv1.PoolsRequest{}, &skeinv1.PoolsResponse{Pools: views()})
	f.showsGolden(t, "pool-list", []string{"pool", "list"}, []string{"pool", "show", "default"})
	if !proto.Equal(f.asked[1], &skeinv1.PoolsRequest{Name: "default"}) {
		t.Errorf("asked for %v", f.asked[1])
	}
	f.lay(&skeinv1.PoolsRequest{}, &skeinv1.PoolsResponse{Pools: views()[1:]})
	f.showsGolden(t, "pool-show", []string{"pool", "show", "public"})
	f.lay(&skeinv1.PoolsRequest{}, &skeinv1.PoolsResponse{Pools: views()[2:]})
	f.showsGolden(t, "pool-show-ipv6", []string{"pool", "show", "six"})
	f.lay(&skeinv1.PoolsRequest{}, &skeinv1.PoolsResponse{})
	f.showsGolden(t, "pool-list-empty", []string{"pool", "list"})
	if _, _, err := f.skein(t, "pool", "show", "nowhere"); err == nil || !strings.Contains(err.Error(),
		"there is no pool named nowhere") {
		t.Errorf("a pool that is not there: %v", err)
	}
}

func TestPoolsAreChanged(t *testing.T) {
	f := newFakeAgent(t)
	for _, r := range []proto.Message{&skeinv1.CreatePoolRequest{}, &skeinv1.ChangePoolRequest{}} {
		f.lay(r, &skeinv1.PoolResponse{Pool: defaultPool, Index: 31})
	}
	f.lay(&skeinv1.RemovePoolRequest{}, &skeinv1.RemovePoolResponse{Index: 32})
	change := func(c *skeinv1.ChangePool) proto.Message { return &skeinv1.ChangePoolRequest{Change: c} }
	var commands [][]string
	for _, c := range []struct {
		args []string
		want proto.Message
	}{
		{[]string{"create", "default", "--subnet", "10.64.0.0/16,fd01::/112"},
			&skeinv1.CreatePoolRequest{Pool: &skeinv1.Pool{Name: "default", BlockSizeBits: 5,
				Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16", Ipv6: "fd01::/112"}}}}},
		{[]string{"create", "public", "--subnet", "fd01::/112,10.64.0.0/16", "--subnet", "10.65.0.0/16, fd02::/112",
			"--block-size-bits", "0", "--cooldown", "5m", "--sticky", "90s",
			"--max-blocks-per-node", "16", "--namespace", "a,b", "--namespace", "c", "--allow", "*", "--quota", "a=3,b=4"},
			&skeinv1.CreatePoolRequest{Pool: &skeinv1.Pool{Name: "public",
				Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16", Ipv6: "fd01::/112"},
					{Ipv4: "10.65.0.0/16", Ipv6: "fd02::/112"}},
				CooldownSeconds: 300, StickySeconds: 90, MaxBlocksPerNode: 16, Namespaces: []string{"a", "b", "c"},
				Allowed: []string{"*"}, Quotas: map[string]uint32{"a": 3, "b": 4}}}},
		{[]string{"extend", "default", "--subnet", "10.65.0.0/16"},
			change(&skeinv1.ChangePool{Name: "default", AddSubnets: []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/16"}}})},
		{[]string{"drain", "default"}, change(&skeinv1.ChangePool{Name: "default", Set: &skeinv1.Pool{Draining: true},
			Fields: []string{"draining"}})},
		{[]string{"drain", "default", "--undo"}, change(&skeinv1.ChangePool{Name: "default", Set: &skeinv1.Pool{},
			Fields: []string{"draining"}})},
		{[]string{"set", "default", "--cooldown", "0", "--namespace", "", "--quota", ""},
			change(&skeinv1.ChangePool{Name: "default", Set: &skeinv1.Pool{}, Fields: []string{"cooldown_seconds",
				"namespaces", "quotas"}})},
		{[]string{"set", "default", "--max-blocks-per-node", "4", "--sticky", "1h", "--allow", "x"},
			change(&skeinv1.ChangePool{Name: "default",
				Set:    &skeinv1.Pool{MaxBlocksPerNode: 4, StickySeconds: 3600, Allowed: []string{"x"}},
				Fields: []string{"sticky_seconds", "max_blocks_per_node", "allowed"}})},
		{[]string{"remove", "default"}, &skeinv1.RemovePoolRequest{Name: "default"}},
	} {
		args := append([]string{"pool"}, c.args...)
		if _, _, err := f.skein(t, args...); err != nil {
			t.Fatalf("skein %v: %v", args, err)
		}
		if have := f.asked[len(f.asked)-1]; !proto.Equal(have, c.want) {
			t.Errorf("skein %v\nasked %v\nwant  %v", args, have, c.want)
		}
		commands = append(commands, args)
	}
	f.showsGolden(t, "pool-change", commands...)
}

// What the agent refuses is shown as it says it; what is mistyped never gets to it.
func TestAddressCommandsRefuse(t *testing.T) {
	f := newFakeAgent(t)
	for _, c := range []struct {
		args string
		want string
	}{
		{"pool", "needs a subcommand"},
		{"pool create", "takes one pool's name"},
		{"pool create a", "--subnet is missing"},
		{"pool create a --subnet 10.64.0.0", `"10.64.0.0" is not a subnet`},
		{"pool create a --subnet ::ffff:10.0.0.0/104", "is not a subnet"},
		{"pool create a --subnet 10.64.0.0/16,10.65.0.0/16", "repeat --subnet for more"},
		{"pool create a --subnet 10.64.0.0/16 --cooldown 1500ms", "--cooldown 1.5s: want whole seconds"},
		{"pool create a --subnet 10.64.0.0/16 --sticky -5s", "--sticky -5s: want whole seconds"},
		{"pool create a --subnet 10.64.0.0/16 --quota team", "--quota team: want NAMESPACE=N"},
		{"pool create a --subnet 10.64.0.0/16 --quota a=1,a=2", "namespace a has two quotas"},
		{"pool create a --subnet 10.64.0.0/16 --quota a=-1", "--quota a=-1: want NAMESPACE=N"},
		{"pool set a", "nothing to set"},
		{"pool extend a", "--subnet is missing"},
		{"pool list a", "unknown command or argument"},
		{"pool list -o xml", "-o xml: allowed: table, json"},
		{"block list --reserved --node a", "--reserved and --node cannot be used together"},
		{"block reserve 10.64.0.0/27", "--pool is missing"},
		{"block reserve hello --pool a", `"hello" is neither a prefix such as 10.64.3.0/27 nor an address`},
		{"block release", "takes one block's prefix"},
		{"ip who", "takes one address"},
		{"ip who 10.64.0.300", `"10.64.0.300" is not an IP address`},
		{"ip who fe80::1%eth0", "is not an IP address"},
		{"ip who 10.64.0.1 --at yesterday", "--at yesterday: want an index such as 17"},
		{"ip who 10.64.0.1 --at 0", "--at 0: want an index"},
		{"explain address 10.64.0.1 --at -5m", "--at -5m: want an index"},
		{"ip reserve 10.64.0.1", "--for is missing"},
		{"ip reserve 10.64.0.1 --for postfix-0", "--for postfix-0: want NAMESPACE/POD"},
		{"ip reserve 10.64.0.1 --for a/b/c", "--for a/b/c: want NAMESPACE/POD"},
		{"import coil", "takes one file, or - for standard input"},
		{"import coil --replace coil.yaml", "--replace takes no file"},
		{"import coil --replace --takeover", "--replace and --takeover cannot be used together"},
		{"import coil --replace --undo", "--replace and --undo cannot be used together"},
		{"import coil --replace --gateways a=b", "--replace and --gateways cannot be used together"},
		{"import coil --replace --timeout 0s", "--timeout 0s: want a time such as 5m"},
		{"import coil - --bare", "--bare needs --replace"},
		{"import coil --takeover --kubeconfig x", "--kubeconfig needs --replace"},
		{"import coil - --pool a", "--pool needs --replace"},
		{"import coil - --timeout 5m", "--timeout needs --replace"},
		{"import coil - --node a", "--node a: want COIL=SKEIN"},
		{"import coil - --node a=b --node a=c", "Coil's node a is given twice"},
	} {
		_, _, err := f.skein(t, strings.Fields(c.args)...)
		var u cli.UsageError
		if !errors.As(err, &u) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("skein %s: %v; want a mistake in usage: %s", c.args, err, c.want)
		}
	}
	if len(f.asked) > 0 {
		t.Errorf("the agent was asked: %v", f.asked)
	}
	f.err = connect.NewError(connect.CodeFailedPrecondition, errors.New("pool a still has 3 blocks: drain it first with "+
		"skein pool drain a"))
	for _, args := range []string{"pool remove a", "pool list", "block list", "ip who 10.64.0.1", "ip list", "ip reserved",
		"block release 10.64.0.0/27", "ip release 10.64.0.1"} {
		_, _, err := f.skein(t, strings.Fields(args)...)
		var u cli.UsageError
		if err == nil || errors.As(err, &u) || err.Error() != "pool a still has 3 blocks: drain it first with skein pool "+
			"drain a" {
			t.Errorf("skein %s: %v", args, err)
		}
	}
}

func TestBlocksAreShown(t *testing.T) {
	f := newFakeAgent(t)
	at := ago(threeDays)
	owned := &skeinv1.Block{Pool: "default", Ipv4: "10.64.0.0/27", Ipv6: "fd01:203:405:607::/123",
		NodeId: "b33ad742981917ca", Since: at, Index: 17}
	other := &skeinv1.Block{Pool: "default", Number: 2055, Ipv4: "10.65.0.224/27", Ipv6: "fd01:203:405:608::e0/123",
		NodeId: "7ef4fee4c02da850", Since: at, Index: 18}
	kept := &skeinv1.Block{Pool: "default", Number: 27, Ipv4: "10.64.3.96/27", Ipv6: "fd01:203:405:607::360/123",
		Since: at, Index: 20, Reason: "static addresses, and a long story about who needs them"}
	public := &skeinv1.Block{Pool: "public", Number: 3, Ipv4: "192.0.2.67/32", NodeId: "b33ad742981917ca", Since: at}
	all := []*skeinv1.BlockView{{Block: owned, Node: "home1", Used: 12, Local: true}, {Block: other, Node: "dc1"},
		{Block: kept}, {Block: public, Node: "home1", Used: 1, Local: true}}
	f.lay(&skeinv1.BlocksRequest{}, &skeinv1.BlocksResponse{Blocks: all})
	f.lay(&skeinv1.ReserveBlockRequest{}, &skeinv1.BlockResponse{Block: kept, Index: 20})
	f.lay(&skeinv1.ReleaseBlockRequest{}, &skeinv1.BlockResponse{Block: kept, Index: 22})
	f.showsGolden(t, "block-list", []string{"block", "list"}, []string{"block", "reserve", "10.64.3.101", "--pool",
		"default", "--reason", "why"}, []string{"block", "release", "10.64.3.96/27"})
	for i, want := range []proto.Message{&skeinv1.BlocksRequest{}, &skeinv1.ReserveBlockRequest{Pool: "default",
		Prefix: "10.64.3.101", Reason: "why"}, &skeinv1.ReleaseBlockRequest{Prefix: "10.64.3.96/27"}} {
		if !proto.Equal(f.asked[i], want) {
			t.Errorf("asked %v, want %v", f.asked[i], want)
		}
	}
	f.lay(&skeinv1.ReleaseBlockRequest{}, &skeinv1.BlockResponse{Index: 23})
	f.showsGolden(t, "block-release-free", []string{"block", "release", "10.64.3.96/27"})
	f.lay(&skeinv1.BlocksRequest{}, &skeinv1.BlocksResponse{Blocks: all[3:]})
	f.showsGolden(t, "block-list-ipv4", []string{"block", "list", "--pool", "public"})
	f.lay(&skeinv1.BlocksRequest{}, &skeinv1.BlocksResponse{})
	f.showsGolden(t, "block-list-empty", []string{"block", "list", "--reserved"})
}

// The new families as `skein events` and `skein state` show them.
func TestAddressEventsAreShown(t *testing.T) {
	block := &skeinv1.Block{Pool: "default", Ipv4: "10.64.0.0/27", Ipv6: "fd01:203:405:607::/123",
		NodeId: "b33ad742981917ca", Since: 9, Index: 17}
	kept := &skeinv1.Block{Pool: "default", Number: 27, Ipv4: "10.64.3.96/27", Ipv6: "fd01:203:405:607::360/123",
		Reason: "static addresses"}
	names := strings.NewReplacer("b33ad742981917ca", "home1")
	var b strings.Builder
	for i, e := range []*skeinv1.Event{
		{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: defaultPool}}},
		{Body: &skeinv1.Event_PoolCreated{PoolCreated: &skeinv1.PoolCreated{Pool: publicPool}}},
		{Body: &skeinv1.Event_PoolChanged{PoolChanged: &skeinv1.PoolChanged{Pool: publicPool, Change: "drained"}}},
		{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: block}}},
		{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: kept}}},
		{Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{Pool: "default", NodeId: block.NodeId,
			Reason: "empty"}}},
		{Body: &skeinv1.Event_AddressReserved{AddressReserved: &skeinv1.AddressReserved{Address: keptIP}}},
		{Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{Pool: "default", Address: "10.64.3.5",
			NodeId: block.NodeId}}},
		{Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{Pool: "default", Address: "10.64.3.5"}}},
		{Body: &skeinv1.Event_AddressReleased{AddressReleased: &skeinv1.AddressReleased{Pool: "default",
			Address: "10.64.3.5"}}},
		{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: &skeinv1.Grant{Pool: "default", Namespace: "team-a",
			NodeId: block.NodeId, Addresses: 8}}}},
		{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: &skeinv1.Grant{Pool: "default", Namespace: "team-a",
			NodeId: block.NodeId}}}},
		{Body: &skeinv1.Event_PoolRemoved{PoolRemoved: &skeinv1.PoolRemoved{Name: "public"}}},
	} {
		e.Index, e.Time = uint64(i+12), 1795269600e9
		b.WriteString(eventLine(e, names) + "\n")
	}
	at := ago(threeDays)
	for _, k := range []*skeinv1.Block{block, kept} {
		k.Since = at
	}
	static := proto.CloneOf(keptIP)
	static.Since = at
	state := &skeinv1.State{Index: 30, Cluster: &skeinv1.Cluster{Id: "65229d4b83746f6b433e05d56d8bc612",
		OverlayIpv4: "10.4.0.0/16", OverlayIpv6: "fd65:229d:4b83::/64"},
		Nodes: []*skeinv1.Node{{Id: block.NodeId, Name: "home1", Ipv4: "10.4.0.1"}}, Pools: []*skeinv1.Pool{defaultPool,
			publicPool}, Blocks: []*skeinv1.Block{block, kept},
		Freed: []*skeinv1.FreedBlock{{Pool: "default", Number: 9}}, Statics: []*skeinv1.StaticAddress{static},
		Grants: []*skeinv1.Grant{{Pool: "default", Namespace: "team-a", NodeId: block.NodeId, Addresses: 8}}}
	printState(&b, &skeinv1.StateResponse{State: state, Hash: "a8faac1c"})
	fits(t, b.String())
	goldenText(t, "address-events", b.String())
	for range 99 {
		state.Blocks = append(state.Blocks, kept)
	}
	b.Reset()
	printState(&b, &skeinv1.StateResponse{State: state})
	if want := "… and 61 blocks; -o json has all\n"; !strings.Contains(b.String(), want) {
		t.Errorf("%q is missing from\n%s", want, b.String())
	}
}

func TestSpans(t *testing.T) {
	var have []string
	for _, s := range []uint32{0, 1, 60, 90, 3600, 3601, 3660, 86400, 36000} {
		have = append(have, span(s))
	}
	if want := []string{"0s", "1s", "1m", "1m30s", "1h", "1h0m1s", "1h1m", "24h", "10h"}; !slices.Equal(have, want) {
		t.Errorf("have %v\nwant %v", have, want)
	}
}
