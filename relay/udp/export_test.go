package udp

import (
	"time"

	"github.com/skeinmesh/skein/relay/wire"
)

// What the tests of the external package see of the insides, and do to them.

const OthersSeen = othersSeen

type Burst = batch

// NewBurst makes room for what one system call receives.
func NewBurst() *Burst { return newBatch() }

// Receive takes what is there, and calls f with the size of each message and the number of datagrams in it.
func (b *batch) Receive(fd uintptr, f func(size, packets int)) (messages int) {
	messages = b.receive(fd)
	for i := range max(messages, 0) {
		f(int(b.headers[i].Len), b.count(i))
	}
	return messages
}

// AppendSegment appends the control message that has the kernel cut up a train.
func AppendSegment(c []byte, size int) []byte { return appendSegment(c, size) }

// OfPairs makes a relay that has pairs already, each second of which is in the kernel, and no sockets.
func OfPairs(kernel Kernel, mappings []Mapping) *Relay {
	u := &Relay{cfg: Config{Kernel: kernel, Idle: defaultIdle}, pairs: map[wire.PairID]*pair{}}
	for i, m := range mappings {
		u.pairs[wire.PairID(i)] = &pair{id: wire.PairID(i), inKernel: i%2 == 0, mapping: m}
	}
	return u
}

// SeeOthers looks for a pair that works, since the first one is said to have failed.
func (u *Relay) SeeOthers(now time.Time) { u.seeOthers(u.pairs[0], now) }

// Worked is when the kernel was last seen to forward.
func (u *Relay) Worked() time.Time { return u.worked.Load() }

// SetWorked says that it was seen to forward.
func (u *Relay) SetWorked(now time.Time) { u.worked.Set(now) }
