package redteam

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/agent/admission"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Names in redteam.yaml.
const (
	relayNode = "dc1"
	attacker  = "mallory"
	gateway   = "gw1"
	victim    = "home1"
	other     = "cloud1"
	lodger    = "lodger"
	stranger  = "stranger"
	bystander = "bystander"

	// Late ones, see redteam.yaml.
	heir   = "dc4"  // wishes to lead dc, as dc2 does
	local  = "dc5"  // known to its own site alone
	mate   = "mate" // of mallory's site
	pal    = "pal"  // likewise
	second = "dc3"  // leads its site beside relayNode

	guest = "guest" // a plain peer of others

	honestPod  = "web"   // on the victim; it uses an egress
	hostilePod = "rogue" // likewise on the victim
)

// honest are the agents that must not suffer.
var honest = []string{"dc1", "dc2", "dc3", gateway, victim, other}

// Field is where attempts are made.
type Field struct {
	lab     *lab.Lab
	relay   string
	members *skeinv1.State // as a member reads it, with what members alone may know
	mallory *person
	prey    *person          // a member without an agent, which attempts may take things from
	puppet  *person          // a second member of the attacker's, without an agent
	exile   *person          // a member that was revoked
	doomed  *person          // a member that is there to be revoked
	started map[string]int64 // when each honest agent started
	pods    map[string][]netip.Addr
	sited   bool // the late ones have started, see inSites
}

// newField gathers what attackers hold.
func newField(ctx context.Context, l *lab.Lab) (*Field, error) {
	f := &Field{lab: l, relay: relayNode, started: map[string]int64{}, pods: map[string][]netip.Addr{}}
	// A relay forwards pairs in its kernel where that forwards at all.
	if _, err := f.sysctl(relayNode, map[string]string{"/proc/sys/net/ipv4/ip_forward": "1"}); err != nil {
		return nil, err
	}
	if err := f.startPods(ctx); err != nil {
		return nil, err
	}
	for _, n := range honest {
		s, err := f.api(n).Status(ctx, &skeinv1.StatusRequest{})
		if err != nil {
			return nil, err
		}
		f.started[n] = s.GetStartedAt()
	}
	var err error
	if f.mallory, err = f.inhabitant(attacker); err != nil {
		return nil, err
	}
	if f.members, err = f.log(ctx); err != nil {
		return nil, err
	}
	f.mallory.node = nodeOf(f.members, f.mallory.id())
	for _, p := range []struct {
		into **person
		host string
		name string
	}{{&f.prey, bystander, "prey"}, {&f.puppet, stranger, "puppet"}, {&f.exile, stranger, "exile"},
		{&f.doomed, bystander, "doomed"}} {
		if *p.into, err = f.newcomer(p.host); err == nil {
			err = (*p.into).enrol(ctx, p.name)
		}
		if err != nil {
			return nil, err
		}
	}
	return f, f.furnish(ctx)
}

