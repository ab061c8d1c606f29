package coil_test

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/imports/coil"
)

// leader decides and folds, without a network.
type leader struct {
	t *testing.T
	s *events.State
	n int
}

func bytesOf(purpose, name string) []byte {
	h := sha256.Sum256([]byte(purpose + " " + name))
	return h[:]
}

// newLeader has a cluster with a server s, and a token for more nodes.
func newLeader(t *testing.T) *leader {
	l := &leader{t: t, s: events.NewState()}
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "00112233445566778899aabbccddeeff", OverlayIpv4: "10.4.0.0/16", FirstNode: newNode("s")}}})
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: "0011223344556677", SecretHash: bytesOf("secret", ""), LifetimeNanos: int64(time.Hour), Uses: 1000}}})
	return l
}

func newNode(name string) *skeinv1.NewNode {
	return &skeinv1.NewNode{Name: name, IdentityKey: bytesOf("identity", name), WireguardKey: bytesOf("wireguard", name),
		MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
}

func (l *leader) admit(name string) {
	l.t.Helper()
	l.must(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
		Node: newNode(name), TokenId: "0011223344556677", TokenSecretHash: bytesOf("secret", ""),
		ClusterId: "00112233445566778899aabbccddeeff"}}})
}

func (l *leader) propose(c *skeinv1.Command) (int, *skeinv1.Answer, error) {
	l.t.Helper()
	l.n++
	c.RequestId, c.Time, c.Entropy = fmt.Sprint("request ", l.n), time.Date(2026, 11, 21, 14, 0, l.n, 0,
		time.UTC).UnixNano(), append(bytesOf("a", fmt.Sprint(l.n)), bytesOf("b", fmt.Sprint(l.n))...)
	all, a, err := events.Decide(l.s, c)
	for _, e := range all {
		if err := l.s.Fold(e); err != nil {
			l.t.Fatalf("fold %v: %v", e, err)
		}
	}
	changes := 0
	for _, e := range all {
		if e.GetCommandAnswered() == nil {
			changes++
		}
	}
	return changes, a, err
}

func (l *leader) must(c *skeinv1.Command) (int, *skeinv1.Answer) {
	l.t.Helper()
	n, a, err := l.propose(c)
	if err != nil {
		l.t.Fatal(err)
	}
	return n, a
}

func command(in *skeinv1.ImportPools, dry bool) *skeinv1.Command {
	in = proto.CloneOf(in)
	in.DryRun = dry
	return &skeinv1.Command{Body: &skeinv1.Command_ImportPools{ImportPools: in}}
}

