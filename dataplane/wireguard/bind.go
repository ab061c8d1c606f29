package wireguard

import (
	"bytes"
	"encoding/binary"
	"maps"
	"net/netip"
	"reflect"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
)

// crossWindow is how long after our own handshake initiation one from the other side counts as
// crossing it: a generous round trip, and well below the five seconds after which either repeats it.
const crossWindow = time.Second

// settleWindow is how long after an answer an initiation, either side's, counts as made before it.
const settleWindow = 250 * time.Millisecond

// busyWindow is how long a handshake may take on a good path.
const busyWindow = 200 * time.Millisecond

// knockWindow is how long an initiation tells that somebody at that endpoint wants a session: as long as
// wireguard-go waits before it repeats one that was not answered.
const knockWindow = 6 * time.Second

// A flood of forged initiations must cost no more than the real ones: maxTracked endpoints are remembered,
// the rest passes as it would without us, and what is old is looked for no more often than sweepEvery.
const (
	maxTracked = 4096
	sweepEvery = 100 * time.Millisecond
)

// answerWithin is how long wireguard-go may take from an initiation to its response.
const answerWithin = 25 * time.Millisecond

// meshBind is wireguard-go's own Bind, batching and all, with two things set right that a mesh meets
// at once and a road warrior hardly ever:
//
// Endpoints of both families. The library's pool of socket addresses cuts an IPv6 destination short
// when the pooled address last held an IPv4 one, and the packet goes to a stranger. Hence one sender
// per family, each with a pool of its own, over the same sockets.
//
// Crossing handshakes. A probe that succeeds makes both ends of a path start at the same moment. Each
// initiation then wipes out the other end's, nobody can use an answer, and both wait five seconds for
// the next try; or worse, initiation and response are consumed at the same time, the keys of the two
// handshakes are mixed, and packets pass one way only. Both ends see both initiations' random sender
// indexes, so they agree without a word: the lower one stands. Its sender drops the other, and repeats
// its own when no answer comes, for it may have come before the other side knew us. The other lets it
// in and drops what may still answer its own. An initiation right behind an answer is dropped, on the
// way out as on the way in: it was made before the session was noticed. One of ours that is made while
// theirs is being answered waits until it is, or is not. A repeated one is not let in twice at once,
// for two workers would both answer it.
//
// A forged packet can make us pass over an initiation or a response here. The handshake then takes
// place at the next try; it needs the address, the port and the moment of one to do even that.
type meshBind struct {
	now func() time.Time

	mu        sync.Mutex
	four      conn.Bind                     // receives for both families, sends IPv4; a new one with each Open
	six       conn.Bind                     // sends IPv6
	started   map[netip.AddrPort]initiation // ours, lately
	heard     map[netip.AddrPort]initiation // theirs, let in lately; open or answered
	responded map[netip.AddrPort]time.Time  // where responses went lately
	knocked   map[netip.AddrPort]time.Time  // where initiations came from lately
	swept     time.Time
}

// initiation is one that was sent lately.
type initiation struct {
	at      time.Time // sent or heard, then answered
	index   uint32
	packet  []byte // of ours
	outcome outcome
}

type outcome int

const (
	open outcome = iota
	answered
	yielded // ours, to the other side's
)

func newMeshBind() *meshBind {
	four := conn.NewStdNetBind()
	return &meshBind{now: time.Now, four: four, six: four, started: map[netip.AddrPort]initiation{}, heard: map[netip.AddrPort]initiation{}, responded: map[netip.AddrPort]time.Time{}, knocked: map[netip.AddrPort]time.Time{}}
}

// Open opens the sockets with a new Bind, and makes its twin before either has sent anything.
func (b *meshBind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	four := conn.NewStdNetBind()
	receive, port, err := four.Open(port)
	if err != nil {
		return nil, 0, err
	}
	b.mu.Lock()
	b.four, b.six = four, twin(four)
	clear(b.started)
	clear(b.heard)
	clear(b.responded)
	b.mu.Unlock()
	for i, fn := range receive {
		receive[i] = b.watch(fn)
	}
	return receive, port, nil
}

