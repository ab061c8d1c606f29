package tunprobe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

const (
	// Link is the device's name.
	Link = "probe0"
	// NoSlot is given to Ping for probes from Options.Source.
	NoSlot = -1
	// MaxProbes is how many wait for an answer at the same time.
	MaxProbes = 1024

	firstPort = 32768
	readBytes = 1 << 16
)

// ErrBusy is returned when MaxProbes wait already.
var ErrBusy = errors.New("too many probes wait for an answer")

// ErrUnreachable is wrapped by the error of a probe that an ICMP error came for.
var ErrUnreachable = errors.New("the target is unreachable")

// Source is what probes leave the device with; one of the two may be invalid.
type Source struct{ IPv4, IPv6 netip.Addr }

// Options are for Open.
type Options struct {
	NetNS  string // the gateway's network namespace, a file
	Source Source // of probes for no slot
	Slots  map[int]Source
	Log    *slog.Logger
}

// Prober asks targets. Make one with Open.
type Prober struct {
	o    Options
	tun  *os.File
	done chan struct{}

	mu      sync.Mutex
	waiting map[key]*probe
	closed  bool
}

type probe struct {
	nonce  uint64
	answer chan answer // has room for one
}

// Open makes the device and its routes.
func Open(o Options) (*Prober, error) {
	var sources []netip.Addr
	add := func(s Source) error {
		for _, a := range []netip.Addr{s.IPv4, s.IPv6} {
			if a.IsValid() {
				sources = append(sources, a)
			}
		}
		if s.IPv4.IsValid() && !s.IPv4.Is4() || s.IPv6.IsValid() && !s.IPv6.Is6() {
			return fmt.Errorf("probing: the source %v has an address of the other family", s)
		}
		return nil
	}
	err := add(o.Source)
	for _, s := range o.Slots {
		err = errors.Join(err, add(s))
	}
	if err != nil {
		return nil, err
	}
	f, err := openDevice(o.NetNS, sources)
	if err != nil {
		return nil, fmt.Errorf("probing: %w", err)
	}
	p := &Prober{o: o, tun: f, done: make(chan struct{}), waiting: map[key]*probe{}}
	go p.read()
	return p, nil
}

// Close ends all probes, and removes the device.
func (p *Prober) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.mu.Unlock()
	err := p.tun.Close()
	<-p.done
	return err
}

func (p *Prober) read() {
	defer close(p.done)
	b := make([]byte, readBytes)
	for {
		n, err := p.tun.Read(b)
		if err != nil {
			p.mu.Lock()
			closed := p.closed
			p.mu.Unlock()
			if !closed {
				p.o.Log.Error("probes get no answers any more: their device cannot be read", "device", Link, "error", err)
			}
			return
		}
		if a, ok := parse(b[:n]); ok {
			p.deliver(a)
		}
	}
}

// deliver gives an answer to the probe that it is for.
func (p *Prober) deliver(a answer) {
	p.mu.Lock()
	w := p.waiting[a.key]
	p.mu.Unlock()
	if w == nil || a.problem == 0 && w.nonce != a.nonce {
		return
	}
	if a.synAck {
		_, _ = p.tun.Write(segment(a.key, flagRST, a.ack))
	}
	select {
	case w.answer <- a:
	default:
	}
}

// Ping asks a target ("icmp:ADDRESS", "tcp:ADDRESS:PORT") once, on the way of a slot's clients, or for NoSlot from the
// Prober's own source, and returns how long the answer took. The wait ends with ctx.
func (p *Prober) Ping(ctx context.Context, slot int, target string) (time.Duration, error) {
	t, err := ParseTarget(target)
	if err != nil {
		return 0, err
	}
	source, err := p.source(slot, t)
	if err != nil {
		return 0, fmt.Errorf("probing %s: %w", t, err)
	}
	k, w, err := p.register(source, t)
	if err != nil {
		return 0, fmt.Errorf("probing %s: %w", t, err)
	}
	defer func() {
		p.mu.Lock()
		delete(p.waiting, k)
		p.mu.Unlock()
	}()
	packet := echo(k, w.nonce)
	if t.Port != 0 {
		packet = segment(k, flagSYN, uint32(w.nonce))
	}
	start := time.Now()
	if _, err := p.tun.Write(packet); err != nil {
		return 0, fmt.Errorf("probing %s through %s: %w", t, Link, err)
	}
	select {
	case a := <-w.answer:
		if a.problem != 0 {
			return 0, fmt.Errorf("probing %s: %w: ICMP type %d code %d", t, ErrUnreachable, a.problem, a.code)
		}
		return time.Since(start), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("probing %s: no answer for %v: %w", t, time.Since(start).Round(time.Millisecond), ctx.Err())
	case <-p.done:
		return 0, fmt.Errorf("probing %s: the prober is closed: %w", t, os.ErrClosed)
	}
}

func (p *Prober) source(slot int, t Target) (netip.Addr, error) {
	s, ok := p.o.Source, true
	if slot != NoSlot {
		s, ok = p.o.Slots[slot]
	}
	a := dataplane.Pick(t.Addr, s.IPv4, s.IPv6)
	if !ok || !a.IsValid() {
		return a, fmt.Errorf("slot %d has no source of that family for probes", slot)
	}
	return a, nil
}

// register finds an identifier that no probe of the target has, and begins to wait for its answer.
func (p *Prober) register(source netip.Addr, t Target) (key, *probe, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return key{}, nil, os.ErrClosed
	case len(p.waiting) >= MaxProbes:
		return key{}, nil, ErrBusy
	}
	for {
		var b [10]byte
		_, _ = rand.Read(b[:]) // never fails
		w := &probe{nonce: binary.BigEndian.Uint64(b[:]), answer: make(chan answer, 1)}
		k := key{source: source, target: t.Addr, port: t.Port, id: binary.BigEndian.Uint16(b[8:])}
		if t.Port != 0 {
			k.id |= firstPort
			w.nonce &= 1<<32 - 1
		}
		if p.waiting[k] == nil {
			p.waiting[k] = w
			return k, w, nil
		}
	}
}
