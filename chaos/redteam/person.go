package redteam

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	controlPort = 7946
	frontPort   = 7443
	stunPort    = 3478
	wgPort      = 51820
	fouPort     = 5555

	patience = 5 * time.Second // for one answer
)

// person is an identity and the network namespace that it acts from.
type person struct {
	field  *Field
	key    *identity.Key
	wg     identity.WireGuardKey
	ns     string
	node   *skeinv1.Node // as the log has it; nil: no member
	conns  *consensus.Conns
	joined *skeinv1.JoinRequest // by which it was admitted
	token  *skeinv1.JoinToken   // that it used up with that
	// tunnel: an agent runs here, so streams go to overlay addresses; else a relay joins them.
	tunnel bool
}

// inhabitant is the person of a lab's agent, with the keys of its state directory.
func (f *Field) inhabitant(name string) (*person, error) {
	info, err := f.lab.Node(name)
	if err != nil {
		return nil, err
	}
	key, wg, err := identity.LoadOrCreate(filepath.Join(info.Dir, "state"))
	if err != nil {
		return nil, err
	}
	return f.person(key, wg, info.Namespace, true), nil
}

// newcomer is a person with fresh keys, no member yet, on a host of the lab.
func (f *Field) newcomer(host string) (*person, error) {
	key, err := identity.NewKey()
	if err != nil {
		return nil, err
	}
	wg, err := identity.NewWireGuardKey()
	return f.person(key, wg, fabric.HostNS(f.lab.Spec.Name, host), false), err
}

func (f *Field) person(key *identity.Key, wg identity.WireGuardKey, ns string, tunnel bool) *person {
	p := &person{field: f, key: key, wg: wg, ns: ns, tunnel: tunnel}
	p.conns = consensus.NewConns(p)
	return p
}

func (p *person) id() string { return p.key.ID().String() }

// connect opens a TCP connection from the person's namespace.
func (p *person) connect(ctx context.Context, to netip.AddrPort) (c net.Conn, err error) {
	err = fabric.In(p.ns, func() error {
		d := net.Dialer{Timeout: patience}
		c, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	return c, err
}

// secure does a TLS handshake by which the person's key is proved. want nil: whoever is there.
func (p *person) secure(ctx context.Context, c net.Conn, alpn string, want ed25519.PublicKey) (*tls.Conn, error) {
	verify := identity.Verify(func(ed25519.PublicKey) error { return nil })
	if want != nil {
		verify = identity.Expect(want)
	}
	conf, err := p.key.ClientTLS(alpn, verify)
	if err != nil {
		c.Close()
		return nil, err
	}
	t := tls.Client(c, conf)
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return t, nil
}

// front connects to the TLS port of a public node.
func (p *person) front(ctx context.Context, node, alpn string) (*tls.Conn, error) {
	c, err := p.connect(ctx, netip.AddrPortFrom(p.field.address(node), frontPort))
	if err != nil {
		return nil, err
	}
	return p.secure(ctx, c, alpn, nil)
}

// Dial opens a stream of the control net, as the person's own agent would.
func (p *person) Dial(ctx context.Context, node identity.ID, alpn string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var victim *skeinv1.Node
	for _, n := range p.field.members.GetNodes() {
		if n.GetId() == node.String() {
			victim = n
		}
	}
	if victim == nil {
		return nil, fmt.Errorf("the attacker knows no node %s", node)
	}
	var c net.Conn
	var err error
	if p.tunnel {
		c, err = p.connect(ctx, netip.AddrPortFrom(netip.MustParseAddr(victim.GetIpv4()), controlPort))
	} else {
		c, err = p.splice(ctx, p.field.relay, node)
	}
	if err != nil {
		return nil, err
	}
	return p.secure(ctx, c, alpn, victim.GetIdentityKey())
}

// cluster and egress are services of a node, called by this person.
func (p *person) cluster(node string) skeinv1connect.ClusterServiceClient {
	return p.conns.Cluster(p.field.id(node))
}

func (p *person) egress(node string) skeinv1connect.EgressServiceClient {
	return skeinv1connect.NewEgressServiceClient(p.conns.HTTP(), consensus.URL(p.field.id(node)))
}

// join asks the front of a node to admit the person.
func (p *person) join(ctx context.Context, at string, r *skeinv1.JoinRequest) (*skeinv1.JoinResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	c, err := p.front(ctx, at, identity.ALPNJoin)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * patience))
	if err := writeMessage(c, r); err != nil {
		return nil, err
	}
	answer := &skeinv1.JoinResponse{}
	return answer, readMessage(c, answer)
}

// request is an honest request of this person to join with a token.
func (p *person) request(t *skeinv1.JoinToken, name string) (*skeinv1.JoinRequest, error) {
	public, err := p.wg.Public()
	r := &skeinv1.JoinRequest{RequestId: consensus.NewRequestID(),
		Node: &skeinv1.NewNode{Name: name, IdentityKey: p.key.Public(), WireguardKey: public[:], MinSchema: 1,
			MaxSchema: p.field.maxSchema()}}
	show(r, t)
	return r, err
}

// show puts a token into a request, with the proof for the node that the request names.
func show(r *skeinv1.JoinRequest, t *skeinv1.JoinToken) {
	r.ClusterId, r.TokenId, r.TokenSecret = t.GetClusterId(), t.GetTokenId(), t.GetSecret()
	if t.GetSigned() {
		r.TokenSecret = events.TokenKey(t.GetSecret())
		r.TokenProof = events.ProveJoin(t.GetSecret(), t.GetClusterId(), t.GetTokenId(), r.GetNode())
	}
}

// enrol makes the person a member without an agent. It returns when the relay takes it for one: the log has it a moment
// before.
func (p *person) enrol(ctx context.Context, name string) error {
	token, err := p.field.token(ctx, 1)
	if err != nil {
		return err
	}
	r, err := p.request(token, name)
	if err != nil {
		return err
	}
	answer, err := p.join(ctx, p.field.relay, r)
	if err == nil && answer.GetErrorCode() != "" {
		err = errors.New(answer.GetErrorMessage())
	}
	if err != nil {
		return fmt.Errorf("%s joins: %w", name, err)
	}
	p.node, p.joined, p.token = answer.GetNode(), r, token
	p.field.members = answer.GetState()
	return until(ctx, 2*patience, func() error {
		s, err := p.session(ctx)
		if err != nil {
			return fmt.Errorf("%s joined, and the relay does not know it: %w", name, err)
		}
		return s.Close()
	})
}

// heard reads from a stream until it ends or time is over, and tells how much came.
func heard(c net.Conn, wait time.Duration) ([]byte, error) {
	_ = c.SetReadDeadline(time.Now().Add(wait))
	return io.ReadAll(io.LimitReader(c, 1<<20))
}

// hear notes what comes by a stream within a second as given to the attacker.
func (s *Seen) hear(c net.Conn, what string) {
	b, err := heard(c, time.Second)
	if err != nil {
		s.Refusal = err.Error()
	}
	if len(b) > 0 {
		s.Given = append(s.Given, fmt.Sprintf("%d bytes of %s", len(b), what))
	}
}

// nodeOf is a node of a state.
func nodeOf(s *skeinv1.State, id string) *skeinv1.Node {
	i := slices.IndexFunc(s.GetNodes(), func(n *skeinv1.Node) bool { return n.GetId() == id })
	if i < 0 {
		return nil
	}
	return s.GetNodes()[i]
}
