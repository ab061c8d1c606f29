package wireguard

import (
	"errors"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/skeinmesh/skein/dataplane"
)

// counters reads what a userspace device counts of its peers. The library tells it as text only, together with every
// peer's keys and prefixes; to write and read that once a second was a quarter of what an idle agent of a large mesh
// allocates.
//
// The counters are private fields of the library; counters_test.go fails when a new version has them elsewhere, and
// the text is read then.
type counters struct {
	lock  *sync.RWMutex // of peers
	peers *map[device.NoisePublicKey]*device.Peer

	received, sent, handshake uintptr // offsets in a device.Peer, as those below
	endpointLock, endpoint    uintptr
}

var errCountersElsewhere = errors.New("this version of wireguard-go keeps its counters elsewhere")

func newCounters(dev *device.Device) (*counters, error) {
	peers, ok := reflect.TypeFor[device.Device]().FieldByName("peers")
	if !ok || peers.Type.Kind() != reflect.Struct {
		return nil, errCountersElsewhere
	}
	lock, err := offset(peers.Type, "RWMutex", reflect.TypeFor[sync.RWMutex]())
	keyMap, err1 := offset(peers.Type, "keyMap", reflect.TypeFor[map[device.NoisePublicKey]*device.Peer]())
	peer := reflect.TypeFor[device.Peer]()
	received, err2 := offset(peer, "rxBytes", reflect.TypeFor[atomic.Uint64]())
	sent, err3 := offset(peer, "txBytes", reflect.TypeFor[atomic.Uint64]())
	handshake, err4 := offset(peer, "lastHandshakeNano", reflect.TypeFor[atomic.Int64]())
	endpoint, ok := peer.FieldByName("endpoint")
	if !ok || endpoint.Type.Kind() != reflect.Struct {
		return nil, errCountersElsewhere
	}
	endpointLock, err5 := offset(endpoint.Type, "Mutex", reflect.TypeFor[sync.Mutex]())
	value, err6 := offset(endpoint.Type, "val", reflect.TypeFor[conn.Endpoint]())
	if err := errors.Join(err, err1, err2, err3, err4, err5, err6); err != nil {
		return nil, errCountersElsewhere
	}
	base := unsafe.Add(unsafe.Pointer(dev), peers.Offset)
	return &counters{
		lock:     (*sync.RWMutex)(unsafe.Add(base, lock)),
		peers:    (*map[device.NoisePublicKey]*device.Peer)(unsafe.Add(base, keyMap)),
		received: received, sent: sent, handshake: handshake,
		endpointLock: endpoint.Offset + endpointLock, endpoint: endpoint.Offset + value,
	}, nil
}

// offset is where a struct has a field of that name and type.
func offset(in reflect.Type, name string, want reflect.Type) (uintptr, error) {
	f, ok := in.FieldByName(name)
	if !ok || f.Type != want || len(f.Index) > 1 {
		return 0, errCountersElsewhere
	}
	return f.Offset, nil
}

// read is what the text of the device tells, sorted by key.
func (c *counters) read() []dataplane.PeerStatus {
	c.lock.RLock()
	out := make([]dataplane.PeerStatus, 0, len(*c.peers))
	for key, peer := range *c.peers {
		p := unsafe.Pointer(peer)
		s := dataplane.PeerStatus{
			PublicKey: dataplane.Key(key),
			RxBytes:   (*atomic.Uint64)(unsafe.Add(p, c.received)).Load(),
			TxBytes:   (*atomic.Uint64)(unsafe.Add(p, c.sent)).Load(),
			Endpoint:  c.endpointOf(p),
		}
		if nanos := (*atomic.Int64)(unsafe.Add(p, c.handshake)).Load(); nanos != 0 {
			s.LastHandshake = time.Unix(0, nanos)
		}
		out = append(out, s)
	}
	c.lock.RUnlock()
	sortStatus(out)
	return out
}

func (c *counters) endpointOf(peer unsafe.Pointer) netip.AddrPort {
	lock := (*sync.Mutex)(unsafe.Add(peer, c.endpointLock))
	lock.Lock()
	defer lock.Unlock()
	if e, ok := (*(*conn.Endpoint)(unsafe.Add(peer, c.endpoint))).(*endpoint); ok {
		return e.to
	}
	return netip.AddrPort{}
}
