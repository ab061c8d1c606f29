package egress

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	maxClients      = 16384    // of one node, for one egress; a client counts once per slot that it uses
	maxRegistryFile = 64 << 20 // bytes
	registryMagic   = "skein egress clients 1\n"
)

// Client is one client of an egress in a gateway's knowledge.
type Client struct {
	Node       identity.ID // the client's host
	Key        string      // determines its slot
	IPv4, IPv6 netip.Addr  // one of the two may be invalid
	Slot       int         // slot of its new flows
	Also       []int       // other slots with flows of the client, in order
}

func (c Client) equal(o Client) bool {
	return c.Node == o.Node && c.Key == o.Key && c.IPv4 == o.IPv4 && c.IPv6 == o.IPv6 && c.Slot == o.Slot &&
		slices.Equal(c.Also, o.Also)
}

// Registry is one gateway's knowledge of the clients of one egress: the newest complete list of each node. It is
// pure, and not safe for concurrent use.
//
// What it installs follows from all lists and the agreed state together, never from a difference between two lists.
// So a list that no longer has an address takes nothing from a client on another node that now has it.
type Registry struct {
	nodes map[identity.ID]*clientList
	turn  uint64
}

// clientList is the newest list of a node.
type clientList struct {
	epoch, generation uint64
	clients           []Client
	turn              uint64 // if two lists may both have an address, the later one gets it
}

// NewRegistry returns an empty registry.
func NewRegistry() *Registry { return &Registry{nodes: make(map[identity.ID]*clientList)} }

// Sync handles a node's complete list. Argument allowed gives the reason why an address cannot be that node's by the
// agreed state. Result changed: what must be installed may differ. A list older than the newest is ignored. Refused
// clients stay in the list and count as soon as they are allowed.
func (r *Registry) Sync(from identity.ID, q *skeinv1.SyncEgressClientsRequest,
	allowed func(identity.ID, netip.Addr) error) (changed bool,
	refused []*skeinv1.SyncEgressClientsResponse_RefusedClient, err error) {
	n := 0
	for _, c := range q.GetClients() {
		n += 1 + len(c.GetAlso())
	}
	if n > maxClients {
		return false, nil, fmt.Errorf("node %s names %d clients of egress %s/%s, each for every slot that it uses; at most "+
			"%d are allowed", from, n, q.GetNamespace(), q.GetName(), maxClients)
	}
	have := r.nodes[from]
	older := have != nil && (q.GetEpoch() < have.epoch || q.GetEpoch() == have.epoch &&
		q.GetGeneration() < have.generation)
	if older {
		return false, nil, nil
	}
	next := &clientList{epoch: q.GetEpoch(), generation: q.GetGeneration()}
	refuse := func(key, why string) {
		refused = append(refused, &skeinv1.SyncEgressClientsResponse_RefusedClient{Key: clip(key), Reason: why})
	}
	taken := make(map[netip.Addr]string)
	for _, c := range q.GetClients() {
		client, err := parseClient(from, c)
		if err != nil {
			refuse(c.GetKey(), err.Error())
			continue
		}
		if other, twice := firstTaken(taken, client); twice {
			refuse(c.GetKey(), "its address belongs to "+other+" too")
			continue
		}
		for _, a := range client.addresses() {
			taken[a] = client.Key
		}
		next.clients = append(next.clients, client)
		if err := client.allowed(allowed); err != nil {
			refuse(c.GetKey(), err.Error())
		}
	}
	slices.SortFunc(next.clients, compareClients)
	if have != nil && slices.EqualFunc(have.clients, next.clients, Client.equal) {
		have.epoch, have.generation = next.epoch, next.generation
		return false, refused, nil
	}
	r.turn++
	next.turn = r.turn
	r.nodes[from] = next
	return true, refused, nil
}

func firstTaken(taken map[netip.Addr]string, c Client) (string, bool) {
	for _, a := range c.addresses() {
		if key, ok := taken[a]; ok {
			return key, true
		}
	}
	return "", false
}

func parseClient(node identity.ID, c *skeinv1.EgressClient) (Client, error) {
	out := Client{Node: node, Key: c.GetKey(), Slot: int(c.GetSlot())}
	switch {
	case out.Key == "" || len(out.Key) > 512:
		return out, errors.New("its key is empty or longer than 512 bytes")
	case c.GetSlot() > 1<<16:
		return out, fmt.Errorf("slot %d is out of range", c.GetSlot())
	case !rising(c.GetAlso()) || slices.Contains(c.GetAlso(), c.GetSlot()) || len(c.GetAlso()) > events.MaxReplicas:
		return out, errors.New("the other slots that it has flows by are not in order, or its own is among them")
	case c.GetIpv4() == "" && c.GetIpv6() == "":
		return out, errors.New("it has no address")
	}
	for _, s := range c.GetAlso() {
		out.Also = append(out.Also, int(s))
	}
	for _, f := range []struct {
		text string
		to   *netip.Addr
		four bool
	}{{c.GetIpv4(), &out.IPv4, true}, {c.GetIpv6(), &out.IPv6, false}} {
		if f.text == "" {
			continue
		}
		a, err := netip.ParseAddr(f.text)
		if err != nil || a.Zone() != "" || a.Is4() != f.four || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() {
			return out, fmt.Errorf("%q is not an address that a client may have", clip(f.text))
		}
		*f.to = a
	}
	return out, nil
}

