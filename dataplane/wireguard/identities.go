package wireguard

import (
	"bytes"
	"crypto/ecdh"
	"net/netip"
	"sync"

	"golang.org/x/crypto/blake2s"
	"golang.org/x/crypto/chacha20poly1305"
	"golang.org/x/time/rate"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tai64n"

	"github.com/skeinmesh/skein/dataplane"
)

// Reading who sent an initiation takes two Diffie-Hellman computations, 0.1 to 0.4 ms. No more are read than these, be
// there a flood or a thousand peers that start together; the others are told by their endpoints.
const (
	readsPerSecond = 200
	readsBurst     = 1000
)

// identities tell whose a handshake message is: to whom one of ours goes by its MAC, which is made with the receiver's
// public key, and from whom one of theirs comes by the key inside. The endpoint tells neither: a peer may send by one
// way what is answered by another.
type identities struct {
	reads *rate.Limiter

	mu      sync.Mutex
	private *ecdh.PrivateKey // nil: not known, and so nobody is
	ours    *device.CookieChecker
	peers   map[dataplane.Key]*identity
	at      map[netip.AddrPort]dataplane.Key // the peers' endpoints
}

// identity is what is known of one peer.
type identity struct {
	macs     device.CookieChecker
	endpoint netip.AddrPort
	stamp    tai64n.Timestamp // of its newest initiation
	index    uint32           // and that one's sender index, which nothing proves
}

// party is whom a handshake is with: a peer, or where it is not known which, whoever is at an endpoint.
type party struct {
	key dataplane.Key
	at  netip.AddrPort
}

func newIdentities() *identities {
	return &identities{
		reads: rate.NewLimiter(readsPerSecond, readsBurst),
		peers: map[dataplane.Key]*identity{},
		at:    map[netip.AddrPort]dataplane.Key{},
	}
}

// learn takes in what is about to be written to the device.
func (x *identities) learn(batch []Op) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, op := range batch {
		if op.PrivateKey != nil {
			x.become(*op.PrivateKey)
		}
		p := op.Peer
		switch {
		case p == nil:
			continue
		case p.Action == Remove:
			x.place(p.Key, netip.AddrPort{})
			delete(x.peers, p.Key)
			continue
		case x.peers[p.Key] == nil:
			x.peers[p.Key] = &identity{}
			x.peers[p.Key].macs.Init(device.NoisePublicKey(p.Key))
		}
		if p.Endpoint.IsValid() {
			x.place(p.Key, unmapped(p.Endpoint))
		}
	}
}

// become sets our private key. The caller holds mu.
func (x *identities) become(key dataplane.Key) {
	x.private, x.ours = nil, nil
	if key == (dataplane.Key{}) {
		return
	}
	private, err := ecdh.X25519().NewPrivateKey(key[:])
	if err != nil {
		return // the device refuses it, too
	}
	x.private, x.ours = private, &device.CookieChecker{}
	x.ours.Init(device.NoisePublicKey(private.PublicKey().Bytes()))
}

// place sets a peer's endpoint; an invalid one is none. The caller holds mu.
func (x *identities) place(key dataplane.Key, at netip.AddrPort) {
	i := x.peers[key]
	if i == nil {
		return
	}
	if x.at[i.endpoint] == key {
		delete(x.at, i.endpoint)
	}
	if i.endpoint = at; at.IsValid() {
		x.at[at] = key
	}
}

// recipient tells for whom a handshake message of ours is.
func (x *identities) recipient(p []byte, to netip.AddrPort) party {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.private == nil { // nor could it be told who answers
		return party{at: to}
	}
	key, ok := x.at[to]
	if ok && x.peers[key].macs.CheckMAC1(p) {
		return party{key: key}
	}
	for key, i := range x.peers {
		if i.macs.CheckMAC1(p) {
			return party{key: key}
		}
	}
	return party{at: to}
}

// initiator tells from whom an initiation is. It is false for one that nobody has made for us, or that is older than
// another of the same peer: wireguard-go passes over those, too.
func (x *identities) initiator(p []byte, from netip.AddrPort) (party, bool) {
	x.mu.Lock()
	private, ours := x.private, x.ours
	key, ok := x.at[from]
	x.mu.Unlock()
	switch {
	case private == nil:
		return party{at: from}, true
	case !ours.CheckMAC1(p):
		return party{}, false
	case !x.reads.Allow():
		if ok {
			return party{key: key}, true
		}
		return party{at: from}, true
	}
	key, stamp, ok := read(p, private)
	if !ok {
		return party{}, false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if i := x.peers[key]; i != nil {
		if n := bytes.Compare(stamp[:], i.stamp[:]); n < 0 || n == 0 && senderIndex(p) != i.index {
			return party{}, false
		}
		i.stamp, i.index = stamp, senderIndex(p)
	}
	return party{key: key}, true
}

type digest = [blake2s.Size]byte

// read opens an initiation, as section 5.4.2 of the WireGuard paper has it: the key of who sent it, and its time, which
// only the holder of that key can have put there.
func read(p []byte, private *ecdh.PrivateKey) (key dataplane.Key, stamp tai64n.Timestamp, ok bool) {
	const (
		ephemeralAt = 8
		staticAt    = ephemeralAt + device.NoisePublicKeySize
		stampAt     = staticAt + device.NoisePublicKeySize + chacha20poly1305.Overhead
		end         = stampAt + tai64n.TimestampSize + chacha20poly1305.Overhead
	)
	ephemeral, static := p[ephemeralAt:staticAt], p[staticAt:stampAt]
	hash := mixed(mixed(device.InitialHash, private.PublicKey().Bytes()), ephemeral)
	var chain digest
	device.KDF1(&chain, device.InitialChainKey[:], ephemeral)
	if !unseal(key[:0], &chain, private, ephemeral, static, hash) {
		return key, stamp, false
	}
	hash = mixed(hash, static)
	ok = unseal(stamp[:0], &chain, private, key[:], p[stampAt:end], hash)
	return key, stamp, ok
}

// unseal mixes what two keys share into the chain and opens what is sealed with the result.
func unseal(into []byte, chain *digest, private *ecdh.PrivateKey, public, sealed []byte, hash digest) bool {
	theirs, err := ecdh.X25519().NewPublicKey(public)
	if err != nil {
		return false
	}
	shared, err := private.ECDH(theirs)
	if err != nil {
		return false
	}
	var key [chacha20poly1305.KeySize]byte
	device.KDF2(chain, &key, chain[:], shared)
	aead, err := chacha20poly1305.New(key[:])
	if err != nil {
		return false
	}
	_, err = aead.Open(into, device.ZeroNonce[:], sealed, hash[:])
	return err == nil
}

func mixed(hash digest, data []byte) digest {
	return blake2s.Sum256(append(hash[:], data...))
}
