package birthday

import (
	"math/rand/v2"
	"time"
)

// Bounds of one attempt.
const (
	MaxSockets = 256  // of the end with many, each with a mapping
	MaxProbes  = 2048 // from the one port
	firstPort  = 1024 // NATs leave the ports below alone (RFC 4787 section 4.2.2)
	portCount  = 65536 - firstPort
)

// Pace. 2,048 probes of 122 bytes in 6.4 s are 40 kB/s; the sockets are there before the first probes arrive.
const (
	tick           = 25 * time.Millisecond
	probesPerTick  = 8
	socketsPerTick = 16
	socketsAgain   = 2 * time.Second         // a socket's packet is repeated, should it have been lost
	attemptFor     = 9500 * time.Millisecond // of one port with many: all probes, and a round trip for the last
	twinFor        = 5 * time.Second
	requestWait    = 3 * time.Second // for the peer's answer to a request
	requestAgain   = time.Second
	askGap         = 800 * time.Millisecond  // between requests of one peer that begin something
	predictSockets = 32                      // that a counting NAT's prediction opens at first
	predictSlack   = 32                      // mappings that others may have made meanwhile
	predictFor     = 1200 * time.Millisecond // then the rest of the sockets comes too
	twinProbes     = 1024
	waveSize       = 16 // sockets of one wave of two ends that both predict
	waves          = 4
	waveEvery      = 700 * time.Millisecond
	waveAgain      = 200 * time.Millisecond
	hitAgain       = 200 * time.Millisecond
	hitFor         = 5 * time.Second // how long the peer is told about a hit, and WireGuard may take to be led there
)

// Range is the ports that NATs map to, as far as is known.
type Range struct {
	First uint16
	Count int
}

// allPorts is where nothing is known.
var allPorts = Range{firstPort, portCount}

// Ports gives the ports to try, the predicted ones first, none twice.
type Ports struct {
	rnd       *rand.Rand
	within    Range
	predicted []uint16
	seen      [portCount/64 + 1]uint64
	left      int
}

// NewPorts begins with what follows from a NAT's newest port, when step is not 0, and goes on with the ports of a
// range.
func NewPorts(rnd *rand.Rand, within Range, base uint16, step, ahead int) *Ports {
	p := &Ports{rnd: rnd, within: within, left: within.Count}
	if base != 0 {
		p.predicted = Predict(base, step, ahead)
	}
	return p
}

// Next is the next port; false when all were given.
func (p *Ports) Next() (uint16, bool) {
	for len(p.predicted) > 0 {
		port := p.predicted[0]
		p.predicted = p.predicted[1:]
		if p.take(port) {
			return port, true
		}
	}
	for p.left > 0 {
		if port := p.within.First + uint16(p.rnd.IntN(p.within.Count)); p.take(port) {
			return port, true
		}
	}
	return 0, false
}

func (p *Ports) take(port uint16) bool {
	i := int(port) - firstPort
	if port < p.within.First || int(port) >= int(p.within.First)+p.within.Count || p.seen[i/64]&(1<<(i%64)) != 0 {
		return false
	}
	p.seen[i/64] |= 1 << (i % 64)
	p.left--
	return true
}

// Predict lists the ports of the mappings that come after base. A step that would leave the range wraps around, as
// counting NATs do.
func Predict(base uint16, step, ahead int) []uint16 {
	if step == 0 {
		return nil
	}
	out := make([]uint16, 0, ahead)
	for k := 1; k <= ahead; k++ {
		i := (int(base) - firstPort + k*step) % portCount
		if i < 0 {
			i += portCount
		}
		out = append(out, uint16(firstPort+i))
	}
	return out
}