// rising reports whether numbers are strictly increasing.
func rising(all []uint32) bool {
	for i := 1; i < len(all); i++ {
		if all[i] <= all[i-1] {
			return false
		}
	}
	return true
}

func (c Client) addresses() (out []netip.Addr) {
	for _, a := range []netip.Addr{c.IPv4, c.IPv6} {
		if a.IsValid() {
			out = append(out, a)
		}
	}
	return out
}

func (c Client) allowed(f func(identity.ID, netip.Addr) error) error {
	for _, a := range c.addresses() {
		if err := f(c.Node, a); err != nil {
			return err
		}
	}
	return nil
}

func compareClients(a, b Client) int {
	if c := strings.Compare(a.Key, b.Key); c != 0 {
		return c
	}
	if c := a.IPv4.Compare(b.IPv4); c != 0 {
		return c
	}
	return a.IPv6.Compare(b.IPv6)
}

// Clients are the clients to install, by address: those of all lists that the agreed state allows. Each address has
// one client; if two nodes may have it, the newer list counts.
func (r *Registry) Clients(allowed func(identity.ID, netip.Addr) error) (out []Client) {
	lists := slices.Collect(maps.Values(r.nodes))
	slices.SortFunc(lists, func(a, b *clientList) int { return int(b.turn) - int(a.turn) })
	taken := make(map[netip.Addr]string)
	for _, l := range lists {
		for _, c := range l.clients {
			if _, twice := firstTaken(taken, c); twice || c.allowed(allowed) != nil {
				continue
			}
			for _, a := range c.addresses() {
				taken[a] = c.Key
			}
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b Client) int {
		if c := a.IPv4.Compare(b.IPv4); c != 0 {
			return c
		}
		return a.IPv6.Compare(b.IPv6)
	})
	return out
}

// Members removes the lists of nodes that are no longer members, and reports whether there were any.
func (r *Registry) Members(member func(identity.ID) bool) (changed bool) {
	for id := range r.nodes {
		if !member(id) {
			delete(r.nodes, id)
			changed = true
		}
	}
	return changed
}

// Heard reports whether a node has sent a list.
func (r *Registry) Heard(id identity.ID) bool { return r.nodes[id] != nil }

// Encode encodes the registry for a file, so that a restarted agent knows the clients at once.
func (r *Registry) Encode() ([]byte, error) {
	out := []byte(registryMagic)
	ids := slices.SortedFunc(maps.Keys(r.nodes), func(a, b identity.ID) int {
		return int(r.nodes[a].turn) - int(r.nodes[b].turn)
	})
	for _, id := range ids {
		l := r.nodes[id]
		q := &skeinv1.SyncEgressClientsRequest{Epoch: l.epoch, Generation: l.generation}
		for _, c := range l.clients {
			e := &skeinv1.EgressClient{Key: c.Key, Slot: uint32(c.Slot)}
			for _, s := range c.Also {
				e.Also = append(e.Also, uint32(s))
			}
			if c.IPv4.IsValid() {
				e.Ipv4 = c.IPv4.String()
			}
			if c.IPv6.IsValid() {
				e.Ipv6 = c.IPv6.String()
			}
			q.Clients = append(q.Clients, e)
		}
		b, err := proto.Marshal(q)
		if err != nil {
			return nil, fmt.Errorf("encode the clients of node %s: %w", id, err)
		}
		out = binary.AppendUvarint(append(out, id[:]...), uint64(len(b)))
		out = append(out, b...)
	}
	return binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(out)), nil
}

// DecodeRegistry decodes the result of Encode. A damaged file is an error; nodes send their lists again within
// SyncEvery.
func DecodeRegistry(data []byte) (*Registry, error) {
	damaged := errors.New("the file with egress clients is damaged: it is left out, and the clients' nodes send their " +
		"lists again")
	if len(data) > maxRegistryFile || len(data) < len(registryMagic)+4 || !bytes.HasPrefix(data, []byte(registryMagic)) {
		return nil, damaged
	}
	body, sum := data[:len(data)-4], binary.BigEndian.Uint32(data[len(data)-4:])
	if crc32.ChecksumIEEE(body) != sum {
		return nil, damaged
	}
	r := NewRegistry()
	for rest := body[len(registryMagic):]; len(rest) > 0; {
		var id identity.ID
		if len(rest) < len(id) {
			return nil, damaged
		}
		rest = rest[copy(id[:], rest):]
		n, used := binary.Uvarint(rest)
		if used <= 0 || n > uint64(len(rest)-used) || r.nodes[id] != nil {
			return nil, damaged
		}
		q := &skeinv1.SyncEgressClientsRequest{}
		if err := proto.Unmarshal(rest[used:used+int(n)], q); err != nil {
			return nil, fmt.Errorf("%w (%w)", damaged, err)
		}
		rest = rest[used+int(n):]
		if _, _, err := r.Sync(id, q, func(identity.ID, netip.Addr) error { return nil }); err != nil {
			return nil, fmt.Errorf("%w (%w)", damaged, err)
		}
	}
	return r, nil
}
