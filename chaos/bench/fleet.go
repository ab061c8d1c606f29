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

// fleetMember is a member that the log and gossip know.
type fleetMember struct {
	number int
	site   string // where its record says that it is
	said   bool   // it has said so when it joined
	public bool   // by its record it has a public address
	slot   uint32 // by its record it leads its site, has this share of it and a public address; 0: it does not
	scope  skeinv1.RecordScope
}

// fleetOf are n members in small sites, which matter to nobody: all nodes are tunnelled to all others.
func fleetOf(n int) (out []fleetMember) {
	for i := range n {
		out = append(out, fleetMember{number: i, site: fmt.Sprintf("site-%d", i/10), public: i%3 == 0})
	}
	return out
}

func (m fleetMember) keys() (*identity.Key, identity.WireGuardKey) {
	seed := sha256.Sum256(binary.BigEndian.AppendUint32([]byte("bench fleet"), uint32(m.number)))
	return identity.KeyFromSeed(seed[:]), identity.WireGuardKey(sha256.Sum256(seed[:]))
}

// newNode is what the member says when it joins.
func (m fleetMember) newNode() (*skeinv1.NewNode, error) {
	k, wg := m.keys()
	public, err := wg.Public()
	if err != nil {
		return nil, err
	}
	n := &skeinv1.NewNode{Name: fmt.Sprintf("fleet%d", m.number), IdentityKey: k.Public(), WireguardKey: public[:],
		MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
	if m.said {
		n.Site, n.SiteSaid = m.site, true
	}
	return n, nil
}

// admitFleet gives a stopped server more members, by its own Raft log, and a record of each.
func admitFleet(ctx context.Context, dir string, members []fleetMember) error {
	state, err := admitMembers(ctx, dir, members)
	if err != nil {
		return err
	}
	key, _, err := identity.LoadOrCreate(dir)
	if err != nil {
		return err
	}
	records, err := recordsOf(members, key.ID())
	if err != nil {
		return err
	}
	return keepRecords(dir, state, gossip.Place{}, records)
}

// admitMembers gives a stopped server more members, by its own Raft log, and returns the state that has them.
func admitMembers(ctx context.Context, dir string, members []fleetMember) (*events.State, error) {
	log := slog.New(slog.DiscardHandler)
	key, _, err := identity.LoadOrCreate(dir)
	if err != nil {
		return nil, err
	}
	replica, err := consensus.OpenReplica(dir, log)
	if err != nil {
		return nil, err
	}
	defer replica.Close()
	server, err := consensus.StartServer(consensus.ServerConfig{Dir: dir, ID: key.ID(), Dialer: nobody{},
		Listener: newSilence(), Replica: replica, Log: log})
	if err != nil {
		return nil, err
	}
	err = propose(ctx, server, replica, members)
	return replica.State(), errors.Join(err, server.Shutdown(context.WithoutCancel(ctx)))
}

func propose(ctx context.Context, server *consensus.Server, replica *consensus.Replica, members []fleetMember) error {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Minute) // an emulated guest is slow
	defer cancel()
	var id [8]byte
	rand.Read(id[:])
	secret := sha256.Sum256(id[:])
	token := hex.EncodeToString(id[:])
	client := consensus.NewClient(consensus.ClientConfig{Self: replicaSelf(replica), Replica: replica, Dialer: nobody{},
		Log:   slog.New(slog.DiscardHandler),
		Local: func() *consensus.Server { return server }})
	if _, err := client.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: token, SecretHash: secret[:], LifetimeNanos: int64(time.Hour), Uses: uint32(len(members)),
		AgentsOnly: true}}}); err != nil {
		return fmt.Errorf("token: %w", err)
	}
	cluster := replica.State().Cluster().GetId()
	errs := make([]error, len(members))
	slots := make(chan struct{}, admitAtOnce)
	var wg sync.WaitGroup
	for i, m := range members {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			node, err := m.newNode()
			if err != nil {
				errs[i] = err
				return
			}
			_, errs[i] = client.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
				Node: node, TokenId: token, TokenSecretHash: secret[:], ClusterId: cluster}}})
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

// wide tells whether everybody has its record where sites speak through leaders.
func (m fleetMember) wide() bool { return m.scope == skeinv1.RecordScope_RECORD_SCOPE_BOTH }

// keepState leaves a state where an agent with this directory finds it, which does not run, unless it has one as new.
func keepState(dir string, state *events.State) (err error) {
	r, err := consensus.OpenReplica(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if r.State().Index() >= state.Index() {
		return nil
	}
	return r.Reset(state.Proto())
}

// keepRecords leaves members' records where the gossip of the node with this directory finds them, which does not run.
func keepRecords(dir string, st *events.State, at gossip.Place, records []*skeinv1.SignedRecord) error {
	key, _, err := identity.LoadOrCreate(dir)
	if err != nil {
		return err
	}
	epoch, err := gossip.NextEpoch(dir)
	if err != nil {
		return err
	}
	packets := make(chan gossip.Packet)
	g, err := gossip.Start(gossip.Config{Self: key.ID(), Key: key, Roster: roster{st}, Place: at, Transport: nobody{},
		Streams: newSilence(), Packets: packets,
		Keys: st.GossipKeys(), Dir: dir, Log: slog.New(slog.DiscardHandler), Epoch: epoch})
	if err != nil {
		return err
	}
	defer g.Close()
	taken, errs := g.Merge(records)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if taken != len(records) {
		return fmt.Errorf("%d of %d records were taken", taken, len(records))
	}
	return nil
}

// recordsOf are typical records of members, which have sessions with a relay.
func recordsOf(members []fleetMember, relay identity.ID) (out []*skeinv1.SignedRecord, err error) {
	for _, m := range members {
		r, err := m.record(relay)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

// record is a member's, in its first version.
func (m fleetMember) record(relay identity.ID) (*skeinv1.SignedRecord, error) {
	r, err := m.says(relay)
	if err != nil {
		return nil, err
	}
	r.Epoch, r.Seq, r.Time, r.Scope = 1, 1, time.Now().UnixNano(), m.scope
	k, _ := m.keys()
	return gossip.Sign(k, r)
}

// says is what a member in the field says of itself: some have a public address, the others are
// behind a NAT. All have a session with the relay.
func (m fleetMember) says(relay identity.ID) (*skeinv1.Record, error) {
	k, wg := m.keys()
	public, err := wg.Public()
	if err != nil {
		return nil, err
	}
	i := m.number
	outside := netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + i%250)}), uint16(20000+i))
	inside := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(i / 250), byte(1 + i%250)}), 51820)
	r := &skeinv1.Record{
		NodeId: k.ID().String(), WireguardKey: public[:], Site: m.site,
		NatType: skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE,
		Candidates: []*skeinv1.Candidate{
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: outside.String(), Priority: 200, Source: "stun"},
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: inside.String(), Priority: 100, Source: "interface"},
		},
		RelayLinks: []*skeinv1.RelayLink{{NodeId: relay.String(), RttMicros: 20_000}},
		Labels:     map[string]string{"topology.kubernetes.io/region": "eu"}, MinSchema: events.SchemaMin,
		MaxSchema: events.SchemaMax,
	}
	if m.slot > 0 {
		r.Leads, r.LeaderSlot = 1, m.slot
	}
	if m.public || m.slot > 0 {
		r.NatType = skeinv1.NatType_NAT_TYPE_NONE
		r.Candidates = []*skeinv1.Candidate{{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: outside.String(),
			Priority: 100, Source: "interface"}}
	}
	return r, nil
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