func file(t *testing.T, name string) *coil.Import {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	in, err := coil.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// owner is the name of the node that has the block an address lies in.
func (l *leader) owner(addr string) string {
	_, _, b := l.s.BlockAt(netip.MustParseAddr(addr))
	if b == nil {
		return "free"
	}
	for _, n := range l.s.Nodes() {
		if n.GetId() == b.GetNodeId() {
			return n.GetName()
		}
	}
	return "reserved: " + b.GetReason()
}

// Files as kubectl and the converter write them are taken over by a leader: a dry run changes nothing, the import what
// the dry run said, and a second one nothing.
func TestLeaderTakesItOver(t *testing.T) {
	for _, name := range []string{"kubectl.yaml", "converter.yaml", "single.json"} {
		t.Run(name, func(t *testing.T) {
			l, in := newLeader(t), file(t, name)
			l.admit("node1")
			l.admit("node2")
			before := l.s.Hash()
			_, dry := l.must(command(in.Pools, true))
			if l.s.Hash() != before {
				t.Fatal("the dry run changed the state")
			}
			n, done := l.must(command(in.Pools, false))
			if want := len(in.Pools.GetPools()) + len(in.Pools.GetBlocks()); n != want || len(dry.GetPlan()) != want+1 {
				t.Errorf("%d changes and a plan of %d lines, want %d and one more:\n%s", n, len(dry.GetPlan()), want,
					strings.Join(dry.GetPlan(), "\n"))
			}
			if strings.Join(done.GetPlan(), "\n") != strings.Join(dry.GetPlan(), "\n") {
				t.Errorf("the plan was\n%s\nand then\n%s", strings.Join(dry.GetPlan(), "\n"), strings.Join(done.GetPlan(), "\n"))
			}
			for _, b := range in.Pools.GetBlocks() {
				p, err := netip.ParsePrefix(b.GetIpv4())
				if err != nil {
					p = netip.MustParsePrefix(b.GetIpv6())
				}
				if have, want := l.owner(p.Addr().String()), b.GetNode()+strings.TrimSuffix("reserved: "+b.GetReason(),
					"reserved: "); have != want {
					t.Errorf("%s: %s, want %s", p, have, want)
				}
			}
			if n, again := l.must(command(in.Pools, false)); n != 0 {
				t.Errorf("a second import made %d changes:\n%s", n, strings.Join(again.GetPlan(), "\n"))
			}
		})
	}
}

// A node that is not a member yet finds its blocks kept for it.
func TestNodesThatJoinLater(t *testing.T) {
	l, in := newLeader(t), file(t, "kubectl.yaml")
	l.admit("node1")
	l.must(command(in.Pools, false))
	if have := l.owner("10.64.2.1"); have != "reserved: for node node2 (imported)" {
		t.Errorf("10.64.2.1: %s", have)
	}
	l.admit("node2")
	if n, _ := l.must(command(in.Pools, false)); n != 3 {
		t.Errorf("%d changes, want those of the 3 blocks of node2", n)
	}
	if have := l.owner("10.64.2.1"); have != "node2" {
		t.Errorf("10.64.2.1: %s", have)
	}
}

// What contradicts the state is listed, all of it, and nothing is taken over.
func TestConflictsAreListed(t *testing.T) {
	l, in := newLeader(t), file(t, "kubectl.yaml")
	l.admit("node1")
	l.admit("node2")
	l.must(command(&skeinv1.ImportPools{Pools: []*skeinv1.Pool{
		{Name: "default", BlockSizeBits: 5,
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16", Ipv6: "fd01:203:405:607::/112"}}},
		{Name: "other", BlockSizeBits: 2, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "192.0.2.64/30"}}},
	}, Blocks: []*skeinv1.ImportBlock{{Pool: "default", Ipv4: "10.64.0.0/27", Node: "node2"}}}, false))
	before := l.s.Hash()
	for _, dry := range []bool{true, false} {
		_, _, err := l.propose(command(in.Pools, dry))
		if err == nil {
			t.Fatal("no conflict")
		}
		for _, want := range []string{"nothing was imported", "pool global: subnet 192.0.2.64/28 overlaps 192.0.2.64/30 of " +
			"pool other", "block 10.64.0.0/27,fd01:203:405:607::/123 of pool default: it belongs to node node2 here"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing from\n%v", want, err)
			}
		}
		if n := strings.Count(err.Error(), "\n- "); n != 2 {
			t.Errorf("%d conflicts, want 2: the pool's, without its block's, and the other block's\n%v", n, err)
		}
		if l.s.Hash() != before {
			t.Error("the state has changed")
		}
	}
}

// A fleet's file is read whole, and its import decided.
func TestLargestImport(t *testing.T) {
	l := newLeader(t)
	for i := range 500 {
		l.admit(fmt.Sprintf("node%d", i))
	}
	in, err := coil.Parse(many(coil.MaxBlocks))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(in.Pools.GetBlocks()); n != coil.MaxBlocks || len(in.Notes) != 0 {
		t.Fatalf("%d blocks, notes %v", n, in.Notes)
	}
	last := in.Pools.GetBlocks()[coil.MaxBlocks-1]
	if want := (&skeinv1.ImportBlock{Pool: "default", Ipv4: "10.71.255.224/27", Ipv6: "fd01:203:405:607::7:ffe0/123",
		Node: "node383"}); !proto.Equal(last, want) {
		t.Errorf("the last block is %v, want %v", last, want)
	}
	if n, _ := l.must(command(in.Pools, false)); n != coil.MaxBlocks+1 {
		t.Errorf("%d changes", n)
	}
	if have := l.owner("10.71.255.230"); have != "node383" {
		t.Errorf("the last block is of %s", have)
	}
}
