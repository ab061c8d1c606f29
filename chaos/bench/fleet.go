package bench

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

const admitAtOnce = 64 // commands under way

// fleetNode is a member that does not run.
func fleetNode(i int) (*identity.Key, identity.WireGuardKey) {
	seed := sha256.Sum256(binary.BigEndian.AppendUint32([]byte("bench fleet"), uint32(i)))
	return identity.KeyFromSeed(seed[:]), identity.WireGuardKey(sha256.Sum256(seed[:]))
}

// admitFleet gives a stopped server n more members, by its own Raft log, and a record of each.
func admitFleet(ctx context.Context, dir string, n int) error {
	log := slog.New(slog.DiscardHandler)
	key, _, err := identity.LoadOrCreate(dir)
	if err != nil {
		return err
	}
	replica, err := consensus.OpenReplica(dir, log)
	if err != nil {
		return err
	}
	defer replica.Close()
	server, err := consensus.StartServer(consensus.ServerConfig{Dir: dir, ID: key.ID(), Dialer: nobody{}, Listener: newSilence(), Replica: replica, Log: log})
	if err != nil {
		return err
	}
	err = propose(ctx, server, replica, n)
	return errors.Join(err, server.Shutdown(context.WithoutCancel(ctx)), keepRecords(dir, key, replica.State(), n))
}

func propose(ctx context.Context, server *consensus.Server, replica *consensus.Replica, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Minute) // an emulated guest is slow
	defer cancel()
	var id [8]byte
	rand.Read(id[:])
	secret := sha256.Sum256(id[:])
	token := hex.EncodeToString(id[:])
	client := consensus.NewClient(consensus.ClientConfig{Self: replicaSelf(replica), Replica: replica, Dialer: nobody{}, Log: slog.New(slog.DiscardHandler),
		Local: func() *consensus.Server { return server }})
	if _, err := client.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: token, SecretHash: secret[:], LifetimeNanos: int64(time.Hour), Uses: uint32(n), AgentsOnly: true}}}); err != nil {
		return fmt.Errorf("token: %w", err)
	}
	cluster := replica.State().Cluster().GetId()
	errs := make([]error, n)
	slots := make(chan struct{}, admitAtOnce)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			k, wg := fleetNode(i)
			public, err := wg.Public()
			if err != nil {
				errs[i] = err
				return
			}
			_, errs[i] = client.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
				Node:    &skeinv1.NewNode{Name: fmt.Sprintf("fleet%d", i), IdentityKey: k.Public(), WireguardKey: public[:], MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax},
				TokenId: token, TokenSecretHash: secret[:], ClusterId: cluster}}})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("admit member %d: %w", i, err)
		}
	}
	return nil
}

func replicaSelf(r *consensus.Replica) identity.ID {
	for _, s := range r.State().Servers() {
		if id, err := identity.ParseID(s.GetNodeId()); err == nil {
			return id
		}
	}
	return identity.ID{}
}

// keepRecords leaves a typical record of every member where the server's gossip finds it.
func keepRecords(dir string, key *identity.Key, st *events.State, n int) error {
	epoch, err := gossip.NextEpoch(dir)
	if err != nil {
		return err
	}
	packets := make(chan gossip.Packet)
	g, err := gossip.Start(gossip.Config{Self: key.ID(), Key: key, Roster: roster{st}, Transport: nobody{}, Streams: newSilence(), Packets: packets,
		Keys: st.GossipKeys(), Dir: dir, Log: slog.New(slog.DiscardHandler), Epoch: epoch})
	if err != nil {
		return err
	}
	defer g.Close()
	var records []*skeinv1.SignedRecord
	for i := range n {
		k, wg := fleetNode(i)
		r, err := fleetRecord(i, k, wg, key.ID())
		if err != nil {
			return err
		}
		records = append(records, r)
	}
	taken, errs := g.Merge(records)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if taken != n {
		return fmt.Errorf("%d of %d records were taken", taken, n)
	}
	return nil
}

// fleetRecord is what a member in the field says of itself: a third has a public address, the others are
// behind a NAT. All have a session with the relay.
func fleetRecord(i int, k *identity.Key, wg identity.WireGuardKey, relay identity.ID) (*skeinv1.SignedRecord, error) {
	public, err := wg.Public()
	if err != nil {
		return nil, err
	}
	outside := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i%250)}), uint16(20000+i))
	inside := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(i / 250), byte(1 + i%250)}), 51820)
	r := &skeinv1.Record{
		NodeId: k.ID().String(), Epoch: 1, Seq: 1, WireguardKey: public[:], Site: fmt.Sprintf("site-%d", i/10), NatType: skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE,
		Candidates: []*skeinv1.Candidate{
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: outside.String(), Priority: 200, Source: "stun"},
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: inside.String(), Priority: 100, Source: "interface"},
		},
		RelayLinks: []*skeinv1.RelayLink{{NodeId: relay.String(), RttMicros: 20_000}},
		Labels:     map[string]string{"topology.kubernetes.io/region": "eu"}, MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax, Time: time.Now().UnixNano(),
	}
	if i%3 == 0 {
		r.NatType = skeinv1.NatType_NAT_TYPE_NONE
		r.Candidates = []*skeinv1.Candidate{{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: outside.String(), Priority: 100, Source: "interface"}}
	}
	return gossip.Sign(k, r)
}

// roster shows a state's members to gossip.
type roster struct{ st *events.State }

// Key is a member's identity key.
func (r roster) Key(id identity.ID) (ed25519.PublicKey, bool) {
	n := r.st.Node(id)
	return n.GetIdentityKey(), n != nil
}

// Members lists the members.
func (r roster) Members() (ids []identity.ID) {
	for _, n := range r.st.Nodes() {
		if id, err := identity.ParseID(n.GetId()); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

var errNobody = errors.New("nobody is there")

// nobody is a control net without any other node.
type nobody struct{}

// Dial finds nobody.
func (nobody) Dial(context.Context, identity.ID, string) (net.Conn, error) { return nil, errNobody }

// SendPacket finds nobody.
func (nobody) SendPacket(identity.ID, []byte) error { return errNobody }

// silence is a listener to whom nobody comes.
type silence struct {
	closed chan struct{}
	once   sync.Once
}

func newSilence() *silence { return &silence{closed: make(chan struct{})} }

// Accept waits for Close.
func (s *silence) Accept() (net.Conn, error) { <-s.closed; return nil, net.ErrClosed }

// Close ends Accept.
func (s *silence) Close() error { s.once.Do(func() { close(s.closed) }); return nil }

// Addr is none.
func (s *silence) Addr() net.Addr { return &net.TCPAddr{} }
