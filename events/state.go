package events

import (
	"crypto/sha256"
	"net/netip"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// MaxAnswers is how many answers a state remembers for retried commands. The oldest go first.
const MaxAnswers = 4096

// State is what the log says up to an index. Its entities are immutable messages: they are replaced
// and never changed.
type State struct {
	content
	owner atomic.Pointer[owner] // nil: everything may be shared with a clone
}

type content struct {
	index uint64
	time  int64

	cluster    *cell[*skeinv1.Cluster]
	settings   *cell[*skeinv1.Settings]
	gossipKeys *cell[*skeinv1.GossipKeys]
	nodes      table[*skeinv1.Node]
	revoked    table[*skeinv1.RevokedNode]
	servers    table[*skeinv1.Server]
	tokens     table[*skeinv1.Token]
	answers    table[*skeinv1.Answer]
	pools      table[*poolState] // pools with their blocks, static addresses and grants, by name
	outlets    table[*outlet]    // egresses with their slots, by egressRef
	plain      table[*skeinv1.PlainPeer]
	rangeTable table[*skeinv1.SiteRange] // by the index of the event that allotted it

	translations table[*skeinv1.SiteTranslation] // by translationKey

	// What follows is derived from the above and not part of the hash.
	names     index // name of a live node → its ID
	keys      index // WireGuard key of a node, live or revoked → its ID; of a plain peer → plainOwner and its name
	addresses index // overlay address of a node, live or revoked → its ID; of a plain peer likewise
	order     queue // request IDs of the answers, oldest first
	newest    admission
	sizes     sizes

	poolNames   []string           // sorted; replaced and never changed, as are spans
	spans       []span             // all prefixes of all pools, by address
	namespaces  index              // namespace → the pool that serves it
	pods        table[[]staticRef] // podKey → its static addresses
	staticCount int                // static addresses in all pools
	grantCount  int                // grants in all pools
	numbers     int                // blocks in all pools that belong to somebody or did

	egressNames      []egressRef           // sorted; replaced and never changed
	egressAddrs      table[EgressUse]      // address of an egress → what it is there
	egressIn         table[uint32]         // egressBlock → addresses of egresses in that block
	slotOwners       table[table[slotRef]] // a node's slots by slotRef, by node ID
	slotCount        int                   // slots of all egresses
	destinationCount int                   // destinations of all egresses

	nodesSet int // live nodes with settings

	podNets   []podNet   // pod CIDRs of all live nodes, by address; replaced and never changed
	plainNets []plainNet // networks behind plain peers, likewise

	translated []translated // all translations, by their addresses elsewhere; replaced and never changed
	ranges     []SiteRange  // those of rangeTable, in its order; replaced and never changed
}

// admission remembers the address that was given last.
type admission struct {
	index uint64
	ipv4  netip.Addr
}

// cell holds a single entity with its digest.
type cell[M proto.Message] struct {
	value  M
	digest atomic.Pointer[[32]byte]
}

func (c *cell[M]) get() (m M) {
	if c != nil {
		m = c.value
	}
	return m
}

func (c *cell[M]) sum() [32]byte {
	if c == nil {
		return [32]byte{}
	}
	if d := c.digest.Load(); d != nil {
		return *d
	}
	d := sha256.Sum256(appendMessage([]byte{leafDigest}, c.value))
	c.digest.Store(&d)
	return d
}

// NewState is the state before the first event.
func NewState() *State { return &State{} }

// Clone is an independent state with the same content. It costs the same for any size of state, and
// many goroutines may clone one state.
func (s *State) Clone() *State {
	s.owner.Store(nil)
	return &State{content: s.content}
}

// own is the mark of trie nodes that this state alone knows.
func (s *State) own() *owner {
	o := s.owner.Load()
	if o == nil {
		o = new(owner)
		s.owner.Store(o)
	}
	return o
}

// Index is the last folded event's; 0 before the first.
func (s *State) Index() uint64 { return s.index }

// Time is the leader's clock at the last folded event, in Unix nanoseconds.
func (s *State) Time() int64 { return s.time }

// Cluster is nil before the cluster is created.
func (s *State) Cluster() *skeinv1.Cluster { return s.cluster.get() }

// GossipKeys is nil before the cluster is created.
func (s *State) GossipKeys() *skeinv1.GossipKeys { return s.gossipKeys.get() }

// Settings are the cluster's, with defaults in place of zeros. The caller owns the message.
func (s *State) Settings() *skeinv1.Settings { return withDefaults(s.settings.get()) }

// Node is a live member, or nil.
func (s *State) Node(id identity.ID) *skeinv1.Node { return find(&s.nodes, id.String()) }

// NodeByName is the live member of that name, or nil.
func (s *State) NodeByName(name string) *skeinv1.Node {
	id, ok := s.names.get(textKey(name), name)
	if !ok {
		return nil
	}
	return find(&s.nodes, id)
}

// KeyOwner is the node, or plain peer, that has a WireGuard key; empty: nobody.
func (s *State) KeyOwner(key []byte) string {
	id, _ := s.keys.get(textKey(string(key)), string(key))
	return id
}

// Nodes are the live members, sorted by ID.
func (s *State) Nodes() []*skeinv1.Node { return list(&s.nodes) }

// SameMembers reports that another state has the same live members, settings and ranges of sites, at no cost: states of
// one log that follow one another share what did not change. It may be false of states that are equal.
func (s *State) SameMembers(o *State) bool {
	return o != nil && s.nodes.root == o.nodes.root && s.settings == o.settings &&
		s.rangeTable.root == o.rangeTable.root
}

// Revoked is the record of a node that was revoked, or nil.
func (s *State) Revoked(id identity.ID) *skeinv1.RevokedNode { return find(&s.revoked, id.String()) }

// RevokedNodes are all nodes ever revoked, sorted by ID.
func (s *State) RevokedNodes() []*skeinv1.RevokedNode { return list(&s.revoked) }

// Server is the server role of a node, or nil.
func (s *State) Server(id identity.ID) *skeinv1.Server { return find(&s.servers, id.String()) }

// Servers are all servers, voters or not, sorted by node ID.
func (s *State) Servers() []*skeinv1.Server { return list(&s.servers) }

// Token is a join token, or nil.
func (s *State) Token(id string) *skeinv1.Token { return find(&s.tokens, id) }

// Tokens are all tokens, also the expired and used up, sorted by ID.
func (s *State) Tokens() []*skeinv1.Token { return list(&s.tokens) }

func find[V any](t *table[V], id string) (v V) {
	if h, ok := hexKey(id); ok {
		v, _ = t.get(h, id)
	}
	return v
}

func list[V any](t *table[V]) []V {
	out := make([]V, 0, t.n)
	for v := range t.all() {
		out = append(out, v)
	}
	return out
}
