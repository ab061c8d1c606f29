package wireguard

import (
	"bytes"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/skeinmesh/skein/dataplane"
)

// hurryAfter is when a first handshake is tried again, counted from one try to the next. After these
// wireguard-go's own five seconds hold.
var hurryAfter = []time.Duration{0, 300 * time.Millisecond, 700 * time.Millisecond, 1500 * time.Millisecond}

// hurrier makes first handshakes happen at once: with peers whose endpoint has just been set and who
// have never had a session. Two things would else cost them wireguard-go's five seconds between
// attempts, and in a mesh they are the rule: a first packet that came before the endpoint, whose attempt
// had nowhere to go and counts all the same; and a first initiation that came before the other side knew
// the peer. Whoever learns of the other last is heard, so it tries if the other has asked, and whoever has
// packets waiting tries again soon. Where neither is so, there is no session, as WireGuard has it.
//
// A device that gets another key can send in no session that it has, so its peers are tried again as if they were met
// first, after the time in which the first handshake with the new key should be over.
//
// A peer without allowed IPs is left alone until it has some: it is the next key of one that changes its key, and that
// one begins. A handshake of ours beside its own would end the session in which packets are still under way.
type hurrier struct {
	dev     *device.Device
	cross   *crossing
	packets sync.Locker // held while packets from the link are being handled

	mu     sync.Mutex
	met    map[dataplane.Key]bool           // had a session of the device's key when last looked at
	keyed  time.Time                        // when the device got its key
	where  map[dataplane.Key]netip.AddrPort // the endpoints then
	fresh  map[dataplane.Key]*firstTries
	unled  map[dataplane.Key]netip.AddrPort // peers without allowed IPs, and their endpoints
	timer  *time.Timer
	closed bool
}

type firstTries struct {
	endpoints []netip.AddrPort // the one it has now, and those it had since it was set first
	done      int              // of hurryAfter
	due       time.Time
}

func newHurrier(dev *device.Device, bind *meshBind, packets sync.Locker) *hurrier {
	return &hurrier{dev: dev, cross: bind.cross, packets: packets, met: map[dataplane.Key]bool{},
		where: map[dataplane.Key]netip.AddrPort{}, fresh: map[dataplane.Key]*firstTries{},
		unled: map[dataplane.Key]netip.AddrPort{}}
}

// changes looks at the device before it is written to: at a peer's former endpoint, which it may have
// from a packet, a handshake may be under way. Who the peers are is known before the first handshake with them.
func (h *hurrier) changes(batch []Op) {
	h.cross.who.learn(batch)
	h.mu.Lock()
	defer h.mu.Unlock()
	if slices.ContainsFunc(batch, func(op Op) bool { return op.PrivateKey != nil }) {
		h.rekeyed(time.Now())
	}
	for _, op := range batch {
		if p := op.Peer; p != nil && p.Endpoint.IsValid() && p.Action == Update && !h.met[p.Key] {
			h.look()
			return
		}
	}
}

// changed looks at what has just been written to the device.
func (h *hurrier) changed(batch []Op) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for _, op := range batch {
		switch p := op.Peer; {
		case p == nil:
		case p.Action == Remove:
			delete(h.met, p.Key)
			delete(h.where, p.Key)
			delete(h.fresh, p.Key)
			delete(h.unled, p.Key)
		default:
			if at := h.led(p); at.IsValid() && !h.met[p.Key] {
				h.hurry(p.Key, at, now)
			}
		}
	}
	h.run(now)
}

// led is the endpoint that an operation sets of a peer that has allowed IPs, or that one was set to before it had. The
// caller holds mu.
func (h *hurrier) led(p *PeerOp) netip.AddrPort {
	before, unled := h.unled[p.Key]
	at := p.Endpoint
	if !at.IsValid() {
		at = before
	}
	if len(p.Gain) == 0 && (unled || p.Action == Add) {
		h.unled[p.Key] = at
		return netip.AddrPort{}
	}
	delete(h.unled, p.Key)
	return at
}

// rekeyed has handshakes tried with all peers that have a session, unless they have another one some time after the
// device got the key that it is about to get. The caller holds mu.
func (h *hurrier) rekeyed(now time.Time) {
	h.keyed = now
	h.cross.reset() // what passed before was of the former key's handshakes
	h.look()
	for key, at := range h.where {
		if h.met[key] && at.IsValid() {
			h.fresh[key] = &firstTries{endpoints: []netip.AddrPort{at}, done: 1, due: now.Add(hurryAfter[1])}
		}
	}
	clear(h.met)
}

// hurry has first handshakes tried with a peer whose endpoint was set. The caller holds mu.
func (h *hurrier) hurry(key dataplane.Key, at netip.AddrPort, now time.Time) {
	t := h.fresh[key]
	if t == nil {
		t = &firstTries{endpoints: []netip.AddrPort{h.where[key]}, due: now}
		h.fresh[key] = t
	} // else a try may be under way by the former endpoint: it has its time
	t.endpoints = append(t.endpoints, at)
}

// run tries what is due and sets the timer for what is next. The caller holds mu.
func (h *hurrier) run(now time.Time) {
	if len(h.fresh) == 0 || h.closed {
		return
	}
	h.look()
	var next time.Time
	for key, t := range h.fresh {
		if h.met[key] {
			delete(h.fresh, key)
			continue
		}
		if !t.due.After(now) && h.cross.answering(key, t.endpoints...) {
			t.due = now.Add(answerWithin)
		}
		if !t.due.After(now) {
			h.try(key, t.endpoints)
			t.done++
			if t.done == len(hurryAfter) {
				delete(h.fresh, key)
				continue
			}
			t.due = now.Add(hurryAfter[t.done])
		}
		if next.IsZero() || t.due.Before(next) {
			next = t.due
		}
	}
	if next.IsZero() {
		return
	}
	if h.timer != nil {
		h.timer.Stop()
	}
	h.timer = time.AfterFunc(max(next.Sub(now), 10*time.Millisecond), func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.run(time.Now())
	})
}

// look finds out who has a session.
func (h *hurrier) look() {
	var text bytes.Buffer // not kept: a thousand peers need a megabyte, and first handshakes are soon over
	if err := h.dev.IpcGetOperation(&text); err != nil {
		return // the device's next reader will say so
	}
	defer clear(text.Bytes()) // there are keys in it
	peers, err := ParseStatus(text.Bytes())
	if err != nil {
		return
	}
	for _, p := range peers {
		h.where[p.PublicKey] = p.Endpoint
		if p.LastHandshake.After(h.keyed) {
			h.met[p.PublicKey] = true
		}
	}
}

// try starts a handshake, unless one is under way, or sends the initiation again that nobody has answered. A second one
// would be taken for a replay of the first, whose answer we would no longer understand; and one that we have answered
// would be undone. A packet that comes just now may be making the first, so it is waited for.
func (h *hurrier) try(key dataplane.Key, endpoints []netip.AddrPort) {
	h.packets.Lock()
	defer h.packets.Unlock()
	if h.cross.busy(key, endpoints...) || h.cross.insist(key, endpoints) {
		return
	}
	if p := h.dev.LookupPeer(device.NoisePublicKey(key)); p != nil {
		p.ExpireCurrentKeypairs() // there are none; it is the former attempt that is forgotten
		if h.cross.wanted(key, endpoints...) {
			p.SendKeepalive() // goes behind the packets that wait, if any do
			return
		}
		p.SendStagedPackets() // nothing waits, nothing is sent: a thousand quiet peers cost nothing
	}
}

func (h *hurrier) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	if h.timer != nil {
		h.timer.Stop()
	}
}