// twin is a Bind on the same sockets with pools of its own. The other must be fresh from Open: its
// pools are empty and its mutex is free, so that a copy of it is a Bind in its own right.
func twin(b conn.Bind) conn.Bind {
	std, ok := b.(*conn.StdNetBind)
	if !ok {
		return b // another platform's, without that pool
	}
	fresh := new(conn.StdNetBind)
	reflect.ValueOf(fresh).Elem().Set(reflect.ValueOf(std).Elem())
	return fresh
}

// Send sends by the family's own sender, and looks after initiations and responses.
func (b *meshBind) Send(bufs [][]byte, ep conn.Endpoint) error {
	at, known := address(ep)
	if known && len(bufs) == 1 {
		switch p := bufs[0]; {
		case isResponse(p):
			b.responding(receiverIndex(p), at)
		case isInitiation(p):
			switch b.starting(at) {
			case drop:
				return nil
			case hold:
				p = bytes.Clone(p)
				time.AfterFunc(answerWithin, func() { b.sendHeld(p, at) })
				return nil
			}
			b.remember(p, at)
		}
	}
	return b.sender(ep).Send(bufs, ep)
}

type decision int

const (
	send decision = iota
	hold
	drop
)

// starting decides about an initiation of ours.
func (b *meshBind) starting(at netip.AddrPort) decision {
	b.mu.Lock()
	defer b.mu.Unlock()
	theirs, ok := b.heard[at]
	age := b.now().Sub(theirs.at)
	switch {
	case !ok || age > settleWindow:
		return send
	case theirs.outcome == answered:
		return drop
	case age > answerWithin:
		return send
	}
	return hold
}

// sendHeld sends an initiation that was held back, unless theirs has been answered meanwhile.
func (b *meshBind) sendHeld(packet []byte, at netip.AddrPort) {
	b.mu.Lock()
	done := b.heard[at].outcome == answered
	b.mu.Unlock()
	if done {
		return
	}
	b.remember(packet, at)
	ep := &conn.StdNetEndpoint{AddrPort: at}
	_ = b.sender(ep).Send([][]byte{packet}, ep) // if it is lost, wireguard-go tries again
}

// responding notes that an initiation of theirs is being answered.
func (b *meshBind) responding(index uint32, at netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	b.responded[at] = b.now()
	if theirs, ok := b.heard[at]; ok && theirs.index == index {
		b.heard[at] = initiation{at: b.now(), index: index, outcome: answered}
	}
}

func (b *meshBind) sender(ep conn.Endpoint) conn.Bind {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ep.DstIP().Is6() {
		return b.six
	}
	return b.four
}

func (b *meshBind) std() conn.Bind {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.four
}

// Close closes the sockets of both senders.
func (b *meshBind) Close() error { return b.std().Close() }

// SetMark marks the sockets of both senders.
func (b *meshBind) SetMark(mark uint32) error { return b.std().SetMark(mark) }

// ParseEndpoint is the library's.
func (b *meshBind) ParseEndpoint(s string) (conn.Endpoint, error) { return b.std().ParseEndpoint(s) }

// BatchSize is the library's.
func (b *meshBind) BatchSize() int { return b.std().BatchSize() }

func isInitiation(p []byte) bool {
	return len(p) == device.MessageInitiationSize && binary.LittleEndian.Uint32(p) == device.MessageInitiationType
}

func isResponse(p []byte) bool {
	return len(p) == device.MessageResponseSize && binary.LittleEndian.Uint32(p) == device.MessageResponseType
}

// senderIndex is where an initiation names itself, receiverIndex where a response names it.
func senderIndex(initiation []byte) uint32 { return binary.LittleEndian.Uint32(initiation[4:]) }
func receiverIndex(response []byte) uint32 { return binary.LittleEndian.Uint32(response[8:]) }