// furnish gives the prey something to take, revokes the exile, and reads what a member may know.
func (f *Field) furnish(ctx context.Context) error {
	admin := f.api(relayNode)
	if _, err := admin.RevokeNode(ctx, &skeinv1.RevokeNodeRequest{Node: "exile", Reason: "red team"}); err != nil {
		return err
	}
	if _, err := f.prey.cluster(relayNode).Propose(ctx,
		f.prey.proposal(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{
			AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: f.prey.id(), Pool: "default", Total: 1}}})); err != nil {
		return fmt.Errorf("the prey takes a block: %w", err)
	}
	if _, err := admin.ReserveAddress(ctx, &skeinv1.ReserveAddressRequest{Pool: "default", Address: "10.100.3.77",
		Namespace: "vault", Pod: "safe"}); err != nil {
		return err
	}
	if _, err := admin.CreatePool(ctx, &skeinv1.CreatePoolRequest{Pool: &skeinv1.Pool{Name: "spare", BlockSizeBits: 2,
		Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.99.0.0/24"}}}}); err != nil {
		return err
	}
	key := freshKey()
	if _, err := admin.AddPlainPeer(ctx, &skeinv1.AddPlainPeerRequest{Name: guest, PublicKey: key[:],
		Via: []string{relayNode}}); err != nil {
		return err
	}
	return f.refresh(ctx)
}

// refresh reads the state as members may.
func (f *Field) refresh(ctx context.Context) error {
	r, err := f.mallory.cluster(relayNode).ReadState(ctx, &skeinv1.ReadStateRequest{})
	if err != nil {
		return fmt.Errorf("mallory reads the state: %w", err)
	}
	f.members = r.GetState()
	return nil
}

func (f *Field) startPods(ctx context.Context) error {
	for name, notes := range map[string]map[string]string{honestPod: {"skein.dev/egress.out": "nat"}, hostilePod: nil} {
		if err := f.lab.StartPods(ctx, 20*time.Second,
			lab.StartPods{Nodes: []string{victim}, Pods: []string{name}, Annotations: notes}); err != nil {
			return err
		}
	}
	all, err := f.lab.Pods(victim)
	for _, p := range all {
		f.pods[p.Name] = p.Addresses
	}
	return err
}

// podAddr is a pod's address of one family.
func (f *Field) podAddr(pod string, v4 bool) netip.Addr {
	i := slices.IndexFunc(f.pods[pod], func(a netip.Addr) bool { return a.Is4() == v4 })
	if i < 0 {
		return netip.Addr{}
	}
	return f.pods[pod][i]
}

// api is a node's own API, as its root uses it.
func (f *Field) api(node string) skeinv1connect.AgentServiceClient {
	c, err := f.lab.Client(node)
	if err != nil {
		panic(err) // a name that redteam.yaml has not: a mistake of this package
	}
	return c
}

// log is the agreed state as a server has it.
func (f *Field) log(ctx context.Context) (*skeinv1.State, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := f.api(relayNode).State(ctx, &skeinv1.StateRequest{})
	return r.GetState(), err
}

// member is a lab's node, or one without an agent, as the log has it.
func (f *Field) member(name string) *skeinv1.Node {
	i := slices.IndexFunc(f.members.GetNodes(), func(n *skeinv1.Node) bool { return n.GetName() == name })
	if i < 0 {
		return nil
	}
	return f.members.GetNodes()[i]
}

func (f *Field) id(name string) identity.ID {
	id, err := identity.ParseID(f.member(name).GetId())
	if err != nil {
		panic(fmt.Sprintf("the log has no node %s", name))
	}
	return id
}

// overlay is a node's address in the tunnel.
func (f *Field) overlay(name string, v4 bool) netip.Addr {
	n := f.member(name)
	if v4 {
		return netip.MustParseAddr(n.GetIpv4())
	}
	return netip.MustParseAddr(n.GetIpv6())
}

// address is where a host is at its site.
func (f *Field) address(host string) netip.Addr {
	info, err := f.lab.Node(host)
	if err != nil {
		panic(err)
	}
	return info.Host.Addr
}

func (f *Field) ns(host string) string { return fabric.HostNS(f.lab.Spec.Name, host) }

func (f *Field) podNS(pod string) string { return fabric.PodNS(f.lab.Spec.Name, victim, pod) }

func (f *Field) maxSchema() uint32 { return events.SchemaMax }

// token is one that an admin made.
func (f *Field) token(ctx context.Context, uses uint32) (*skeinv1.JoinToken, error) {
	t, err := f.api(relayNode).CreateToken(ctx,
		&skeinv1.CreateTokenRequest{Uses: uses, LifetimeNanos: int64(time.Hour), Label: "red team"})
	if err != nil {
		return nil, err
	}
	return decodeToken(t.GetToken())
}

// suffering lists honest agents that are not the ones that started.
func (f *Field) suffering(ctx context.Context) (out []string) {
	for n := range f.started {
		err := until(ctx, 2*patience, func() error {
			s, err := f.api(n).Status(ctx, &skeinv1.StatusRequest{})
			if err == nil && s.GetStartedAt() != f.started[n] {
				out = append(out, "the agent of "+n+" started again")
				f.started[n] = s.GetStartedAt()
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			out = append(out, fmt.Sprintf("the agent of %s answers no more: %v", n, err))
		}
	}
	return out
}

// until tries until there is no error.
func until(ctx context.Context, within time.Duration, try func() error) error {
	return pause.Until(ctx, within, 50*time.Millisecond, try)
}

// decodeToken reads what an admin prints.
func decodeToken(text string) (*skeinv1.JoinToken, error) { return admission.DecodeToken(text) }
