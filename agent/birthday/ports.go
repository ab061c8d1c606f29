package birthday

import (
	"math/rand/v2"
	"time"
)

// Bounds of one attempt.
const (
	MaxSockets = 256  // at an end with many sockets, each with its own mapping
	MaxProbes  = 2048 // from the one port
	firstPort  = 1024 // NATs do not map to lower ports (RFC 4787 section 4.2.2)
	portCount  = 65536 - firstPort
)

// Pace. 2,048 probes of 122 bytes in 6.4 s are 40 kB/s; the sockets are open before the first probes arrive.
const (
	tick           = 25 * time.Millisecond
	probesPerTick  = 8
	socketsPerTick = 16
	socketsAgain   = 2 * time.Second         // between repetitions of a socket's packet, in case it was lost
	attemptFor     = 9500 * time.Millisecond // role One with Many: all probes, and a round trip for the last
	twinFor        = 5 * time.Second
	requestWait    = 3 * time.Second // for the peer's answer to a request
	requestAgain   = time.Second
	askGap         = 800 * time.Millisecond  // between requests of one peer that are considered
	predictSockets = 32                      // opened first for the prediction of a counting NAT
	predictSlack   = 32                      // allowance for mappings that other hosts made meanwhile
	predictFor     = 1200 * time.Millisecond // then the remaining sockets are opened, too
	twinProbes     = 1024
	waveSize       = 16 // sockets of one wave when both ends predict
	waves          = 4
	waveEvery      = 700 * time.Millisecond
	waveAgain      = 200 * time.Millisecond
	hitAgain       = 200 * time.Millisecond
	hitFor         = 5 * time.Second // how long the peer is informed of a hit, and WireGuard's packets may take to use it
)

// Range is the range of ports that a NAT maps to.
type Range struct {
	First uint16
	Count int
}

// allPorts is used when nothing is known of the NAT.
var allPorts = Range{firstPort, portCount}

// Ports yields the ports to try: predicted ones first, none twice.
type Ports struct {
	rnd       *rand.Rand
	within    Range
	predicted []uint16
	seen      [portCount/64 + 1]uint64
	left      int
}

// NewPorts yields the ports predicted from a NAT's newest port base, if base is not 0, and then those of a range in
// random order.
func NewPorts(rnd *rand.Rand, within Range, base uint16, step, ahead int) *Ports {
	p := &Ports{rnd: rnd, within: within, left: within.Count}
	if base != 0 {
		p.predicted = Predict(base, step, ahead)
	}
	return p
}

// Next returns the next port; false when none is left.
func (p *Ports) Next() (uint16, bool) {
	for len(p.predicted) > 0 {
		port := p.predicted[0]
		p.predicted = p.predicted[1:]
		if p.claim(port) {
			return port, true
		}
	}
	for p.left > 0 {
		if port := p.within.First + uint16(p.rnd.IntN(p.within.Count)); p.claim(port) {
			return port, true
		}
	}
	return 0, false
}

func (p *Ports) claim(port uint16) bool {
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