func address(ep conn.Endpoint) (netip.AddrPort, bool) {
	std, ok := ep.(*conn.StdNetEndpoint)
	if !ok {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(std.Addr().Unmap(), std.Port()), true
}

func (b *meshBind) remember(packet []byte, at netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	b.started[at] = initiation{at: b.now(), index: senderIndex(packet), packet: bytes.Clone(packet)}
}

// busy tells whether a handshake with an endpoint is under way: an initiation or a response of ours
// left for there a moment ago.
func (b *meshBind) busy(at netip.AddrPort) bool {
	at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	ours, started := b.started[at]
	last, responded := b.responded[at]
	return started && now.Sub(ours.at) < busyWindow || responded && now.Sub(last) < busyWindow
}

// wanted tells whether an initiation came from an endpoint that may still wait for its answer.
func (b *meshBind) wanted(at netip.AddrPort) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	last, ok := b.knocked[netip.AddrPortFrom(at.Addr().Unmap(), at.Port())]
	return ok && b.now().Sub(last) < knockWindow
}

// expire forgets what is older than any window.
func (b *meshBind) expire() {
	now := b.now()
	if now.Sub(b.swept) < sweepEvery {
		return
	}
	b.swept = now
	maps.DeleteFunc(b.knocked, func(_ netip.AddrPort, at time.Time) bool { return now.Sub(at) > knockWindow })
	for _, m := range []map[netip.AddrPort]initiation{b.started, b.heard} {
		maps.DeleteFunc(m, func(_ netip.AddrPort, i initiation) bool { return now.Sub(i.at) > crossWindow })
	}
	maps.DeleteFunc(b.responded, func(_ netip.AddrPort, at time.Time) bool { return now.Sub(at) > crossWindow })
}

// watch looks through what comes in for handshakes that cross ours.
func (b *meshBind) watch(receive conn.ReceiveFunc) conn.ReceiveFunc {
	return func(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		n, err := receive(packets, sizes, eps)
		for i := range n {
			pass := true
			switch p := packets[i][:sizes[i]]; {
			case isInitiation(p):
				pass = b.admitInitiation(senderIndex(p), eps[i])
			case isResponse(p):
				pass = b.admitResponse(receiverIndex(p), eps[i])
			}
			if !pass {
				sizes[i] = 0 // wireguard-go passes over what is too short
			}
		}
		return n, err
	}
}

// admitInitiation decides about the other side's initiation.
func (b *meshBind) admitInitiation(theirs uint32, ep conn.Endpoint) bool {
	at, ok := address(ep)
	if !ok {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	if len(b.heard) >= maxTracked {
		return true
	}
	if len(b.knocked) < maxTracked {
		b.knocked[at] = b.now()
	}
	if again, ok := b.heard[at]; ok && again.index == theirs && b.now().Sub(again.at) <= answerWithin {
		return false
	}
	ours, ok := b.started[at]
	switch {
	case !ok:
	case ours.outcome == answered && b.now().Sub(ours.at) <= settleWindow:
		return false
	case ours.outcome == open && ours.index < theirs:
		time.AfterFunc(2*answerWithin, func() { b.repeat(ours, at) })
		return false
	case ours.outcome == open:
		ours.outcome = yielded
		b.started[at] = ours
	}
	b.heard[at] = initiation{at: b.now(), index: theirs}
	return true
}

// repeat sends an initiation of ours again that has still not been answered.
func (b *meshBind) repeat(ours initiation, at netip.AddrPort) {
	b.mu.Lock()
	now, ok := b.started[at]
	b.mu.Unlock()
	if ok && now.index == ours.index && now.outcome == open {
		ep := &conn.StdNetEndpoint{AddrPort: at}
		_ = b.sender(ep).Send([][]byte{ours.packet}, ep) // if it is lost, wireguard-go tries again
	}
}

// admitResponse decides about a response, which ends an initiation of ours.
func (b *meshBind) admitResponse(index uint32, ep conn.Endpoint) bool {
	at, ok := address(ep)
	if !ok {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.expire()
	ours, ok := b.started[at]
	if !ok || ours.index != index {
		return true
	}
	if ours.outcome == yielded {
		return false
	}
	ours.outcome, ours.at = answered, b.now()
	b.started[at] = ours
	return true
}
